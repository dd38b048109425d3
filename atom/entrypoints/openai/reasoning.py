"""Takes the thinking out of an answer as it streams: text in, (reasoning, content) out.

An answer starts in one of three states, told by its prompt. ``thinking``: the prompt ends with the opener.
``answer``: it ends with the end marker, so no thinking comes. ``undecided``: the first characters tell; they
are held back until an opener or an end marker comes, or until they are more than ``UNDECIDED_CHARS``.
Afterwards only what could be the beginning of a marker is held back. Line breaks right after a marker are
framing and dropped.
"""

import codecs
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from atom.entrypoints.openai.tool_parsers.harmony import (
    CHANNEL,
    ENDS,
    START,
    channel_of,
    read_header,
    recipient_of,
)
from atom.entrypoints.openai.tool_parsers.kimi import SECTIONS
from atom.entrypoints.openai.tool_parsers.reader import Malformed, Markers, Reader, Steps, TooLong
from atom.entrypoints.openai.tool_parsers.registry import unknown_name
from atom.errors import ConfigError
from atom.model_engine.answer_stops import StopGate

if TYPE_CHECKING:
    from atom.entrypoints.openai.logprobs import TokenBytes

UNDECIDED_CHARS = 100
PROMPT_TAIL_CHARS = 256  # all of a rendered prompt that is looked at
MAX_HEADER_CHARS = 4096

StartState = Literal["thinking", "answer", "undecided"]


@dataclass(frozen=True)
class ReasoningDialect:
    """How one family of models marks its thinking.

    ``opener`` ends a prompt that makes the model think at once, or begins an answer; ``end`` ends the
    thinking; ``answer_mark`` is what the answer proper comes right after.
    """

    name: str
    opener: str
    end: str
    efforts: tuple[str, ...] = ()  # values of reasoning_effort that templates of the family know
    answer_mark: str = ""

    @property
    def wire_tokens(self) -> tuple[str, ...]:
        """Markers whose text must be left in what is fed, where a tokenizer holds them as special tokens."""
        return self.opener, self.end


CHANNEL_DIALECT = ReasoningDialect(
    "channel", "<|open|>think<|sep|>", "<|close|>think<|sep|>", ("low", "high", "max")
)
THINK = ReasoningDialect("think", "<think>", "</think>")
MM_THINK = ReasoningDialect("mm_think", "<mm:think>", "</mm:think>")
HARMONY = ReasoningDialect(
    "harmony",
    "<|channel|>analysis<|message|>",
    "<|end|>",
    ("low", "medium", "high"),
    "<|channel|>final<|message|>",
)
# Tried in order where no name is given.
DIALECTS: tuple[ReasoningDialect, ...] = (CHANNEL_DIALECT, MM_THINK, THINK, HARMONY)
REASONING_DIALECTS: dict[str, ReasoningDialect] = {dialect.name: dialect for dialect in DIALECTS}
# Templates may write a marker in parts: what they hold of it in any case.
TEMPLATE_MARKS: tuple[tuple[str, str], ...] = (
    ("<|open|>", "channel"),
    ("mm:think>", "mm_think"),
    ("<think>", "think"),
    ("</think>", "think"),
    ("<|channel|>analysis", "harmony"),
)
MODEL_TYPES: dict[str, str] = {
    "gpt_oss": "harmony",
    "kimi_k3": "channel",
    "minimax_m3": "mm_think",
    "minimax_m2": "think",
    "qwen3": "think",
    "qwen3_moe": "think",
    "deepseek_v3": "think",
    "deepseek_v32": "think",
    "deepseek_v4": "think",
}


def get_reasoning_dialect(name: str) -> ReasoningDialect:
    """The dialect called ``name``, as ``--reasoning-parser`` spells it.

    Raises:
        ConfigError: there is none; the message lists all and names the nearest.
    """
    if name in REASONING_DIALECTS:
        return REASONING_DIALECTS[name]
    raise ConfigError(unknown_name("--reasoning-parser", name, REASONING_DIALECTS))


