"""Splitting a graph, compiling its pieces, and the code for chosen numbers of tokens."""

import ast
import operator
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import fx

from atom.config import CompilationConfig
from atom.errors import ConfigError
from atom.utils import backends
from atom.utils.backends import CompilerManager, VllmBackend, split_graph
from atom.utils.compile_cache import ArtifactFolder, StaleArtifact, cache_hash, compilation_counter
from atom.utils.compiler_interface import (
    AlwaysHitShapeEnv,
    CompilerInterface,
    EagerAdaptor,
    InductorAdaptor,
    InductorStandaloneAdaptor,
    graph_fingerprint,
)
from atom.utils.cuda_piecewise_backend import ConcreteSizeEntry, PiecewiseBackend
from tests.helpers import toy_compiled
from tests.helpers.toy_compiled import build, inputs, toy_config


class TextCompiler(CompilerInterface):
    """Runs graphs as they are and keeps a text for each, through the same folder as Inductor's artifacts."""

    name = "text"

    def __init__(self):
        self.compiled: list[tuple[str, int | None]] = []

    def initialize_cache(self, cache_dir, disable_cache=False, prefix=""):
        self.folder = ArtifactFolder(Path(cache_dir))

    def compile(self, graph, example_inputs, compiler_config, runtime_shape=None, key=None):
        compilation_counter.num_compiled += 1
        self.compiled.append((key, runtime_shape))
        source = graph_fingerprint(graph, example_inputs)
        path = self.folder.publish(
            key, source, lambda aside: (aside / "code.txt").write_text(graph.code * 20)
        )
        return graph.forward, (key, str(path))

    def load(self, handle, graph, example_inputs, graph_index, runtime_shape=None):
        self.folder.find(handle[0], graph_fingerprint(graph, example_inputs))
        compilation_counter.num_loaded += 1
        return graph.forward


@pytest.fixture(autouse=True)
def fresh_counter(monkeypatch):
    torch.set_grad_enabled(False)
    compilation_counter.reset()
    yield
    torch.set_grad_enabled(True)


@pytest.fixture
def text_compiler(monkeypatch):
    made = []

    def make(config):
        made.append(TextCompiler())
        return made[-1]

    monkeypatch.setattr(backends, "make_compiler", make)
    return made


def toy_graph() -> fx.GraphModule:
    """x -> relu -> split op into ``out`` -> add -> split op into ``out`` -> mul."""
    graph = fx.Graph()
    x, out = graph.placeholder("x"), graph.placeholder("out")
    y = graph.call_function(torch.relu, (x,))
    graph.call_function(torch.ops.aiter.toy_attention, (y, out, "a"))
    z = graph.call_function(torch.add, (out, 1))
    graph.call_function(torch.ops.aiter.toy_attention, (z, out, "b"))
    graph.output((graph.call_function(torch.mul, (out, 2)),))
    return fx.GraphModule({}, graph)


def test_split_graph_keeps_the_order():
    graph = toy_graph()
    stitched, items = split_graph(graph)
    assert [item.is_splitting_graph for item in items] == [False, True, False, True, False]
    assert [item.graph_id for item in items] == sorted(item.graph_id for item in items)
    called = [node.target for node in stitched.graph.nodes if node.op == "call_module"]
    assert called == [item.submod_name for item in items]
    targets = [
        [node.target for node in item.graph.graph.nodes if node.op == "call_function"] for item in items
    ]
    split = torch.ops.aiter.toy_attention
    assert targets == [[torch.relu], [split], [torch.add], [split], [torch.mul]]
    x = torch.randn(5, 3)
    (expected,) = graph(x, torch.empty(5, 3))
    assert torch.equal(stitched(x, torch.empty(5, 3))[0], expected)


def test_split_graph_follows_configured_names_and_can_leave_the_graph_whole():
    graph = toy_graph()
    for node in graph.graph.nodes:
        if node.target is torch.ops.aiter.toy_attention:
            node.target = torch.ops.aiter.toy_attention.default
    assert len(split_graph(graph, ["aten.relu"])[1]) == 5
    _, items = split_graph(graph, None)
    assert [item.is_splitting_graph for item in items] == [False]


