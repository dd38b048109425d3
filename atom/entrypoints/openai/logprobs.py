"""Log-probabilities in the shapes of the two OpenAI APIs."""

import codecs
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


class CompletionLogprobsWriter:
    """Shapes the log-probabilities of one answer, delta by delta. ``text_offset`` counts characters of the
    answer; a token that ends a character begins where that character does.
    """

    def __init__(self, tokenizer: TokenBytes, num_top: int):
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def take(self, entries: list[TokenLogprobs]) -> CompletionLogprobs:
        tokens, logprobs, offsets = [], [], []
        tops: list[dict[str, float]] = []
        for entry in entries:
            text = token_text(self._tokenizer, entry.token_id)
            tokens.append(text)
            logprobs.append(_finite(entry.logprob))
            offsets.append(self._offset)
            if entry.token_id not in self._tokenizer.special_ids:
                self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(entry.token_id)))
            # Tokens of equal text (parts of characters) share a key: the likeliest keeps it.
            top: dict[str, float] = {}
            pairs = zip(entry.top_ids[: self._num_top], entry.top_logprobs, strict=False)
            for token_id, logprob in (*pairs, (entry.token_id, entry.logprob)):
                top.setdefault(token_text(self._tokenizer, token_id), _finite(logprob))
            tops.append(top)
        return CompletionLogprobs(tokens, logprobs, tops if self._num_top else None, offsets)


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


def prompt_logprobs(tokenizer: TokenBytes, entries: list[TokenLogprobs | None]) -> PromptLogprobs:
    """One map a prompt token from id to log-probability: the prompt's own token and the likeliest ones."""
    rows: PromptLogprobs = []
    for entry in entries:
        if entry is None:
            rows.append(None)
            continue
        row = {}
        tops = zip(entry.top_ids, entry.top_logprobs, strict=False)
        ranked = [(entry.token_id, entry.logprob, entry.rank)]
        ranked += [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(tops, 1)]
        for token_id, logprob, rank in ranked:
            text = token_text(tokenizer, token_id)
            row.setdefault(str(token_id), PromptTokenLogprob(_finite(logprob), rank, text))
        rows.append(row)
    return rows
