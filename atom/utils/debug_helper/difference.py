"""How far two tensors are apart."""

import math
from dataclasses import dataclass

import torch

# Relative error that rounding explains, by the coarser dtype of a pair; integers have to be equal.
TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 5e-3,
    torch.bfloat16: 3e-2,
}
FLOAT8_TOLERANCE = 0.2
_CHUNK = 1 << 22  # elements compared at a time, in float64


@dataclass(frozen=True, slots=True)
class Difference:
    """Of a target ``a`` from its reference ``b``; infinite where one is not finite and the other not the same."""

    is_equal: bool  # every element, bit for bit but for the sign of zero
    max_abs: float
    relative: float  # |a - b| / |b|, Euclidean norms
    cosine: float
    worst_row_cosine: float  # smallest over the rows (tokens)
    tolerance: float  # of ``relative``, that their dtypes suggest


def difference(target: torch.Tensor, reference: torch.Tensor) -> Difference:
    """Compare tensors of one shape; the last dimension is a row. Raises ValueError when the shapes differ."""
    if target.shape != reference.shape:
        raise ValueError(f"shapes differ: {list(target.shape)} and {list(reference.shape)}")
    width = target.shape[-1] if target.dim() else 1
    rows_a, rows_b = target.reshape(-1, max(1, width)), reference.reshape(-1, max(1, width))
    num_rows = max(1, _CHUNK // max(1, width))
    is_equal, max_abs, worst = True, 0.0, 1.0
    dot = norm_a = norm_b = norm_d = 0.0
    for a, b in zip(rows_a.split(num_rows), rows_b.split(num_rows), strict=True):
        a, b = a.double(), b.double()
        same = (a == b) | (a.isnan() & b.isnan())
        is_equal = is_equal and bool(same.all())
        both = same & ~a.isfinite()
        a, b = a.masked_fill(both, 0.0), b.masked_fill(both, 0.0)
        if not a.numel():
            continue
        if not bool(a.isfinite().all() and b.isfinite().all()):
            max_abs = norm_d = math.inf
            worst = -1.0
            continue
        delta = a - b
        max_abs = max(max_abs, float(delta.abs().max()))
        norm_d += float(delta.square().sum())
        dots, squares_a, squares_b = (a * b).sum(1), a.square().sum(1), b.square().sum(1)
        dot, norm_a, norm_b = (
            dot + float(dots.sum()),
            norm_a + float(squares_a.sum()),
            norm_b + float(squares_b.sum()),
        )
        worst = min(worst, float(_cosines(dots, squares_a, squares_b).min()))
    if math.isinf(norm_d):
        return Difference(False, math.inf, math.inf, -1.0, -1.0, _tolerance(target, reference))
    relative = math.sqrt(norm_d / norm_b) if norm_b else (math.inf if norm_d else 0.0)
    cosine = float(_cosines(*(torch.tensor([x], dtype=torch.float64) for x in (dot, norm_a, norm_b)))[0])
    return Difference(is_equal, max_abs, relative, cosine, worst, _tolerance(target, reference))


def _cosines(dots: torch.Tensor, squares_a: torch.Tensor, squares_b: torch.Tensor) -> torch.Tensor:
    """Two rows of zeros are alike, a row of zeros and another are not."""
    product = squares_a.sqrt() * squares_b.sqrt()
    cosines = torch.where(product > 0, dots / product, ((squares_a == 0) & (squares_b == 0)).double())
    return cosines.clamp(-1.0, 1.0)


def _tolerance(a: torch.Tensor, b: torch.Tensor) -> float:
    return max(_tolerance_of(a.dtype), _tolerance_of(b.dtype))


def _tolerance_of(dtype: torch.dtype) -> float:
    if not dtype.is_floating_point:
        return 0.0
    return TOLERANCES.get(dtype, FLOAT8_TOLERANCE)
