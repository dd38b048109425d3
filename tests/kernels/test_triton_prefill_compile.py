"""The sm_90 kernel of prefill attention compiles without a device, and its softmax runs beside a product."""

import torch

from atom.kernels.triton import varlen_hopper
from atom.kernels.triton.compile_ahead import recording
from tests.helpers.own_process import json_of


def test_the_prefill_kernel_compiles_for_sm_90(tmp_path):
    for name, facts in json_of("compile_prefill_for_sm90.py", tmp_path).items():
        assert facts["warps"] == 12, name
        assert facts["copies"] > 0 and facts["products"] > 0, name
        assert facts["overlapped"] and all(count >= 60 for count in facts["overlapped"]), name
        assert facts["shared"] <= 227 * 1024, name


def launch(values, page=16):
    q, k, v = torch.full((40, 8, 64), values).bfloat16().split((4, 2, 2), 1)
    keys = torch.zeros(5, 2, page, 64, dtype=torch.bfloat16)
    table, tiles = torch.zeros(1, 3, dtype=torch.int32), torch.zeros(2, 8, dtype=torch.int32)
    output = torch.empty(40, 4, 64, dtype=torch.bfloat16)
    varlen_hopper.launch(128, 2, q, k, v, keys, keys.clone(), table, None, tiles, output, scale=0.1)


def test_layers_of_a_shape_are_compiled_once():
    with recording() as recorder:
        for values in (0.0, 1.0):
            launch(values)
        assert len(recorder.launches) == 1
        launch(0.0, page=32)
        assert len(recorder.launches) == 2


def test_what_the_kernel_cannot_read_is_left_to_the_portable_one():
    def fits(num_heads=4, dim=64, page=16, dtype=torch.bfloat16, cache_dtype=torch.bfloat16):
        q, k, v = torch.zeros(3, num_heads + 4, dim, dtype=dtype).split((num_heads, 2, 2), 1)
        keys = torch.zeros(2, 2, page, dim, dtype=cache_dtype)
        return varlen_hopper.fits(q, k, v, keys, keys)

    assert fits() and fits(num_heads=32, dim=128, page=128)
    assert not fits(num_heads=6)  # three query heads a kv head do not divide a tile
    assert not fits(num_heads=64)
    assert not fits(dim=80) and not fits(page=24) and not fits(page=256)
    assert not fits(dtype=torch.float32, cache_dtype=torch.float32)
    assert not fits(cache_dtype=torch.float8_e4m3fn)
