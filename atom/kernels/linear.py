"""What an implementation of the ``linear`` operation is: a weight layout and a product over it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch


class QuantisedRows(NamedTuple):
    """Activations rounded row by row, ``values * scales``.

    Attributes:
        values: ``[num_tokens, size]``, float8_e4m3fn.
        scales: ``[num_tokens, 1]``, fp32.
    """

    values: torch.Tensor
    scales: torch.Tensor


Activations = torch.Tensor | QuantisedRows


def add_up(total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``total + x``, rounded to their dtype."""
    if torch.compiler.is_compiling():
        # In fp32, which rounds alike: Inductor makes a sum of products part of the last one, as addmm, and that copies
        # ``total`` to its output first. Together with the norm behind it a pass over both costs less.
        return (total.float() + x.float()).to(x.dtype)
    return total + x


class LinearKernel(ABC):
    """A product with a weight that was packed once, after loading."""

    makes_copy: ClassVar[bool]  # whether ``pack`` leaves the original unused
    takes_gguf_blocks: bool = False  # whether a GGUF file's blocks may stand in for what ``pack`` makes
    can_gather: ClassVar[bool] = False  # whether an embedding may be read from the packed weight
    takes_quantised: ClassVar[bool] = False  # whether it rounds its input, and takes ``QuantisedRows`` too

    @abstractmethod
    def pack(self, weight: torch.Tensor) -> Any:
        """``weight [out, in]`` in the layout that the product wants: ``weight`` itself, or a copy.

        Where ``makes_copy`` is set the copy may take the memory of ``weight``, whose values are then gone.
        """

    def pack_gated(self, weight: torch.Tensor, activation: str) -> Any | None:
        """``weight [gate | up, in]`` so that the product is ``activation(gate) * up``; None: this kernel cannot.

        Args:
            activation: ``silu`` or ``gelu_tanh``.
        """
        return None

    def num_bytes(self, out_features: int, in_features: int, dtype: torch.dtype) -> int:
        """What :meth:`pack` makes of a weight of ``dtype``."""
        return out_features * in_features * dtype.itemsize

    def rehearse(self, packed: Any, max_tokens: int) -> None:
        """Launch each kernel that steps of up to ``max_tokens`` take and those of few tokens do not; called while
        launches are recorded.
        """
        return None

    @abstractmethod
    def __call__(self, x: torch.Tensor, packed: Any, bias: torch.Tensor | None) -> torch.Tensor:
        """``x [num_tokens, in]`` times the packed weight, plus ``bias [out]``: ``[num_tokens, out]``."""

    def add_to(
        self, total: torch.Tensor, x: torch.Tensor, packed: Any, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """``total [num_tokens, out]`` plus the product. The sum may take the memory of ``total``."""
        return add_up(total, self(x, packed, bias))

    def gather(self, ids: torch.Tensor, packed: Any) -> torch.Tensor:
        """Rows ``ids [n]`` of what was packed: ``[n, in]``, in fp32 or the weight's dtype."""
        raise NotImplementedError(f"{type(self).__name__} reads no rows")
