"""Persistent kernels of sm_90 are launched with as many programs as run at a time on the device that they are for."""

from types import SimpleNamespace

import pytest
import torch

from atom.kernels.triton import batch_linear, gated_linear, head_projection, hopper, varlen_hopper
from atom.kernels.triton.batch_linear import BatchShape


@pytest.fixture(params=[78, 132], ids=["H20", "H200"])
def at_once(request, monkeypatch):
    for module in (batch_linear, gated_linear, head_projection, varlen_hopper):
        monkeypatch.setattr(module, "num_at_once", lambda device: request.param)
    return request.param


@pytest.fixture
def grids(monkeypatch):
    """The grids that kernels are launched in, which run nowhere."""
    from atom.kernels.triton import batch_gemm_gluon, gated_gluon, head_projection_gluon

    found = []

    class Launched:
        def __getitem__(self, grid):
            found.append(grid[0])
            return lambda *_, **__: None

    for module, name in (
        (batch_gemm_gluon, "batch_gemm"), (gated_gluon, "gated_sm90"),
        (head_projection_gluon, "projection_sm90"), (varlen_hopper, "varlen_sm90"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, Launched())
    return found


def half(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


def test_grids_follow_the_device(at_once, grids):
    x, weight = half(2048, 256), half(4096, 256)
    gated_linear.launch(gated_linear.SHAPE, x, weight, half(2048, 2048), "silu")
    batch_linear.launch(BatchShape(64, 1, 128, 6, 132), x[:100], weight, half(100, 4096))
    keys, values = half(2, 9, 8, 16, 64)
    slots, cos = torch.zeros(2048, dtype=torch.int64), half(2048, 1, 64)
    heads = half(2048, 64, 64)
    head_projection.launch(x, weight, heads, 48, cos, cos, None, 0.0, keys, values, slots)
    qkv = half(2048, 48, 64)
    q, k, v = qkv.split((32, 8, 8), 1)
    tables, tiles = torch.zeros(1, 200, dtype=torch.int32), torch.zeros(64, 8, dtype=torch.int32)
    varlen_hopper.launch(64, 3, q, k, v, keys, values, tables, None, tiles, half(2048, 32, 64), scale=1.0)
    assert grids == [at_once] * 4


def test_the_device_is_asked_once(monkeypatch):
    asked = []
    properties = SimpleNamespace(multi_processor_count=114)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: (asked.append(index), properties)[1]
    )
    hopper.num_at_once.cache_clear()
    for index in (0, 1, 1):
        assert hopper.num_at_once(torch.device("cuda", index)) == 114
    hopper.num_at_once.cache_clear()
    assert asked == [0, 1]
    assert hopper.num_at_once(torch.device("meta")) == hopper.MULTIPROCESSORS == 132