def test_what_is_taken_from_a_split_op_stays_with_it():
    graph = fx.Graph()
    x = graph.placeholder("x")
    pair = graph.call_function(torch.ops.aten.max.dim, (x, 0))
    values = graph.call_function(operator.getitem, (pair, 0))
    graph.output(graph.call_function(torch.neg, (values,)))
    module = fx.GraphModule({}, graph)
    stitched, items = split_graph(module, ["aten.max"])
    assert [item.is_splitting_graph for item in items] == [True, False]
    assert torch.equal(stitched(torch.eye(3)), -torch.ones(3))


def test_pieces_of_a_model_are_compiled_once_and_alike_ones_shared(tmp_path, text_compiler):
    model = build(toy_config(3, str(tmp_path)), num_layers=4)
    for n in (3, 2, 1, 17):
        assert torch.equal(model(*inputs(n)), model.forward(*inputs(n)))
    assert compilation_counter.num_graphs_seen == 1
    assert compilation_counter.num_pieces == 5
    assert compilation_counter.num_compiled == 3 == len(text_compiler[0].compiled)
    assert compilation_counter.num_shared == 2


def test_the_index_is_a_literal_that_maps_pieces_to_handles(tmp_path, text_compiler):
    build(toy_config(3, str(tmp_path)), num_layers=3)(*inputs(3))
    (path,) = tmp_path.glob("*/rank_0/backbone/vllm_compile_cache.py")
    index = ast.literal_eval(path.read_text())
    assert sorted(index) == [(None, i, "text") for i in range(4)]
    assert index[None, 2, "text"] == index[None, 1, "text"]
    assert (path.parent / "computation_graph.py").read_text().count("toy_attention") >= 3
    assert len(path.parents[2].name) == 10 and int(path.parents[2].name, 16) >= 0


def test_a_second_engine_compiles_nothing(tmp_path, text_compiler):
    for _ in range(2):
        compilation_counter.reset()
        model = build(toy_config(3, str(tmp_path)))
        assert torch.equal(model(*inputs(4)), model.forward(*inputs(4)))
    assert (compilation_counter.num_compiled, compilation_counter.num_loaded) == (0, 3)


def damage_nothing(folder):
    return 0


def truncate(folder):
    path = folder / "artifact_shape_None_subgraph_0" / "code.txt"
    path.write_text(path.read_text()[:10])
    return 1


def add_foreign_file(folder):
    (folder / "artifact_shape_None_subgraph_1" / "extra").write_text("x")
    return 1


def replace_by_another(folder):
    (folder / "artifact_shape_None_subgraph_1").rename(folder / "old")
    (folder / "artifact_shape_None_subgraph_0").rename(folder / "artifact_shape_None_subgraph_1")
    (folder / "old").rename(folder / "artifact_shape_None_subgraph_0")
    return 2


def empty_manifest(folder):
    (folder / "artifact_shape_None_subgraph_2" / "manifest.json").write_text("")
    return 1


def link_artifact(folder):
    path = folder / "artifact_shape_None_subgraph_2"
    path.rename(folder.parent / "elsewhere")
    path.symlink_to(folder.parent / "elsewhere")
    return 1


def open_artifact_to_all(folder):
    os.chmod(folder / "artifact_shape_None_subgraph_2", 0o777)
    return 1


def cut_index(folder):
    path = folder / "vllm_compile_cache.py"
    path.write_text(path.read_text()[:30])
    return 3


def put_code_into_index(folder):
    (folder / "vllm_compile_cache.py").write_text("__import__('os').abort()")
    return 3


def point_index_elsewhere(folder):
    (folder / "vllm_compile_cache.py").write_text("{(None, 0, 'text'): ('../x', '/tmp/x')}")
    return 3


@pytest.mark.parametrize(
    "damage",
    [
        damage_nothing,
        truncate,
        add_foreign_file,
        replace_by_another,
        empty_manifest,
        link_artifact,
        open_artifact_to_all,
        cut_index,
        put_code_into_index,
        point_index_elsewhere,
    ],
)
def test_what_is_not_as_it_was_written_is_built_again(tmp_path, text_compiler, damage):
    config = toy_config(3, str(tmp_path))
    build(config)(*inputs(4))
    num_rebuilt = damage(Path(config.compilation_config.local_cache_dir))
    for expected in (num_rebuilt, 0):  # and what was built again is good
        compilation_counter.reset()
        model = build(toy_config(3, str(tmp_path)))
        assert torch.equal(model(*inputs(4)), model.forward(*inputs(4)))
        assert (compilation_counter.num_compiled, compilation_counter.num_loaded) == (expected, 3 - expected)