def detect_reasoning(chat_template: str | None, model_type: str | None) -> ReasoningDialect | None:
    """The dialect whose marks the template holds. Without a template that of the model type; or None."""
    if chat_template is None:
        return REASONING_DIALECTS.get(MODEL_TYPES.get(model_type or "", ""))
    for mark, name in TEMPLATE_MARKS:
        if mark in chat_template:
            return REASONING_DIALECTS[name]
    return None


def starts_in_reasoning(prompt: str, dialect: ReasoningDialect | None = None) -> bool:
    """Whether the rendered prompt ends with an opener, so that every answer to it begins as thinking.

    ``prompt`` may be its last ``PROMPT_TAIL_CHARS`` characters alone. Without a dialect all are tried.
    """
    tail = prompt[-PROMPT_TAIL_CHARS:].rstrip()
    return any(tail.endswith(one.opener) for one in ([dialect] if dialect else DIALECTS))


def start_state(prompt: str, dialect: ReasoningDialect) -> StartState:
    """How all n answers to the rendered prompt (or its tail) start."""
    if starts_in_reasoning(prompt, dialect):
        return "thinking"
    tail = prompt[-PROMPT_TAIL_CHARS:].rstrip()
    return "answer" if dialect is not HARMONY and tail.endswith(dialect.end) else "undecided"


def stop_gate(dialect: ReasoningDialect | None, start: StartState) -> StopGate | None:
    """What keeps stop strings out of the thinking; None if there is nothing to keep them out of."""
    if dialect is None or start == "answer":
        return None
    is_thinking = start == "thinking" or dialect is HARMONY  # whose answer always has its mark
    return StopGate(dialect.opener, dialect.answer_mark or dialect.end, is_thinking)


def make_reasoning_parser(dialect: ReasoningDialect, start: StartState = "undecided") -> "ReasoningParser":
    """A parser for one answer."""
    return (HarmonyReasoningParser if dialect is HARMONY else ReasoningParser)(dialect, start)


def split_reasoning(text: str, dialect: ReasoningDialect, start: StartState = "undecided") -> tuple[str, str]:
    """The reasoning and the content of a whole answer.

    Equals what a parser streams, but in one case that a stream cannot tell: an end marker without opener,
    later than ``UNDECIDED_CHARS``, still makes reasoning of everything before it.
    """
    before, found, _ = text.partition(dialect.end)
    if start == "undecided" and dialect is not HARMONY and found and dialect.opener not in before:
        start = "thinking"
    parser = make_reasoning_parser(dialect, start)
    (early_reasoning, early), (late_reasoning, late) = parser.feed(text), parser.finish()
    return early_reasoning + late_reasoning, early + late


