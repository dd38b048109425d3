"""The gated product of many tokens: who takes a layer, who takes a step, and what the kernel for sm_90 compiles to."""

import pytest
import torch
import torch.nn.functional as F

from atom.kernels.reference import activation
from atom.kernels.reference.linear import ReferenceLinear
from atom.kernels.registry import select_kernel, traceable_kernels
from atom.kernels.triton import gated_linear as gated
from atom.kernels.triton.compile_ahead import recording
from atom.model_ops.linear import GateUpParallelLinear, QKVParallelLinear
from atom.models.base import GatedMLP
from atom.platforms import PLATFORMS, meta_stands_for
from atom.utils.call_description import describe
from tests.helpers.gated_layers import Ampere, Hopper, give_cpu_gated_layers
from tests.helpers.own_process import json_of

LAYER = {"in_features": 2048, "out_features": 16384, "dtype": torch.bfloat16, "gated_by": "silu"}


def kernel_of(platform, **traits):
    with meta_stands_for(platform("a test")):
        return select_kernel("linear", device=torch.device("meta"), **LAYER | traits)


def test_gated_layers_of_hopper_take_it_and_no_others():
    assert kernel_of(Hopper).activation == "silu"
    assert kernel_of(Hopper, gated_by="gelu_tanh", dtype=torch.float16).activation == "gelu_tanh"
    others = [
        {"gated_by": None},
        {"gated_by": "relu"},
        {"has_bias": True},
        {"dtype": torch.float32},
        {"in_features": 2044},
        {"out_features": 16392},
    ]
    for traits in others:
        assert type(kernel_of(Hopper, **traits)) is ReferenceLinear, traits
    assert type(kernel_of(Ampere)) is ReferenceLinear
    assert type(kernel_of(PLATFORMS["rocm"])) is ReferenceLinear


def test_only_the_gated_layer_of_a_model_takes_it():
    with meta_stands_for(Hopper("a test")), torch.device("meta"):
        torch.set_default_dtype(torch.bfloat16)
        try:
            layer, biased = (
                GateUpParallelLinear(512, 1024, "gelu_tanh", bias=bias) for bias in (False, True)
            )
            qkv = QKVParallelLinear(512, 64, 8, 2)
        finally:
            torch.set_default_dtype(torch.float32)
    assert isinstance(layer.kernel, gated.GatedLinear) and layer.kernel.activation == "gelu_tanh"
    assert type(biased.kernel) is type(qkv.kernel) is ReferenceLinear
    for one in (layer, biased):
        one.after_load()
    assert layer.is_activated and layer.packed is not None and layer.weight is not None
    assert not biased.is_activated


def test_a_layer_that_takes_another_kernel_needs_another_plan():
    """Tracing bakes the kernel's class into code; a plan that stands in for tracing is kept by it."""

    def description(platform):
        with meta_stands_for(platform("a test")), torch.device("meta"):
            layer = GateUpParallelLinear(512, 1024, "silu", bias=False)
        layer.after_load()
        return type(layer.kernel), describe(layer, ["atom"])

    torch.set_default_dtype(torch.bfloat16)
    try:
        (taken, changed), (without, plain), (_, again) = map(description, (Hopper, Ampere, Ampere))
    finally:
        torch.set_default_dtype(torch.float32)
    assert without is ReferenceLinear and taken is gated.GatedLinear
    assert plain == again != changed


@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_few_tokens_take_a_product_and_a_pass(name):
    x, weight = torch.randn(5, 256).half(), (torch.randn(96, 256) / 16).half()
    found = gated.gated_linear(x, weight, name)
    wanted = getattr(activation, f"{name}_and_mul")(F.linear(x, weight))
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)


def test_steps_whose_tiles_fill_the_device_take_the_kernel():
    """As they were measured on an H200."""
    taken = {3072: [512, 640, 1024, 2048], 8192: [256, 384, 2048, 4096], 14336: [256, 512, 1024, 4096]}
    tall = {3072: [8192, 16384], 8192: [8192, 16384], 14336: [8192, 16384]}
    left = {3072: [1, 128, 256, 384, 768], 8192: [1, 128], 14336: [1, 128]}
    for tokens, shape in ((taken, gated.SHAPE), (tall, gated.TALL), (left, None)):
        for size, numbers in tokens.items():
            assert {gated.gated_shape(num_tokens, size) for num_tokens in numbers} == {shape}, (size, shape)


