"""Mistral: ``[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]``, and ``[TOOL_CALLS]NAME[ARGS]{...}``."""

import secrets
import string

from atom.entrypoints.openai.tool_parsers.base import ToolParser, call_of
from atom.entrypoints.openai.tool_parsers.reader import WORD, Malformed, Markers, Steps

CALLS = "[TOOL_CALLS]"
LIST = Markers("[")
NEXT = Markers(",", "]")
CALL_ID = Markers("[CALL_ID]")
ARGS = Markers("[ARGS]")
ID_LEN = 9
_ALPHABET = string.ascii_letters + string.digits


class MistralParser(ToolParser):
    name = "mistral"
    openers = Markers(CALLS)
    wire_tokens = (CALLS, *CALL_ID.literals, *ARGS.literals)

    def new_id(self) -> str:
        # Mistral's own templates refuse a conversation whose ids have any other form.
        return "".join(secrets.choice(_ALPHABET) for _ in range(ID_LEN))

    def call(self, marker: str) -> Steps[None]:
        yield from self.reader.space()
        if (yield from self.reader.accept(LIST)):
            yield from self._list()
        else:
            yield from self._named()

    def _list(self) -> Steps[None]:
        reader = self.reader
        while True:
            yield from reader.space()
            if (yield from reader.peek()) != "{":
                raise Malformed
            name, arguments = call_of((yield from self.json_object()))
            self.emit(name, arguments)
            yield from reader.space()
            following = yield from reader.accept(NEXT)
            if following != ",":
                return
            reader.record(following)

    def _named(self) -> Steps[None]:
        reader = self.reader
        name = yield from reader.run(WORD)
        if (yield from reader.accept(CALL_ID)):
            yield from reader.run(WORD)
        yield from reader.accept(ARGS)
        yield from reader.space()
        if not name or (yield from reader.peek()) != "{":
            raise Malformed
        self.emit(name, (yield from self.json_object()))
