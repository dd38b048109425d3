"""Products of 65 to 512 tokens: how programs share the work, who takes a layer and a step, what is compiled."""

import types

import pytest
import torch

from atom.benchmarks import gpu_batch
from atom.kernels.reference import activation
from atom.kernels.registry import override_kernel
from atom.kernels.triton import batch_gemm_gluon as kernels
from atom.kernels.triton import batch_linear as batch
from atom.kernels.triton import gated_linear as gated
from atom.kernels.triton.batch_linear import BatchShape
from atom.kernels.triton.compile_ahead import recording
from atom.kernels.triton.gated_linear import GatedLinear, gated_linear
from atom.kernels.triton.hopper import MULTIPROCESSORS, rows_there
from tests.helpers.gated_layers import give_cpu_gated_layers
from tests.helpers.own_process import json_of
from tests.helpers.tiny_model import make_tiny_model
from tests.model_engine.test_graph_modes import run

SHAPE = BatchShape(64, 2, 256, 4, 128)
SMALL = {(512, 256): {128: BatchShape(128, 2, 128, 4, 128), 256: SHAPE}}  # what the tests measured


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.setattr(batch, "GATED_PRODUCTS", SMALL)


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


def fits(shape, rows, columns, num_tokens, **what):
    assert rows % (shape.rows * shape.groups) == 0 and columns % batch.STEP == 0
    assert shape.rows * shape.groups * shape.tokens <= batch.SUMS
    token_tiles = -(-num_tokens // shape.tokens)
    programs = shape.num_programs(rows, columns, num_tokens)
    assert programs % token_tiles == 0 and 0 < programs <= shape.programs <= MULTIPROCESSORS
    stages = shape.stages_there(**what)
    assert 2 <= stages <= shape.stages
    ring = stages * (shape.rows * shape.groups + shape.tokens) * batch.STEP * 2
    out_rows = shape.rows // (1 + what["is_gated"])
    buffers = shape.buffers(what["has_residual"], what["has_next"])
    room = buffers * shape.groups * shape.chunk(**what) * out_rows * 2
    return ring + room <= 226 * 1024  # of shared memory; barriers and reductions take some too


@pytest.mark.parametrize("at_once", [132, 114, 78, 16, 1])
def test_no_more_programs_than_run_at_once(at_once):
    """Of H200, H100 PCIe, H20 and small parts of one; with as many programs as tiles of tokens at least."""
    for (rows, columns), choices in batch.GATED_PRODUCTS.items():
        for num_tokens, shape in choices.items():
            token_tiles = -(-num_tokens // shape.tokens)
            programs = shape.num_programs(rows, columns, num_tokens, at_once)
            assert programs % token_tiles == 0 and programs > 0
            assert programs == token_tiles or programs <= at_once
            if at_once == MULTIPROCESSORS:
                assert programs == shape.programs // token_tiles * token_tiles


@pytest.mark.parametrize(("rows", "columns"), batch.GATED_PRODUCTS)
def test_what_was_measured_fits_the_device(rows, columns):
    for num_tokens, shape in batch.GATED_PRODUCTS[rows, columns].items():
        assert 65 <= num_tokens <= 512
        assert fits(shape, rows, columns, num_tokens, is_gated=True, has_residual=False, has_next=False)


def test_what_decode_steps_and_the_benchmark_take_fits_the_device():
    for layer in (layer for layers in gpu_batch.MODELS.values() for layer in layers):
        is_gated = layer.activation is not None
        for num_tokens in gpu_batch.TOKENS:
            shapes = [*gpu_batch.variants(layer, num_tokens), gpu_batch.chosen(layer, num_tokens)]
            for shape in shapes:
                for has_residual in {False, not is_gated}:
                    for has_next in {False, not is_gated}:
                        assert fits(
                            shape, layer.rows, layer.columns, num_tokens,
                            is_gated=is_gated, has_residual=has_residual, has_next=has_next,
                        )  # fmt: skip


def test_a_choice_depends_on_the_class_of_the_number_of_tokens(measured):
    def chosen(num_tokens):
        return batch.batch_shape(512, 256, num_tokens)

    assert [chosen(n) for n in (1, 64, 96, 129, 224, 257, 513)] == [None] * 7
    assert [chosen(n) for n in (225, 256)] == [SHAPE] * 2
    assert chosen(97) == chosen(128) == SMALL[512, 256][128]
    assert batch.batch_shape(512, 320, 250) is None


def launched(call):
    with recording() as recorder:
        call()
    return [launch.kernel.fn.__name__ for launch in recorder.launches.values()]


def test_steps_outside_and_what_cannot_be_read_go_elsewhere(measured):
    x, weight = torch.zeros(600, 256).bfloat16(), torch.zeros(512, 256).bfloat16()
    for num_tokens, by_kernel in ((64, False), (128, True), (240, True), (512, False)):
        names = launched(lambda n=num_tokens: gated_linear(x[:n], weight, "silu"))
        assert ("batch_gemm" in names) == by_kernel, num_tokens
    for other in (
        torch.zeros(256, 250).bfloat16().t(),
        torch.zeros(250, 257).bfloat16()[:, :256],
        torch.zeros(250, 264).bfloat16()[:, 4:260],  # not at a multiple of 16 bytes
        x[:250].half(),
    ):
        assert batch.gated_product(other, weight.to(other.dtype), "silu") is None


def test_rows_behind_the_last_are_read_where_there_are_some():
    room = torch.zeros(200, 64)
    assert [rows_there(room[:n], 128) for n in (65, 128)] == [128, 128]
    assert rows_there(room[150:170], 128) == 50 and rows_there(room, 256) == 200
    assert rows_there(room[:70, 32:], 256) == 200 and rows_there(room.view(100, 128)[:7, 8:72], 256) == 100


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


def test_what_some_number_of_tokens_takes_is_compiled_ahead(measured):
    weight = torch.zeros(512, 256).bfloat16()
    for most, count in ((4096, 2), (225, 2), (224, 1), (96, 0)):  # none where no step is so long
        names = launched(lambda n=most: GatedLinear("silu").rehearse(weight, n))
        assert names.count("batch_gemm") == count, most


def test_compiled_code_follows_a_table_that_changes(monkeypatch):
    """Its op chooses as it runs: artifacts of an earlier start are right whatever was measured since."""
    x, weight = torch.ones(240, 256).bfloat16(), torch.ones(512, 256).bfloat16()
    monkeypatch.setattr(batch, "launch", lambda shape, x, weight, output, activation: output.fill_(-1.0))
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def product(x):
        return torch.ops.aiter.gated_linear(x, weight, "silu")

    monkeypatch.setitem(gated.ACTIVATIONS, "silu", activation.silu_and_mul)
    compiled = torch.compile(product, backend=backend, fullgraph=True, dynamic=True)
    for table, is_launched in (({}, False), (SMALL, True), ({}, False)):
        monkeypatch.setattr(batch, "GATED_PRODUCTS", table)
        assert bool((compiled(x) == -1.0).all()) == is_launched
    assert len(graphs) == 1


@pytest.mark.parametrize("level", [0, 1, 3])
def test_steps_say_the_same_at_every_level(level, tmp_path, monkeypatch):
    give_cpu_gated_layers(monkeypatch)
    folder = make_tiny_model(tmp_path / "model", "llama")
    asked = []
    monkeypatch.setattr(batch, "batch_shape", lambda *shape: asked.append(shape))
    compilation = {"level": level, "use_inductor": False, "cache_dir": str(tmp_path / "compiled")}
    steps = {mode: run(folder, mode, compilation=compilation).tokens for mode in ("NONE", "FULL")}
    assert len({num_tokens for _, _, num_tokens in asked}) > 2  # decode steps too, and a prefill's
    with override_kernel("linear", "reference"):
        wanted = run(folder, "NONE").tokens
    assert steps == {"NONE": wanted, "FULL": wanted}


def test_the_kernel_compiles_for_sm_90(tmp_path):
    found = json_of("compile_batch_for_sm90.py", tmp_path)
    facts = found["a prefill's"]
    assert facts["copies"] == 5  # two of weights before the wait, all three in the loop
    assert facts["waits for launches"] == 1 and facts["residuals"] == 0
    assert found["norm + activation"]["waits for launches"] == 3  # the others read sums of squares
    facts = found["residual + next"]
    assert facts["copies"] == 7  # of two groups of warps the residual
    assert facts["residuals"] == 16  # by eight bytes a lane and matrix
    for name, facts in found.items():
        assert facts["warps"] == 12
        assert facts["products"] == 8, name  # four a step for each of two groups of warps
        assert facts["waits"] == 4, name  # in the loop and behind it: nothing was serialised
        assert facts["stores"] > 0 and facts["spilled"] == 0, name
        assert facts["wide"] == 32, name  # sums of others come by 16 bytes, all asked for at once
        assert facts["shared"] <= 227 * 1024, name
