"""Llama 3.x: ``{"name": ..., "parameters": {...}}``, as the whole answer or after ``<|python_tag|>``.

Several are joined by ``;``.

A bare object at the start of an answer is a call only if its first key belongs to a call and, where tools
are declared, its name is one of theirs: an answer may be JSON for other reasons.
"""

from atom.entrypoints.openai.tool_parsers.base import ToolParser, call_of
from atom.entrypoints.openai.tool_parsers.reader import Malformed, Markers, Steps

TAG = "<|python_tag|>"
BRACE = Markers("{")
JOIN = Markers(";", ",")
FIRST_KEY = Markers('"name"', '"parameters"', '"arguments"', '"type"', '"function"')


class Llama3Parser(ToolParser):
    name = "llama3"
    openers = Markers(TAG)
    wire_tokens = (TAG,)

    def parse(self) -> Steps[None]:
        self.text((yield from self.reader.space()))
        if (yield from self.reader.accept(BRACE)):
            yield from self.attempt("{")
        yield from super().parse()

    def call(self, marker: str) -> Steps[None]:
        reader = self.reader
        if marker == TAG:
            yield from reader.space()
            yield from reader.expect(BRACE)
        is_bare = marker == "{"
        while True:
            yield from self._object(is_bare)
            yield from reader.space()
            joint = yield from reader.accept(JOIN)
            reader.record(joint or "")
            yield from reader.space()
            if not (yield from reader.accept(BRACE)):
                if joint:
                    raise Malformed
                return

    def _object(self, is_bare: bool) -> Steps[None]:
        """One call whose opening brace has been read."""
        opened = "{" + (yield from self.reader.space())
        if not (yield from self.reader.at(FIRST_KEY)):
            raise Malformed
        value = yield from self.json_object(opened)
        if not value.keys() & {"parameters", "arguments", "function"}:
            raise Malformed
        name, arguments = call_of(value)
        if is_bare and self.schemas and name not in self.schemas:
            raise Malformed
        self.emit(name, arguments)
