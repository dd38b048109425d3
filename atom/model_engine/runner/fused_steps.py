"""Whether decode steps may be fused, and what that will take: known before a weight is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atom.config import Config
from atom.platforms import Platform
from atom.utils import envs
from atom.utils.debug_helper import needs_eager

if TYPE_CHECKING:
    from atom.models.base import CausalLM


def why_modules(config: Config) -> str | None:
    """Why steps run module by module whatever the model; None where a fused decoder may run them."""
    reason = needs_eager() or (None if envs.ATOM_FUSED_DECODE else "ATOM_FUSED_DECODE is off")
    if reason is None and config.mark_trace and config.compilation_level == 0:
        reason = "--mark-trace labels modules"
    return reason


def buffer_bytes(config: Config, platform: Platform, model: CausalLM | None) -> int:
    """What a fused decoder will allocate on the device once the cache is there; 0 where there is none.

    Args:
        model: whose weights need not be read yet; None where it has no layers.
    """
    if (
        model is None
        or platform.name == "cpu"
        or not platform.supports("triton")
        or why_modules(config) is not None
    ):
        return 0
    from atom.model_ops.fused_cuda import planned_bytes

    return planned_bytes(model.dense_decoder(), platform, max_tokens=config.max_num_seqs)
