"""Hermes, Qwen2.5, Qwen3: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, keys in any order."""

from atom.entrypoints.openai.tool_parsers.base import ToolParser, call_of
from atom.entrypoints.openai.tool_parsers.reader import Malformed, Markers, Steps

CALL_END = Markers("</tool_call>")


class HermesParser(ToolParser):
    name = "hermes"
    openers = Markers("<tool_call>")
    wire_tokens = ("<tool_call>", "</tool_call>")

    def call(self, marker: str) -> Steps[None]:
        reader = self.reader
        yield from reader.space()
        while True:
            if (yield from reader.peek()) != "{":
                raise Malformed
            name, arguments = call_of((yield from self.json_object()))
            self.emit(name, arguments)
            yield from reader.space()
            if (yield from reader.accept(CALL_END)) or (yield from reader.peek()) != "{":
                return
            reader.record("")
