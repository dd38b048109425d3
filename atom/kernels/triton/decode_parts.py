"""What the decode kernels share: dependent launch, epilogues, and keys whose order is (value, lowest id).

A step is a chain of kernels, each launched while the one before it still runs (``launch_pdl``). Every kernel first
loads what no kernel of the step but the first one writes (weights, keys of earlier steps, lengths and rotations), lets
its successor start, then waits for its predecessor; what it computes is read and written behind that wait. Only the
second kernel lets nobody start before its wait, so that what the first one wrote is complete for all behind it.
"""

import torch
import triton
import triton.language as tl

NO_ACTIVATION, SILU, GELU_TANH = 0, 1, 2
ACTIVATIONS = {"silu": SILU, "gelu_tanh": GELU_TANH}
_GELU = tl.constexpr(GELU_TANH)
ROOT_2_OVER_PI, GELU_CUBE = tl.constexpr(0.7978845608028654), tl.constexpr(0.044715)  # of gelu by tanh

LOWEST = tl.constexpr(-(1 << 63))  # below every key
_PREFETCH = tl.constexpr("prefetch.global.L2 [$1]; mov.u32 $0, 0;")


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr):
    """``act(gate) * up`` in fp32."""
    if ACTIVATION == _GELU:
        inner = ROOT_2_OVER_PI * (gate + GELU_CUBE * gate * gate * gate)
        value = gate * (1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0)) * up
    else:
        value = gate / (1.0 + tl.exp(-gate)) * up
    return value


@triton.jit
def send_to_l2(places):
    """Bring the cache lines at ``places`` to the L2 cache, without waiting."""
    tl.inline_asm_elementwise(_PREFETCH, "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def finite(x):
    """x, and 0 where it is not finite."""
    return tl.where(x - x == 0.0, x, 0.0)


@triton.jit
def pack_key(value, token):
    """int64 in the order of (value, lower token first); NaN is above all.

    The sign of a key is its value's, so that a float's bits are the key's upper half.
    """
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where(value != value, 0x7FC00000, bits)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


def pdl_options(uses_pdl: bool) -> dict[str, bool]:
    """Launch options: nothing where dependent launch is off, since not every backend knows the name."""
    return {"launch_pdl": True} if uses_pdl else {}


def compact(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``weight`` in ``dtype`` where that loses nothing, which halves what every program reads of it."""
    narrow = weight.to(dtype)
    return narrow.contiguous() if torch.equal(narrow.to(weight.dtype), weight) else weight.contiguous()
