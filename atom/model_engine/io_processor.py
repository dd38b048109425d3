"""Between text and the engine: requests become ids and messages, messages become text deltas.

``InputOutputProcessor`` holds every request in flight. Adding and aborting may happen on any thread,
results arrive on the output thread; a lock guards the tables, never the text work.
"""

import itertools
import secrets
import struct
import threading
import time
from array import array
from collections.abc import Sequence as Ids
from copy import copy
from dataclasses import dataclass
from numbers import Integral

import msgspec
import numpy as np
from msgspec.structs import force_setattr

from atom.config import Config
from atom.errors import ContextLengthError, RequestError
from atom.model_engine.answer_stops import StopGate
from atom.model_engine.detokenizer import DetokenizerFactory
from atom.model_engine.messages import (
    Abort,
    AddRequests,
    CompiledGuide,
    NewRequest,
    ShippedChain,
    StepOutput,
)
from atom.model_engine.outputs import RequestOutput
from atom.model_engine.queue_bound import QueueBound
from atom.model_engine.request_state import AnswerState, RequestState, Sink, make_stop_checker
from atom.model_engine.scheduling.prefix_hash import hash_prompt, mix_seed
from atom.model_engine.stop_strings import special_stop_ids
from atom.model_loader.tokenize_cache import enable_tokenize_cache
from atom.model_loader.tokenizer import Tokenizer
from atom.sampling_params import SamplingParams
from atom.utils import envs

MAX_CACHE_SALT = 256


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized prompt with the prefix-hash chain that rides to the engine beside it.

    ``packed`` are the ids as the engine takes them: int32, little endian.
    """

    token_ids: Ids[int]
    packed: bytes
    hash_seed: int = 0
    cache_salted: bool = False
    chain: ShippedChain | None = None

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine has proven it can serve."""

    max_model_len: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class _Rules:
    """What the requests of one set of sampling parameters have in common."""

    params: SamplingParams
    engine_params: SamplingParams  # without what the front end does itself
    eos_ids: frozenset[int]  # in force
    special_stops: dict[int, str]
    stop_ids: list[int]
    bad_word_ids: list[list[int]]


