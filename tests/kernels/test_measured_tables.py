"""What was measured on this machine is kept, found again by engines, and nothing but a whole table is trusted."""

import json
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import varlen

from atom.benchmarks import gpu_kernels
from atom.kernels.triton import decode_table, prefill_table
from atom.kernels.triton.decode_choices import (
    BATCH_CLASSES,
    CLASSES,
    LINEAR_CHOICES,
    Choice,
    LinearShape,
    candidates,
    default_choice,
    fits,
)
from atom.kernels.triton.prefill_table import TORCH, PrefillLayer, choose
from atom.kernels.triton.varlen_attention import HOPPER_SHAPE, TileShape, layer_tile_shape, tile_shape
from atom.model_ops.attentions import triton as triton_backend
from atom.model_ops.attentions.backend import AttentionSpec, override_backend, select_backend
from atom.model_ops.attentions.flash import FlashAttention
from atom.model_ops.attentions.triton import TritonAttention
from atom.platforms.cuda import CudaPlatform

LAYER = PrefillLayer(64, 4)
SMALL, WIDE = TileShape(64, 64, 4, 3, True), TileShape(128, 64, 8, 3, False)
MEASURED = {1024: HOPPER_SHAPE, 4096: SMALL, 8192: TORCH, 16384: WIDE}
SPEC = AttentionSpec(32, 8, 64, 0.125, torch.bfloat16)

PREFILLS = {LAYER: MEASURED, PrefillLayer(128, 2): {2048: WIDE, 4096: WIDE}}
DECODES = {
    (LinearShape(96, 256, 1), 8): Choice("loop", (64, 128, 2, 5, 0)),
    (LinearShape(64, 96, 0), 1): Choice("gemv", (2, 4)),
}
TABLES = {"prefill": (prefill_table, PREFILLS), "decode": (decode_table, DECODES)}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    prefill_table.measured_on.cache_clear()
    yield tmp_path
    prefill_table.measured_on.cache_clear()


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_is_found_again_and_added_to(kind):
    module, table = TABLES[kind]
    assert module.load_table("sm_90") == {}
    first, *others = table.items()
    module.save_table("sm_90", dict([first]))
    module.save_table("sm_90", dict(others))
    assert module.load_table("sm_90") == table
    assert module.load_table("sm_80") == {}, "of another device"


@pytest.mark.parametrize("damage", ["cut", "other numbers", "others may write", "no list"])
@pytest.mark.parametrize("kind", TABLES)
def test_what_is_no_table_is_not_used(kind, damage, cache, caplog):
    module, table = TABLES[kind]
    module.save_table("sm_90", table)
    (path,) = cache.rglob("*.json")
    if damage == "cut":
        path.write_text(path.read_text()[:-9])
    elif damage == "other numbers":
        path.write_text(json.dumps([row[:-1] for row in json.loads(path.read_text())]))
    elif damage == "no list":
        path.write_text("7")
    else:
        path.parent.chmod(0o777)
    assert module.load_table("sm_90") == {}
    assert "is not used" in caplog.text


@pytest.mark.parametrize(
    ("tokens", "kernel", "blocks"),
    [
        (8, "gemv", [2, 4]),  # of one token
        (1, "loop", [64, 128, 1, 5, 0]),  # of several
        (8, "gemm", [64, 128, 1, 5, 0]),  # no kernel of today
        (8, "loop", [64, 128, 1, 5]),  # blocks of another day
        (8, "tile", [64, 128, 2, 2, 2]),
        (8, "rows", [16, 4, 1]),
        (8, "ring", [16, 128, 1, 2, 4, 0]),
        (8, "loop", [64, 128, 3, 5, 0]),  # does not divide the columns
        (12, "loop", [64, 128, 1, 5, 0]),  # no class
    ],
)
def test_a_choice_that_does_not_serve_its_layer_is_not_used(tokens, kernel, blocks, cache, caplog):
    decode_table.save_table("sm_90", DECODES)
    (path,) = cache.rglob("*.json")
    path.write_text(json.dumps([*json.loads(path.read_text()), [256, 1024, 0, tokens, kernel, blocks]]))
    assert decode_table.load_table("sm_90") == {}
    assert "is not used" in caplog.text


def test_every_usual_choice_and_every_candidate_may_be_kept():
    for n, k, has_activation in LINEAR_CHOICES:
        shape = LinearShape(n, k, int(has_activation))
        for most in CLASSES + BATCH_CLASSES[:2]:
            choices = [default_choice(shape, most, True), *candidates(shape, most, True)]
            assert all(fits(choice, shape, most) for choice in choices), (shape, most)


def test_new_measurements_of_a_layer_leave_other_lengths(cache):
    prefill_table.save_table("sm_90", {LAYER: {2048: SMALL, 8192: SMALL}})
    prefill_table.save_table("sm_90", {LAYER: {8192: TORCH}})
    assert prefill_table.load_table("sm_90") == {LAYER: {2048: SMALL, 8192: TORCH}}


