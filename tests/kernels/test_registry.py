import logging

import pytest
import torch

from atom.errors import ConfigError
from atom.kernels import registry
from atom.kernels.registry import (
    implementations,
    override_kernel,
    register_kernel,
    select_kernel,
    selected_kernels,
)


@pytest.fixture
def toy(monkeypatch):
    """An operation with a reference, a CPU path for even sizes, and a CUDA one."""
    registry.implementations("linear")  # the real ones are there before the table is replaced by a copy
    monkeypatch.setattr(registry, "_kernels", dict(registry._kernels))
    monkeypatch.setattr(registry, "_selected", {})
    register_kernel("toy", "reference")(lambda: "reference")
    register_kernel(
        "toy", "even", priority={"cpu": 10}, supports=lambda platform, *, size=1, **_: size % 2 == 0
    )(lambda: "even")
    register_kernel("toy", "gpu", priority={"cuda": 20})(lambda: "gpu")


def test_priority_decides_and_an_unsupported_shape_falls_back(toy):
    assert select_kernel("toy", size=4)() == "even"
    assert select_kernel("toy", size=3)() == "reference"
    assert selected_kernels()["toy"] == ["even", "reference"]


def test_the_log_says_once_which_path_runs(toy, caplog):
    with caplog.at_level(logging.INFO, logger="atom.kernels.registry"):
        for _ in range(3):
            select_kernel("toy", size=4)
    assert [r.getMessage() for r in caplog.records] == ["kernel toy: even on cpu"]


def test_override_by_name(toy):
    with override_kernel("toy", "reference"):
        assert select_kernel("toy", size=4)() == "reference"
    assert select_kernel("toy", size=4)() == "even"
    with override_kernel("toy", "gpu"), pytest.raises(ConfigError, match="'gpu' was asked for but does not"):
        select_kernel("toy", size=4)
    with pytest.raises(ConfigError, match="no implementation 'evn'; there are even, gpu, reference"):
        with override_kernel("toy", "evn"):
            pass


def test_unknown_and_duplicate_names(toy):
    with pytest.raises(ConfigError, match="unknown kernel 'tyo'"):
        select_kernel("tyo")
    with pytest.raises(ValueError, match="already has an implementation called 'even'"):
        register_kernel("toy", "even")(lambda: None)


def test_every_operation_has_a_reference_that_runs_everywhere():
    implementations("rms_norm")  # imports them all
    for op, kernels in registry._kernels.items():
        assert set(kernels["reference"].priority) == {"cpu", "cuda", "rocm"}, op
        assert kernels["reference"].supports is None, op


def test_bf16_linears_pack_and_fp32_ones_do_not():
    wide = select_kernel("linear", dtype=torch.float32)
    weight = torch.randn(8, 4)
    assert wide.pack(weight) is weight
