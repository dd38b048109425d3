"""The native sampling against the reference: the same id, or one whose bound the target meets within rounding."""

import pytest
import torch

from atom.kernels.cpu.native.library import native_library
from atom.kernels.cpu.native.sampling import native_argmax, native_choose
from atom.kernels.reference import sampling as reference
from atom.model_ops import sampler_cpu

pytestmark = pytest.mark.skipif(native_library() is None, reason="no C compiler")

ROUNDING = 2e-6  # of the total weight: exponentials differ by 1e-7, sums are in fp64


def logits_like(kind, num_rows, vocab_size, seed):
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(num_rows, vocab_size, generator=generator)
    if kind == "peaked":
        return noise * 4
    if kind == "flat":
        return noise * 0.1
    if kind == "tied":  # as bf16 logits are
        return (noise * 4).round() / 2
    banned = torch.rand(num_rows, vocab_size, generator=generator) < 0.6
    banned[:, vocab_size // 2] = False
    return (noise * 3).masked_fill(banned, -torch.inf)


def assert_chosen_as_the_reference(ids, logits, best, temperature, top_k, top_p, min_p, uniforms):
    wanted = reference.choose(logits, best, temperature, top_k, top_p, min_p, uniforms)
    weights = reference.weights_of(logits, best, temperature).double()
    for row in (ids != wanted).nonzero().flatten().tolist():
        part = slice(row, row + 1)
        # A filter's bound that is met within rounding may fall either way; so may the uniform's target.
        for shift in (0.0, -ROUNDING, ROUNDING):
            p = top_p[part] if (top_p[part] >= 1).all() else top_p[part] + shift
            kept = reference.keep_mask(
                logits[part], weights[part].float(), top_k[part], p, min_p[part] * (1 - shift)
            )[0]
            cumulative = (weights[row] * kept).cumsum(0)
            target, slack = cumulative[-1] * uniforms[row].double(), ROUNDING * cumulative[-1]
            chosen = ids[row]
            if (
                kept[chosen]
                and cumulative[chosen] - weights[row, chosen] - slack <= target <= cumulative[chosen] + slack
            ):
                break
        else:
            pytest.fail(f"row {row}: {ids[row]} instead of {wanted[row]}")


@pytest.mark.parametrize("vocab_size", [7, 64, 1000, 2048, 20480 + 37, 2**16 + 3])
@pytest.mark.parametrize("kind", ["peaked", "flat", "tied", "banned"])
def test_choose(kind, vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    n = 24
    logits = logits_like(kind, n, vocab_size, vocab_size)
    best = reference.argmax(logits)[1]

    def column(values, dtype=torch.float32):
        picks = torch.randint(len(values), (n,), generator=generator)
        return torch.tensor(values, dtype=dtype)[picks]

    parameters = (
        column([1e-5, 0.05, 0.7, 1.0, 3.0]),
        column([0, 0, 1, 2, 40, 300, 10**6], torch.int32),
        column([1e-4, 0.3, 0.9, 0.999, 1.0]),
        column([0.0, 0.0, 1e-6, 0.1, 1.0]),
        torch.rand(n, generator=generator),
    )
    before = logits.clone()
    ids = native_choose(native_library(), logits, best, *parameters)
    assert torch.equal(logits, before)
    assert_chosen_as_the_reference(ids, logits, best, *parameters)
    for i in (0, n - 1):  # the company of other rows changes nothing
        alone = [p[i : i + 1] for p in (logits, best, *parameters)]
        assert native_choose(native_library(), *alone) == ids[i]


def test_shares_of_the_ids():
    """Top-k of 4 and top-p: frequencies over many uniforms are the probabilities."""
    logits = torch.full((1, 3000), -5.0)
    logits[0, [5, 900, 2999, 17]] = torch.tensor([2.0, 1.0, 1.0, 0.0])
    n = 4000
    uniforms = (torch.arange(n) + 0.5) / n
    ids = native_choose(
        native_library(), logits.expand(n, -1).contiguous(), torch.full((n,), 2.0), torch.ones(n),
        torch.full((n,), 4, dtype=torch.int32), torch.full((n,), 0.9), torch.zeros(n), uniforms,
    )  # fmt: skip
    weights = torch.tensor([2.0, 1.0, 1.0]).exp()  # the fourth is beyond 0.9 of what top-k keeps
    shares = torch.bincount(ids, minlength=3000)[[5, 900, 2999]] / n
    torch.testing.assert_close(shares, weights / weights.sum(), atol=1e-3, rtol=0)


@pytest.mark.parametrize("vocab_size", [1, 5, 64, 1000, 70_001])
def test_argmax(vocab_size):
    logits = (torch.randn(9, vocab_size) * 3).round()
    logits[1] = -torch.inf
    logits[2, vocab_size // 2 :] = torch.nan
    logits[3, ::2] = -torch.inf
    logits[4] = torch.inf
    ids, values = native_argmax(native_library(), logits)
    wanted_ids, wanted = reference.argmax(logits)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(values, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite_yield_some_id_and_do_not_touch_others(bad):
    logits = torch.randn(3, 5000)
    best = reference.argmax(logits)[1]
    ones, off = torch.ones(3), torch.zeros(3)
    for top_k, top_p, min_p in ((0, 1.0, 0.0), (40, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.2), (10, 0.5, 0.1)):
        rest = (ones, torch.full((3,), top_k, dtype=torch.int32), ones * top_p, off + min_p, ones * 0.4)
        clean = native_choose(native_library(), logits, best, *rest)
        dirty = logits.clone()
        dirty[1] = bad
        ids = native_choose(native_library(), dirty, reference.argmax(dirty)[1], *rest)
        assert ids[0] == clean[0] and ids[2] == clean[2] and 0 <= ids[1] < 5000


def test_the_sampler_of_the_cpu_uses_it(monkeypatch):
    logits = torch.randn(2, 3000)
    off, ones = torch.zeros(2), torch.ones(2)
    calls = []
    monkeypatch.setattr(sampler_cpu, "native_choose", lambda *a: calls.append(native_choose(*a)) or calls[-1])
    ids = sampler_cpu.choose(logits, logits.amax(-1), ones, off.int(), ones, off, ones * 0.3)
    assert ids is calls[0]
    sampler_cpu.choose(logits.double(), logits.amax(-1), ones, off.int(), ones, off, ones * 0.3)
    assert len(calls) == 1
