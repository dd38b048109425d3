"""What one forward pass knows beside its input ids and positions: a single typed object, set for its duration.

It never holds request state; attention layers read their group's metadata from it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class AttentionMetadata:
    """Where each query token stands and where its keys lie; one per cache group.

    Prefill sequences come first: sequences ``[0, num_prefill_seqs)`` own query tokens
    ``[0, num_prefill_tokens)``; each of the rest owns ``1 + drafts`` tokens.
    ``*_host`` lists are exact for prefill sequences and upper bounds for decode ones (equal without
    speculation), so that launching never waits for the device.
    """

    num_prefill_seqs: int
    num_prefill_tokens: int
    query_lens_host: list[int]  # [num_seqs]
    context_lens_host: list[int]  # [num_seqs] keys visible to the last query token of the sequence
    cu_query_lens: "torch.Tensor"  # [num_seqs + 1] int32
    context_lens: "torch.Tensor"  # [num_seqs] int32, includes this step's tokens
    block_table: "torch.Tensor"  # [num_seqs, max_blocks] int32; columns outside a sliding window are stale
    slots: "torch.Tensor"  # [num_tokens] int64 cache position of each query token; -1: do not write
    backend_data: Any = None  # what the attention backend derives once a step for all layers of the group

    @property
    def num_seqs(self) -> int:
        return len(self.query_lens_host)


@dataclass(slots=True)
class ForwardContext:
    """``attention[g]`` belongs to cache group ``g``; ``group_of_layer`` maps a layer's name to its group."""

    attention: list[AttentionMetadata]
    group_of_layer: dict[str, int]
    kv_caches: dict[str, tuple["torch.Tensor", "torch.Tensor"]]  # layer name -> (keys, values)


_current: ForwardContext | None = None


def get_forward_context() -> ForwardContext:
    """The context of the running forward pass. Raises RuntimeError outside of one."""
    if _current is None:
        raise RuntimeError("no forward context is set: call the model inside set_forward_context()")
    return _current


@contextmanager
def set_forward_context(context: ForwardContext) -> Iterator[None]:
    """Make ``context`` current for one forward pass. Raises RuntimeError when one is already set."""
    global _current
    if _current is not None:
        raise RuntimeError("forward contexts do not nest")
    _current = context
    try:
        yield
    finally:
        _current = None
