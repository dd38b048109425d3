"""Reading a text that arrives in pieces, written as if it were all there.

A grammar is a generator: wherever it needs characters that have not arrived it yields, and goes on when they
have. What it does depends on the characters alone, never on how they were cut, so a streamed text and a
whole one are read alike. Every character is looked at a bounded number of times.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields where more text is needed

MAX_JSON_DEPTH = 64

SPACE = re.compile(r"\s*")
WORD = re.compile(r"[\w.:/\-]*")  # names of tools
HEAD = re.compile(r"[^<>\n]*")  # what a tag may hold between its name and its end
_STRUCTURE = re.compile(r"[^ \t\r\n\w:,.+\-]", re.ASCII)  # quotes and brackets, or what JSON cannot hold
_STRING = re.compile(r'["\\]')
_CLOSERS = {"{": "}", "[": "]"}


class Malformed(Exception):
    """The text is not what its marker promised. Never leaves a parser."""


class TooLong(Exception):
    """More was recorded than the limit allows. Never leaves a parser."""


class Markers:
    """Literals to look for. None may lie inside another: the first to start would depend on the cut."""

    def __init__(self, *literals: str):
        self.literals = literals
        self._pattern = re.compile("|".join(map(re.escape, literals)))
        self._beginnings = frozenset(one[:size] for one in literals for size in range(1, len(one)))
        self._first = frozenset(one[0] for one in literals)
        self.max_len = max(map(len, literals))

    def search(self, text: str, start: int) -> re.Match[str] | None:
        return self._pattern.search(text, start)

    def match(self, text: str, start: int) -> str | None:
        """The literal that stands at ``start``."""
        found = self._pattern.match(text, start)
        return found[0] if found else None

    def may_begin(self, text: str) -> bool:
        """Whether more characters could make ``text`` one of the literals."""
        return not text or text in self._beginnings

    def num_held(self, text: str, start: int) -> int:
        """Length of the longest end of ``text[start:]`` that could be the beginning of a literal."""
        for position in range(max(start, len(text) - self.max_len + 1), len(text)):
            if text[position] in self._first and text[position:] in self._beginnings:
                return len(text) - position
        return 0


class Reader:
    """The text of one answer: what has arrived and is not read yet.

    While recording, what is read is kept, so that a call that turns out to be none can be given back.

    Args:
        max_recorded: characters a record may hold; one more raises ``TooLong``.
    """

    def __init__(self, max_recorded: int):
        self.closed = False  # no more text will come
        self._text = ""
        self._pos = 0
        self._max_recorded = max_recorded
        self._record: list[str] | None = None
        self._num_recorded = 0

    def push(self, text: str) -> None:
        self._text = self._text[self._pos :] + text  # the unread rest is shorter than a marker
        self._pos = 0

    def record(self, read: str) -> None:
        """Start a record with ``read``, which has just been read."""
        self._record, self._num_recorded = [read], len(read)

    def take_record(self) -> str:
        """End the record and return it."""
        record, self._record = self._record, None
        return "".join(record or ())

    def _advance(self, end: int) -> str:
        piece = self._text[self._pos : end]
        self._pos = end
        if self._record is not None and piece:
            self._record.append(piece)
            self._num_recorded += len(piece)
            if self._num_recorded > self._max_recorded:
                raise TooLong
        return piece

    def flow(self, markers: Markers, out: Callable[[str], None]) -> Steps[str | None]:
        """Hand all text before the next marker to ``out``, as early as it is known to be none.

        Returns the marker, which is read as well, or None at the end of the text.
        """
        while True:
            found = markers.search(self._text, self._pos)
            if found:
                if found.start() > self._pos:
                    out(self._advance(found.start()))
                return self._advance(found.end())
            held = 0 if self.closed else markers.num_held(self._text, self._pos)
            end = len(self._text) - held
            if end > self._pos:
                out(self._advance(end))
            if self.closed:
                return None
            yield

    def until(self, markers: Markers) -> Steps[tuple[str, str]]:
        """The text before the next marker, and the marker. Malformed if there is none."""
        pieces: list[str] = []
        marker = yield from self.flow(markers, pieces.append)
        if marker is None:
            raise Malformed
        return "".join(pieces), marker

    def peek(self) -> Steps[str]:
        """The next character, not read; empty at the end of the text."""
        while self._pos == len(self._text) and not self.closed:
            yield
        return self._text[self._pos : self._pos + 1]

    def at(self, markers: Markers) -> Steps[str | None]:
        """The marker that comes next, not read; None if something else does."""
        while True:
            marker = markers.match(self._text, self._pos)
            if marker or self.closed:
                return marker
            if not markers.may_begin(self._text[self._pos : self._pos + markers.max_len]):
                return None
            yield

    def accept(self, markers: Markers) -> Steps[str | None]:
        """Read the marker that comes next; None, and nothing read, if something else does."""
        marker = yield from self.at(markers)
        if marker:
            self._advance(self._pos + len(marker))
        return marker

    def expect(self, markers: Markers) -> Steps[str]:
        """As ``accept``; Malformed if something else comes."""
        marker = yield from self.accept(markers)
        if marker is None:
            raise Malformed
        return marker

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read characters of a class; ``pattern`` is the class, repeated."""
        pieces: list[str] = []
        while True:
            found = pattern.match(self._text, self._pos)
            end = found.end() if found else self._pos
            pieces.append(self._advance(end))
            if end < len(self._text) or self.closed:
                return "".join(pieces)
            yield

    def space(self) -> Steps[str]:
        return (yield from self.run(SPACE))

    def rest(self, out: Callable[[str], None]) -> Steps[None]:
        """Hand everything that still comes to ``out``."""
        while True:
            if self._pos < len(self._text):
                out(self._advance(len(self._text)))
            if self.closed:
                return
            yield

    def json(self, out: Callable[[str], None], opened: str = "") -> Steps[None]:
        """Hand one JSON object or array to ``out``; ``opened`` is its beginning if that was read before.

        Brackets outside strings are balanced and nothing but JSON's characters stands between them; the
        rest of the grammar is not checked. Malformed at the first character that cannot belong to it.
        """
        scan = _JsonScan()
        if opened:
            scan.end_of(opened, 0)
            out(opened)
        while not scan.is_done:
            if self._pos == len(self._text):
                if self.closed:
                    raise Malformed
                yield
                continue
            end = scan.end_of(self._text, self._pos)
            if end > self._pos:
                out(self._advance(end))
            if scan.is_bad:
                raise Malformed


class _JsonScan:
    """Where a JSON object or array ends."""

    def __init__(self) -> None:
        self.is_done = False
        self.is_bad = False
        self._closers: list[str] = []
        self._in_string = False
        self._escaped = False

    def end_of(self, text: str, start: int) -> int:
        """The position up to which ``text`` belongs to the value."""
        position = start
        while position < len(text):
            if self._escaped:
                self._escaped = False
                position += 1
                continue
            found = (_STRING if self._in_string else _STRUCTURE).search(text, position)
            if found is None:
                return len(text)
            char, position = found[0], found.end()
            if self._in_string:
                self._in_string = char != '"'
                self._escaped = char == "\\"
            elif not self._take(char):
                self.is_bad = True
                return position - 1
            elif not self._closers:
                self.is_done = True
                return position
        return position

    def _take(self, char: str) -> bool:
        """Whether a character outside strings may stand here."""
        if char in _CLOSERS:
            self._closers.append(_CLOSERS[char])
            return len(self._closers) <= MAX_JSON_DEPTH
        if char == '"':
            self._in_string = True
            return bool(self._closers)
        return bool(self._closers) and char == self._closers.pop()
