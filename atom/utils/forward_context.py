"""What one forward pass knows beside its input ids and positions: a single typed object, set for its duration.

A recorded graph takes no new arguments, so everything that changes from step to step reaches the layers by this
side channel. It never holds request state; attention layers read their group's metadata from it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    import torch

    from atom.config_parts import KVCacheTensor


@dataclass(slots=True)
class AttentionMetaData:
    """Where each query token stands and where its keys lie; one per cache group.

    Prefill sequences come first: sequences ``[0, num_prefill_seqs)`` own query tokens
    ``[0, num_prefill_tokens)``; each of the rest owns ``1 + drafts`` tokens. Sequences of context length 0
    and tokens of slot -1 are the padding of a recorded step; so are tokens behind the last sequence's.
    ``*_host`` lists are exact for prefill sequences and upper bounds for decode ones (equal without
    speculation), so that launching never waits for the device.
    """

    num_prefill_seqs: int
    num_prefill_tokens: int
    query_lens_host: list[int]
    context_lens_host: list[int]  # keys visible to the last query token of the sequence
    cu_seqlens_q: "torch.Tensor"  # [num_seqs + 1] int32
    context_lens: "torch.Tensor"  # [num_seqs] int32, includes this step's tokens
    block_tables: "torch.Tensor"  # [rows, max_blocks] int32; columns outside a sliding window are stale
    slot_mapping: "torch.Tensor"  # [num_tokens] int64 cache position of each query token; -1: do not write
    table_rows: "torch.Tensor | None" = (
        None  # [num_seqs] int64 rows of block_tables; None: sequence i has row i
    )
    backend_data: Any = None  # what the attention backend derives once a step for all layers of the group

    @property
    def num_seqs(self) -> int:
        """Sequences that own query tokens; the tensors may go on behind them."""
        return len(self.query_lens_host)

    @property
    def max_seqlen_q(self) -> int:
        return max(self.query_lens_host, default=0)

    @property
    def max_seqlen_k(self) -> int:
        return max(self.context_lens_host, default=0)


@dataclass(slots=True)
class Context:
    """The state of a step that is read most often.

    ``running_bs`` counts padded sequences and is the key of request graphs; ``running_tokens`` counts padded
    rows, which is what token graphs go by and what MoE layers pad to. Neither follows from the other.
    """

    positions: "torch.Tensor | None" = None
    is_prefill: bool = False
    batch_size: int = 0
    running_bs: int = 0
    running_tokens: int = 0
    is_draft: bool = False


@dataclass(slots=True)
class DPMetadata:
    """Token counts of the data-parallel ranks in this step."""

    num_tokens_across_dp: list[int]

    @property
    def cu_tokens_across_dp(self) -> list[int]:
        """Running sums: rank r's rows end before entry r."""
        total, sums = 0, []
        for count in self.num_tokens_across_dp:
            total += count
            sums.append(total)
        return sums

    @property
    def max_tokens_across_dp(self) -> int:
        return max(self.num_tokens_across_dp)


@dataclass(slots=True)
class SpecDecodeMetadata:
    """Draft tokens that this step verifies, all sequences' after each other."""

    draft_token_ids: "torch.Tensor"  # [num drafts]
    num_spec_steps: int
    num_draft_tokens_np: "np.ndarray"  # [num_seqs]
    cu_num_draft_tokens: "torch.Tensor"  # [num_seqs]
    target_logits_indices: "torch.Tensor"  # [num drafts] rows of the logits that judge a draft
    bonus_logits_indices: "torch.Tensor"  # [num_seqs] rows that yield the token after all drafts


@dataclass(slots=True)
class HeadWork:
    """What a fused decoder may do behind the hidden states in the same call, and what came out.

    ``rows`` are the tokens that sample, ascending. With ``is_argmax`` the result is each row's best id below
    ``num_valid_ids``, the lowest on ties, otherwise the rows' logits. Where ``keeps_hidden`` is False, the hidden
    states that the model returns are undefined. Results die at the next step.
    """

    rows: "np.ndarray"  # [num_rows] int64
    num_valid_ids: int
    is_argmax: bool
    keeps_hidden: bool
    is_done: bool = False  # the rest is the result
    best_ids: "torch.Tensor | None" = None  # [num_rows] int64
    is_finite: "torch.Tensor | None" = None  # [num_rows] bool, whether the best logit is
    letter: Any = None  # ``outbox.Letter``: both in host memory, once the step is done
    logits: "torch.Tensor | None" = None  # [num_rows, vocab_size]
    is_advanced: bool = False  # whether the step's tables hold the ids and lengths already


@dataclass(slots=True)
class ForwardContext:
    """``attn_metadata`` and ``kv_cache_data`` are by layer name; the layers of a cache group share an entry.

    ``tr_graph`` tells a model's recording unit to record its token graph, or to replay it. What it records begins
    with ``prepare``, if there is one: launches that make the step's inputs, at the addresses that the unit is given.
    ``is_rehearsal``: the step is nothing but padding, and its kernels may be kept from running: what modules put out
    is of no interest to anybody.
    """

    no_compile_layers: dict[str, Any] = field(default_factory=dict)
    attn_metadata: dict[str, AttentionMetaData] = field(default_factory=dict)
    kv_cache_data: dict[str, "KVCacheTensor"] = field(default_factory=dict)
    context: Context = field(default_factory=Context)
    dp_metadata: DPMetadata | None = None
    spec_decode_metadata: SpecDecodeMetadata | None = None
    tr_graph: Literal["record", "replay"] | None = None
    prepare: Callable[[], object] | None = None
    head: HeadWork | None = None
    is_rehearsal: bool = False


_EMPTY = ForwardContext()
_current: ForwardContext = _EMPTY


def get_forward_context() -> ForwardContext:
    """The context of the running forward pass; an empty one outside of any."""
    return _current


@contextmanager
def set_forward_context(context: ForwardContext) -> Iterator[ForwardContext]:
    """Make ``context`` current for one forward pass. Raises RuntimeError when one is already set."""
    global _current
    if _current is not _EMPTY:
        raise RuntimeError("forward contexts do not nest")
    _current = context
    try:
        yield context
    finally:
        reset_forward_context()


def reset_forward_context() -> None:
    """Back to the empty context."""
    global _current
    _current = _EMPTY
