"""What an implementation of the ``linear`` operation is: a weight layout and a product over it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch


class LinearKernel(ABC):
    """A product with a weight that was packed once, after loading."""

    makes_copy: ClassVar[bool]  # whether ``pack`` leaves the original unused

    @abstractmethod
    def pack(self, weight: torch.Tensor) -> Any:
        """``weight [out, in]`` in the layout that the product wants: a copy of the same size, or ``weight``."""

    @abstractmethod
    def __call__(self, x: torch.Tensor, packed: Any, bias: torch.Tensor | None) -> torch.Tensor:
        """``x [num_tokens, in]`` times the packed weight, plus ``bias [out]``: ``[num_tokens, out]``."""
