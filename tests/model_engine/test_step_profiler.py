"""The runner's profiler in a running engine: what a trace of real steps shows."""

import gzip
import json
import logging

import pytest
import torch
from torch import nn

from atom.config import Config
from atom.errors import ConfigError
from atom.model_engine.messages import Utility
from atom.model_engine.runner.step_profiler import StepProfiler
from atom.platforms import get_platform
from atom.sampling_params import SamplingParams
from tests.helpers.core_driver import CoreDriver
from tests.helpers.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "llama")


def event_names(path) -> list[str]:
    with gzip.open(path, "rt") as file:
        return [str(event.get("name")) for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def make_profiler(**fields) -> StepProfiler:
    return StepProfiler(Config.build("m", **fields), get_platform("cpu"))


@pytest.mark.parametrize("loop", ["plain", "overlapped"])
@pytest.mark.parametrize("mark_trace", [False, True])
def test_a_trace_names_every_step_and_with_mark_trace_the_modules(folder, tmp_path, loop, mark_trace):
    config = Config.build(
        str(folder), device="cpu", dtype="float32", loop=loop, max_num_batched_tokens=64,
        kv_cache_memory=2**22, torch_profiler_dir=str(tmp_path), mark_trace=mark_trace,
    )  # fmt: skip
    driver = CoreDriver(config)
    greedy = SamplingParams(temperature=0.0, max_tokens=3)
    driver.add({1: [5, 6, 7]}, greedy)
    driver.run()
    driver.core.handle(Utility(1, "start_profile", {}))
    driver.core.handle(Utility(2, "start_profile", {}))
    assert driver.others[-2].error == "" and "already being recorded" in driver.others[-1].error
    driver.add({2: [8, 9, 10, 11], 3: [20, 21]}, greedy)
    driver.run()
    driver.core.handle(Utility(3, "stop_profile", {}))
    (path,) = driver.others[-1].result
    names = event_names(path)
    steps = [name for name in names if "[bs=" in name]
    assert steps == ["prefill[bs=2 tok=6 ctx=4]"] + ["eager_decode[bs=2/2 tok=2 p=0 d=2 spec=0]"] * 2
    marked = {
        "model",
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.1.self_attn",
        "model.layers.1.mlp",
    }
    assert marked <= set(names) if mark_trace else not marked & set(names)
    driver.core.handle(Utility(4, "stop_profile", {}))
    assert "no profile is being recorded" in driver.others[-1].error
    driver.core.close()


def test_a_profile_without_a_folder_is_refused_and_a_given_one_is_used(tmp_path, monkeypatch):
    monkeypatch.delenv("ATOM_TORCH_PROFILER_DIR", raising=False)
    profiler = make_profiler()
    with pytest.raises(ConfigError, match="ATOM_TORCH_PROFILER_DIR"):
        profiler.start()
    profiler.start(str(tmp_path))
    (path,) = profiler.stop()
    assert path.startswith(str(tmp_path / "rank_0"))


def test_an_engine_among_several_has_a_folder_of_its_own(tmp_path):
    parallel = {"data_parallel_size": 2, "data_parallel_rank": 1}
    profiler = make_profiler(torch_profiler_dir=str(tmp_path), parallel_config=parallel)
    profiler.start()
    assert profiler.stop()[0].startswith(str(tmp_path / "dp1_tp0"))


def test_captures_are_traced_with_their_modules_where_marks_are_asked_for(tmp_path):
    model = nn.ModuleDict({"norm": nn.LayerNorm(4)})
    profiler = make_profiler(torch_profiler_dir=str(tmp_path), mark_trace=True)
    profiler.watch(model)
    for query_len in (1, 2):
        with profiler.capture(4, query_len):
            model["norm"](torch.ones(1, 4))
    assert sorted(path.name for path in (tmp_path / "capture_traces").iterdir()) == [
        "bs_4_q_1_rank0.json.gz",
        "bs_4_q_2_rank0.json.gz",
    ]
    assert "norm" in event_names(tmp_path / "capture_traces" / "bs_4_q_2_rank0.json.gz")
    assert not model["norm"]._forward_hooks
    profiler.start()
    with profiler.capture(8, 1):  # one profiler at a time: the running trace has it
        model["norm"](torch.ones(1, 4))
    assert "norm" in event_names(profiler.stop()[0])
    assert not (tmp_path / "capture_traces" / "bs_8_q_1_rank0.json.gz").exists()
    with make_profiler(torch_profiler_dir=str(tmp_path / "unmarked")).capture(4, 1):
        pass
    assert not (tmp_path / "unmarked").exists()


def test_marks_that_cannot_be_made_are_said_in_the_log(caplog, monkeypatch):
    monkeypatch.delenv("ATOM_TORCH_PROFILER_DIR", raising=False)
    profiler = make_profiler(mark_trace=True)
    with caplog.at_level(logging.WARNING, "atom"):
        profiler.watch(nn.Linear(2, 2), is_compiled=True)
    assert "--torch-profiler-dir names no folder" in caplog.text
    assert "compiled code has no modules to mark" in caplog.text
    with profiler.capture(4, 1):
        pass


def test_a_watched_model_is_not_kept():
    import gc
    import weakref

    profiler = make_profiler(mark_trace=True)
    model = nn.Linear(2, 2)
    gone = weakref.ref(model)
    profiler.watch(model)
    del model
    gc.collect()
    assert gone() is None
