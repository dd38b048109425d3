"""The interface of an attention backend, and how a layer gets one.

A backend sees the paged cache of one layer, keys and values each
``[num_blocks, num_kv_heads, block_size, head_dim]``, and the step's ``AttentionMetaData``. Contracts:

- The cache is allocated zeroed, so every position holds a finite number; backends may read positions that
  they then mask. A backend stores 0 for a value that is not finite, so one request's overflow cannot reach
  the next owner of its page through ``0 * NaN``.
- ``forward`` first stores the step's keys and values at ``metadata.slot_mapping``, then attends.
- A sequence of context length 0 yields zeros, and so do tokens behind the last sequence's (padding).
- What is the same for all layers of a group is derived once a step and kept in ``metadata.backend_data``.
"""

from __future__ import annotations

import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch

from atom.errors import ConfigError
from atom.platforms import Platform, platform_of_device
from atom.utils.forward_context import AttentionMetaData

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AttentionSpec:
    """What one layer asks of its backend; heads are those of this rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    dtype: torch.dtype
    window: int | None = None  # a query sees itself and the window - 1 positions before it
    soft_cap: float | None = None
    has_sinks: bool = False

    @property
    def group_size(self) -> int:
        """Query heads that share a key/value head."""
        return self.num_heads // self.num_kv_heads


class AttentionBackend(ABC):
    """One way to compute attention; an instance serves one layer."""

    name: ClassVar[str]
    # Whether launches depend on nothing but shapes, so that a device graph can hold them.
    supports_token_graph: ClassVar[bool] = False
    # Whether it norms and rotates the heads itself, see ``forward_projected``.
    fuses_rotation: ClassVar[bool] = False
    # Whether it makes the heads itself, see ``forward_hidden``.
    fuses_projection: bool = False

    @classmethod
    @abstractmethod
    def supports(cls, platform: Platform, spec: AttentionSpec) -> bool:
        """Whether this backend computes such a layer on this platform."""

    @classmethod
    def is_preferred(cls, spec: AttentionSpec) -> bool:
        """Whether such layers take this backend where nobody asks for it, though one behind it may support them too."""
        return True

    def __init__(self, spec: AttentionSpec, sinks: torch.Tensor | None = None):
        """``sinks [num_heads]``: logits that join each softmax's denominator only."""
        self.spec = spec
        self.sinks = sinks

    @abstractmethod
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        metadata: AttentionMetaData,
        output: torch.Tensor,
    ) -> None:
        """Store ``k`` and ``v`` in the cache and attend.

        Args:
            q: ``[num_tokens, num_heads, head_dim]``, prefill sequences first.
            k: ``[num_tokens, num_kv_heads, head_dim]``; ``v`` alike.
            keys: the layer's cache; ``values`` alike. Both are written.
            output: ``[num_tokens, num_heads, head_dim]``, contiguous; every element is written.
        """

    def prefill_sizes(self) -> tuple[int, ...]:
        """Tokens of the longest prompt from which on other kernels serve, ascending: to be compiled ahead."""
        return ()

    def forward_projected(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        keys: torch.Tensor,
        values: torch.Tensor,
        metadata: AttentionMetaData,
        output: torch.Tensor,
    ) -> None:
        """Norm (unless ``weight`` is None) and rotate query and key heads, then as :meth:`forward`.

        Only of a backend that ``fuses_rotation``. ``qkv [num_tokens, num_heads + 2 * num_kv_heads, head_dim]`` is
        written to; the rest is as the kernels "rms_norm" and "rotary" take it.
        """
        raise NotImplementedError(f"{self.name} takes heads that are rotated already")

    def forward_hidden(
        self,
        x: torch.Tensor,
        projection: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        keys: torch.Tensor,
        values: torch.Tensor,
        metadata: AttentionMetaData,
        output: torch.Tensor,
    ) -> None:
        """As :meth:`forward_projected` of ``x projection^T``; only of a backend that ``fuses_projection``.

        Args:
            x: ``[num_tokens, hidden_size]``.
            projection: ``[(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]``, contiguous.
        """
        raise NotImplementedError(f"{self.name} takes heads that are made already")


# Where each backend lives; a platform lists the names that it prefers. Imported when first asked for.
_BACKENDS = {
    "cpu_native": "atom.model_ops.attentions.cpu_native:CpuNativeAttention",
    "cpu_paged": "atom.model_ops.attentions.cpu:CpuPagedAttention",
    "flash_attention": "atom.model_ops.attentions.flash:FlashAttention",
    "reference": "atom.model_ops.attentions.reference:ReferenceAttention",
    "triton": "atom.model_ops.attentions.triton:TritonAttention",
}
_override: str | None = None
_logged: set[str] = set()


def select_backend(spec: AttentionSpec, device: torch.device | None = None) -> type[AttentionBackend]:
    """The first backend by the platform's preference that supports the layer and is to be preferred for it.

    Raises ConfigError when an override names a backend that does not, or none does.
    """
    platform = platform_of_device(device or torch.get_default_device())
    names = platform.attention_backends if _override is None else (_override,)
    for name in names:
        if name not in _BACKENDS:
            continue
        backend = _import_backend(name)
        if (is_asked_for(name) or backend.is_preferred(spec)) and backend.supports(platform, spec):
            if name not in _logged:
                _logged.add(name)
                log.info("attention backend: %s on %s", name, platform.name)
            return backend
    raise ConfigError(f"attention backend: none of {', '.join(names)} supports {spec} on {platform.name}")


@contextmanager
def override_backend(name: str) -> Iterator[None]:
    """Layers built inside use backend ``name``. Raises ConfigError for an unknown one."""
    global _override
    if name not in _BACKENDS:
        raise ConfigError(f"attention backend: {name!r} is not one of {', '.join(_BACKENDS)}")
    previous, _override = _override, name
    try:
        yield
    finally:
        _override = previous


def is_asked_for(name: str) -> bool:
    """Whether ``override_backend`` names this backend now."""
    return name == _override


def _import_backend(name: str) -> type[AttentionBackend]:
    module, _, attribute = _BACKENDS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
