"""Plans of compiled calls: used when everything is as it was, and never otherwise."""

import importlib
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from atom.utils.compile_cache import compilation_counter as counter
from atom.utils.compiled_plan import Unplannable, parse_source
from atom.utils.decorators import support_torch_compile
from tests.helpers.tiny_model import make_tiny_model
from tests.helpers.toy_compiled import ToyLayer, ToyModel, build, inputs, toy_config
from tests.model_engine.test_graph_modes import run


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def start(folder: Path, level: int = 3, change=lambda model: None, **compilation) -> ToyModel:
    """A new instance that has compiled itself or found its code; ``counter`` tells which."""
    counter.reset()
    model = build(toy_config(level, str(folder), **compilation))
    change(model)
    model(*inputs(5))
    return model


def is_right(model: nn.Module) -> bool:
    calls = [(model(*inputs(n)), model.forward(*inputs(n))) for n in (5, 2, 1, 33, 5)]
    return all(a.shape == b.shape and torch.allclose(a, b, atol=1e-6) for a, b in calls)


@pytest.fixture(scope="module", params=[2, 3])
def cold(request, tmp_path_factory) -> tuple[int, Path]:
    folder = tmp_path_factory.mktemp("plans")
    with torch.no_grad():
        assert is_right(start(folder, request.param))
    assert (counter.num_graphs_seen, counter.num_plans_saved, counter.num_planned) == (1, 1, 0)
    return request.param, folder


@pytest.fixture
def cache(cold, tmp_path) -> tuple[int, Path]:
    """A copy that a test may spoil."""
    level, folder = cold
    shutil.copytree(folder, tmp_path / "cache")
    return level, tmp_path / "cache"


def plan_of(folder: Path) -> Path:
    (path,) = (folder / ".plans").iterdir()
    return path


def test_a_second_start_does_not_trace(cold):
    level, folder = cold
    model = start(folder, level)
    assert (counter.num_graphs_seen, counter.num_compiled, counter.num_planned) == (0, 0, 1)
    assert counter.num_loaded > 0
    assert is_right(model)
    assert plan_of(folder).stat().st_mode & 0o077 == 0


def test_weights_that_are_replaced_later_count(cold):
    level, folder = cold
    model = start(folder, level)
    layer = model.layers[0]
    layer.scale.data = layer.scale.data * 2
    assert is_right(model)
    layer.scale = nn.Parameter(layer.scale.data + 1)
    assert is_right(model)
    assert counter.num_planned == 1


@pytest.mark.parametrize("what", ["shape", "dtype", "name", "hook"])
def test_a_changed_module_is_traced(cache, what):
    def change(model: ToyModel) -> None:
        if what == "shape":
            model.embedding = nn.Parameter(torch.ones(20, 4))
        elif what == "dtype":
            model.layers[0].scale = nn.Parameter(model.layers[0].scale.double())
        elif what == "name":
            model.layers[0].layer_name = "another"
        else:
            model.layers[0].register_forward_hook(lambda module, args, output: output + 1)

    level, folder = cache
    model = start(folder, level, change)
    assert (counter.num_graphs_seen, counter.num_planned) == (1, 0)
    if what != "dtype":  # the toy op writes float only
        assert is_right(model)


def test_a_patched_class_is_traced(cache, monkeypatch):
    level, folder = cache
    monkeypatch.setattr(ToyLayer, "forward", lambda self, x: x * self.scale)
    model = start(folder, level)
    assert (counter.num_graphs_seen, counter.num_planned) == (1, 0)
    assert is_right(model)


