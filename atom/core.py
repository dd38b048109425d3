"""Shared vocabulary of the engine: a sequence, its states, a scheduled batch and its output. No torch.

Lengths of a :class:`Sequence` (one token = one KV position):

    token_ids            committed ids: the prompt, then the answer as far as it has been read back; an array of
                         int32 where it came by message, which grows as a list does but adds to no list
    num_computed         positions whose KV committed steps have written
    num_scheduled        where the next step starts: positions of committed steps and of those in flight
                         (an upper bound: a verify step of 1 + k tokens may keep fewer, commit corrects it)
    num_inflight_tokens  num_scheduled - num_computed
    max_len              prompt and answer together never grow past this
    decode_limit         a decode step may run up to this position: reserved in every block table and below
                         max_len; 0 while the sequence cannot decode
    commit_check         num_computed at which commit looks closer: a block is full, or max_len is reached

A row of the device tables belongs to a sequence from admission to finish or preemption. ``epoch`` grows
each time a sequence loses its row, so a result that arrives one step late for a row that is gone (a
zombie) is recognised and dropped.
"""

import enum
from array import array
from dataclasses import dataclass, field
from typing import Any

from atom.sampling_params import SamplingParams

NO_ROW = -1


class SequenceStatus(enum.IntEnum):
    WAITING = 0
    WAITING_FOR_REMOTE_KVS = 1
    RUNNING = 2
    FINISHED = 3
    ABORTED = 4


class Sequence:
    """One answer being generated: ids, lengths, blocks and the rules by which it ends."""

    __slots__ = (
        "id",
        "token_ids",
        "packed_prompt",
        "num_prompt_tokens",
        "params",
        "stop_ids",
        "bad_word_ids",
        "guide",
        "max_output_tokens",
        "status",
        "leave_reason",
        "row",
        "epoch",
        "tables",
        "num_computed",
        "num_scheduled",
        "num_inflight_samples",
        "num_published",
        "max_len",
        "decode_limit",
        "commit_check",
        "prefill_end",
        "num_drafts",
        "num_cached_tokens",
        "num_preemptions",
        "chain",
        "hash_seed",
        "priority",
        "cache_salted",
        "arrival_time",
        "first_scheduled_time",
        "prompt_logprobs",
    )

    def __init__(
        self,
        seq_id: int,
        token_ids: "list[int] | array[int]",
        params: SamplingParams,
        *,
        stop_ids: frozenset[int] = frozenset(),
        bad_word_ids: tuple[tuple[int, ...], ...] = (),
        guide: Any = None,
        max_output_tokens: int,
        hash_seed: int = 0,
        cache_salted: bool = False,
        priority: int = 0,
        arrival_time: float = 0.0,
        packed_prompt: bytes | None = None,
    ):
        self.id = seq_id
        self.token_ids = token_ids
        self.packed_prompt = packed_prompt  # the prompt's ids as int32, which a step's buffer copies at once
        self.num_prompt_tokens = len(token_ids)
        self.params = params
        self.stop_ids = stop_ids  # ids that end the answer; empty under ignore_eos
        self.bad_word_ids = bad_word_ids
        self.guide = guide  # messages.CompiledGuide: ids are chosen within a grammar
        self.max_output_tokens = max_output_tokens
        self.status = SequenceStatus.WAITING
        self.leave_reason = (
            ""  # eos | stop_<id> | stop_sequence | max_tokens | aborted | unschedulable: <why>
        )
        self.row = NO_ROW
        self.epoch = 0
        self.tables: list[list[int]] = []  # one block table (or [slot]) per cache group while running
        self.num_computed = 0
        self.num_scheduled = 0
        self.num_inflight_samples = 0  # preempted: ids of its former row that are still to be committed
        self.num_published = 0  # leading blocks that the prefix cache has been told of
        self.max_len = len(token_ids) + max_output_tokens  # the scheduler lowers it to the context
        self.decode_limit = 0
        self.commit_check = 0
        self.prefill_end = len(token_ids)  # the prefill of this admission ends here
        self.num_drafts = 0  # draft tokens that ride in the next decode step
        self.num_cached_tokens = 0  # prefix hit of the first admission, reported to the client
        self.num_preemptions = 0
        self.chain: Any = None  # scheduling.prefix_hash.HashChain, extended as the answer grows
        self.hash_seed = hash_seed
        self.priority = priority
        self.cache_salted = cache_salted
        self.arrival_time = arrival_time  # time.monotonic() of the front end
        self.first_scheduled_time = 0.0
        self.prompt_logprobs: list[TokenLogprobs] = []  # gathered chunk by chunk until the first output

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_inflight_tokens(self) -> int:
        return self.num_scheduled - self.num_computed

    @property
    def is_prefilling(self) -> bool:
        """Whether the next step of this sequence is a prefill chunk."""
        return self.num_scheduled < self.prefill_end

    @property
    def is_finished(self) -> bool:
        return self.status >= SequenceStatus.FINISHED

    def __repr__(self) -> str:
        return (
            f"Sequence({self.id}, {self.status.name}, tokens={self.num_prompt_tokens}+{self.num_output_tokens}, "
            f"computed={self.num_computed}+{self.num_inflight_tokens}, row={self.row})"
        )


