"""Sampling on a CUDA device against the reference at serving sizes, without a sync and inside a recorded graph."""

import pytest
import torch

from atom.kernels.reference import sampling as reference
from atom.kernels.triton import sampling
from atom.model_ops.sampler import Sampler, late_bans, to_batch_output
from tests.helpers.sampling_cases import as_reference, random_draw, random_logits
from tests.model_ops.test_sampler import make_batch, make_seq

pytestmark = pytest.mark.gpu

VOCAB = 151_936
KINDS = ["peaked", "flat", "tied", "banned"]


def fresh():
    return torch.Generator().manual_seed(torch.seed())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("is_filtered", [False, True], ids=["plain", "filtered"])
@pytest.mark.parametrize("vocab, valid", [(VOCAB, 151_669), (262_144, 262_144), (1000, 999)])
def test_ids_are_the_references(dtype, is_filtered, vocab, valid):
    generator = fresh()
    wide = torch.cat([random_logits(kind, 4, vocab, generator) for kind in KINDS]).to("cuda", dtype)
    logits = wide[:, :valid]
    for _ in range(4):
        draw = random_draw(len(logits), generator, is_filtered, "cuda")
        ids, is_finite = sampling.sample(logits, draw)
        assert is_finite.all()
        as_reference(ids, logits, draw)
    assert torch.equal(sampling.sample(logits)[0], reference.argmax(logits)[0])


def test_philox_is_the_references():
    """All ids alike: the id is the uniform number times their count."""
    n, vocab = 512, 100_000
    generator = fresh()
    draw = random_draw(n, generator, False, "cuda")
    draw.temperature.fill_(1.0)
    ids, _ = sampling.sample(torch.zeros(1, vocab, device="cuda").expand(n, vocab), draw)
    wanted = (reference.philox_uniform(draw.seeds, draw.positions).double() * vocab).long()
    assert torch.equal(ids, wanted)


def test_a_recorded_graph_says_the_same_and_nothing_waits():
    generator = fresh()
    logits = random_logits("peaked", 64, VOCAB, generator).to("cuda", torch.bfloat16)
    draw = random_draw(64, generator, True, "cuda")
    rows = torch.randperm(100)[:64].cuda()
    lens = torch.arange(64, dtype=torch.int32, device="cuda")
    computed = torch.zeros(101, dtype=torch.int32, device="cuda")
    last_token = torch.zeros(101, dtype=torch.int64, device="cuda")
    wanted = sampling.sample(logits, draw)[0].clone()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampling.sample(logits, draw, (rows, lens, computed, last_token))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, _ = sampling.sample(logits, draw, (rows, lens, computed, last_token))
    for _ in range(3):
        last_token.zero_()
        graph.replay()
        assert torch.equal(ids, wanted) and torch.equal(last_token[rows], wanted)
    assert torch.equal(computed[rows], lens)


@pytest.mark.parametrize("filters", [(0, 1.0, 0.0), (4, 0.9, 0.05)], ids=["plain", "filtered"])
def test_frequencies_follow_the_distribution(filters):
    """Chi-square over one position a row; what a filter drops never occurs."""
    n, vocab = 20_000, 6
    logits = torch.tensor([0.5, 2.0, -1.0, 2.0, 1.2, 0.0]).to("cuda").expand(n, vocab).contiguous()
    columns = [torch.full((n,), value, device="cuda") for value in (1.5, *filters)]
    columns[1] = columns[1].int()
    seeds, positions = torch.full((n,), 42, device="cuda"), torch.arange(n, device="cuda")
    draw = reference.Draw(*columns, seeds, positions, is_filtered=filters[0] > 0)
    counts = torch.bincount(sampling.sample(logits, draw)[0], minlength=vocab).double().cpu()
    row, best, heat = logits[:1], logits[:1].amax(-1), columns[0][:1]
    weights = reference.weights_of(row, best, heat)
    kept = reference.keep_mask(row, weights, *(column[:1] for column in columns[1:]))
    expected = n * (weights * kept / (weights * kept).sum()).double()[0].cpu()
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert statistic < 25  # five degrees of freedom: one in 7,000, and the seed is fixed


def test_masks_of_some_rows():
    logits = torch.randn(5, VOCAB, device="cuda").bfloat16()[:, :151_669]
    bits = torch.randint(
        -(2**31), 2**31 - 1, (2, 4739), dtype=torch.int32
    ).cuda()  # shorter than the vocabulary
    rows = torch.tensor([3, 0], device="cuda")
    found, wanted = logits.clone(), logits.clone()
    sampling.mask_bits(found, rows, bits)
    reference.mask_bits(wanted, rows, bits)
    assert torch.equal(found, wanted) and (found[3] == -torch.inf).any() and found[1].isfinite().all()


def test_a_sampler_with_the_kernels_equals_one_with_the_reference():
    """Every stage in one batch, several steps, bf16 logits."""

    def seqs_of():
        return [
            make_seq(0, 0, temperature=1.0, seed=7),
            make_seq(1, 1),
            make_seq(2, 2, temperature=0.8, seed=11, top_k=50, top_p=0.9, logprobs=3),
            make_seq(3, 3, temperature=1.5, seed=7, min_p=0.01, bad_word_ids=((5,), (3, 9))),
            make_seq(4, 4, temperature=1.0, seed=2**63 - 1, presence_penalty=1.0, logit_bias={4: 3.0}),
            make_seq(5, 5, repetition_penalty=1.3, logprobs=0),
        ]

    answers = []
    steps = [
        random_logits("peaked", 6, 5000, torch.Generator().manual_seed(i)).bfloat16().cuda() for i in range(4)
    ]
    for ops in (reference, sampling):
        sampler, seqs = Sampler(8, 4990, "cuda", ops), seqs_of()
        answers.append([])
        for number, logits in enumerate(steps):
            batch = make_batch(seqs, seqs if number == 0 else ())
            plan = sampler.plan(batch)
            bans = late_bans(batch) if plan.needs_late_mask else None
            output = to_batch_output(batch, plan, sampler.sample(logits.clone(), plan, bans).to_host())
            assert output.errors is None
            for seq, token in zip(seqs, output.token_ids, strict=True):
                seq.token_ids.append(token)
            entries = [(row, e[0].rank, e[0].top_ids) for row, e in sorted(output.logprobs.items())]
            answers[-1].append((output.token_ids, entries))
    assert answers[0] == answers[1]
