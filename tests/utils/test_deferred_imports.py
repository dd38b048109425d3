"""Deferred modules are executed at the first look into them, once, and by whoever needs all of them."""

import importlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from atom.config import Config
from atom.config_parts import CompilationConfig
from atom.model_engine import engine_process
from atom.utils.deferred_imports import DeferredModule, deferred_modules, deferring, execute_all
from atom.utils.gc_utils import release_library_code
from atom.utils.torch_imports import lean_torch
from tests.helpers.tiny_model import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = {
    "__init__.py": "from shop import part, stock as stock\nimport shop.shelf.row\n",
    "part.py": "import shop\nshop.log.append('part')\nVALUE = 3\n__all__ = ['VALUE']\n",
    "stock.py": "import shop\nshop.log.append('stock')\nraise ValueError('no stock')\n",
    "shelf/__init__.py": "import shop\nshop.log.append('shelf')\nWIDTH = 80\n",
    "shelf/row.py": "DEPTH = 30\n",
    "compiler.py": "import shop\nseen = list(shop.log)\n",
}


@pytest.fixture
def shop(tmp_path, monkeypatch):
    for name, text in PACKAGE.items():
        path = tmp_path / "shop" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("log = []\n" + text if name == "__init__.py" else text)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path)
    with deferring(["shop.part", "shop.stock", "shop.shelf"], needed_by=["shop.compiler"]):
        yield importlib.import_module("shop")
    sys.meta_path[:] = before
    for name in [name for name in sys.modules if name.split(".")[0] == "shop"]:
        del sys.modules[name]


def test_a_module_is_executed_once_at_the_first_look(shop):
    assert shop.log == [] and type(shop.part) is DeferredModule
    assert shop.part.VALUE == 3 and shop.part.VALUE == 3
    assert shop.log == ["part"] and type(shop.part) is not DeferredModule


def test_what_is_asked_of_every_module_is_no_look(shop):
    assert shop.part.__name__ == "shop.part" and shop.part.__file__.endswith("part.py")
    assert not hasattr(shop.part, "__warningregistry__") and not hasattr(shop.part, "__path__")
    assert shop.log == []


def test_a_submodule_does_not_execute_its_package(shop):
    assert shop.shelf.row.DEPTH == 30 and shop.log == []
    assert shop.shelf.WIDTH == 80 and shop.log == ["shelf"]


def test_names_can_be_imported_from_a_deferred_module(shop):
    names: dict = {}
    exec("from shop.part import *", names)
    assert names["VALUE"] == 3


def test_an_error_is_raised_at_each_look(shop):
    for _ in range(2):
        with pytest.raises(ValueError, match="no stock"):
            shop.stock.anything  # noqa: B018
    assert shop.log == ["stock", "stock"]


def test_whoever_needs_all_finds_all_executed(shop):
    shop.stock.__dict__["anything"] = 1
    sys.modules.pop("shop.stock")  # it cannot be executed
    importlib.import_module("shop.compiler")
    assert sorted(sys.modules["shop.compiler"].seen) == ["part", "shelf"]


def test_threads_that_look_at_once_see_a_whole_module(shop):
    barrier, seen = threading.Barrier(8), []

    def look():
        barrier.wait()
        seen.append(shop.part.VALUE)

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [3] * 8 and shop.log == ["part"]


def test_a_module_without_names_to_defer_is_left_alone(shop):
    sys.modules.pop("shop.stock")
    execute_all()
    assert not [module for module in deferred_modules() if module.__name__.startswith("shop")]


SERVE = """
import sys
from atom.utils.deferred_imports import deferred_modules
from atom.utils.torch_imports import UNUSED_PARTS, lean_torch
with lean_torch(is_on=True):
    import atom.model_engine.model_runner
import torch
from atom import LLMEngine, SamplingParams
with LLMEngine(sys.argv[1], device="cpu", in_process=True, kv_cache_memory=1 << 24, max_model_len=64) as engine:
    answers = engine.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert answers[0]["num_tokens_output"] >= 1
left = {module.__name__ for module in deferred_modules()}
assert left == set(UNUSED_PARTS), set(UNUSED_PARTS) - left
for name in ("torch._decomp.decompositions", "torch._dynamo", "torch._export", "torch._inductor", "torch.onnx",
             "torch.distributions.normal", "torch.optim.adam", "torch.ao.quantization", "sympy", "transformers"):
    assert name not in sys.modules, name
assert torch.distributions.Normal(0.0, 1.0).sample().shape == ()
assert torch.optim.SGD and torch.export.export and torch.ao.quantization.QuantStub
assert torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(3)).tolist() == [1, 1, 1]
assert not list(deferred_modules())
"""


def test_an_engine_on_the_cpu_computes_without_the_unused_parts_of_torch(tmp_path):
    """They are deferred beyond the first token, and work when somebody does look."""
    model = make_tiny_model(tmp_path)
    run = subprocess.run([sys.executable, "-c", SERVE, str(model)], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("fields", "nodes", "expected"),
    [
        ({"device": "cpu"}, ["nvidia0"], True),
        ({"device": "auto"}, [], True),
        ({"device": "auto"}, ["kfd"], False),
        ({"device": "cuda"}, [], False),
        ({"device": "cpu", "compilation_config": CompilationConfig(level=3)}, [], False),
        (
            {"device": "cpu", "compilation_config": CompilationConfig(level=3), "enforce_eager": True},
            [],
            True,
        ),
    ],
)
def test_parts_are_deferred_where_a_model_surely_runs_uncompiled_on_the_cpu(
    fields, nodes, expected, monkeypatch
):
    monkeypatch.setattr(engine_process, "has_accelerator_node", lambda: bool(nodes))
    assert engine_process._serves_on_cpu(Config.build("demo", **fields)) is expected


def test_nothing_is_deferred_when_it_is_turned_off(monkeypatch):
    monkeypatch.setenv("ATOM_DEFER_IMPORTS", "0")
    before = list(sys.meta_path)
    with lean_torch(is_on=True):
        assert sys.meta_path == before


def test_code_of_libraries_is_let_go_and_comes_back():
    folder = str(Path(torch.__file__).parent)
    assert release_library_code(folder) > 1 << 20
    assert (torch.ones(8, 8) @ torch.ones(8, 8)).sum() == 512
    assert release_library_code("/no/such/folder") == 0
