"""Linear layers of 65 to 512 tokens: how programs share the work, who takes a layer and a step, what is compiled."""

import types

import pytest
import torch
import torch.nn.functional as F

from atom.benchmarks import gpu_batch
from atom.kernels.reference import activation
from atom.kernels.reference.linear import ReferenceLinear
from atom.kernels.registry import override_kernel, register_kernel, select_kernel, traceable_kernels
from atom.kernels.triton import batch_gemm_gluon as kernels
from atom.kernels.triton import batch_linear as batch
from atom.kernels.triton import gated_linear as gated
from atom.kernels.triton.batch_linear import BatchShape
from atom.kernels.triton.compile_ahead import recording
from atom.kernels.triton.gated_linear import GatedLinear, gated_linear
from atom.kernels.triton.hopper import MULTIPROCESSORS
from atom.model_ops.linear import ReplicatedLinear
from atom.models.base import GatedMLP
from atom.platforms import PLATFORMS, meta_stands_for
from atom.utils.call_description import describe
from tests.helpers.gated_layers import Ampere, Hopper, give_cpu_gated_layers
from tests.helpers.own_process import json_of
from tests.helpers.tiny_model import make_tiny_model
from tests.model_engine.test_graph_modes import run

SHAPE = BatchShape(64, 2, 256, 4, 128)
SMALL = {  # what the tests measured
    (512, 256, False): {256: SHAPE, 512: SHAPE},
    (512, 256, True): {128: BatchShape(128, 2, 128, 4, 128), 256: SHAPE},
}
LAYER = {"in_features": 256, "out_features": 512, "dtype": torch.bfloat16}


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.setattr(batch, "MEASURED", SMALL)


def as_python(function, program=0, programs=1):
    """One of the kernel's functions over numbers, called as program ``program`` of ``programs``."""
    language = types.SimpleNamespace(
        program_id=lambda _: program, num_programs=lambda _: programs, maximum=max, minimum=min
    )
    return types.FunctionType(function.fn.__code__, {"gl": language})


