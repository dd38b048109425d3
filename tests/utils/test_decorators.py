"""Models that compile themselves: levels, dispatch without guards, kinds of call, guards against silent errors."""

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from atom.config import Config, get_current_atom_config, get_current_rank, set_current_atom_config
from atom.model_ops.attention import Attention
from atom.utils.compile_cache import compilation_counter
from atom.utils.decorators import (
    MAX_CODES,
    TorchCompileWrapperWithCustomDispatcher,
    compile_as_is,
    infer_dynamic_arg_dims,
    set_model_tag,
    start_monitoring_torch_compile,
    support_torch_compile,
)
from tests.helpers.toy_compiled import STEP, ToyModel, build, inputs, toy_config

ROOT = Path(__file__).parents[2]
SIZES = (7, 1, 2, 3, 8, 64)


@pytest.fixture(autouse=True)
def no_gradients():
    torch.set_grad_enabled(False)
    compilation_counter.reset()
    yield
    torch.set_grad_enabled(True)


@pytest.fixture
def config(tmp_path):
    """Level 3 with the pieces left as they are: everything but Inductor."""
    return toy_config(3, str(tmp_path), use_inductor=False)


def make(cls, config, *args):
    with set_current_atom_config(config):
        return cls(*args)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_every_level_gives_the_same_for_every_number_of_tokens(tmp_path, level):
    expected = build(None)
    model = build(toy_config(level, str(tmp_path), use_inductor=False))
    called = compile_as_is(model.forward) if level == 1 else model
    for n in SIZES:
        assert torch.equal(called(*inputs(n)), expected(*inputs(n))), n
    assert model.do_not_compile == (level < 2)
    assert compilation_counter.num_pieces == {0: 0, 1: 0, 2: 1, 3: 3}[level]


def test_inference_mode_and_keyword_arguments(config):
    model = build(config)
    with torch.inference_mode():
        for n in SIZES:
            input_ids, positions = inputs(n)
            result = model(positions=positions, input_ids=input_ids)
            assert torch.equal(result, model.forward(input_ids, positions))
    assert compilation_counter.num_graphs_seen == 1


def test_split_ops_read_the_live_step(config, monkeypatch):
    model = build(config)
    model(*inputs(5))
    before = model(*inputs(5))
    monkeypatch.setitem(STEP, "factor", 0.25)
    assert not torch.equal(before, model(*inputs(5)))
    assert torch.equal(model(*inputs(5)), model.forward(*inputs(5)))


def test_enforce_eager_and_no_configuration_mean_no_compilation():
    assert build(None).do_not_compile
    assert build(toy_config(3).replace(enforce_eager=True)).do_not_compile
    assert get_current_atom_config() is None


def test_the_configuration_may_be_an_argument(config):
    assert not ToyModel(1, atom_config=config).do_not_compile
    assert not ToyModel(1, vllm_config=config).do_not_compile
    with set_current_atom_config(toy_config(0), rank=3):
        assert get_current_rank() == 3
        assert not ToyModel(1, atom_config=config).do_not_compile
        with set_current_atom_config(config):
            assert get_current_atom_config() is config and get_current_rank() == 0
        assert ToyModel(1).do_not_compile


