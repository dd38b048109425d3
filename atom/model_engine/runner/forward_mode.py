"""How a step runs: eagerly, by a recorded graph or by the mono kernels, and to what size it is padded. No torch.

Decided once a step from host data alone, and from the whole data-parallel group's: every rank comes to the same
answer, as ranks that replay recordings of different buckets would wait for each other in their collectives.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from atom.config_parts import CUDAGraphMode
from atom.errors import ConfigError
from atom.utils import envs

DEVICE_TOKEN_RANGE = (256, 4096)
MAX_UNSPLIT_BS = 2


class StepFacts(NamedTuple):
    """One rank's step. An idle rank has no tokens; its ``is_prefill`` and ``max_seqlen_q`` say nothing."""

    is_prefill: bool  # any request computes prompt tokens
    batch_size: int  # requests
    num_tokens: int  # rows of the forward pass
    max_seqlen_q: int  # rows of the longest request


@dataclass(frozen=True, slots=True)
class GraphTables:
    """What this engine may replay. Built when recording is done; the same on every data-parallel rank."""

    mode: CUDAGraphMode = CUDAGraphMode.NONE
    enforce_eager: bool = False
    request_sizes: Mapping[int, Sequence[int]] = field(
        default_factory=dict
    )  # max_seqlen_q -> ascending counts
    prefill_tokens: Sequence[int] = ()  # ascending token buckets
    decode_tokens: Sequence[int] = ()
    splits_decode: bool = False  # two-batch overlap of decode steps
    takes_mono: Callable[[StepFacts], bool] | None = None  # the router of the fused decode kernels
    uses_tr_hybrid: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "uses_tr_hybrid", self.mode.uses_tr_hybrid())