@pytest.mark.parametrize(
    ("num_tokens", "columns", "share"), [(128, 132, 1.0), (64, 132, 0.5), (128, 133, 133 / 264), (129, 132, 129 / 256)]
)  # fmt: skip
def test_a_fill_counts_whole_rounds_of_whole_tiles(num_tokens, columns, share):
    assert gated.SHAPE.fill(num_tokens, 128 * columns) == share


def test_fills_are_of_the_rounds_of_the_device():
    assert gated.SHAPE.fill(128, 128 * 114, 114) == 1.0
    assert gated.SHAPE.fill(128, 128 * 132, 114) == 132 / 228
    assert gated.gated_shape(256, 7296, 114) is gated.SHAPE and gated.gated_shape(256, 8448, 114) is None


def test_a_step_of_many_tokens_takes_the_kernel_unless_it_cannot_read_it(monkeypatch):
    def takes_kernel(x):
        passes.clear()
        with recording() as recorder:
            gated.gated_linear(x, weight, "silu")
        names = [launch.kernel.fn.__name__ for launch in recorder.launches.values()]
        assert names == ([] if passes else ["gated_sm90"])
        return not passes

    weight, passes = torch.zeros(2 * 8192, 32).half(), []
    monkeypatch.setitem(gated.ACTIVATIONS, "silu", passes.append)
    assert takes_kernel(torch.zeros(256, 32).half())
    assert takes_kernel(torch.zeros(256, 40).half()[:, 8:])
    assert not takes_kernel(torch.zeros(128, 32).half())
    assert not takes_kernel(torch.zeros(32, 256).half().t())
    assert not takes_kernel(torch.zeros(256, 33).half()[:, :32])
    assert not takes_kernel(torch.zeros(256, 40).half()[:, 4:36])  # not at a multiple of 16 bytes


def test_one_kernel_serves_all_numbers_of_tokens_and_layers():
    with recording() as recorder:
        for num_tokens, size in ((256, 8192), (1024, 8192), (255, 8200), (259, 8192 - 120)):
            x, weight = torch.zeros(num_tokens, 32).half(), torch.zeros(2 * size, 32).half()
            gated.launch(gated.SHAPE, x, weight, x.new_empty(num_tokens, size), "silu")
    first, *others = recorder.launches.values()
    assert len(others) == 3 and all(launch.options == first.options for launch in others)
    numbers = [
        p for p in first.kernel.params if isinstance(first.arguments[p.name], int) and not p.is_constexpr
    ]
    assert len(numbers) == 5 and all(number.do_not_specialize for number in numbers)


def test_compiled_code_sees_one_op_for_any_number_of_tokens(monkeypatch):
    seen = give_cpu_gated_layers(monkeypatch)
    with traceable_kernels():
        mlp = GatedMLP(256, 96, "silu")
    assert isinstance(mlp.gate_up_proj.kernel, gated.GatedLinear)
    for linear in (mlp.gate_up_proj, mlp.down_proj):
        torch.nn.init.normal_(linear.weight, std=1 / 16)
        linear.after_load()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(mlp, backend=backend, fullgraph=True, dynamic=True)
    for num_tokens in (7, 30):
        x = torch.randn(num_tokens, 256)
        torch.testing.assert_close(compiled(x), mlp(x))
    assert len(graphs) == 1 and seen == [7, 7, 30, 30]
    assert [n.target for n in graphs[0].graph.nodes].count(torch.ops.aiter.gated_linear) == 1


def test_the_kernel_compiles_for_sm_90(tmp_path):
    for groups, facts in json_of("compile_gated_for_sm90.py", tmp_path).items():
        num = int(groups)
        # A group has the first step's products and those of the loop: four of 256 columns, or eight of 128.
        assert facts["products"] == {f"HGMMA.64x{128 * (4 - num)}x16.F32.BF16": num * 2 * 4 * (num - 1)}
        assert facts["waits"] == 3 * num  # behind the first step, in the loop, behind it
        assert facts["copies"] == 2 + num and facts["stores"] == num
        assert facts["spilled"] == 0 and facts["warps"] == 4 * num + 4
        assert facts["shared"] <= 227 * 1024


@pytest.mark.parametrize(("max_tokens", "groups"), [(200, []), (4096, [2]), (16384, [2, 3])])
def test_what_no_rehearsed_step_takes_is_compiled_ahead_if_a_step_can_need_it(max_tokens, groups):
    with recording() as recorder:
        gated.GatedLinear("silu").rehearse(torch.zeros(64, 32).half(), max_tokens)
    assert [launch.options["GROUPS"] for launch in recorder.launches.values()] == groups