def test_level_0_never_imports_dynamo_and_later_levels_only_when_called():
    code = (
        "import sys\n"
        "from tests.helpers.toy_compiled import build, inputs, toy_config\n"
        "build(toy_config(0))(*inputs(4)); build(toy_config(3))\n"
        "sys.exit(', '.join(m for m in ('torch._dynamo', 'torch._inductor', 'sympy') if m in sys.modules) or 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_instances_of_a_class_have_their_own_code(config):
    first, second = build(config, 1), build(config, 1)
    for model in (first, second, first):
        model(*inputs(3))
        assert torch.equal(model(*inputs(5)), model.forward(*inputs(5)))
    assert len(first.compiled_codes) == len(second.compiled_codes) == 1
    assert compilation_counter.num_graphs_seen == 2
    assert first.dispatch_to_code(0)(*inputs(2)).shape == (2, 4)


def test_first_calls_too_small_to_compile_run_eagerly(config):
    model = build(config)
    assert torch.equal(model(*inputs(1)), model.forward(*inputs(1)))
    assert model.compiled_codes == []
    model(*inputs(2))
    assert len(model.compiled_codes) == 1


@support_torch_compile
class Optional(nn.Module):
    def forward(
        self, input_ids: torch.Tensor, embeddings: torch.Tensor | None = None, factor: int = 1
    ) -> torch.Tensor:
        x = input_ids.float() if embeddings is None else embeddings
        return x * factor


def test_each_kind_of_call_has_its_own_code(config):
    model = make(Optional, config)
    ids, x = torch.arange(4), torch.ones(4)
    for _ in range(2):
        assert torch.equal(model(ids), ids.float())
        assert torch.equal(model(ids, x), x)
        assert torch.equal(model(ids, embeddings=x * 2), x * 2)
        assert torch.equal(model(ids.int(), None, 3), ids * 3.0)
    assert len(model.compiled_codes) == 4


def test_a_number_that_varies_is_an_error_and_not_a_compilation_for_each(config):
    model = make(Optional, config)
    for factor in range(MAX_CODES):
        model(torch.arange(4), None, factor)
    with pytest.raises(RuntimeError, match="Optional.forward was compiled for 8 kinds of call"):
        model(torch.arange(4), None, MAX_CODES)


@support_torch_compile
class Assigning(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total = self.total + x.sum(0)
        return x + self.total


def test_assigning_to_a_buffer_is_refused_where_graphs_are_recorded(tmp_path):
    recording = toy_config(3, str(tmp_path), use_inductor=False, use_cudagraph=True)
    with pytest.raises(Exception, match="Assigning.forward assigns to a buffer"):
        make(Assigning, recording)(torch.ones(2, 3))
    model = make(Assigning, toy_config(3, str(tmp_path), use_inductor=False))
    for expected in (3.0, 5.0, 7.0):
        assert torch.equal(model(torch.ones(2, 3)), torch.full((2, 3), expected))


@support_torch_compile
class Copying(Assigning):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = dict(one=x)
        table.update(two=x * 2)  # the name alone is no offence
        self.total.copy_(x.sum(0))
        return table["two"] + self.total


def test_writing_into_a_buffer_is_allowed(tmp_path):
    model = make(Copying, toy_config(3, str(tmp_path), use_inductor=False, use_cudagraph=True))
    for n in (2, 4):
        assert torch.equal(model(torch.ones(n, 3)), torch.full((n, 3), 2.0 + n))
    assert Copying.__mro__.count(TorchCompileWrapperWithCustomDispatcher) == 1


def test_a_compiled_model_inside_a_larger_graph_is_traced_as_part_of_it(config):
    model = build(config, 1)
    outer = torch.compile(lambda ids, positions: model(ids, positions) + 1, backend="eager", fullgraph=True)
    assert torch.equal(outer(*inputs(3)), model.forward(*inputs(3)) + 1)
    assert model.compiled_codes == []


def test_a_model_is_freed_when_it_is_dropped(config):
    model = build(config, 1)
    model(*inputs(3))
    model(*inputs(3))
    gc.collect()
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_dynamic_dimensions_come_from_annotations_or_by_name():
    def forward(self, a: torch.Tensor, b: "torch.Tensor | None", c: "Optional[torch.Tensor]", d: int):
        raise NotImplementedError

    assert infer_dynamic_arg_dims(forward) == {"a": 0, "b": 0, "c": 0}
    with pytest.raises(ValueError, match="no argument is annotated"):
        support_torch_compile(type("Plain", (nn.Module,), {"forward": lambda self, x: x}))
    with pytest.raises(ValueError, match="no argument 'z'"):
        support_torch_compile(dynamic_arg_dims={"z": 0})(type("Other", (nn.Module,), {"forward": forward}))


def test_a_named_dimension_is_the_one_that_varies(config):
    @support_torch_compile(dynamic_arg_dims={"x": -1})
    class Columns(nn.Module):
        def forward(self, x):
            return x.relu() * 2

    model = make(Columns, config)
    for n in (3, 5, 1):
        assert torch.equal(model(torch.ones(2, n)), torch.full((2, n), 2.0))
    assert len(model.compiled_codes) == 1


def test_tags_name_the_folder(config, tmp_path):
    with set_model_tag("drafter"):
        drafter = build(config, 1)
        with pytest.raises(AssertionError, match="drafter"):
            with set_model_tag("drafter"):
                pass
    for model in (build(config, 1), drafter, build(config, 1)):
        model(*inputs(2))
    assert sorted(path.name for path in tmp_path.glob("*/rank_0/*")) == ["backbone", "backbone_1", "drafter"]


def test_debug_dump_shows_graphs_pieces_and_bytecode(tmp_path):
    dump = tmp_path / "dump"
    build(toy_config(3, str(tmp_path / "cache"), use_inductor=False, debug_dump_path=str(dump)))(*inputs(3))
    files = {path.name: path.read_text() for path in (dump / "rank_0").iterdir()}
    assert {f"backbone_{name}.py" for name in ("graph", "split_graph", "piece_0", "piece_2")} <= set(files)
    assert "toy_attention" in files["backbone_graph.py"] and "submod_4" in files["backbone_split_graph.py"]
    assert "toy_attention" not in files["backbone_piece_1.py"]
    assert "__compiled_fn" in files["backbone_forward_bytecode.txt"]


def test_time_spent_is_added_up(config):
    with start_monitoring_torch_compile(config):
        pass
    first = config.compilation_config.compilation_time
    build(config, 1)(*inputs(3))
    assert config.compilation_config.compilation_time > first >= 0


def test_layers_are_found_by_name_and_names_are_unique():
    state = Config("m").compilation_config.state
    state.add_layer("layers.0", 1)
    assert Config("m").compilation_config.static_forward_context == {}
    with pytest.raises(ValueError, match="'layers.0' is taken"):
        state.add_layer("layers.0", 2)


def test_attention_layers_of_an_engines_model_are_found_by_name():
    config = Config("m")
    with set_current_atom_config(config):
        layer = Attention(2, 16, 0.25, 1, "layers.0.attn")
        with pytest.raises(ValueError, match="'layers.0.attn' is taken"):
            Attention(2, 16, 0.25, 1, "layers.0.attn")
    assert config.compilation_config.static_forward_context == {"layers.0.attn": layer}
    Attention(2, 16, 0.25, 1, "layers.0.attn")  # of no engine
