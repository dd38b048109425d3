"""GLM-4.5 and later: ``<tool_call>NAME<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>``."""

from typing import Any

from atom.entrypoints.openai.tool_parsers.base import ToolParser, convert_arguments
from atom.entrypoints.openai.tool_parsers.reader import HEAD, WORD, Malformed, Markers, Steps

INSIDE = Markers("<arg_key>", "</tool_call>")
KEY_END = Markers("</arg_key>")
VALUE = Markers("<arg_value>")
VALUE_END = Markers("</arg_value>")


class GlmParser(ToolParser):
    name = "glm"
    openers = Markers("<tool_call>")
    wire_tokens = (
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    )

    def call(self, marker: str) -> Steps[None]:
        reader = self.reader
        yield from reader.space()
        name = yield from reader.run(WORD)
        texts: dict[str, Any] = {}
        while True:
            yield from reader.space()
            if (yield from reader.expect(INSIDE)) == "</tool_call>":
                break
            key = (yield from reader.run(HEAD)).strip()
            yield from reader.expect(KEY_END)
            if not key:
                raise Malformed
            yield from reader.space()
            yield from reader.expect(VALUE)
            texts[key] = yield from self.value(VALUE_END, INSIDE)
        self.emit(name, convert_arguments(texts, self.schema(name)))
