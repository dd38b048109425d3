"""The dialect chosen by the answer itself: the first marker that can only belong to one decides."""

from atom.entrypoints.openai.tool_parsers import kimi, kimi_k3, minimax
from atom.entrypoints.openai.tool_parsers.base import ToolParser
from atom.entrypoints.openai.tool_parsers.dsml import INVOKE, SECTION_OPEN, DsmlParser
from atom.entrypoints.openai.tool_parsers.glm import GlmParser
from atom.entrypoints.openai.tool_parsers.harmony import CHANNEL, START, HarmonyParser
from atom.entrypoints.openai.tool_parsers.hermes import HermesParser
from atom.entrypoints.openai.tool_parsers.llama3 import TAG, Llama3Parser
from atom.entrypoints.openai.tool_parsers.mistral import CALLS, MistralParser
from atom.entrypoints.openai.tool_parsers.qwen import QwenParser
from atom.entrypoints.openai.tool_parsers.reader import WORD, Malformed, Markers, Steps

SHARED = "<tool_call>"  # of four dialects: what follows it decides
DECISIVE: dict[str, type[ToolParser]] = {
    kimi_k3.OPEN: kimi_k3.KimiK3Parser,
    kimi_k3.CLOSE: kimi_k3.KimiK3Parser,
    minimax.MARK: minimax.MinimaxParser,
    **dict.fromkeys((*SECTION_OPEN, *INVOKE.literals), DsmlParser),
    "<function=": QwenParser,
    **dict.fromkeys(kimi.KimiParser.openers.literals, kimi.KimiParser),
    CALLS: MistralParser,
    TAG: Llama3Parser,
    START: HarmonyParser,
    CHANNEL: HarmonyParser,
}
AFTER_SHARED: dict[str, type[ToolParser]] = {
    "{": HermesParser,
    "<function=": QwenParser,
    minimax.MARK: minimax.MinimaxParser,
}
AFTER_SHARED_MARKERS = Markers(*AFTER_SHARED)
AFTER_NAME = Markers("<arg_key>", "</tool_call>")


class AutoParser(ToolParser):
    name = "auto"
    openers = Markers(SHARED, *DECISIVE)
    wire_tokens = tuple(dict.fromkeys(token for one in DECISIVE.values() for token in one.wire_tokens))

    def call(self, marker: str) -> Steps[None]:
        dialect = DECISIVE.get(marker) or (yield from self._after_shared())
        chosen = dialect(self.tools, max_call_chars=self.max_call_chars)
        self.hand_over(chosen)
        yield from self.reader.rest(lambda piece: self.add(chosen.feed(piece)))
        self.add(chosen.finish())

    def _after_shared(self) -> Steps[type[ToolParser]]:
        reader = self.reader
        yield from reader.space()
        known = yield from reader.at(AFTER_SHARED_MARKERS)
        if known:
            return AFTER_SHARED[known]
        name = yield from reader.run(WORD)
        yield from reader.space()
        if not name or not (yield from reader.at(AFTER_NAME)):
            raise Malformed
        return GlmParser
