"""Kimi-K3: everything stands in channels, ``<|open|>NAME attributes<|sep|>text<|close|>NAME<|sep|>``.

The answer's text is the channel ``response``, calls are ``call tool="N" index="1"`` in ``tools``, with
children ``argument key="k" type="string"`` or one ``json``. Types are on the wire. Framing is never content.
"""

import re
from typing import Any

from atom.entrypoints.openai.tool_parsers.base import ToolParser, as_object, attributes
from atom.entrypoints.openai.tool_parsers.reader import Malformed, Markers, Steps
from atom.entrypoints.openai.tool_parsers.values import load_json

OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
_OPEN, _CLOSE, _SEP = Markers(OPEN), Markers(CLOSE), Markers(SEP)
TAG = Markers(OPEN, CLOSE)
_HEAD = re.compile(r"[^<]*")


class KimiK3Parser(ToolParser):
    name = "kimi_k3"
    openers = Markers(OPEN, CLOSE, END)
    wire_tokens = (OPEN, CLOSE, SEP, END)
    frames_answers = True

    def call(self, marker: str) -> Steps[None]:
        """Any framing; only a call is more than dropped."""
        if marker == END:
            return
        head = yield from self._head()
        if head is None:
            return
        if marker == OPEN and head.split()[:1] == ["call"]:
            yield from self._call(head)
        elif marker == OPEN and head.strip() == "tools":
            yield from self.reader.space()

    def _head(self) -> Steps[str | None]:
        """A tag's inside, read up to and with its separator; None if the answer ends within."""
        head = yield from self.reader.run(_HEAD)
        if (yield from self.reader.accept(_SEP)):
            return head
        if (yield from self.reader.peek()):
            raise Malformed
        return None

    def _call(self, head: str) -> Steps[None]:
        reader = self.reader
        name = attributes(head).get("tool", "").strip()
        arguments: dict[str, Any] = {}
        while True:
            yield from reader.space()
            marker = yield from reader.expect(TAG)
            head = yield from self._full_head()
            kind = head.split()[:1]
            if marker == CLOSE and kind == ["call"]:
                break
            if marker == OPEN and kind == ["argument"]:
                stated = attributes(head)
                if "key" not in stated:
                    raise Malformed
                text = yield from self._body("argument")
                arguments[stated["key"]] = _typed(text, stated.get("type", "string"))
            elif marker == OPEN and kind == ["json"]:
                arguments |= as_object((yield from self._body("json")))
            else:
                raise Malformed
        self.emit(name, arguments)

    def _full_head(self) -> Steps[str]:
        head = yield from self._head()
        if head is None:
            raise Malformed
        return head

    def _body(self, tag: str) -> Steps[str]:
        """The text up to the closing tag; other closing tags within are text."""
        pieces: list[str] = []
        while True:
            text, marker = yield from self.reader.until(_CLOSE)
            head = yield from self.reader.run(_HEAD)
            sep = yield from self.reader.accept(_SEP)
            pieces.append(text)
            if sep and head.strip() == tag:
                return "".join(pieces)
            pieces += (marker, head, sep or "")


def _typed(text: str, kind: str) -> Any:
    if kind == "string":
        return text
    try:
        return load_json(text)
    except ValueError:
        return text
