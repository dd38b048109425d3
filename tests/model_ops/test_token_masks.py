"""Bit masks on logits: the quick way by rows, the device's way in tensors, and one bit at a time."""

import numpy as np
import pytest
import torch

from atom.core import TokenMasks
from atom.kernels.reference import sampling as reference
from atom.kernels.triton import sampling as fused
from atom.model_ops.sampler import Sampler
from atom.model_ops.token_masks import apply_masks
from tests.model_ops.test_sampler import VOCAB, make_batch, make_seq, random_logits


def bits_of(rows: list[set[int]], num_words: int) -> np.ndarray:
    flags = np.zeros((len(rows), num_words * 32), np.uint8)
    for i, ids in enumerate(rows):
        flags[i, list(ids)] = 1
    return np.packbits(flags, axis=1, bitorder="little").view(np.int32)


@pytest.mark.parametrize(
    "num_ids, num_words", [(50, 2), (64, 2), (70, 2), (3000, 94), (40_000, 1100), (36_000, 1200)]
)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.4, 0.999, 1.0])
def test_masks_leave_what_is_allowed_and_nothing_else(num_ids, num_words, share):
    rng = np.random.default_rng(3)
    known = min(num_ids, 32 * num_words)
    rows = [set(np.flatnonzero(rng.random(32 * num_words) < share).tolist()) | {0} for _ in range(3)]
    logits = torch.randn(5, num_ids)
    masks = TokenMasks([4, 0, 2], np.vstack((bits_of(rows, num_words), bits_of([set()], num_words))))
    expected = logits.clone()
    for row, ids in zip(masks.rows, rows, strict=True):
        for i in range(num_ids):
            if i not in ids or i >= known:
                expected[row, i] = -torch.inf
    by_row, by_tensor, by_kernel = (logits.clone() for _ in range(3))
    apply_masks(by_row, masks)
    on_device = torch.tensor(masks.rows), torch.from_numpy(masks.bits[:3])
    reference.mask_bits(by_tensor, *on_device)
    assert torch.equal(by_row, expected) and torch.equal(by_tensor, expected)
    if not torch.cuda.is_available():  # under the interpreter
        fused.mask_bits(by_kernel, *on_device)
        assert torch.equal(by_kernel, expected)


def test_a_slice_of_wider_logits_is_masked_in_place():
    wide = torch.zeros(2, 64)
    apply_masks(wide[:, :40], TokenMasks([1], bits_of([{3, 39}], 2)))
    assert wide[0].isfinite().all() and wide[1, 40:].isfinite().all()
    assert wide[1, :40].isfinite().nonzero().flatten().tolist() == [3, 39]


def test_the_sampler_chooses_within_masks_and_reports_the_models_own_logprobs():
    sampler = Sampler(4, VOCAB)
    seqs = [
        make_seq(0, 0),
        make_seq(1, 1, temperature=1.0, seed=1, logprobs=1),
        make_seq(2, 2, logit_bias={7: 9.0}),
    ]
    logits = random_logits(3, 1)
    plan = sampler.plan(make_batch(seqs, seqs))
    free = sampler.sample(logits.clone(), plan)
    masks = TokenMasks([0, 1], bits_of([{11}, {5, 6}], 2))
    result = sampler.sample(logits.clone(), plan, None, masks)
    assert result.token_ids[0] == 11 and result.token_ids[1] in (5, 6)
    assert result.token_ids[2] == free.token_ids[2]
    own = logits[1].log_softmax(-1)[result.token_ids[1]]
    torch.testing.assert_close(result.logprobs.to_list([1])[0].logprob, own.item(), rtol=1e-4, atol=1e-4)


def test_a_mask_without_an_id_fails_its_row_alone():
    sampler = Sampler(4, VOCAB)
    seqs = [make_seq(0, 0), make_seq(1, 1)]
    plan = sampler.plan(make_batch(seqs, seqs))
    result = sampler.sample(random_logits(2, 1), plan, None, TokenMasks([1], bits_of([set()], 2)))
    assert result.is_finite.tolist() == [True, False]


def test_an_ended_grammar_lifts_the_ban_on_ending_early():
    sampler = Sampler(4, VOCAB)
    seqs = [make_seq(i, i, min_tokens=5, stop_ids=frozenset({9})) for i in range(2)]
    plan = sampler.plan(make_batch(seqs, seqs))
    masks = TokenMasks([0, 1], bits_of([{9}, {9, 10}], 2), {0})
    assert sampler.sample(random_logits(2, 1), plan, None, masks).token_ids.tolist() == [9, 10]