class ReasoningParser:
    """Separates one answer's thinking from its text. A parser serves one answer; no text makes it raise.

    ``has_answer`` becomes True where the answer begins.
    """

    def __init__(self, dialect: ReasoningDialect, start: StartState = "undecided"):
        self.has_answer = False
        self._dialect = dialect
        self._start = start
        self._opener = Markers(dialect.opener)
        # A model may call a tool out of its thinking; that section's marker is content as well.
        self._ends = Markers(dialect.end, *SECTIONS)
        self._reader = Reader(self._max_recorded())
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._is_after_marker = False
        self._steps = self._run()
        next(self._steps)

    def feed(self, text: str) -> tuple[str, str]:
        """The reasoning and the content that ``text`` makes certain. Not after ``finish``."""
        self._reader.push(text)
        next(self._steps)
        return self._take()

    def finish(self) -> tuple[str, str]:
        """What was held back: the answer has ended."""
        self._reader.closed = True
        next(self._steps, None)
        return self._take()

    def _max_recorded(self) -> int:
        return UNDECIDED_CHARS

    def _run(self) -> Steps[None]:
        reader = self._reader
        if self._start == "thinking":
            self._is_after_marker = True
            lead = yield from reader.space()
            repeats = yield from reader.accept(self._opener)  # what the template has already written
            self._think("" if repeats else lead)
            yield from self._thinking()
        elif self._start == "undecided":
            yield from self._undecided()
        self.has_answer = True
        yield from reader.rest(self._answer)

    def _thinking(self) -> Steps[None]:
        marker = yield from self._reader.flow(self._ends, self._think)
        self._is_after_marker = marker == self._dialect.end
        if marker in SECTIONS:
            self._content.append(marker)

    def _undecided(self) -> Steps[None]:
        reader = self._reader
        held: list[str] = []
        reader.record("")
        try:
            marker = yield from reader.flow(Markers(self._dialect.opener, self._dialect.end), held.append)
        except TooLong:
            self._answer(reader.take_record())
            return
        reader.take_record()
        text = "".join(held)
        if marker == self._dialect.end:
            self._is_after_marker = True  # the opener, which is not there
            self._think(text)
        elif text.strip() or marker is None:
            self._answer(text)
        self._is_after_marker = marker is not None
        if marker == self._dialect.opener:
            yield from self._thinking()

    def _think(self, text: str) -> None:
        self._add(self._reasoning, text)

    def _answer(self, text: str) -> None:
        self._add(self._content, text)

    def _add(self, target: list[str], text: str) -> None:
        if self._is_after_marker:
            text = text.lstrip("\r\n")
            self._is_after_marker = not text
        if text:
            target.append(text)

    def _take(self) -> tuple[str, str]:
        taken = "".join(self._reasoning), "".join(self._content)
        self._reasoning, self._content = [], []
        return taken


class HarmonyReasoningParser(ReasoningParser):
    """Harmony: messages of the channel ``analysis`` are reasoning. All else goes on with its framing, for
    ``HarmonyParser`` to read."""

    _MESSAGE = Markers(START, CHANNEL)
    _BODY_END = Markers(START, CHANNEL, *ENDS)

    def _max_recorded(self) -> int:
        return MAX_HEADER_CHARS

    def _run(self) -> Steps[None]:
        reader = self._reader
        marker: str | None = None
        if self._start == "thinking":
            marker = yield from reader.flow(self._BODY_END, self._think)
        while True:
            if marker not in self._MESSAGE.literals:
                marker = yield from reader.flow(self._MESSAGE, self._answer)
            if marker is None:
                return
            reader.record(marker)
            marker = yield from self._message(marker)

    def _message(self, opened: str) -> Steps[str | None]:
        """Read a message's header, and its body if that is reasoning; returns what the body ended with."""
        reader = self._reader
        try:
            header = opened + ((yield from read_header(reader)) or "")
        except (Malformed, TooLong):
            header = ""
        record = reader.take_record()
        if channel_of(header) == "analysis" and not recipient_of(header).startswith("functions."):
            return (yield from reader.flow(self._BODY_END, self._think))
        self._answer(record)
        return None

    def _answer(self, text: str) -> None:
        self.has_answer = True
        super()._answer(text)


class ReasoningCounter:
    """Counts the tokens of one answer's thinking, its marks included. It reads the tokens one by one, for a
    delta may hold both thinking and answer."""

    def __init__(self, dialect: ReasoningDialect, start: StartState, tokenizer: "TokenBytes"):
        self._parser = make_reasoning_parser(dialect, start)
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_tokens = 0
        self._has_reasoning = False

    @property
    def num_tokens(self) -> int:
        """Tokens before the answer; 0 if it was no thinking that came before."""
        return self._num_tokens if self._has_reasoning else 0

    def add(self, token_ids: Iterable[int]) -> int:
        """Read the next tokens; how many of them came before the answer began."""
        num_before = self._num_tokens
        for token_id in token_ids:
            if self._parser.has_answer:
                break
            reasoning, _ = self._parser.feed(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
            self._has_reasoning = self._has_reasoning or bool(reasoning)
            self._num_tokens += 1
        return self._num_tokens - num_before
