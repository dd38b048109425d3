"""Sampling never waits for the device: every stage on tensors that have no values, as if those were still to come.

Reading a value of such a tensor raises; a copy between host and device must be an asynchronous one. What this
cannot see (memory that is not pinned, kernels that wait) the GPU tests look for.
"""

from numbers import Number

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from atom.core import TokenMasks
from atom.kernels.reference import sampling as reference
from atom.model_ops.logprobs import prompt_logprobs
from atom.model_ops.sampler import Sampler
from tests.model_ops.test_sampler import VOCAB, make_batch, make_seq

DEVICE = torch.device("meta")


class NoWaitingCalls(TorchFunctionMode):
    """Raises at calls that copy numbers of the host to the device and wait for that."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type != "cpu":
            raise AssertionError("torch.tensor waits for its device")
        if func is torch.Tensor.__setitem__ and isinstance(args[2], Number):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(part, torch.Tensor | list) for part in index):
                raise AssertionError("a number assigned through an index is copied to the device first")
        return func(*args, **kwargs)


class NoWaitingCopies(TorchDispatchMode):
    """Raises at copies between host and device that wait."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        source = target = None
        if func is torch.ops.aten._to_copy.default:
            source, target = args[0].device, kwargs.get("device") or args[0].device
        elif func is torch.ops.aten.copy_.default:
            source, target = args[1].device, args[0].device
        is_async = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
        if source != target and not is_async:
            raise AssertionError(f"a copy from {source} to {target} waits")
        return func(*args, **kwargs)


@pytest.fixture
def device():
    with NoWaitingCalls(), NoWaitingCopies():
        yield DEVICE


KINDS = {
    "greedy": {},
    "seed": dict(temperature=0.8, seed=3),
    "top-k": dict(temperature=0.8, seed=3, top_k=5),
    "top-p and min-p": dict(temperature=0.8, seed=3, top_p=0.9, min_p=0.01),
    "penalties": dict(presence_penalty=0.5, frequency_penalty=0.1, repetition_penalty=1.2),
    "bias": dict(logit_bias={3: 1.0, 4: -1.0}),
    "bad word": dict(bad_word_ids=((7,),)),
    "bad words": dict(bad_word_ids=((1, 7),)),
    "least length": dict(min_tokens=9, stop_ids=frozenset({2})),
    "log-probabilities": dict(logprobs=3),
}


def sample(sampler, seqs, new=(), masks=None, late=None, **fields):
    plan = sampler.plan(make_batch(seqs, new, **fields))
    num_rows = len(seqs) if plan.indices is None else len(plan.indices)
    logits = torch.empty(num_rows, VOCAB, device=DEVICE)
    return sampler.sample(logits, plan, late, masks)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_alone", [True, False])
def test_a_stage(device, kind, is_alone):
    sampler = Sampler(4, VOCAB, device, reference)
    seqs = [make_seq(0, 2, **KINDS[kind])]
    if not is_alone:
        seqs += [make_seq(1, 0), make_seq(2, 1)]
    late = [(0, 7)] if kind == "bad words" else None
    for step in range(2):
        result = sample(sampler, seqs, [] if step else seqs, late=late)
        assert result.token_ids.shape == (len(seqs),) and result.token_ids.device == device
        assert (result.logprobs is not None) == (kind == "log-probabilities")
        for seq in seqs:
            seq.token_ids.append(5)


def test_all_at_once_in_a_step_whose_first_row_does_not_sample(device):
    sampler = Sampler(16, VOCAB, device, reference)
    seqs = [make_seq(i, i, **fields) for i, fields in enumerate(KINDS.values())]
    samples = [False] + [True] * (len(seqs) - 1)
    result = sample(sampler, seqs, seqs, samples=samples, num_prefill=2)
    assert len(result.token_ids) == len(seqs) - 1


@pytest.mark.parametrize("rows", [[0, 1], [1]])
def test_masks(device, rows):
    sampler = Sampler(4, VOCAB, device, reference)
    seqs = [make_seq(0, 0), make_seq(1, 1, temperature=1.0, seed=1)]
    masks = TokenMasks(rows, np.full((len(rows), 2), 7, np.int32))
    assert len(sample(sampler, seqs, seqs, masks).token_ids) == 2


def test_prompt_log_probabilities(device):
    hidden, head = torch.empty(9, 16, device=device), torch.empty(16, VOCAB, device=device)
    next_ids = torch.empty(9, dtype=torch.int64, device=device)
    scores = prompt_logprobs(hidden, lambda states: states @ head, next_ids, 2, VOCAB, reference)
    assert scores.top_ids.shape == (9, 2)


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: torch.tensor([1, 2], device=x.device),
        lambda x: x.__setitem__(torch.zeros(2, dtype=torch.int64, device=x.device), 1.0),
        lambda x: x.cpu(),
        lambda x: x[x > 0],
        lambda x: int(x[0]),
        lambda x: x.tolist(),
    ],
)
def test_the_check_itself(device, wait):
    with pytest.raises(Exception):  # noqa: B017 - of several kinds, each of which fails a test
        wait(torch.empty(4, device=device))
