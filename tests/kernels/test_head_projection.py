"""Query, key and value heads in one launch: who takes a layer and a step, what is compiled; numbers are a device's."""

import pytest
import torch

from atom.kernels.triton import head_projection
from atom.model_ops.attentions.backend import AttentionSpec
from atom.model_ops.attentions.triton import TritonAttention
from atom.platforms import PLATFORMS
from tests.helpers.gated_layers import Ampere, Hopper
from tests.helpers.own_process import json_of


def test_the_kernel_compiles_for_sm_90(tmp_path):
    for name, facts in json_of("compile_heads_for_sm90.py", tmp_path).items():
        assert facts["warps"] == 12, name
        # Four of K = 16 a step, for the first step and the others, in two groups.
        assert facts["products"] == 16, name
        assert facts["wide_stores"] == 32, name  # to the cache: a row of 256 columns is 32 threads' 16 bytes
        assert facts["spilled"] <= 128, name
        assert facts["shared"] <= 227 * 1024, name


def test_layers_of_hopper_whose_tiles_are_heads_of_one_kind():
    def supports(platform=Hopper("a test"), dtype=torch.bfloat16, num_heads=32, kv=8, dim=128):
        return head_projection.supports(platform, dtype, num_heads, kv, dim)

    assert supports() and supports(dim=64) and supports(dtype=torch.float16)
    assert not supports(Ampere("a test")) and not supports(PLATFORMS["rocm"]("rocm"))
    assert not supports(dtype=torch.float32)
    assert not supports(kv=1)  # its key head would share a tile with the value head
    assert not supports(kv=2, dim=64)
    assert not supports(dim=256) and not supports(dim=80)


@pytest.mark.parametrize(
    ("num_tokens", "rows", "takes"),
    [
        (4096, 6144, True),
        (2048, 6144, True),
        (2048, 4096, True),
        (2048, 3072, False),
        (256, 6144, False),
        (1, 4096, False),
    ],
)
def test_steps_whose_tiles_fill_their_rounds(num_tokens, rows, takes):
    half = {"dtype": torch.bfloat16, "device": "meta"}
    x, weight, keys = (
        torch.empty(num_tokens, 1024, **half),
        torch.empty(rows, 1024, **half),
        torch.empty(1, **half),
    )
    assert head_projection.takes(x, weight, keys) == takes
    assert not head_projection.takes(x[:0], weight, keys)
    assert not head_projection.takes(x, weight, keys.to(torch.float8_e4m3fn))


def test_tiles_fill_the_rounds_of_the_device():
    assert head_projection.fills(896, 4096, 114) and not head_projection.fills(896, 4096, 132)
    assert [head_projection.fewest_tokens(4096, number) for number in (78, 132)] == [1061, 898]


def test_the_smallest_step_that_takes_it_is_compiled_ahead():
    for num_rows, fewest in ((3072, 1197), (4096, 898), (6144, 599)):
        assert head_projection.fewest_tokens(num_rows) == fewest
        assert not any(head_projection.fills(n, num_rows) for n in range(fewest))
    backend = TritonAttention(AttentionSpec(32, 8, 128, 1.0, torch.bfloat16))
    assert backend.prefill_sizes() == (), "nothing is measured, and this is no sm_90"
    backend.fuses_projection = True
    assert backend.prefill_sizes() == (599,)