@pytest.mark.parametrize(
    ("longest", "choice"),
    [(1, None), (1023, None), (1024, HOPPER_SHAPE), (8191, SMALL), (8192, TORCH), (99999, WIDE)],
)
def test_lengths_go_by_the_longest_that_was_measured_up_to_them(longest, choice):
    assert choose(MEASURED, longest) == choice


def test_without_a_device_nothing_is_measured():
    assert prefill_table.measured_on("cuda") == prefill_table.measured_on("cpu") == {}


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.setattr(triton_backend, "measured_choices", lambda platform, layer: PREFILLS.get(layer, {}))


def test_a_measured_shape_is_taken_where_it_can_be():
    q, k, v = torch.empty(9, 6, 64, dtype=torch.bfloat16).split((4, 1, 1), 1)
    cache = torch.empty(2, 1, 16, 64, dtype=torch.bfloat16)
    usual = tile_shape(q.dtype, 64, 4, True)
    for shape, taken in ((None, usual), (WIDE, WIDE), (SMALL, SMALL), (HOPPER_SHAPE, usual)):
        assert layer_tile_shape(q, k, v, cache, cache, measured=shape) == taken
    odd = k.expand(9, 1, 64).transpose(1, 2).contiguous().transpose(1, 2)
    assert layer_tile_shape(q, odd[:, :, :63], v, cache, cache, measured=SMALL) == tile_shape(
        q.dtype, 64, 4, False
    )
    assert layer_tile_shape(q, k, v, cache, cache, measured=WIDE, has_scales=True) == usual


def test_engines_take_what_was_measured(measured, monkeypatch):
    monkeypatch.setattr(CudaPlatform, "supports", lambda self, feature: True)
    monkeypatch.setattr("atom.model_ops.attentions.backend.platform_of_device", lambda device: CudaPlatform())
    other = replace(SPEC, num_heads=16, head_dim=128)
    assert select_backend(SPEC) is FlashAttention
    assert select_backend(other) is TritonAttention, "for which PyTorch's was never the fastest"
    assert select_backend(replace(SPEC, window=64)) is TritonAttention
    with override_backend("triton"):
        assert select_backend(SPEC) is TritonAttention
    with override_backend("flash_attention"):
        assert select_backend(other) is FlashAttention
    assert TritonAttention(SPEC).prefill_sizes() == (1024, 4096, 8192, 16384)
    assert FlashAttention(other).prefill_sizes() == (2048,)
    assert TritonAttention(replace(SPEC, window=64)).prefill_sizes() == ()
    assert TritonAttention(replace(SPEC, dtype=torch.float32)).prefill_sizes() == ()


def whole_prompts(*lens):
    from tests.model_ops.test_attention_backends import make_step

    return make_step(lens, lens, len(lens))


@pytest.mark.parametrize(
    ("asked", "longest", "kernel"),
    [
        (False, 5, "triton"),
        (False, 40, "torch"),
        (False, 90, "triton"),
        (True, 5, "torch"),
        (True, 90, "torch"),
    ],
)
def test_prompts_choose_the_kernel(monkeypatch, asked, longest, kernel):
    """Asked for by name PyTorch's kernel takes all whole prompts, else those for which it was the fastest."""
    choices = {4: SMALL, 32: TORCH, 64: WIDE}
    monkeypatch.setattr(triton_backend, "measured_choices", lambda platform, layer: choices)
    taken = []
    monkeypatch.setattr(varlen, "varlen_attn", lambda q, *rest, **options: (taken.append("torch"), q)[1])
    monkeypatch.setattr(
        triton_backend, "varlen_attention", lambda *args, shape, **options: taken.append(("triton", shape))
    )
    if asked:
        with override_backend("flash_attention"):
            backend = FlashAttention(SPEC)
    else:
        backend = FlashAttention(SPEC)
    step = whole_prompts(3, longest)
    q, k, v = torch.zeros(3 + longest, 48, 64, dtype=torch.bfloat16).split((32, 8, 8), 1)
    cache = torch.zeros(4, 8, 16, 64, dtype=torch.bfloat16)
    backend._attend(q, k, v, cache, cache, step, torch.empty(q.shape, dtype=q.dtype))
    assert taken == ["torch"] if kernel == "torch" else taken == [("triton", {5: SMALL, 90: WIDE}[longest])]


def test_a_benchmark_keeps_its_first_choice_unless_another_is_clearly_faster():
    assert gpu_kernels.fastest({SMALL: 10.0, TORCH: 9.9, WIDE: 12.0}) == SMALL
    assert gpu_kernels.fastest({SMALL: 10.0, TORCH: 9.9, WIDE: 9.5}) == WIDE
    with pytest.raises(SystemExit):
        gpu_kernels.main(["--parts", "decode", "--keep"])
