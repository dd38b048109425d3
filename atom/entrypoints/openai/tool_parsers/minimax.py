"""MiniMax-M3: every tag follows the mark ``]<]minimax[>[``; a parameter's tag is its name, and tags nest.

``<invoke name="N">]<]minimax[>[<city>Paris]<]minimax[>[</city>]<]minimax[>[</invoke>``
"""

import re
from typing import Any

from atom.entrypoints.openai.tool_parsers.base import ToolParser, attributes
from atom.entrypoints.openai.tool_parsers.reader import HEAD, Malformed, Markers, Steps
from atom.entrypoints.openai.tool_parsers.values import Schema, convert

MARK = "]<]minimax[>["
MAX_DEPTH = 32
NEXT = Markers(MARK)
SECTION_OR_INVOKE = Markers("<tool_call>", "<invoke ")
INVOKE = Markers("<invoke ")
AFTER = Markers("<invoke ", "</tool_call>")
TAG = Markers("<")
SLASH = Markers("/")
HEAD_END = Markers(">")
_KEY = re.compile(r"[\w.\-]+")


class MinimaxParser(ToolParser):
    name = "minimax"
    openers = Markers(MARK, "<tool_call>")
    wire_tokens = (MARK, "<tool_call>", "</tool_call>")

    def call(self, marker: str) -> Steps[None]:
        reader = self.reader
        is_section = marker == "<tool_call>"  # the mark of the outermost tag is sometimes left out
        if not is_section:
            is_section = (yield from reader.expect(SECTION_OR_INVOKE)) == "<tool_call>"
        if is_section:
            yield from reader.space()
            yield from reader.expect(NEXT)
            yield from reader.expect(INVOKE)
        while True:
            yield from self._invoke()
            yield from reader.space()
            if not (yield from reader.accept(NEXT)):
                return
            reader.record(MARK)
            following = yield from reader.expect(AFTER)
            if following == "</tool_call>":
                return

    def _invoke(self) -> Steps[None]:
        head = yield from self.reader.run(HEAD)
        yield from self.reader.expect(HEAD_END)
        name = attributes(head).get("name", "").strip()
        value = yield from self._element("invoke", self.schema(name), 0)
        if not isinstance(value, dict):
            if not isinstance(value, str) or value.strip():
                raise Malformed  # arguments without names
            value = {}
        self.emit(name, value)

    def _element(self, tag: str, schema: Schema, depth: int) -> Steps[Any]:
        """The value of an element whose opening tag has been read: text, or elements within."""
        reader = self.reader
        if depth > MAX_DEPTH:
            raise Malformed
        text, _ = yield from reader.until(NEXT)
        children: list[tuple[str, Any]] = []
        while True:
            yield from reader.expect(TAG)
            is_end = bool((yield from reader.accept(SLASH)))
            key = (yield from reader.run(HEAD)).strip()
            yield from reader.expect(HEAD_END)
            if is_end:
                if key != tag:
                    raise Malformed
                if children:
                    return _composed(children)
                return convert(text, schema) if depth else text
            if text.strip() or not _KEY.fullmatch(key):
                raise Malformed
            is_item = key == "item" and not schema.has_property("item")
            inner = schema.items() if is_item else schema.property(key)
            children.append((key, (yield from self._element(key, inner, depth + 1))))
            yield from reader.space()
            yield from reader.expect(NEXT)


def _composed(children: list[tuple[str, Any]]) -> Any:
    """An array of ``item`` elements, or an object; a name that comes again makes a list of its values."""
    if all(key == "item" for key, _ in children):
        return [value for _, value in children]
    groups: dict[str, list[Any]] = {}
    for key, value in children:
        groups.setdefault(key, []).append(value)
    return {key: values[0] if len(values) == 1 else values for key, values in groups.items()}