class InputOutputProcessor:
    """Tokenizes, validates and registers requests; turns step outputs into deltas for their sinks."""

    def __init__(self, config: Config, tokenizer: Tokenizer, eos_ids: list[int]):
        self.tokenizer = tokenizer
        enable_tokenize_cache(tokenizer, envs.ATOM_TOKENIZE_CACHE_MB)
        self.eos_ids = frozenset(eos_ids)
        self.limits = Limits(0, 0)  # set once the engine is ready
        self.requests: dict[str, RequestState] = {}
        self.queue = QueueBound(config.max_queued_requests, config.max_queued_tokens)
        self._answers: dict[int, AnswerState] = {}
        self._detokenizers = DetokenizerFactory(tokenizer)
        self._config = config
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._ship_chain = config.enable_prefix_caching and envs.ATOM_FRONTEND_PREFIX_HASH

    # -- in

    def tokenize(self, prompt: str | list[int], cache_salt: str | None = None) -> Prompt:
        """Ids and hash chain of a prompt. CPU work: call it off the event loop.

        Raises RequestError for an empty prompt, an id outside the vocabulary, or a bad salt.
        """
        if cache_salt is not None and not (
            0 < len(cache_salt) <= MAX_CACHE_SALT and cache_salt.isprintable()
        ):
            raise RequestError(
                f"cache_salt must have 1 to {MAX_CACHE_SALT} printable characters, got {len(cache_salt)}",
                param="cache_salt",
            )
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        packed = self._pack_prompt(ids)
        seed = mix_seed(self._config.prefix_hash_seed, cache_salt)
        chain = None
        if self._ship_chain and len(ids) <= self.limits.max_model_len:
            chain = hash_prompt(array("i", packed), self._config.kv_cache_block_size, seed, packed)
        return Prompt(ids, packed, seed, cache_salt is not None, chain)

    def _pack_prompt(self, ids: Ids[int]) -> bytes:
        """A prompt's ids as the engine takes them. One pass over Python objects: all else is done on the bytes."""
        if not len(ids):
            raise RequestError("prompt must hold at least 1 token, got 0", param="prompt")
        try:
            packed = struct.pack(f"<{len(ids)}i", *ids)
        except struct.error:  # no integer, or one of more than 32 bits
            packed = b""
        size = self.limits.vocab_size
        if not packed or np.frombuffer(packed, "<u4").max() >= size:  # one below 0 reads as a large one
            bad = next(i for i in ids if not (isinstance(i, Integral) and 0 <= i < size))
            raise RequestError(
                f"prompt holds token id {bad!r}, outside the vocabulary [0, {size})", param="prompt"
            )
        return packed

    def add(
        self,
        prompts: list[Prompt],
        params: list[SamplingParams],
        sinks: list[Sink],
        request_ids: list[str],
        priority: int = 0,
        stop_gate: StopGate | None = None,
        is_bounded: bool = False,
        guides: list[CompiledGuide | None] | None = None,
    ) -> AddRequests:
        """Register requests and build the message that starts them; all or none. ``is_bounded``: refuse what
        would pass the bounds of the queue.

        Raises ContextLengthError, RequestError, QueueFullError.
        """
        now = time.monotonic()
        message = AddRequests([], [])
        states = []
        shipped = _Guides(message)
        guides = guides or [None] * len(prompts)
        rules: _Rules | None = None
        for prompt, param, sink, request_id, guide in zip(
            prompts, params, sinks, request_ids, guides, strict=True
        ):
            max_output = self._max_output_tokens(len(prompt), param)
            if rules is None or rules.params is not param:  # prompts that come together share them as a rule
                rules = self._rules(param)
            state = RequestState(request_id, param, len(prompt), rules.eos_ids, sink, now)
            states.append(state)
            request = self._new_request(prompt, rules, max_output, now, priority)
            request.guide = shipped.index(param, guide)
            for index in range(param.n):
                seq_id = next(self._ids)
                message.requests.append(_sibling(request, seq_id, index))
                message.chains.append(prompt.chain)
                stops = make_stop_checker(param.stop_strings, stop_gate)
                detokenizer = self._detokenizers.create(param.skip_special_tokens)
                answer = AnswerState(seq_id, index, state, detokenizer, stops, rules.special_stops)
                state.answers.append(answer)
        with self._lock:
            seen: set[str] = set()
            for request_id in request_ids:
                if request_id in self.requests or request_id in seen:
                    raise RequestError(f"request id {request_id!r} is in use", param="request_id")
                seen.add(request_id)
            num_answers = sum(len(state.answers) for state in states)
            num_tokens = sum(state.num_prompt_tokens * len(state.answers) for state in states)
            self.queue.enter(num_answers, num_tokens, is_bounded=is_bounded)
            for state in states:
                self.requests[state.request_id] = state
                for answer in state.answers:
                    self._answers[answer.seq_id] = answer
        return message

    def _rules(self, params: SamplingParams) -> _Rules:
        """What follows from sampling parameters alone. Raises RequestError."""
        self._check_params(params)
        special_stops = special_stop_ids(params.stop_strings or [], self.tokenizer)
        eos_ids = frozenset() if params.ignore_eos else self.eos_ids
        return _Rules(
            params,
            msgspec.structs.replace(
                params, n=1, guide=None, stop_strings=None, bad_words=None, skip_special_tokens=True
            ),
            eos_ids,
            special_stops,
            sorted(set(params.stop_token_ids or ()) | special_stops.keys() | eos_ids),
            [ids for word in params.bad_words or () for ids in self._spellings(word)],
        )

    def _new_request(
        self, prompt: Prompt, rules: _Rules, max_output: int, now: float, priority: int
    ) -> NewRequest:
        params = rules.engine_params
        if params.seed is None:
            params = copy(params)  # which nobody else has yet, and of which all else was checked
            force_setattr(params, "seed", secrets.randbits(63))
        return NewRequest(
            id=0,
            token_ids=prompt.packed,
            params=params,
            stop_ids=rules.stop_ids,
            max_output_tokens=max_output,
            arrival_time=now,
            bad_word_ids=rules.bad_word_ids,
            hash_seed=prompt.hash_seed,
            cache_salted=prompt.cache_salted,
            priority=priority,
        )

    def _spellings(self, word: str) -> list[list[int]]:
        """A bad word as the ids of its spellings: at the start of a text and after a space."""
        both = (self.tokenizer.encode(text, add_special_tokens=False) for text in (word, " " + word.lstrip()))
        return [ids for ids in both if ids]

    def _max_output_tokens(self, num_prompt: int, params: SamplingParams) -> int:
        limit = self.limits.max_model_len
        if num_prompt >= limit:
            raise ContextLengthError(
                f"the prompt has {num_prompt} tokens, which leaves no room for an answer in the context of "
                f"{limit} tokens",
                param="prompt",
            )
        if params.max_tokens is None:
            return limit - num_prompt
        if num_prompt + params.max_tokens > limit:
            raise ContextLengthError(
                f"the prompt has {num_prompt} tokens and max_tokens is {params.max_tokens}: "
                f"{num_prompt + params.max_tokens} together, over the context of {limit} tokens",
                param="max_tokens",
            )
        return params.max_tokens

    def _check_params(self, params: SamplingParams) -> None:
        self._check_ids("logit_bias", params.logit_bias or ())
        self._check_ids("stop_token_ids", params.stop_token_ids or ())

    def _check_ids(self, field: str, ids) -> None:
        size = self.limits.vocab_size
        if ids and (min(ids) < 0 or max(ids) >= size):
            bad = next(i for i in ids if not 0 <= i < size)
            raise RequestError(
                f"{field} holds token id {bad}, outside the vocabulary [0, {size})", param=field
            )

    # -- out

    def process(self, step: StepOutput) -> tuple[list[tuple[Sink, RequestOutput]], Abort | None]:
        """Deltas of one engine step, and the message that ends requests whose stop string was found."""
        ids = np.frombuffer(step.ids, np.int64).tolist()
        tokens = np.frombuffer(step.token_ids, np.int32).tolist()
        counts = np.frombuffer(step.counts, np.int32).tolist() if step.counts else None
        events = {event.index: event for event in step.events}
        outputs: list[tuple[Sink, RequestOutput]] = []
        abort = None
        at = 0
        for i, seq_id in enumerate(ids):
            count = 1 if counts is None else counts[i]
            new_ids = tokens[at : at + count]
            at += count
            answer = self._answers.get(seq_id)
            if answer is None:
                continue  # aborted here; the engine has yet to hear of it
            event = events.get(i)
            if not answer.has_started:
                self._leave_queue(answer, is_served=True)
            output = answer.advance(new_ids, event)
            outputs.append((answer.request.sink, output))
            if output.finished:
                if event is None or not event.leave_reason:
                    abort = abort or Abort([], [], [])
                    abort.ids.append(seq_id)
                    abort.keep_tokens.append(answer.request.num_prompt_tokens + answer.num_output_tokens)
                    abort.reasons.append("stop_sequence")
                self._close_answer(answer)
        return outputs, abort

    def _leave_queue(self, answer: AnswerState, *, is_served: bool) -> None:
        with self._lock:
            if not answer.has_started:
                answer.has_started = True
                self.queue.leave(answer.request.num_prompt_tokens, is_served=is_served)

    def _close_answer(self, answer: AnswerState) -> None:
        request = answer.request
        self._leave_queue(answer, is_served=False)
        with self._lock:
            if self._answers.pop(answer.seq_id, None) is None:
                return
            request.num_open -= 1
            if request.num_open == 0:
                self.requests.pop(request.request_id, None)

    def abort(self, request_id: str) -> Abort | None:
        """The message that ends a request, None if it has ended: its answers end as the engine tells them to."""
        ids = [answer.seq_id for answer in self._open_answers(request_id)]
        return Abort(ids, [-1] * len(ids), ["aborted"] * len(ids)) if ids else None

    def forget(self, request_id: str) -> Abort | None:
        """Close a request whose client is gone; the message that frees it, None if it has ended."""
        answers = self._open_answers(request_id)
        kept = [answer.request.num_prompt_tokens + answer.num_output_tokens for answer in answers]
        for answer in answers:
            self._close_answer(answer)
        ids = [answer.seq_id for answer in answers]
        return Abort(ids, kept, ["aborted"] * len(ids)) if ids else None

    def _open_answers(self, request_id: str) -> list[AnswerState]:
        with self._lock:
            request = self.requests.get(request_id)
        return [] if request is None else [answer for answer in request.answers if not answer.finished]

    def fail_all(self, error: Exception) -> None:
        """The engine is gone: every request in flight ends with ``error``."""
        with self._lock:
            requests = list(self.requests.values())
            self.requests.clear()
            self._answers.clear()
        for request in requests:
            request.sink.fail(error)


class _Guides:
    """The compiled guides of a message, each once."""

    def __init__(self, message: AddRequests):
        self._shipped = message.guides = []
        self._indices: dict[tuple[bytes, str], int] = {}

    def index(self, params: SamplingParams, guide: CompiledGuide | None) -> int:
        """Where the guide of a request is; -1 for none. Raises RequestError for one that is not compiled."""
        if guide is None:
            if params.guide is not None:
                raise RequestError("guide has to be compiled first (LLMEngine.compile_guide)", param="guide")
            return -1
        key = (guide.key, guide.start_after)
        if key not in self._indices:
            self._indices[key] = len(self._shipped)
            self._shipped.append(guide)
        return self._indices[key]


def _sibling(request: NewRequest, seq_id: int, index: int) -> NewRequest:
    """The request of the n-th answer: independent noise for each, the first keeps the request's own seed."""
    if index == 0:
        request.id = seq_id
        return request
    value = (request.params.seed + index) & (2**64 - 1)
    seed = value - 2**64 if value >= 2**63 else value
    return msgspec.structs.replace(
        request, id=seq_id, params=msgspec.structs.replace(request.params, seed=seed)
    )