@pytest.mark.parametrize("token_tiles", [1, 2, 4])
@pytest.mark.parametrize(
    ("num_tiles", "steps", "programs"),
    [(224, 64, 132), (224, 64, 128), (48, 64, 132), (32, 224, 128), (8, 32, 128), (1, 3, 1), (5, 7, 29)],
)
def test_every_step_is_done_once_and_every_sum_left_is_waited_for(num_tiles, steps, programs, token_tiles):
    programs = max(1, programs // token_tiles)
    bounds, whose_start = as_python(kernels._bounds), as_python(kernels._whose_start)
    left, ended = {}, {}
    for program in range(programs * token_tiles):
        share = as_python(kernels._own_share, program, programs * token_tiles)
        tokens, number, count, begin, end = share(num_tiles, token_tiles, steps)
        assert count == programs
        tiles = range((end - 1) // steps, begin // steps - 1, -1)
        for tile in tiles:
            first, last = bounds(tile, begin, end, steps)
            assert 0 <= first < last <= steps
            if last < steps:
                assert tile == tiles[0]  # left before this program waits for anybody
                assert (tokens, number) not in left  # there is one place a program
                left[tokens, number] = tile, first, last
            else:
                others = range(whose_start(tile, num_tiles, programs, steps), number)
                assert (tokens, tile) not in ended
                ended[tokens, tile] = first, [(tokens, other) for other in others]
    assert len(ended) == num_tiles * token_tiles
    for (_, tile), (first, others) in ended.items():
        reached = 0
        for other in others:
            own_tile, start, stop = left.pop(other)
            assert (own_tile, start) == (tile, reached)
            reached = stop
        assert reached == first
    assert not left


def fits(shape, rows, columns, is_gated, num_tokens):
    assert rows % (shape.rows * shape.groups) == 0 and columns % batch.STEP == 0
    assert shape.rows * shape.groups * shape.tokens <= batch.SUMS
    token_tiles = -(-num_tokens // shape.tokens)
    assert token_tiles <= shape.programs <= MULTIPROCESSORS
    ring = shape.stages * (shape.rows * shape.groups + shape.tokens) * batch.STEP * 2
    out_rows = shape.rows // (1 + is_gated)
    room = 2 * shape.groups * batch.chunk_tokens(shape.tokens, out_rows) * out_rows * 2
    return ring + room <= 226 * 1024  # of shared memory; barriers take some too


@pytest.mark.parametrize(("rows", "columns", "is_gated"), batch.MEASURED)
def test_what_was_measured_fits_the_device(rows, columns, is_gated):
    for num_tokens, shape in batch.MEASURED[rows, columns, is_gated].items():
        assert 65 <= num_tokens <= 512
        assert fits(shape, rows, columns, is_gated, num_tokens)


def test_what_the_benchmark_measures_fits_the_device_and_has_the_choices():
    for layer in (layer for layers in gpu_batch.MODELS.values() for layer in layers):
        is_gated = layer.activation is not None
        for num_tokens in gpu_batch.TOKENS:
            shapes = list(gpu_batch.variants(layer, num_tokens))
            assert all(fits(shape, layer.rows, layer.columns, is_gated, num_tokens) for shape in shapes)
            chosen = batch.batch_shape(layer.rows, layer.columns, is_gated, num_tokens)
            assert chosen is None or chosen in shapes, (layer, num_tokens)


def test_a_choice_depends_on_the_class_of_the_number_of_tokens(measured):
    def chosen(num_tokens, is_gated=False):
        return batch.batch_shape(512, 256, is_gated, num_tokens)

    assert [chosen(n) for n in (1, 64, 128, 224, 257, 480, 513)] == [None] * 7
    assert [chosen(n) for n in (225, 256, 481, 512)] == [SHAPE] * 4
    assert chosen(97, True) == chosen(128, True) == SMALL[512, 256, True][128]
    assert chosen(96, True) is None and chosen(300, True) is None
    assert batch.batch_shape(512, 320, False, 250) is None


def kernel_of(platform, **traits):
    with meta_stands_for(platform("a test")):
        return select_kernel("linear", device=torch.device("meta"), **LAYER | traits)


def test_measured_layers_of_hopper_take_it_and_no_others(measured):
    assert isinstance(kernel_of(Hopper), batch.BatchLinear)
    assert isinstance(kernel_of(Hopper, gated_by="silu"), GatedLinear)  # which asks for measured shapes
    for traits in ({"has_bias": True}, {"dtype": torch.float16}, {"in_features": 320}, {"out_features": 640}):
        assert not isinstance(kernel_of(Hopper, **traits), batch.BatchLinear), traits
    assert type(kernel_of(Ampere)) is ReferenceLinear
    assert type(kernel_of(PLATFORMS["rocm"])) is ReferenceLinear


def launched(call):
    with recording() as recorder:
        call()
    return [launch.kernel.fn.__name__ for launch in recorder.launches.values()]


def test_steps_outside_and_what_cannot_be_read_go_to_cublas(measured):
    x, weight = torch.zeros(600, 256).bfloat16(), torch.zeros(512, 256).bfloat16()
    for num_tokens, by_kernel in ((64, False), (128, False), (240, True), (512, True), (513, False)):
        names = launched(lambda n=num_tokens: batch.batch_linear(x[:n], weight))
        assert names == ["batch_gemm"] * by_kernel, num_tokens
        names = launched(lambda n=num_tokens: gated_linear(x[:n], weight, "silu"))
        assert ("batch_gemm" in names) == (num_tokens in (128, 240)), num_tokens
    for other in (
        torch.zeros(256, 250).bfloat16().t(),
        torch.zeros(250, 257).bfloat16()[:, :256],
        torch.zeros(250, 264).bfloat16()[:, 4:260],  # not at a multiple of 16 bytes
        x[:250].half(),
    ):
        assert launched(lambda x=other: batch.batch_linear(x, weight.to(x.dtype))) == []


def test_sums_take_the_memory_of_their_total(measured, monkeypatch):
    monkeypatch.setattr(batch, "launch", lambda shape, x, weight, output, activation: output.fill_(2.0))
    x, weight = torch.randn(300, 256).bfloat16(), torch.randn(512, 256).bfloat16()
    for num_tokens, by_kernel in ((240, True), (300, False)):
        total = torch.ones(num_tokens, 512).bfloat16()
        assert batch.BatchLinear().add_to(total, x[:num_tokens], weight, None) is total
        wanted = torch.full_like(total, 3.0) if by_kernel else F.linear(x.float(), weight.float()) + 1
        torch.testing.assert_close(total.float(), wanted.float(), rtol=1e-2, atol=1e-1)


def test_one_kernel_serves_all_layers_and_numbers_of_tokens_that_share_blocks():
    with recording() as recorder:
        for rows, columns, num_tokens in ((512, 256, 200), (1024, 64, 256), (512, 4096, 512)):
            x, weight = torch.zeros(num_tokens, columns).bfloat16(), torch.zeros(rows, columns).bfloat16()
            batch.launch(SHAPE, x, weight, torch.empty(num_tokens, rows).bfloat16())
    specialised = {tuple(sorted(launch.launch_options.items())) for launch in recorder.launches.values()}
    constants = {
        tuple(sorted((k, v) for k, v in launch.options.items())) for launch in recorder.launches.values()
    }
    assert len(specialised) == len(constants) == 1


@pytest.fixture
def on_cpu(monkeypatch):
    """Layers of the CPU take it too: what it leaves to cuBLAS runs here."""
    give_cpu_gated_layers(monkeypatch)
    register_kernel(
        "linear", "here", priority={"cpu": 99}, supports=lambda platform, gated_by=None, **_: gated_by is None
    )(batch.BatchLinear())


def test_what_some_number_of_tokens_takes_is_compiled_ahead(measured):
    weight = torch.zeros(512, 256).bfloat16()
    with recording() as recorder:
        batch.BatchLinear().rehearse(weight, 4096)
    assert len(recorder.launches) == 1  # both choices are one kernel
    assert launched(lambda: batch.BatchLinear().rehearse(weight, 225)) == ["batch_gemm"]
    assert launched(lambda: batch.BatchLinear().rehearse(weight, 224)) == []  # no step is so long
    assert "batch_gemm" in launched(lambda: GatedLinear("silu").rehearse(weight, 4096))


def test_compiled_code_sees_one_op_a_layer_for_any_number_of_tokens(on_cpu):
    with traceable_kernels():
        mlp = GatedMLP(256, 96, "silu")
    assert isinstance(mlp.down_proj.kernel, batch.BatchLinear)
    for linear in (mlp.gate_up_proj, mlp.down_proj):
        torch.nn.init.normal_(linear.weight, std=1 / 16)
        linear.after_load()
    assert mlp.gate_up_proj.is_activated
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(mlp, backend=backend, fullgraph=True, dynamic=True)
    for num_tokens in (7, 30):
        x = torch.randn(num_tokens, 256)
        wanted = F.linear(activation.silu_and_mul(F.linear(x, mlp.gate_up_proj.weight)), mlp.down_proj.weight)
        torch.testing.assert_close(compiled(x), wanted, rtol=1e-3, atol=1e-3)
    (graph,) = graphs
    targets = [node.target for node in graph.graph.nodes]
    assert targets.count(torch.ops.aiter.gated_linear) == targets.count(torch.ops.aiter.batch_linear) == 1


def test_compiled_code_follows_a_table_that_changes(monkeypatch):
    """Its op chooses as it runs: artifacts of an earlier start are right whatever was measured since."""
    x, weight = torch.ones(240, 256).bfloat16(), torch.ones(512, 256).bfloat16()
    monkeypatch.setattr(batch, "launch", lambda shape, x, weight, output, activation: output.fill_(-1.0))
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def product(x):
        plain = torch.ops.aiter.batch_linear(x, weight)
        return plain, torch.ops.aiter.gated_linear(x, weight, "silu")

    monkeypatch.setitem(gated.ACTIVATIONS, "silu", activation.silu_and_mul)
    compiled = torch.compile(product, backend=backend, fullgraph=True, dynamic=True)
    for table, is_launched in (({}, False), (SMALL, True), ({}, False)):
        monkeypatch.setattr(batch, "MEASURED", table)
        assert [bool((found == -1.0).all()) for found in compiled(x)] == [is_launched] * 2
    assert len(graphs) == 1


def test_a_layer_that_takes_another_kernel_needs_another_plan(monkeypatch):
    """Tracing bakes the kernel's class into code; a plan that stands in for tracing is kept by it."""

    def description(table):
        monkeypatch.setattr(batch, "MEASURED", table)
        with meta_stands_for(Hopper("a test")), torch.device("meta"):
            layer = ReplicatedLinear(256, 512, False)
        layer.after_load()
        return type(layer.kernel), describe(layer, ["atom"])

    torch.set_default_dtype(torch.bfloat16)
    try:
        (without, plain), (taken, changed), (_, again) = map(description, ({}, SMALL, {}))
    finally:
        torch.set_default_dtype(torch.float32)
    assert without is ReferenceLinear and taken is batch.BatchLinear
    assert plain == again != changed


@pytest.mark.parametrize("level", [0, 1, 3])
def test_steps_say_the_same_at_every_level(level, on_cpu, tmp_path, monkeypatch):
    folder = make_tiny_model(tmp_path / "model", "llama")
    asked = []
    monkeypatch.setattr(batch, "batch_shape", lambda *shape: asked.append(shape[2:]))
    compilation = {"level": level, "use_inductor": False, "cache_dir": str(tmp_path / "compiled")}
    steps = {mode: run(folder, mode, compilation=compilation).tokens for mode in ("NONE", "FULL")}
    assert {is_gated for is_gated, _ in asked} == {False, True}
    assert len({num_tokens for _, num_tokens in asked}) > 2  # decode steps too, and a prefill's
    with override_kernel("linear", "reference"):
        wanted = run(folder, "NONE").tokens
    assert steps == {"NONE": wanted, "FULL": wanted}


def test_the_kernel_compiles_for_sm_90(tmp_path):
    facts = json_of("compile_batch_for_sm90.py", tmp_path)
    assert facts["warps"] == 12
    assert facts["products"] == 8  # four a step for each of two groups of warps
    assert facts["waits"] == 4  # in the loop and behind it: nothing was serialised
    assert facts["copies"] == 5  # two of weights before the wait, all three in the loop
    assert facts["stores"] > 0 and facts["spilled"] == 0
    assert facts["wide"] == 32  # sums of others come by 16 bytes, all asked for at once
    assert facts["shared"] <= 227 * 1024
