"""Log-probabilities in the shapes of the two OpenAI APIs."""

import codecs
from dataclasses import dataclass
from typing import Protocol

from atom.core import TokenLogprobs
from atom.entrypoints.openai.protocol import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprobs,
    PromptTokenLogprob,
    TopLogprob,
)

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot say


class TokenBytes(Protocol):
    """The part of a tokenizer that is needed here."""

    special_ids: frozenset[int]  # ids whose text an answer does not show

    def token_bytes(self, token_id: int) -> bytes: ...


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB) if logprob == logprob else MIN_LOGPROB


def token_text(tokenizer: TokenBytes, token_id: int) -> str:
    """A token as text; bytes that are part of a longer character show as U+FFFD."""
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that its answer begins with."""

    text: str
    first_id: int  # its first token, which has no log-probability


class CompletionLogprobsWriter:
    """Shapes the log-probabilities of one answer, delta by delta. ``text_offset`` counts characters of the
    answer; a token that ends a character begins where that character does.

    Args:
        num_top: alternatives told a token.
        echo: the prompt, where it is told before the answer.
        shows_special: whether special tokens are part of the answer's text. Those of ``echo`` are where it
            has them.
    """

    def __init__(
        self, tokenizer: TokenBytes, num_top: int, *, echo: Echo | None = None, shows_special: bool = False
    ):
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._echo = echo
        self._shows_special = shows_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def take(self, entries: list[TokenLogprobs | None]) -> CompletionLogprobs:
        """The shape of ``entries``; None stands for the first token of the echo."""
        shaped = CompletionLogprobs([], [], [] if self._num_top else None, [])
        for entry in entries:
            if entry is None and self._echo is None:
                continue
            token_id = self._echo.first_id if entry is None else entry.token_id
            shaped.tokens.append(token_text(self._tokenizer, token_id))
            shaped.text_offset.append(self._offset)
            shaped.token_logprobs.append(None if entry is None else _finite(entry.logprob))
            self._offset += len(self._shown(token_id))
            if shaped.top_logprobs is not None:
                shaped.top_logprobs.append(None if entry is None else self._top(entry))
        return shaped

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        pairs = zip(entry.top_ids[: self._num_top], entry.top_logprobs, strict=False)
        # Tokens of equal text (parts of characters) share a key: the likeliest keeps it.
        for token_id, logprob in (*pairs, (entry.token_id, entry.logprob)):
            top.setdefault(token_text(self._tokenizer, token_id), _finite(logprob))
        return top

    def _shown(self, token_id: int) -> str:
        """The characters that a token adds to the text."""
        echo = "" if self._echo is None else self._echo.text
        is_in_echo = self._offset < len(echo)
        if token_id in self._tokenizer.special_ids:
            text = token_text(self._tokenizer, token_id)
            is_shown = echo.startswith(text, self._offset) if is_in_echo else self._shows_special
            return text if is_shown else ""
        text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        if is_in_echo and text.startswith(" ") and not echo.startswith(" ", self._offset):
            return text[1:]  # a word's leading space, which the start of a text does not have
        return text


def chat_logprobs(tokenizer: TokenBytes, num_top: int, entries: list[TokenLogprobs]) -> ChatLogprobs:
    """The same tokens in the chat shape, which also gives each token's bytes."""

    def top(token_id: int, logprob: float) -> TopLogprob:
        raw = tokenizer.token_bytes(token_id)
        return TopLogprob(raw.decode("utf-8", "replace"), _finite(logprob), list(raw))

    content = []
    for entry in entries:
        chosen = top(entry.token_id, entry.logprob)
        best = [top(*pair) for pair in zip(entry.top_ids[:num_top], entry.top_logprobs, strict=False)]
        content.append(ChatTokenLogprob(chosen.token, chosen.logprob, chosen.bytes, best))
    return ChatLogprobs(content)


def prompt_logprobs(
    tokenizer: TokenBytes, entries: list[TokenLogprobs | None], num_top: int
) -> PromptLogprobs:
    """One map a prompt token from id to log-probability: the prompt's own token and the ``num_top`` likeliest."""
    rows: PromptLogprobs = []
    for entry in entries:
        if entry is None:
            rows.append(None)
            continue
        row = {}
        tops = zip(entry.top_ids[:num_top], entry.top_logprobs, strict=False)
        ranked = [(entry.token_id, entry.logprob, entry.rank)]
        ranked += [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(tops, 1)]
        for token_id, logprob, rank in ranked:
            text = token_text(tokenizer, token_id)
            row.setdefault(str(token_id), PromptTokenLogprob(_finite(logprob), rank, text))
        rows.append(row)
    return rows
