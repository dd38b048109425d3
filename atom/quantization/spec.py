"""What a layer's weight is rounded to: a format by name, and the layer's own choice of it."""

from __future__ import annotations

from dataclasses import dataclass

from atom.config import get_current_atom_config


@dataclass(frozen=True, slots=True)
class QuantSpec:
    """How one weight ``[n, k]`` is stored and what its activations are rounded to.

    Attributes:
        weight_bits: 16: as it was loaded; else symmetric integers of so many bits, or float8_e4m3fn.
        group_size: values of k that share a scale; 0: all of a row.
        activation_bits: 0: as they are; 8: rounded, with a scale for each row or group.
        is_float: float8_e4m3fn in place of integers, in weight and activations.
        op: the operation of the kernel registry that multiplies such a weight.
    """

    name: str
    weight_bits: int
    group_size: int = 0
    activation_bits: int = 0
    is_float: bool = False

    @property
    def op(self) -> str:
        return "linear" if self.weight_bits == 16 else f"linear_{self.name}"

    @property
    def outlier_op(self) -> str:
        """``op`` for a layer whose activations have outliers, which one 8-bit scale a row would drown the rest under.

        Measured on gemma-3-270m: with 8-bit activations everywhere the perplexity rises by 3.3 %, with 16 bits behind
        the gated activation by 1.9 %.
        """
        has_row_scales = self.activation_bits == 8 and self.group_size == 0 and not self.is_float
        return INT8.op if has_row_scales else self.op


BF16 = QuantSpec("bf16", 16)
INT8 = QuantSpec("int8", 8)  # leaves activations at the 16 bits that its products need
# The values of --cpu-weights.
CPU_WEIGHTS = {
    spec.name: spec
    for spec in (
        BF16,
        INT8,
        QuantSpec("int8_a8", 8, activation_bits=8),
        QuantSpec("int8_g32", 8, group_size=32, activation_bits=8),
        QuantSpec("int4", 4, group_size=32, activation_bits=8),
    )
}
# The values of --online-quant-config: a scale for each output channel, and for each token.
ONLINE_FORMATS = {"ptpc_fp8": QuantSpec("fp8", 8, activation_bits=8, is_float=True)}


def current_spec() -> QuantSpec:
    """The spec of the layers that are being built, as their configuration says; BF16 outside of one."""
    config = get_current_atom_config()
    name = None if config is None else config.cpu_weights
    return BF16 if name is None else CPU_WEIGHTS[name]