@dataclass(slots=True)
class ForwardMode:
    """The decision about one step.

    ``running_bs`` counts requests and ``running_tokens`` rows, padding included: the size of what is replayed, or
    for an eager step the largest of the data-parallel group.
    """

    kind: Literal["eager", "request", "token", "mono"]
    running_bs: int
    running_tokens: int
    ubatch_split_bs: int | None = None  # cut the step in two as the recording of so many requests was cut

    @property
    def token_graph(self) -> bool:
        """Whether the model's recording units replay a token bucket."""
        return self.kind == "token"

    @property
    def tr_graph(self) -> Literal["replay"] | None:
        """What the forward context tells the recording units."""
        return "replay" if self.kind == "token" else None

    @classmethod
    def decide(
        cls, step: StepFacts, tables: GraphTables, group: Sequence[StepFacts] | None = None
    ) -> "ForwardMode":
        """How ``step`` runs.

        Args:
            group: the steps of all data-parallel ranks, this one included. All of them run at the group's largest
                size; where some prefill and others decode, all run eagerly. An idle rank runs a dummy of their kind.
        """
        is_prefill, batch_size, num_tokens, max_seqlen_q = step
        is_alike, is_uniform = True, num_tokens == batch_size * max_seqlen_q
        if group is not None:
            is_prefill, batch_size, num_tokens, max_seqlen_q, is_alike, is_uniform = _largest(step, group)
        elif tables.takes_mono is not None and not is_prefill and tables.takes_mono(step):
            return cls("mono", batch_size, num_tokens)
        if tables.enforce_eager or not is_alike or not num_tokens:
            return cls("eager", batch_size, num_tokens)
        if is_prefill or tables.uses_tr_hybrid:
            buckets = tables.prefill_tokens if is_prefill else tables.decode_tokens
            tokens = cls._pad_to_token_graph(num_tokens, buckets)
            if tokens is not None:
                pads_requests = is_uniform and not is_prefill and not tokens % max_seqlen_q
                return cls("token", tokens // max_seqlen_q if pads_requests else batch_size, tokens)
        elif is_uniform:
            sizes = tables.request_sizes.get(max_seqlen_q, ())
            index = bisect_left(sizes, batch_size)
            if index < len(sizes):
                bs = sizes[index]
                is_split = tables.splits_decode and decode_bucket_splits(bs)
                return cls("request", bs, bs * max_seqlen_q, bs if is_split else None)
        return cls("eager", batch_size, num_tokens)

    @staticmethod
    def _pad_to_token_graph(num_tokens: int, buckets: Sequence[int]) -> int | None:
        """The smallest recorded bucket that holds ``num_tokens``; None: longer than all of them."""
        index = bisect_left(buckets, num_tokens)
        return buckets[index] if index < len(buckets) else None


def _largest(step: StepFacts, group: Sequence[StepFacts]) -> tuple[bool, int, int, int, bool, bool]:
    """The facts that all ranks go by, whether all do the same kind of work, and all their requests the same rows."""
    busy = [other for other in group if other[2]]
    if not busy:
        return *step, True, False
    kind, max_bs, max_tokens, max_seqlen_q = busy[0]
    is_alike, is_uniform = True, max_tokens == max_bs * max_seqlen_q
    for is_prefill, batch_size, num_tokens, seqlen_q in busy[1:]:
        if is_prefill != kind:
            is_alike = False
        if seqlen_q != max_seqlen_q or num_tokens != batch_size * seqlen_q:
            is_uniform = False
            max_seqlen_q = max(max_seqlen_q, seqlen_q)
        max_bs = batch_size if batch_size > max_bs else max_bs
        max_tokens = num_tokens if num_tokens > max_tokens else max_tokens
    return kind, max_bs, max_tokens, max_seqlen_q, is_alike, is_uniform


def decode_bucket_splits(running_bs: int) -> bool:
    """Whether two-batch overlap records a decode bucket of so many requests in two halves."""
    return running_bs > MAX_UNSPLIT_BS


def capture_sizes(
    sizes: Sequence[int], max_num_seqs: int, max_num_batched_tokens: int, max_seqlen_q: int = 1
) -> tuple[int, ...]:
    """Request counts to record, largest first so that the shared pool is laid out once.

    Args:
        sizes: request counts as ``CompilationConfig.capture_sizes`` gives them. What no step can have (by
            ``max_num_seqs`` or the token budget) stands for the largest step, so that full batches have a bucket.
        max_seqlen_q: rows of each decoding request: 1, or the drafts it verifies and one.

    Raises:
        ConfigError: a size or ``max_seqlen_q`` is below 1.
    """
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"capture sizes must be sizes of at least 1, got {list(sizes)}")
    if max_seqlen_q < 1:
        raise ConfigError(f"max_seqlen_q must be at least 1, got {max_seqlen_q}")
    largest = min(max_num_seqs, max_num_batched_tokens // max_seqlen_q)
    return tuple(sorted({min(size, largest) for size in sizes} - {0}, reverse=True))


def eighths_of_octaves(first: int, last: int) -> tuple[int, ...]:
    """``first``, then steps of an eighth of the octave that they lie in, up to ``last``: 12 % of padding at most."""
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(sizes[-1] + (1 << sizes[-1].bit_length() - 1) // 8)
    return tuple(sizes)


def token_graph_sizes(in_eighths: bool = False) -> tuple[int, ...]:
    """Prefill token buckets of ``ATOM_TOKEN_GRAPH_SIZES``, ascending; empty when it is.

    Args:
        in_eighths: where the variable is not set, steps of an eighth of an octave up to where launching kernels
            costs less than running them. One graph holds a whole prefill there, so that many are cheap.

    Raises:
        ConfigError: the variable holds something else.
    """
    if in_eighths and not envs.is_set("ATOM_TOKEN_GRAPH_SIZES"):
        return eighths_of_octaves(*DEVICE_TOKEN_RANGE)
    text = envs.ATOM_TOKEN_GRAPH_SIZES
    sizes = set()
    for part in filter(None, map(str.strip, text.split(","))):
        if not (part.isascii() and part.isdigit()) or int(part) < 1:
            raise ConfigError(
                f"ATOM_TOKEN_GRAPH_SIZES must be sizes of at least 1 separated by commas, got {part!r} in {text!r}"
            )
        sizes.add(int(part))
    return tuple(sorted(sizes))
