"""How the tokens of one request are chosen and when it ends."""

import math

import msgspec

from atom.errors import RequestError
from atom.guide import Guide

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_STOP = 64
MAX_STOP_CHARS = 4096  # of all stop strings or bad words together: each character costs memory while matching
MAX_N = 128


def _check(ok: bool, field: str, rule: str, value: object) -> None:
    if not ok:
        raise RequestError(f"{field} must be {rule}, got {value!r}", param=field)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling and stopping rules of one request; validated when built.

    Raises:
        RequestError: a field is outside its range; the message names field, range and value.
    """

    temperature: float = 1.0  # 0 = greedy
    top_k: int = -1  # -1 off
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int | None = 64  # None: as many as the context holds
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_strings: list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    n: int = 1
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    logprobs: bool | int | None = None  # True or 0: the chosen token alone; k: the k best as well
    prompt_logprobs: int | None = None
    guide: Guide | None = None  # what the answer has to look like
    skip_special_tokens: bool = True  # False: their text is part of the answer, but for one that ends it

    def __post_init__(self) -> None:
        t = self.temperature
        _check(math.isfinite(t) and 0 <= t <= 100, "temperature", "in [0, 100]", t)
        _check(self.top_k == -1 or self.top_k >= 1, "top_k", "-1 (off) or at least 1", self.top_k)
        _check(0 < self.top_p <= 1, "top_p", "in (0, 1]", self.top_p)
        _check(0 <= self.min_p <= 1, "min_p", "in [0, 1]", self.min_p)
        _check(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1", self.max_tokens)
        _check(self.min_tokens >= 0, "min_tokens", "at least 0", self.min_tokens)
        if self.max_tokens is not None:
            limit = f"at most max_tokens ({self.max_tokens})"
            _check(self.min_tokens <= self.max_tokens, "min_tokens", limit, self.min_tokens)
        _check(1 <= self.n <= MAX_N, "n", f"in [1, {MAX_N}]", self.n)
        if self.seed is not None:
            _check(-(2**63) <= self.seed < 2**63, "seed", "a signed 64-bit integer", self.seed)
        for field in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, field)
            _check(-2 <= value <= 2, field, "in [-2, 2]", value)
        # Logits are divided by it: what is next to 0 makes them infinite.
        value = self.repetition_penalty
        _check(0.01 <= value <= 10, "repetition_penalty", "in [0.01, 10]", value)
        if self.guide is not None:
            rule = "false with a guide: the answer ends where its grammar ends"
            _check(not self.ignore_eos, "ignore_eos", rule, self.ignore_eos)
        self._check_lists()
        if not isinstance(self.logprobs, bool) and self.logprobs is not None:
            _check(0 <= self.logprobs <= MAX_LOGPROBS, "logprobs", f"in [0, {MAX_LOGPROBS}]", self.logprobs)
        if self.prompt_logprobs is not None:
            k = self.prompt_logprobs
            _check(0 <= k <= MAX_LOGPROBS, "prompt_logprobs", f"in [0, {MAX_LOGPROBS}]", k)

    def _check_lists(self) -> None:
        for field in ("stop_strings", "stop_token_ids", "bad_words"):
            value = getattr(self, field) or ()
            _check(len(value) <= MAX_STOP, field, f"at most {MAX_STOP} entries", len(value))
            if field != "stop_token_ids":
                _check(all(value), field, "a list of non-empty strings", value)
                size = sum(map(len, value))
                _check(size <= MAX_STOP_CHARS, field, f"at most {MAX_STOP_CHARS} characters together", size)
        bias = self.logit_bias or {}
        _check(len(bias) <= MAX_LOGIT_BIAS, "logit_bias", f"at most {MAX_LOGIT_BIAS} entries", len(bias))
        for token, value in bias.items():
            _check(token >= 0, "logit_bias", "keyed by token ids of at least 0", token)
            _check(-100 <= value <= 100, "logit_bias", "a map to values in [-100, 100]", value)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1

    @property
    def num_logprobs(self) -> int:
        """How many alternatives to report a token; -1 when logprobs are not asked for."""
        if self.logprobs is None or self.logprobs is False:
            return -1
        return 0 if self.logprobs is True else self.logprobs

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)