class GroupKind(enum.StrEnum):
    FULL = "full"
    SLIDING = "sliding"
    STATE = "state"


@dataclass(frozen=True)
class CacheGroupSpec:
    """Layers that share one block table. ``bytes_per_block`` sums over the group's layers."""

    kind: GroupKind
    layer_names: tuple[str, ...]
    bytes_per_block: int
    window: int | None = None  # sliding: a query sees itself and the window - 1 tokens before it
    num_blocks: int = 0  # set once the memory budget is known


@dataclass(slots=True)
class ScheduledBatch:
    """One step, as the scheduler decided it. Lists are parallel; prefill sequences come first.

    A decode sequence's first position is derived on the device (``computed[row]``), so ``starts`` is only
    exact for prefill sequences; for decode it is the upper bound known to the host.
    """

    step: int
    seqs: list[Sequence]
    epochs: list[int]
    rows: list[int]
    starts: list[int]
    num_scheduled: list[int]  # query tokens of each sequence; decode: 1 + drafts
    samples: list[bool]  # whether the step yields tokens for it (False: a middle prefill chunk)
    num_prefill_seqs: int
    num_tokens: int
    new_seqs: list[Sequence]  # admitted in this step: their row's parameters are to be written
    patches: list[list[tuple[int, int, int]]]  # per cache group: (row, column, block)
    connector_meta: Any = None
    group_meta: list[Any] = field(default_factory=list)  # per cache group, e.g. state copies

    @property
    def num_seqs(self) -> int:
        return len(self.seqs)


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities of one position: the chosen token's, its rank, and the best alternatives'."""

    token_id: int
    logprob: float
    rank: int  # 1 = the most likely
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True)
class TokenMasks:
    """Which ids the guided rows of a step may take.

    ``bits`` is a NumPy array [at least len(rows), ceil(vocab / 32)] int32: logits row ``rows[i]`` may take id t
    if bit ``t % 32`` of ``bits[i, t // 32]`` is set, and no id past its end.
    """

    rows: list[int]
    bits: Any
    ended: set[int] = field(default_factory=set)  # of ``rows``: only an end id is left


@dataclass(slots=True)
class BatchOutput:
    """What a step sampled, in the order of ``ScheduledBatch.seqs``.

    ``token_ids[i]`` is the id of sequence i (undefined where it did not sample). A speculative step fills
    ``accepted[i]`` instead: the ids it keeps, accepted drafts first, then the bonus token.
    """

    token_ids: list[int]
    accepted: list[list[int]] | None = None
    logprobs: dict[int, list[TokenLogprobs]] | None = None  # batch index -> one entry a kept token
    prompt_logprobs: dict[int, list[TokenLogprobs]] | None = None  # batch index -> a row a chunk position
    errors: dict[int, str] | None = None  # batch index -> why this sequence alone failed


def openai_finish_reason(leave_reason: str) -> str:
    """The engine's reason in OpenAI's vocabulary: ``stop``, ``length``, ``abort`` or ``error``."""
    if leave_reason == "eos" or leave_reason.startswith("stop"):
        return "stop"
    if leave_reason == "max_tokens":
        return "length"
    return "abort" if leave_reason == "aborted" else "error"
