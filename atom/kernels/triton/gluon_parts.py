"""What the kernels in Gluon share: operations that Triton has renamed, and a few steps that several of them take."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

from atom.kernels.triton.attention_parts import LOG2_E
from atom.kernels.triton.decode_parts import GELU_CUBE, GELU_TANH, ROOT_2_OVER_PI

# Triton 3.6 has the latter names.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
bring = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
write = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

_GELU = gl.constexpr(GELU_TANH)
SHARES = gl.constexpr(64)  # of sums of squares, read at once


@gluon.jit
def activate(gate, up, ACTIVATION: gl.constexpr):
    """As ``decode_parts.activate``."""
    if ACTIVATION == _GELU:
        inner = ROOT_2_OVER_PI * (gate + GELU_CUBE * gate * gate * gate)
        value = gate * (1.0 - 1.0 / (gl.exp2(inner * (2 * LOG2_E)) + 1.0)) * up
    else:
        value = gate / (1.0 + gl.exp2(gate * -LOG2_E)) * up
    return value


@gluon.jit
def finite(x):
    """As ``decode_parts.finite``."""
    return gl.where(x - x == 0.0, x, 0.0)


@gluon.jit
def place_tile(number, num_rows, num_columns, BAND: gl.constexpr):
    """Row and column of tile ``number``: down a band of tiles, then to the next column."""
    of_band = BAND * num_columns
    band = number // of_band
    inside = number - band * of_band
    height = gl.minimum(num_rows - band * BAND, BAND)
    return band * BAND + inside % height, inside // height


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The ring's next place, and the phase in which it is waited for."""
    is_around = stage + 1 == STAGES
    return gl.where(is_around, 0, stage + 1), gl.where(is_around, phase ^ 1, phase)


@gluon.jit
def load_shares(squares_in, start, num_shares, share, token, BM: gl.constexpr):
    """Shares of sums of squares ``[tokens, len(share)]``, from share ``start`` on; 0 behind the last one."""
    place = squares_in + (start + share)[None, :] * BM + token[:, None]
    return gl.load(place, mask=(start + share < num_shares)[None, :], other=0.0)
