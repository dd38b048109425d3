"""Qwen3-Coder: ``<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>``."""

from typing import Any

from atom.entrypoints.openai.tool_parsers.base import ToolParser, convert_arguments
from atom.entrypoints.openai.tool_parsers.reader import HEAD, WORD, Malformed, Markers, Steps

FUNCTION = Markers("<function=")
HEAD_END = Markers(">")
PARAMETER_END = Markers("</parameter>")
INSIDE = Markers("<parameter=", "</function>")
AFTER = Markers("<function=", "</tool_call>")


class QwenParser(ToolParser):
    name = "qwen"
    openers = Markers("<tool_call>", "<function=")
    wire_tokens = ("<tool_call>", "</tool_call>")

    def call(self, marker: str) -> Steps[None]:
        reader = self.reader
        if marker == "<tool_call>":
            yield from reader.space()
            yield from reader.expect(FUNCTION)
        while True:
            yield from self._function()
            yield from reader.space()
            marker = yield from reader.accept(AFTER)
            if marker != "<function=":
                return
            reader.record(marker)

    def _function(self) -> Steps[None]:
        reader = self.reader
        name = yield from reader.run(WORD)
        yield from reader.expect(HEAD_END)
        texts: dict[str, Any] = {}
        while True:
            yield from reader.space()
            if (yield from reader.expect(INSIDE)) == "</function>":
                break
            key = (yield from reader.run(HEAD)).strip()
            yield from reader.expect(HEAD_END)
            if not key:
                raise Malformed
            text = yield from self.value(PARAMETER_END, INSIDE)
            texts[key] = text.removeprefix("\n").removesuffix("\n")
        self.emit(name, convert_arguments(texts, self.schema(name)))
