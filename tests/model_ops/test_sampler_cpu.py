"""The CPU's way of sampling equals the reference, on vocabularies large enough that it takes its short cuts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.kernels.reference import sampling as reference
from atom.model_ops import sampler_cpu


@pytest.fixture(autouse=True, scope="module")
def no_native_kernels():
    """They are compared with the reference in test_native_sampling.py; here is what runs without them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_cpu, "native_library", lambda: None)
        yield


VOCABS = [7, 64, 1000, 1025, 2048, 20000, 20480 + 37, 2**16 + 3]


def logits_like(kind: str, num_rows: int, vocab_size: int, seed: int) -> torch.Tensor:
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


KINDS = st.sampled_from(["peaked", "flat", "tied", "banned"])


@settings(max_examples=120, deadline=None)
@given(kind=KINDS, vocab_size=st.sampled_from(VOCABS), seed=st.integers(0, 10**6), data=st.data())
def test_choose_equals_the_reference(kind, vocab_size, seed, data):
    n = data.draw(st.integers(1, 6))
    logits = logits_like(kind, n, vocab_size, seed)
    best = reference.argmax(logits)[1]

    def column(values, dtype=torch.float32):
        return torch.tensor(data.draw(st.lists(st.sampled_from(values), min_size=n, max_size=n)), dtype=dtype)

    parameters = dict(
        temperature=column([1e-5, 0.05, 0.7, 1.0, 3.0]),
        top_k=column([0, 1, 2, 40, 300, 10**6], torch.int32),
        top_p=column([1e-4, 0.3, 0.9, 0.999, 1.0]),
        min_p=column([0.0, 0.0, 1e-6, 0.1, 1.0]),
        uniforms=torch.rand(n, generator=torch.Generator().manual_seed(seed)),
    )
    before = logits.clone()
    expected = reference.choose(logits, best, **parameters)
    assert torch.equal(sampler_cpu.choose(logits, best, **parameters), expected)
    assert torch.equal(logits, before)
    # Row by row: the company of other rows changes nothing.
    for i in range(n):
        alone = {name: value[i : i + 1] for name, value in parameters.items()}
        assert sampler_cpu.choose(logits[i : i + 1], best[i : i + 1], **alone) == expected[i]


@settings(max_examples=100, deadline=None)
@given(
    kind=KINDS,
    vocab_size=st.sampled_from(VOCABS),
    seed=st.integers(0, 10**6),
    bf16=st.booleans(),
    cut=st.booleans(),
)
def test_argmax_and_top_equal_the_reference(kind, vocab_size, seed, bf16, cut):
    logits = logits_like(kind, 3, vocab_size + 5, seed)
    logits = logits[:, :vocab_size] if cut else logits  # a slice has a row stride of its own
    k = min(20, vocab_size)
    for got, expected in zip(sampler_cpu.top(logits, k), reference.top(logits, k), strict=True):
        assert torch.equal(got, expected)
    ids = sampler_cpu.top(logits, k)[1][:, seed % k]
    assert torch.equal(sampler_cpu.rank_of(logits, ids), reference.rank_of(logits, ids))
    logits = logits.bfloat16() if bf16 else logits
    for got, expected in zip(sampler_cpu.argmax(logits), reference.argmax(logits), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("vocab_size", [40, 4096, 5000])
def test_argmax_takes_the_lowest_of_equals_and_shows_nan(vocab_size):
    logits = torch.zeros(3, vocab_size)
    logits[1, vocab_size - 3 :] = 1
    logits[2, vocab_size - 1] = torch.nan
    ids, best = sampler_cpu.argmax(logits)
    assert ids.tolist() == [0, vocab_size - 3, vocab_size - 1]
    assert best.isfinite().tolist() == [True, True, False]


@pytest.mark.parametrize("vocab_size", [50, 20000])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite_do_not_touch_the_others(vocab_size, bad):
    logits = logits_like("peaked", 4, vocab_size, 5)
    logits[2] = bad
    parameters = dict(
        temperature=torch.ones(4), top_k=torch.tensor([0, 40, 40, 0]), top_p=torch.tensor([1.0, 0.9, 0.9, 0.5]),
        min_p=torch.zeros(4), uniforms=torch.tensor([0.1, 0.5, 0.5, 0.9]),
    )  # fmt: skip
    best = reference.argmax(logits)[1]
    rows = [0, 1, 3]
    good = {name: value[rows] for name, value in parameters.items()}
    expected = reference.choose(logits[rows], best[rows], **good)
    assert torch.equal(sampler_cpu.choose(logits, best, **parameters)[rows], expected)
    for variant in (dict(top_k=torch.zeros(4), top_p=torch.ones(4)), dict(top_k=torch.full((4,), 3))):
        sampler_cpu.choose(logits, best, **(parameters | variant))  # must not raise
