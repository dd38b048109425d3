"""The sampling reference against exact distributions, slow loops and published random numbers."""

import os
import subprocess
import sys

import pytest
import torch

from atom.kernels.reference import sampling as reference
from atom.model_ops import sampler_cpu

OPS = pytest.mark.parametrize("ops", [reference, sampler_cpu], ids=["reference", "cpu"])


def philox_4x32_10(counter: list[int], key: list[int]) -> list[int]:
    """Random123's algorithm, written from the paper in plain integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        low, high = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(high >> 32) ^ c[1] ^ k[0], high & 0xFFFFFFFF, (low >> 32) ^ c[3] ^ k[1], low & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def test_plain_philox_gives_the_published_vectors():
    """kat_vectors of Random123."""
    assert philox_4x32_10([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert philox_4x32_10([ones] * 4, [ones] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@OPS
def test_philox_equals_the_plain_algorithm(ops):
    generator = torch.Generator().manual_seed(1)
    seeds = torch.randint(-(2**63), 2**63 - 1, (200,), generator=generator)
    positions = torch.randint(0, 2**40, (200,), generator=generator)
    seeds[0], positions[0], seeds[1] = 0, 0, -1
    expected = []
    for seed, position in zip(seeds.tolist(), positions.tolist(), strict=True):
        key = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
        word = philox_4x32_10([position & 0xFFFFFFFF, position >> 32, 0, 0], key)[0]
        signed = word - 2**32 if word >= 2**31 else word
        expected.append(~signed if signed < 0 else signed)
    uniforms = ops.philox_uniform(seeds, positions)
    assert uniforms.dtype == torch.float32
    assert torch.equal(uniforms, torch.tensor(expected).float() * reference.UNIFORM_SCALE)
    assert uniforms.min() >= 0 and uniforms.max() < 1


def test_largest_word_stays_below_one():
    assert (torch.tensor(2**31 - 1).float() * reference.UNIFORM_SCALE).item() < 1


TRITON_PROGRAM = """
import torch, triton, triton.language as tl
@triton.jit
def kernel(seeds, positions, out):
    i = tl.program_id(0)
    tl.store(out + i, tl.rand(tl.load(seeds + i), tl.load(positions + i)))
seeds = torch.tensor([0, 1, -1, 2**62 + 12345, 77])
positions = torch.tensor([0, 5, 131071, 2**33 + 1, 3])
out = torch.empty(5)
kernel[(5,)](seeds, positions, out)
from atom.kernels.reference.sampling import philox_uniform
assert torch.equal(out, philox_uniform(seeds, positions)), (out, philox_uniform(seeds, positions))
"""


def test_philox_equals_triton_rand():
    pytest.importorskip("triton")
    environment = dict(os.environ, TRITON_INTERPRET="1")
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    run = subprocess.run(
        [sys.executable, "-c", TRITON_PROGRAM], cwd=root, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def exact_distribution(logits, temperature, top_k, top_p, min_p) -> list[float]:
    """Probabilities by the definition, in Python floats."""
    weights = (torch.tensor(logits, dtype=torch.float64) / temperature).softmax(-1).tolist()
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    kept = order[:top_k] if top_k > 0 else order
    mass = sum(weights[i] for i in kept)
    if top_p < 1:
        nucleus, so_far = [], 0.0
        for i in kept:
            if so_far >= top_p * mass - 1e-6 * mass:
                break
            nucleus.append(i)
            so_far += weights[i]
        kept = nucleus
    kept = [i for i in kept if weights[i] >= min_p * weights[order[0]]]
    mass = sum(weights[i] for i in kept)
    return [weights[i] / mass if i in kept else 0.0 for i in range(len(logits))]


CASES = [
    dict(temperature=1.0),
    dict(temperature=0.5),
    dict(temperature=2.0, top_k=4),
    dict(temperature=1.0, top_p=0.7),
    dict(temperature=1.0, min_p=0.3),
    dict(temperature=1.3, top_k=6, top_p=0.8, min_p=0.1),
]


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> tuple[float, int]:
    expected = probabilities * counts.sum()
    possible = expected > 0
    assert counts[~possible].sum() == 0, "an id that was filtered out was sampled"
    difference = (counts[possible] - expected[possible]) ** 2 / expected[possible]
    return difference.sum().item(), int(possible.sum()) - 1


@OPS
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(f"{k}{v}" for k, v in c.items()))
def test_sampled_frequencies_follow_the_exact_distribution(ops, case):
    case = dict(top_k=0, top_p=1.0, min_p=0.0) | case
    logits = [0.3, 2.0, -1.0, 2.0, 1.1, 0.0, -0.4, 1.7, 0.9, -2.0]
    probabilities = torch.tensor(exact_distribution(logits, **case), dtype=torch.float64)
    n = 20000
    rows = torch.tensor(logits).expand(n, -1).contiguous()
    uniforms = ops.philox_uniform(torch.full((n,), 42), torch.arange(n))
    parameters = {name: torch.full((n,), value) for name, value in case.items()}
    chosen = ops.choose(rows, torch.full((n,), 2.0), uniforms=uniforms, **parameters)
    statistic, freedom = chi_square(torch.bincount(chosen, minlength=10).double(), probabilities)
    # 99.99 % quantile of chi-square by Wilson and Hilferty; the seed is fixed, so this never flickers.
    bound = max(1, freedom) * (1 - 2 / (9 * max(1, freedom)) + 3.72 * (2 / (9 * max(1, freedom))) ** 0.5) ** 3
    assert statistic < bound


def test_ties_go_to_the_lowest_id():
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]])
    assert reference.argmax(logits)[0].item() == 1
    weights = reference.weights_of(logits, torch.tensor([3.0]), torch.tensor([1.0]))
    mask = reference.keep_mask(logits, weights, torch.tensor([2]), torch.tensor([1.0]), torch.tensor([0.0]))
    assert mask.tolist() == [[False, True, True, False, False]]
    assert reference.top(logits, 3)[1].tolist() == [[1, 2, 3]]
    assert [reference.rank_of(logits, torch.tensor([i])).item() for i in range(5)] == [4, 1, 2, 3, 5]


def test_uniform_choice_keeps_a_whole_number_of_ids():
    """Ten equal ids at top_p 0.3: rounding must not let a fourth one in."""
    logits = torch.zeros(1, 10)
    weights = torch.ones(1, 10)
    for tenth in range(1, 10):
        top_p = torch.tensor([tenth / 10])
        mask = reference.keep_mask(logits, weights, torch.tensor([0]), top_p, torch.tensor([0.0]))
        assert mask.sum() == tenth


def test_penalties_equal_a_slow_loop():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 30, generator=generator)
    counts = torch.randint(0, 3, (4, 30), generator=generator, dtype=torch.int32)
    prompt = torch.rand(4, 30, generator=generator) < 0.3
    presence, frequency = torch.tensor([0.0, 1.5, -0.5, 0.2]), torch.tensor([0.0, 0.0, 0.7, -1.0])
    repetition = torch.tensor([1.2, 1.0, 0.8, 2.0])
    got = reference.apply_penalties(logits, counts, prompt, presence, frequency, repetition)
    for row in range(4):
        for i in range(30):
            value, count = logits[row, i].item(), counts[row, i].item()
            if count or prompt[row, i]:
                value = value / repetition[row].item() if value > 0 else value * repetition[row].item()
            value -= frequency[row].item() * count + presence[row].item() * (count > 0)
            assert got[row, i].item() == pytest.approx(value, abs=1e-5)
