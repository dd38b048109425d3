"""Random logits and parameters for samplers, and the bound within which a sampler's ids are the reference's."""

import torch

from atom.kernels.reference import sampling as reference

ROUNDING = 2e-6  # of the total weight


def random_logits(kind: str, num_rows: int, vocab: int, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(num_rows, vocab, generator=generator)
    if kind == "peaked":
        return noise * 4
    if kind == "flat":
        return noise * 0.1
    if kind == "tied":
        return (noise * 4).round() / 2
    banned = torch.rand(num_rows, vocab, generator=generator) < 0.6
    banned[:, vocab // 2] = False
    return (noise * 3).masked_fill(banned, -torch.inf)


def random_draw(n: int, generator: torch.Generator, is_filtered: bool, device: str) -> reference.Draw:
    """Greedy and random rows; with filters, any mix of them and rows without."""

    def column(values, dtype=torch.float32):
        return torch.tensor(values, dtype=dtype)[torch.randint(len(values), (n,), generator=generator)]

    def number(low, high):
        return torch.randint(low, high, (n,), generator=generator)

    columns = [
        column([0.0, 1e-5, 0.05, 0.7, 1.0, 1.0, 3.0, 1e4]),
        column([0, 0, 1, 2, 40, 300, 10**6] if is_filtered else [0], torch.int32),
        column([1e-7, 1e-4, 0.3, 0.9, 0.999, 1.0, 1.0] if is_filtered else [1.0]),
        column([0.0, 0.0, 1e-6, 0.1, 1.0] if is_filtered else [0.0]),
        number(-(2**63), 2**63 - 1),
        number(0, 2**34),
    ]
    return reference.Draw(*(c.to(device) for c in columns), is_filtered=is_filtered)


def as_reference(ids: torch.Tensor, logits: torch.Tensor, draw: reference.Draw) -> None:
    """Each id is the reference's, or one that a filter's bound or the target allows within ROUNDING."""
    wanted, _ = reference.sample(logits, draw)
    uniforms = reference.philox_uniform(draw.seeds, draw.positions).double()
    for row in (ids != wanted).nonzero().flatten().tolist():
        one = slice(row, row + 1)
        assert draw.temperature[row] > 0, f"greedy row {row}: {ids[row]} instead of {wanted[row]}"
        value = logits[one].float()
        weights = reference.weights_of(value, value.amax(-1), draw.temperature[one])
        for shift in (0.0, -ROUNDING, ROUNDING):
            p = draw.top_p[one]
            p = p if p >= 1 else p + shift
            kept = reference.keep_mask(value, weights, draw.top_k[one], p, draw.min_p[one] * (1 - shift))[0]
            cumulative = (weights[0].double() * kept).cumsum(0)
            target, slack = cumulative[-1] * uniforms[row], ROUNDING * cumulative[-1]
            low, high = cumulative[ids[row]] - weights[0, ids[row]] - slack, cumulative[ids[row]] + slack
            if kept[ids[row]] and low <= target <= high:
                break
        else:
            raise AssertionError(f"row {row}: {ids[row]} instead of {wanted[row]}")
