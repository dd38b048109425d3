"""Harmony (gpt-oss): messages ``<|start|>role<|channel|>NAME to=RECIPIENT<|message|>text<|end|>``.

``to=functions.N`` makes a message a call; any other message is content. Framing is never content. The
channel ``analysis`` is reasoning: ``reasoning.py`` takes it out before this parser sees the rest.
"""

import re

from atom.entrypoints.openai.tool_parsers.base import MAX_HEAD_CHARS, ToolParser
from atom.entrypoints.openai.tool_parsers.reader import Malformed, Markers, Reader, Steps

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
CONSTRAIN = "<|constrain|>"
RECIPIENT_FIRST = Markers("to=")
BODY_END = Markers(*ENDS)
HEADER_END = Markers(MESSAGE, START, *ENDS)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyParser(ToolParser):
    name = "harmony"
    openers = Markers(START, CHANNEL, MESSAGE, *ENDS)
    wire_tokens = (START, CHANNEL, MESSAGE, *ENDS, CONSTRAIN)
    frames_answers = True

    def parse(self) -> Steps[None]:
        # The prompt may end within a header, after the role.
        lead = yield from self.reader.space()
        if (yield from self.reader.accept(RECIPIENT_FIRST)):
            yield from self.attempt(lead + "to=")
        else:
            self.text(lead)
        yield from super().parse()

    def call(self, marker: str) -> Steps[None]:
        """Any framing; only a call is more than dropped."""
        if marker == MESSAGE or marker in ENDS:
            return
        header = yield from read_header(self.reader)
        if header is None:
            return
        recipient = recipient_of(marker + header)
        if recipient.startswith("functions."):
            yield from self._call(recipient.removeprefix("functions."))

    def _call(self, name: str) -> Steps[None]:
        reader = self.reader
        yield from reader.space()
        first = yield from reader.peek()
        if first == "{":
            arguments = yield from self.json_object()
        else:
            yield from reader.expect(BODY_END)
            arguments = {}
        self.emit(name, arguments)
        yield from reader.space()
        yield from reader.accept(BODY_END)


def read_header(reader: Reader) -> Steps[str | None]:
    """The header up to and without its ``<|message|>``; None if the text ends within."""
    pieces: list[str] = []
    marker = yield from reader.flow(HEADER_END, pieces.append)
    header = "".join(pieces)
    if marker not in (None, MESSAGE) or len(header) > MAX_HEAD_CHARS:
        raise Malformed
    return header if marker else None


def recipient_of(header: str) -> str:
    """Whom a message is for; empty if nobody is named."""
    found = _RECIPIENT.search(header)
    return found[1] if found else ""


def channel_of(header: str) -> str:
    found = _CHANNEL.search(header)
    return found[1] if found else ""
