"""Compiled models say what eager ones say: every family, levels and graph modes together, on the CPU."""

import re

import pytest

from atom.errors import ConfigError
from atom.model_engine import model_runner
from atom.platforms.cpu import CpuPlatform
from atom.utils.compile_cache import compilation_counter
from tests.helpers.gated_layers import give_cpu_gated_layers
from tests.helpers.tiny_model import FAMILIES
from tests.model_engine.test_graph_modes import folders, run  # noqa: F401


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("level", [1, 2, 3])
def test_greedy_text_does_not_depend_on_the_level(folders, family, level, tmp_path):  # noqa: F811
    eager = run(folders[family], "NONE").tokens
    # Without Inductor: what is cut, stitched and dispatched is the same, and takes a tenth of the time.
    compilation = {"level": level, "use_inductor": False, "cache_dir": str(tmp_path)}
    for mode in ("NONE", "FULL", "TR_HYBRID"):
        recorded = run(folders[family], mode, compilation=compilation)
        assert recorded.tokens == eager, mode


@pytest.mark.parametrize(("level", "family"), [(2, "gemma3"), (3, "gemma3"), (3, "llama")])
def test_inductors_code_says_the_same_and_is_kept(folders, level, family, tmp_path):  # noqa: F811
    eager = run(folders[family], "NONE").tokens
    compilation = {"level": level, "cache_dir": str(tmp_path)}
    assert run(folders[family], "NONE", compilation=compilation).tokens == eager
    compiled = compilation_counter.num_compiled
    for mode in ("FULL", "FULL_DECODE_ONLY"):
        assert run(folders[family], mode, compilation=compilation).tokens == eager
    assert compilation_counter.num_compiled == compiled
    if family == "llama":
        assert_sums_are_not_copied(tmp_path)


def assert_sums_are_not_copied(cache_dir):
    """Each piece's products add to the tensor that the piece was given."""
    num_sums = 0
    for path in cache_dir.rglob("*.py"):
        totals = re.findall(r"aiter\.add_product\.default\((\w+),", path.read_text())
        assert all(re.fullmatch(r"arg\d+_1", total) for total in totals) and len(set(totals)) <= 1, path
        num_sums += len(totals)
    assert num_sums >= 4


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_gated_products_run_at_every_level(folders, level, tmp_path, monkeypatch):  # noqa: F811
    eager = run(folders["qwen3"], "NONE").tokens
    seen = give_cpu_gated_layers(monkeypatch)
    compilation = {"level": level, "use_inductor": False, "cache_dir": str(tmp_path)}
    for mode in ("NONE", "FULL"):
        seen.clear()
        assert run(folders["qwen3"], mode, compilation=compilation).tokens == eager, mode
        assert len(set(seen)) > 2, mode  # decode steps too, and a prefill's


def test_a_level_that_a_model_does_not_support_is_refused(folders, monkeypatch):  # noqa: F811
    monkeypatch.setattr(model_runner, "can_compile", lambda model: False)
    with pytest.raises(ConfigError, match="level 3 needs a model that is marked @support_torch_compile"):
        run(folders["llama"], "NONE", compilation={"level": 3})


def test_a_mode_that_a_model_does_not_support_is_refused(folders, monkeypatch):  # noqa: F811
    monkeypatch.setattr(model_runner, "token_graphs", lambda model: [])
    with pytest.raises(ConfigError, match="TR_HYBRID needs a model with a part that is marked @token_graph"):
        run(folders["llama"], "TR_HYBRID")
    assert run(folders["llama"], "FULL").tokens


def test_a_mode_that_nobody_asked_for_is_left_out_instead(folders, monkeypatch):  # noqa: F811
    monkeypatch.setattr(model_runner, "token_graphs", lambda model: [])
    monkeypatch.setattr(CpuPlatform, "cudagraph_mode", "TR_HYBRID")
    driver = run(folders["llama"], None)
    assert driver.core.worker._recorder is None
    assert driver.tokens == run(folders["llama"], "NONE").tokens
