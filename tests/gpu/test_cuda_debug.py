"""Dumps and traces on a CUDA device: hooks keep out of a capture, traces hold kernels below the steps' names."""

import gzip
import json

import pytest
import torch

from atom.config import Config
from atom.core import ScheduledBatch, Sequence
from atom.model_engine.messages import Utility
from atom.model_engine.runner.step_profiler import StepProfiler
from atom.platforms import get_platform
from atom.sampling_params import SamplingParams
from atom.utils.debug_helper import TopkLog, install_block_forward_hooks
from atom.utils.debug_helper.compare import EQUAL, main
from atom.utils.debug_helper.files import load
from tests.helpers.core_driver import CoreDriver, run_to_the_end
from tests.helpers.tiny_model import make_tiny_model

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "llama")


def run(folder, device, **fields) -> CoreDriver:
    return run_to_the_end(
        folder, {1: [5, 6, 7, 8]}, GREEDY, device=device, max_num_batched_tokens=64, **fields
    )


def test_the_cpu_and_the_device_have_the_same_hidden_states(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ATOM_FWD_DUMP_ONE_SHOT", "0")
    for name, device in (("ref", "cpu"), ("target", "cuda")):
        monkeypatch.setenv("ATOM_FWD_DUMP_DIR", str(tmp_path / name))
        run(folder, device)
    assert (
        main(["ref-vs-target", "--dir", str(tmp_path), "--tolerance", "1e-2"]) == EQUAL
    ), capsys.readouterr()
    assert (
        "12 comparisons" in capsys.readouterr().out
    )  # 2 layers: the warm-up's two steps, and four of the answer


def test_a_capture_is_neither_dumped_nor_logged_and_the_call_after_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ATOM_FWD_DUMP_DIR", str(tmp_path))
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4)]).cuda()
    model.eval()
    x = torch.ones(2, 4, device="cuda")
    model.layers[0](x)  # cuBLAS sets itself up outside of the capture
    install_block_forward_hooks(model)
    log = TopkLog(2)
    seqs = [Sequence(i, [1], SamplingParams(), max_output_tokens=4) for i in range(2)]
    ones = [1, 1]
    batch = ScheduledBatch(1, seqs, ones, ones, ones, ones, [True] * 2, 0, 2, [], [])
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        log.maybe_log_topk(model.layers[0](x), batch)
    graph.replay()
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().err == ""
    with torch.no_grad():
        log.maybe_log_topk(model.layers[0](x), batch)
    states = load(tmp_path / "layer00_Linear_rank0.pt")["hidden_states"]
    assert states.shape == (2, 4) and states.device.type == "cpu"
    assert len(capsys.readouterr().err.splitlines()) == 2


def trace_events(path) -> list[dict]:
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


def test_a_trace_holds_kernels_and_the_names_of_steps_and_modules(folder, tmp_path):
    driver = run(folder, "cuda", torch_profiler_dir=str(tmp_path), mark_trace=True)
    driver.core.handle(Utility(1, "start_profile", {}))
    driver.add({2: [9, 10, 11]}, GREEDY)
    driver.run()
    driver.core.handle(Utility(2, "stop_profile", {}))
    events = trace_events(driver.others[-1].result[0])
    names = {event.get("name") for event in events}
    assert {"prefill[bs=1 tok=3 ctx=3]", "model.layers.1.self_attn"} <= names
    assert "kernel" in {event.get("cat") for event in events}


def test_the_trace_of_a_capture_names_its_modules(tmp_path):
    config = Config.build("m", torch_profiler_dir=str(tmp_path), mark_trace=True)
    profiler = StepProfiler(config, get_platform("cuda"))
    model = torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(4)}).cuda()
    profiler.watch(model)
    x = torch.ones(2, 4, device="cuda")
    with torch.no_grad(), profiler.capture(2, 1):
        model["norm"](x)
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            model["norm"](x)
    events = trace_events(tmp_path / "capture_traces" / "bs_2_q_1_rank0.json.gz")
    assert sum(event.get("name") == "norm" and event.get("cat") == "user_annotation" for event in events) == 2