def test_a_changed_model_with_the_same_configuration_is_not_served_the_old_code(
    tmp_path, text_compiler, caplog
):
    build(toy_config(3, str(tmp_path)))(*inputs(4))
    compilation_counter.reset()
    model = build(toy_config(3, str(tmp_path)))
    for layer in model.layers:
        layer.scale = torch.nn.Parameter(torch.ones(1, toy_compiled.WIDTH))
    assert torch.equal(model(*inputs(4)), model.forward(*inputs(4)))
    assert compilation_counter.num_rejected == 2 == compilation_counter.num_compiled
    assert "made from another graph" in caplog.text


def test_a_cache_that_others_can_write_is_refused_when_asked_for(
    tmp_path, text_compiler, monkeypatch, caplog
):
    os.chmod(tmp_path, 0o777)
    with pytest.raises(ConfigError, match="can be written by others"):
        build(toy_config(3, str(tmp_path)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(backends, "make_compiler", lambda config: EagerAdaptor())
    os.makedirs(tmp_path / "atom" / "torch_compile_cache")
    os.chmod(tmp_path / "atom" / "torch_compile_cache", 0o777)
    model = build(toy_config(3))
    assert torch.equal(model(*inputs(4)), model.forward(*inputs(4)))
    assert "Compiling without a cache" in caplog.text


def test_the_hash_follows_sources_quantisation_and_compiler(tmp_path):
    source = tmp_path / "model.py"
    source.write_text("x = 1\n")
    config = toy_config(3)
    before = cache_hash(config.compute_hash(), [str(source)], "a")
    assert before == cache_hash(toy_config(3).compute_hash(), [str(source)], "a")
    assert len(before) == 10
    assert before != cache_hash(config.compute_hash(), [str(source)], "b")
    quantised = config.replace(quant_config={"quant_method": "fp8"})
    online = config.replace(online_quant_config={"global_quant_config": "mxfp4"})
    hashes = {cache_hash(c.compute_hash(), [str(source)], "a") for c in (config, quantised, online)}
    assert len(hashes) == 3
    source.write_text("x = 2\n")
    assert before != cache_hash(config.compute_hash(), [str(source)], "a")


def test_what_was_traced_is_part_of_the_hash(tmp_path, text_compiler):
    config = toy_config(3, str(tmp_path))
    build(config)(*inputs(4))
    assert toy_compiled.__file__ in config.compilation_config.traced_files
    assert config.compilation_config.compilation_time > 0


def test_compile_sizes_are_compiled_once_when_first_met(tmp_path, text_compiler):
    sizes = ["cudagraph_capture_sizes", 6]
    for round_number in range(2):
        config = toy_config(
            3, str(tmp_path), compile_sizes=sizes, use_cudagraph=True, cudagraph_capture_sizes=[2, 4]
        )
        model = build(config, num_layers=1)
        model(*inputs(4))  # the first call is general
        assert {shape for _, shape in text_compiler[-1].compiled} <= {None}
        compilation_counter.reset()
        for n in (4, 4, 3, 6, 4, 6):
            assert torch.equal(model(*inputs(n)), model.forward(*inputs(n)))
        expected = (4, 0) if round_number == 0 else (0, 4)  # two pieces, two sizes
        assert (compilation_counter.num_compiled, compilation_counter.num_loaded) == expected
    (folder,) = tmp_path.glob("*/rank_0/backbone")
    assert (folder / "artifact_shape_4_subgraph_1").is_dir()
    assert not (folder / "artifact_shape_2_subgraph_1").exists()


def test_a_cache_cleared_while_in_use_is_begun_again(tmp_path, text_compiler):
    model = build(toy_config(3, str(tmp_path), compile_sizes=[4]), num_layers=1)
    model(*inputs(5))
    (entry,) = tmp_path.iterdir()
    shutil.rmtree(entry)
    assert torch.equal(model(*inputs(4)), model.forward(*inputs(4)))
    assert sorted(path.name for path in tmp_path.glob("*/rank_0/backbone/art*")) == [
        f"artifact_shape_4_subgraph_{i}" for i in range(2)
    ]


def test_piecewise_backend_dispatches_by_the_number_of_tokens():
    asked = []

    def compile_for_size(args, size):
        asked.append(size)
        return lambda *args: f"exactly {size}"

    piece = PiecewiseBackend(None, lambda *args: "general", [1], [4, 8], compile_for_size)
    assert piece.to_be_compiled_sizes == {4, 8}
    assert [piece("x", n) for n in (4, 4, 5, 4)] == ["general", "exactly 4", "general", "exactly 4"]
    assert asked == [4] and piece.to_be_compiled_sizes == {8}
    assert piece.concrete_size_entries[8] == ConcreteSizeEntry(8)
    assert not PiecewiseBackend(None, print, [], [4], compile_for_size).concrete_size_entries


def test_a_backend_is_called_once():
    backend = VllmBackend(toy_config(3, use_inductor=False))
    backend._is_called = True
    with pytest.raises(AssertionError, match="one graph"):
        backend(toy_graph(), [])


def test_inputs_are_copied_to_fixed_addresses(tmp_path, text_compiler):
    config = toy_config(
        3, str(tmp_path), cudagraph_copy_inputs=True, use_cudagraph=True, cudagraph_capture_sizes=[2, 4]
    )
    model = build(config, num_layers=1)
    addresses = []
    op = torch.relu
    for n in (6, 3, 2, 9):
        assert torch.equal(model(*inputs(n)), model.forward(*inputs(n)))
    copied = backends.CopiedInputs(lambda *args: addresses.append(args[0].data_ptr()) or op(args[0]), [0])
    for n in (6, 3):
        assert torch.equal(copied(torch.ones(n, 2)), torch.ones(n, 2))
    assert addresses[0] == addresses[1]


def test_adaptors():
    assert isinstance(backends.make_compiler(CompilationConfig(use_inductor=False)), EagerAdaptor)
    assert isinstance(backends.make_compiler(CompilationConfig()), InductorStandaloneAdaptor)
    with pytest.raises(RuntimeError, match="InductorStandaloneAdaptor"):
        InductorAdaptor()
    with pytest.raises(StaleArtifact):
        EagerAdaptor().load(None, None, [], 0)
    shapes = AlwaysHitShapeEnv()
    assert shapes.evaluate_guards_expression("False", []) is True
    assert shapes.get_pruned_guards([]) == [] and shapes.produce_guards_expression([]) == ""


def test_the_alias_module_has_the_same_classes():
    from atom.utils import compiler_inferface, compiler_interface

    for name in compiler_interface.__all__:
        assert getattr(compiler_inferface, name) is getattr(compiler_interface, name)


def test_fingerprints_tell_graphs_apart_and_ignore_names():
    def traced(function):
        return fx.symbolic_trace(function)

    x = torch.ones(2, 2)
    base = graph_fingerprint(traced(lambda a, b: a * 2 + b), [x, x.clone()])
    assert base == graph_fingerprint(traced(lambda first, second: first * 2 + second), [x, x.clone()])
    assert base != graph_fingerprint(traced(lambda a, b: a * 3 + b), [x, x.clone()])
    assert base != graph_fingerprint(traced(lambda a, b: b * 2 + a), [x, x.clone()])
    assert base != graph_fingerprint(traced(lambda a, b: a * 2 + b), [x, x.clone().double()])
    assert base != graph_fingerprint(traced(lambda a, b: a * 2 + b), [x, x.clone().t()[:1].t()])
    assert base != graph_fingerprint(traced(lambda a, b: a * 2 + b), [x, x])  # the same memory twice


def test_a_manager_without_a_cache_compiles_every_time():
    graph = toy_graph()
    for _ in range(2):
        manager = CompilerManager(CompilationConfig(use_inductor=False))
        manager.initialize_cache("", disable_cache=True)
        code = manager.compile(graph, [torch.ones(2), torch.ones(2)])
        assert torch.equal(code(torch.ones(2), torch.ones(2))[0], torch.tensor([4.0, 10.0]))
    assert compilation_counter.num_compiled == 2


def test_compile_sizes_must_be_positive():
    with pytest.raises(ConfigError, match="compile_sizes .* at least 1, got \\[0\\]"):
        CompilationConfig(compile_sizes=[0])