@pytest.mark.parametrize("damage", ["truncated", "altered", "foreign", "writable", "no artifacts", "link"])
def test_a_plan_that_is_not_trusted_is_made_again(cache, damage, tmp_path):
    level, folder = cache
    path = plan_of(folder)
    text = path.read_text()
    if damage == "truncated":
        path.write_text(text[: len(text) // 2])
    elif damage == "altered":
        path.write_text(text.replace("embedding", "embeddinh"))
    elif damage == "foreign":
        path.write_text("[]")
    elif damage == "writable":
        path.chmod(0o666)
    elif damage == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        shutil.rmtree(next(folder.glob("*/rank_0/backbone/artifact_*")))
    assert is_right(start(folder, level))
    assert (counter.num_graphs_seen, counter.num_planned, counter.num_plans_saved) == (1, 0, 1)
    start(folder, level)
    assert (counter.num_graphs_seen, counter.num_planned) == (0, 1)


def test_another_configuration_or_a_dump_traces(cache, tmp_path):
    level, folder = cache
    start(folder, level, debug_dump_path=str(tmp_path / "dump"))
    assert (counter.num_graphs_seen, counter.num_planned) == (1, 0)
    assert list((tmp_path / "dump" / "rank_0").iterdir())
    start(folder, level, inductor_compile_config={"max_fusion_size": 8})
    assert (counter.num_graphs_seen, counter.num_planned) == (1, 0)


MODEL = """
import torch
from torch import nn
from atom.utils.decorators import support_torch_compile
from plan_constants import OFFSET

@support_torch_compile
class Edited(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + OFFSET
"""


@pytest.mark.parametrize("name", ["plan_model.py", "plan_constants.py"])
def test_an_edited_source_is_traced(tmp_path, monkeypatch, name):
    package = tmp_path / "edited"
    package.mkdir()
    (package / "plan_model.py").write_text(MODEL.replace("from plan", "from edited.plan"))
    (package / "plan_constants.py").write_text("OFFSET = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def call() -> torch.Tensor:
        for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] == "edited"]:
            del sys.modules[loaded]
        importlib.invalidate_caches()
        counter.reset()
        model = importlib.import_module("edited.plan_model").Edited(
            atom_config=toy_config(2, str(tmp_path / "cache"))
        )
        return model(torch.arange(4.0))

    expected = torch.arange(4.0) * 2 + 1
    assert torch.equal(call(), expected) and counter.num_plans_saved == 1
    assert torch.equal(call(), expected) and counter.num_planned == 1
    text = (package / name).read_text().replace("x * 2", "x * 3").replace("OFFSET = 1", "OFFSET = 10")
    (package / name).write_text(text)
    expected = torch.arange(4.0) * 3 + 1 if name == "plan_model.py" else torch.arange(4.0) * 2 + 10
    assert torch.equal(call(), expected)
    assert (counter.num_graphs_seen, counter.num_planned) == (1, 0)


class Unusual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("weight", torch.ones(3))
        self.num_calls = 0


class Named(Unusual):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"x": x + 1}


class Counts(Unusual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return x + 1


class Accumulates(Unusual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x.sum())
        return x + 1


class Random(Unusual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


class Passes(Unusual):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, self.weight


@pytest.mark.parametrize("cls", [Named, Counts, Accumulates, Random, Passes])
def test_what_no_plan_can_say_is_traced_by_each_start(cls, tmp_path):
    model_class = support_torch_compile(type(cls.__name__, (cls,), {"forward": cls.forward}))
    for _ in range(2):
        counter.reset()
        model = model_class(atom_config=toy_config(2, str(tmp_path)))
        result = model(torch.arange(4.0))
        assert (counter.num_graphs_seen, counter.num_plans_saved, counter.num_planned) == (1, 0, 0)
        assert model.total == (6 if cls is Accumulates else 0)
        assert model.num_calls == (1 if cls is Counts else 0)
        if cls is Named:
            assert torch.equal(result["x"], torch.arange(4.0) + 1)


def test_sources_of_inputs_are_read_and_never_run():
    assert parse_source("L['ids']") == ["arg", "ids"]
    assert parse_source("L['ids'].size()[0]") == ["size", "ids", 0]
    assert parse_source("L['self']._modules['0'].packed[1]") == [
        "held",
        [["attr", "_modules"], ["key", "0"], ["attr", "packed"], ["key", 1]],
    ]
    for name in ("L['self']", "L['a'].tensors['x']", "G['x']", "L['self'].f()", "L['self'].x[-1]"):
        with pytest.raises(Unplannable, match="neither an argument"):
            parse_source(name)


@pytest.mark.parametrize("mode", ["NONE", "FULL", "TR_HYBRID"])
def test_an_engine_that_starts_again_says_the_same(tmp_path_factory, mode):
    folder = tmp_path_factory.mktemp("engine")
    model = make_tiny_model(folder / "model", "llama")
    settings = {"level": 3, "cache_dir": str(folder / "cache")}
    counter.reset()
    first = run(model, mode, compilation=settings)
    assert (counter.num_graphs_seen, counter.num_plans_saved) == (1, 1)
    counter.reset()
    second = run(model, mode, compilation=settings)
    assert (counter.num_graphs_seen, counter.num_compiled, counter.num_planned) == (0, 0, 1)
    assert second.tokens == first.tokens
    plan = json.loads(json.loads(plan_of(folder / "cache").read_text())["plan"])
    assert any(step[:2] == ["op", "aiter.unified_attention_with_output"] for step in plan["steps"])
