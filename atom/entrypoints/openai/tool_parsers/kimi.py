"""Kimi-K2: a section of calls whose ids are on the wire and whose arguments are JSON as it stands.

``<|tool_call_begin|>functions.NAME:IDX<|tool_call_argument_begin|>JSON<|tool_call_end|>``

The wire states the name before the arguments, so these stream as they come. A section that is cut off is
salvaged: its last call ends with the arguments it got.
"""

from atom.entrypoints.openai.tool_parsers.base import ToolParser
from atom.entrypoints.openai.tool_parsers.reader import Malformed, Markers, Steps

CALL = "<|tool_call_begin|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
CALL_END = "<|tool_call_end|>"
SECTIONS = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
SECTION_ENDS = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
ID_END = Markers(ARGUMENTS, CALL, CALL_END, *SECTIONS, *SECTION_ENDS)
ENDS = Markers(CALL_END, *SECTION_ENDS)
AFTER = Markers(CALL, *SECTION_ENDS)
ONE_END = Markers(CALL_END)


class KimiParser(ToolParser):
    name = "kimi"
    openers = Markers(CALL, *SECTIONS)
    wire_tokens = (CALL, ARGUMENTS, CALL_END, *SECTIONS, *SECTION_ENDS)

    def call(self, marker: str) -> Steps[None]:
        reader = self.reader
        if marker != CALL:
            yield from reader.space()
            if (yield from reader.accept(AFTER)) != CALL:
                raise Malformed
        while True:
            yield from self._one()
            yield from reader.space()
            if (yield from reader.accept(AFTER)) != CALL:
                return
            reader.record(CALL)

    def _one(self) -> Steps[None]:
        reader = self.reader
        text, marker = yield from reader.until(ID_END)
        call_id = text.strip()
        name = call_id.removeprefix("functions.").rpartition(":")[0] or call_id.removeprefix("functions.")
        if marker != ARGUMENTS or not name:
            raise Malformed
        yield from reader.space()
        first = yield from reader.peek()
        if first != "{":
            yield from reader.expect(ENDS)
            self.emit(name, {}, call_id)
            return
        index = self.start(name, call_id)

        def out(piece: str) -> None:
            self.arguments(index, piece)

        try:
            yield from reader.json(out)
            yield from reader.space()
            yield from reader.accept(ONE_END)
        except Malformed:  # no JSON from here on, but still what the model gave as arguments
            yield from reader.flow(ENDS, out)
        self.end(index)
