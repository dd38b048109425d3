"""What every tool-call parser is: text in, events out, the same events however the text is cut."""

import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from atom.entrypoints.openai.tool_parsers.reader import Malformed, Markers, Reader, Steps, TooLong
from atom.entrypoints.openai.tool_parsers.values import (
    Schema,
    convert,
    declared_parameters,
    dump_json,
    load_json,
)

MAX_CALL_CHARS = 1 << 20  # of one call on the wire; a longer one is no call
MAX_HEAD_CHARS = 1024  # between a tag's name and its end
_ATTRIBUTE = re.compile(r"""(\w+)\s*=\s*"([^"]*)\"""")


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the thinking before the answer; only ``AnswerParser`` has it."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    index: int  # counts up from 0 within an answer
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of the call's arguments; the pieces joined are JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    index: int


ParserEvent = Content | Reasoning | ToolCallStart | ToolCallArguments | ToolCallEnd


@dataclass(slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # JSON text


def collect(events: Iterable[ParserEvent]) -> tuple[str, list[ToolCall]]:
    """The content and the calls that a whole answer's events amount to."""
    content: list[str] = []
    calls: list[ToolCall] = []
    arguments: list[list[str]] = []
    for event in events:
        match event:
            case Content(text):
                content.append(text)
            case ToolCallStart(_, call_id, name):
                calls.append(ToolCall(call_id, name, ""))
                arguments.append([])
            case ToolCallArguments(index, text):
                arguments[index].append(text)
    for call, pieces in zip(calls, arguments, strict=True):
        call.arguments = "".join(pieces)
    return "".join(content), calls


class ToolParser(ABC):
    """Finds the tool calls in one answer. A parser serves one answer and is then thrown away.

    Text that is no call is handed out at once, but for an end that could be the beginning of a marker. A call
    that is malformed, cut off or longer than ``max_call_chars`` is content, word for word; after one that is
    too long everything is. Dropped as framing: white space before the first call that no
    text precedes, white space right after a call, and the markers themselves. No text makes a parser raise.

    Subclasses state ``openers`` and read one call in ``call``, or replace ``parse`` altogether.

    Args:
        tools: the request's tools; their JSON schemas give values their types.
        max_call_chars: size of one call on the wire.
    """

    name: ClassVar[str]
    openers: ClassVar[Markers]
    # Markers that tokenizers tend to hold as special tokens: their text must be left in what is fed.
    wire_tokens: ClassVar[tuple[str, ...]] = ()
    # Whether plain answers are framed as well, so that the parser is needed without any tool.
    frames_answers: ClassVar[bool] = False

    def __init__(self, tools: Sequence[Any] | None = None, *, max_call_chars: int = MAX_CALL_CHARS):
        self.tools = tools or ()
        self.max_call_chars = max_call_chars
        self.schemas = {name: Schema(schema) for name, schema in declared_parameters(self.tools).items()}
        self.num_calls = 0
        self._ids: set[str] = set()
        self.reader = Reader(max_call_chars)
        self._events: list[ParserEvent] = []
        self._content: list[str] = []  # not in an event yet
        self._lead: list[str] | None = []  # white space before the first text or call; None afterwards
        self._is_after_call = False
        self._steps = self._guarded()
        next(self._steps)

    def feed(self, text: str) -> list[ParserEvent]:
        """What ``text``, the next piece of the answer, makes certain. Not after ``finish``."""
        self.reader.push(text)
        next(self._steps)
        return self._take_events()

    def finish(self) -> list[ParserEvent]:
        """What was held back: the answer has ended. A second time there is nothing left."""
        self.reader.closed = True
        next(self._steps, None)
        if self._lead:
            self._content, self._lead = self._lead, None
        return self._take_events()

    def parse_all(self, text: str) -> tuple[str, list[ToolCall]]:
        """Content and calls of a whole answer, for a parser that was fed nothing."""
        return collect(self.feed(text) + self.finish())

    # What a dialect reads

    def parse(self) -> Steps[None]:
        """Read the whole answer."""
        while (marker := (yield from self.reader.flow(self.openers, self.text))) is not None:
            yield from self.attempt(marker)

    @abstractmethod
    def call(self, marker: str) -> Steps[None]:
        """Read what follows ``marker``, one of the openers; Malformed if it is no call."""

    def attempt(self, marker: str) -> Steps[None]:
        """Read a call; what was read since the last complete one is content if it is malformed."""
        self.reader.record(marker)
        try:
            yield from self.call(marker)
        except Malformed:
            self.text(self.reader.take_record())
        else:
            self.reader.take_record()

    def value(self, close: Markers, followers: Markers) -> Steps[str]:
        """The text before ``close``. A ``close`` that no follower comes after is part of the text."""
        pieces: list[str] = []
        while True:
            text, marker = yield from self.reader.until(close)
            pieces.append(text)
            space = yield from self.reader.space()
            if (yield from self.reader.at(followers)):
                return "".join(pieces)
            pieces += (marker, space)

    def json_object(self, opened: str = "") -> Steps[dict[str, Any]]:
        """The JSON object that comes next; Malformed if anything else does."""
        pieces: list[str] = []
        yield from self.reader.json(pieces.append, opened)
        return as_object("".join(pieces))

    # What a dialect writes

    def text(self, text: str) -> None:
        """Content. White space that turns out to lie before or after a call is dropped."""
        if self._is_after_call:
            text = text.lstrip()
            self._is_after_call = not text
        elif self._lead is not None:
            if not text or text.isspace():
                self._lead += [text] if text else []
                return
            self._content += self._lead
            self._lead = None
        if text:
            self._content.append(text)

    def start(self, name: str, call_id: str | None = None) -> int:
        """Begin a call; returns its index. What was recorded is a call now and cannot be given back."""
        self.reader.take_record()
        self._flush_content()
        self._lead, self._is_after_call = None, True
        index, self.num_calls = self.num_calls, self.num_calls + 1
        if not call_id or call_id in self._ids:  # a model may count wrong
            call_id = self.new_id()
        self._ids.add(call_id)
        self._events.append(ToolCallStart(index, call_id, name))
        return index

    def arguments(self, index: int, text: str) -> None:
        self._events.append(ToolCallArguments(index, text))

    def end(self, index: int) -> None:
        self._events.append(ToolCallEnd(index))

    def emit(self, name: str, arguments: dict[str, Any], call_id: str | None = None) -> None:
        """A whole call."""
        if not name:
            raise Malformed
        try:
            text = dump_json(arguments)
        except (ValueError, RecursionError):
            raise Malformed from None
        index = self.start(name, call_id)
        self.arguments(index, text)
        self.end(index)

    def new_id(self) -> str:
        return f"call_{uuid.uuid4().hex}"

    def schema(self, tool: str) -> Schema:
        return self.schemas.get(tool) or Schema(None)

    def hand_over(self, other: "ToolParser") -> None:
        """Let ``other`` go on from the start of the record; it must be fed all that follows."""
        other._lead, self._lead = self._lead, None
        self.add(other.feed(self.reader.take_record()))

    def add(self, events: list[ParserEvent]) -> None:
        """Events of the parser that goes on in this one's place."""
        self._flush_content()
        self.num_calls += sum(isinstance(event, ToolCallStart) for event in events)
        self._events += events

    # The machinery

    def _guarded(self) -> Steps[None]:
        try:
            yield from self.parse()
        except TooLong:
            self.text(self.reader.take_record())
        yield from self.reader.rest(self.text)

    def _flush_content(self) -> None:
        if self._content:
            self._events.append(Content("".join(self._content)))
            self._content = []

    def _take_events(self) -> list[ParserEvent]:
        self._flush_content()
        events, self._events = self._events, []
        return events


def attributes(head: str) -> dict[str, str]:
    """The ``name="value"`` pairs of a tag's head; Malformed if it is longer than any tag's."""
    if len(head) > MAX_HEAD_CHARS:
        raise Malformed
    return dict(_ATTRIBUTE.findall(head))


def as_object(text: str) -> dict[str, Any]:
    """A JSON text as an object; Malformed if it is none."""
    try:
        value = load_json(text)
    except ValueError:
        raise Malformed from None
    if not isinstance(value, dict):
        raise Malformed
    return value


def call_of(value: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a call written as ``{"name": ..., "arguments": ...}``, keys in any order."""
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or not name:
        raise Malformed
    if isinstance(arguments, str):  # JSON within JSON
        arguments = as_object(arguments) if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise Malformed
    return name, arguments


def convert_arguments(texts: dict[str, str], schema: Schema) -> dict[str, Any]:
    """Arguments that came as texts, each converted by what the tool declares for it."""
    return {key: convert(text, schema.property(key)) for key, text in texts.items()}
