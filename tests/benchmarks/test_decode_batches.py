"""The chain that decode attention is timed in: it checks every form, and tells a wrong one from a right one."""

import pytest
import torch

from atom.benchmarks import decode_batches
from atom.benchmarks.decode_batches import Chain, TwoLaunches, shapes_of, spread, table_of, time_attention
from atom.benchmarks.decode_launches import SHAPES, DecodeShape
from atom.errors import ConfigError
from atom.kernels.triton.fused_attention_launch import MAX_PROGRAMS, SplitShape, WarpShape, batch_shape
from tests.helpers.interpreted_gluon import use_gluon_kernels

TINY = DecodeShape("tiny", 64, 4, 2, 16, 64, 100, True)


@pytest.fixture
def chain(tmp_path, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("too small for what a device runs; decode_chain --attention checks real shapes there")
    use_gluon_kernels(monkeypatch, tmp_path)
    monkeypatch.setattr(decode_batches, "LONGEST", 40)
    torch.manual_seed(0)
    chain = Chain(TINY, 3, torch.device("cpu"), num_layers=2, dtype=torch.float16)
    chain.set_lengths([1, 0, 40])
    return chain


@pytest.mark.parametrize(
    "shape", [SplitShape(2, 16, 4, 2), WarpShape(2, 16, 2, 2, 0), TwoLaunches()], ids=str
)
def test_forms_are_checked_against_the_twin(chain, shape):
    wanted, cache = chain.twin()
    assert chain.check(shape, wanted, cache) is None
    assert "error" in chain.check(shape, wanted + 1.0, cache)
    assert "stored keys and values" in chain.check(shape, wanted, [t + 1.0 for t in cache])
    assert "more than" in str(
        pytest.raises(ValueError, chain.check, WarpShape(999, 16, 2, 2, 0), wanted, cache)
    )


def test_a_chain_is_a_step(chain):
    before = chain.x.clone()
    chain.run()
    assert torch.isfinite(chain.x).all() and not torch.equal(chain.x, before)


def test_lengths_are_spread_evenly_and_in_no_order():
    lengths = spread(1025, 1545, 261)
    assert sorted(lengths) == list(range(1025, 1546, 2)) and lengths != sorted(lengths)
    assert spread(7, 7, 3) == [7, 7, 7]


@pytest.mark.parametrize("batch", [8, 32, 64, 256])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_the_choice_of_serving_is_timed_first(shape, batch):
    forms = shapes_of(shape, batch)
    assert forms[0] == batch_shape(shape.attention_layer(), batch, True)
    assert len(set(forms)) == len(forms) > 8
    assert all(one.splits == 1 or one.splits * batch * shape.num_kv_heads <= MAX_PROGRAMS for one in forms)


def test_a_table_has_the_best_and_the_choice_of_serving():
    forms = shapes_of(SHAPES[0], 8)
    found = {one: {"256": 20.0 + i, "1100": 30.0 - i} for i, one in enumerate(forms)}
    text = table_of("a model", 8, {"256": 2.0, "1100": 8.1}, found)
    head = "us a layer and share of the bandwidth (256: floor 2.0, 1100: floor 8.1)"
    assert text.splitlines()[0] == f"## a model b8, {head}"
    assert f"{tuple(forms[0])} <- serving" in text and f"{tuple(forms[-1])}" in text.splitlines()[1]
    assert "30.00  27%" in text


def test_batches_that_no_chain_has_are_refused():
    with pytest.raises(ConfigError, match="--batches of --attention must be 2 to 512, got 513"):
        time_attention(["qwen3-0.6b"], [513], 1.0)
