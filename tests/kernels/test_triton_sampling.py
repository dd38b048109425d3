"""The sampling kernels against the reference: under the interpreter without a device, natively with one."""

from types import SimpleNamespace

import pytest
import torch

from atom.kernels.reference import sampling as reference
from atom.kernels.triton import sampling
from atom.model_ops.sampler import Sampler
from tests.helpers.sampling_cases import as_reference, random_draw, random_logits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
KINDS = ["peaked", "flat", "tied", "banned"]


def fresh():
    return torch.Generator().manual_seed(torch.seed())


@pytest.mark.parametrize(
    "vocab, is_filtered", [(1, False), (256, False), (9001, False), (7, True), (5001, True)]
)
def test_rows_of_every_kind_side_by_side(vocab, is_filtered):
    generator = fresh()
    for dtype in (torch.float32, HALF):
        parts = [random_logits(kind, 1 if is_filtered else 2, vocab, generator) for kind in KINDS]
        wide = torch.cat(parts).to(DEVICE, dtype)
        draw = random_draw(len(wide), generator, is_filtered, DEVICE)
        ids, is_finite = sampling.sample(wide, draw)
        assert is_finite.all()
        as_reference(ids, wide, draw)


@pytest.mark.parametrize("vocab", [5, 5000])
def test_greedy_rows_take_the_lowest_of_the_best(vocab):
    logits = torch.zeros(4, vocab + 3, device=DEVICE)[:, :vocab]
    logits[1, 2:] = 3
    logits[2] = -torch.inf
    logits[2, vocab - 1] = -2
    logits[3] = random_logits("tied", 1, vocab, fresh())[0].to(DEVICE)
    ids, is_finite = sampling.sample(logits)
    assert torch.equal(ids, reference.argmax(logits)[0]) and ids[:3].tolist() == [0, 2, vocab - 1]
    assert is_finite.all()


@pytest.mark.parametrize(
    "bad, is_filtered", [(torch.nan, False), (torch.inf, False), (-torch.inf, False), (torch.nan, True)]
)
def test_a_row_that_is_not_finite_fails_alone(bad, is_filtered):
    generator = fresh()
    logits = random_logits("peaked", 5, 3000, generator).to(DEVICE)
    draw = random_draw(5, generator, is_filtered, DEVICE)
    healthy, _ = sampling.sample(logits, draw)
    logits[2, slice(None) if bad == -torch.inf else 1234] = bad
    ids, is_finite = sampling.sample(logits, draw)
    assert is_finite.tolist() == [True, True, False, True, True]
    others = [0, 1, 3, 4]
    assert torch.equal(ids[others], healthy[others]) and 0 <= ids[2] < 3000


def test_a_row_does_not_depend_on_its_company():
    generator = fresh()
    logits = random_logits("flat", 3, 4500, generator).to(DEVICE, HALF)
    draw = random_draw(3, generator, True, DEVICE)
    together, _ = sampling.sample(logits, draw)
    for i in range(3):
        fields = [getattr(draw, name)[i : i + 1] for name in reference.Draw.__slots__[:-1]]
        alone = reference.Draw(*fields, is_filtered=True)
        assert sampling.sample(logits[i : i + 1], alone)[0] == together[i]


@pytest.mark.parametrize("is_filtered", [False, True])
def test_the_tables_move_on(is_filtered):
    generator = fresh()
    logits = random_logits("peaked", 3, 700, generator).to(DEVICE)
    draw = random_draw(3, generator, is_filtered, DEVICE)
    computed = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    last_token = torch.full((8,), -1, dtype=torch.int64, device=DEVICE)
    rows, lens = torch.tensor([6, 0, 3]).to(DEVICE), torch.tensor([10, 20, 30], dtype=torch.int32).to(DEVICE)
    ids, _ = sampling.sample(logits, draw, (rows, lens, computed, last_token))
    assert computed.tolist() == [20, 0, 0, 30, 0, 0, 10, 0]
    assert torch.equal(last_token[rows], ids) and (last_token == -1).sum() == 5
    assert torch.equal(ids, sampling.sample(logits, draw)[0])
    out = torch.zeros_like(ids), torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    assert sampling.sample(logits, draw, None, out) is out and torch.equal(out[0], ids) and out[1].all()


def test_no_rows_are_no_launch():
    ids, is_finite = sampling.sample(torch.zeros(0, 50, device=DEVICE))
    assert ids.shape == is_finite.shape == (0,)


def test_the_best_are_selected_with_the_lowest_id_first():
    values = torch.cat([random_logits(kind, 2, 3001, fresh()) for kind in ("tied", "banned")]).to(DEVICE)
    values[0, 5:9] = torch.tensor([0.0, -0.0, 0.0, -0.0])
    for k in (0, 1, 20, 3001):
        for found, wanted in zip(sampling.top(values, k), reference.top(values, k), strict=True):
            assert torch.equal(found, wanted)


def test_a_sampler_rehearses_every_way():
    calls = []
    ops = SimpleNamespace(sample=lambda *args: calls.append(args) or sampling.sample(*args))
    Sampler(2, 90, DEVICE, ops).rehearse(100, HALF)
    facts = {(c[0].dtype, c[1] is None, c[2] is None) for c in calls}
    assert len(facts) == 8 and all(c[0].shape == (1, 90) for c in calls)
