"""One answer's text taken apart: reasoning first, then tool calls in what is left."""

from collections.abc import Sequence
from typing import Any

from atom.entrypoints.openai.reasoning import (
    ReasoningDialect,
    ReasoningParser,
    StartState,
    make_reasoning_parser,
)
from atom.entrypoints.openai.tool_parsers.base import Content, ParserEvent, Reasoning, ToolParser


class AnswerParser:
    """Text of one answer in, events out; the same events however the text is cut.

    Args:
        reasoning: None where the model does not think, or its thinking is to stay in the text.
        tools: None where no call can be in the text.
        keeps_calls: False drops the calls (``tool_choice: none``).
    """

    def __init__(
        self, reasoning: ReasoningParser | None, tools: ToolParser | None, *, keeps_calls: bool = True
    ):
        self._reasoning = reasoning
        self._tools = tools
        self._keeps_calls = keeps_calls

    @property
    def num_calls(self) -> int:
        """Calls handed out so far; more than 0 makes the finish reason ``tool_calls``."""
        return self._tools.num_calls if self._tools and self._keeps_calls else 0

    def feed(self, text: str) -> list[ParserEvent]:
        """What ``text``, the next piece of the answer, makes certain. Not after ``finish``."""
        if self._reasoning is None:
            return self._read("", text)
        return self._read(*self._reasoning.feed(text))

    def finish(self) -> list[ParserEvent]:
        """What was held back: the answer has ended."""
        events = self._read(*self._reasoning.finish()) if self._reasoning else []
        return events + (self._kept(self._tools.finish()) if self._tools else [])

    def _read(self, reasoning: str, content: str) -> list[ParserEvent]:
        events: list[ParserEvent] = [Reasoning(reasoning)] if reasoning else []
        if content and self._tools:
            events += self._kept(self._tools.feed(content))
        elif content:
            events.append(Content(content))
        return events

    def _kept(self, events: list[ParserEvent]) -> list[ParserEvent]:
        return events if self._keeps_calls else [event for event in events if isinstance(event, Content)]


def wire_tokens(tool_parser: type[ToolParser] | None, dialect: ReasoningDialect | None) -> tuple[str, ...]:
    """Markers whose text the detokenizer must leave in, should the tokenizer hold them as special tokens.

    All other special tokens, the end of the answer above all, stay out.
    """
    return (tool_parser.wire_tokens if tool_parser else ()) + (dialect.wire_tokens if dialect else ())


def make_answer_parser(
    tool_parser: type[ToolParser] | None,
    dialect: ReasoningDialect | None,
    *,
    start: StartState = "undecided",
    tools: Sequence[Any] | None = None,
    keeps_calls: bool = True,
) -> AnswerParser:
    """A parser for one answer of a request with these ``tools``, to a prompt with this start state.

    Without tools the text is searched for calls only where plain answers are framed as well.
    """
    needed = tool_parser is not None and (tools or tool_parser.frames_answers)
    return AnswerParser(
        make_reasoning_parser(dialect, start) if dialect else None,
        tool_parser(tools) if tool_parser and needed else None,
        keeps_calls=keeps_calls,
    )
