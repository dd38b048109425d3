"""Kernels that processes compile before a step launches them: what is recorded, and that nothing leaks or hangs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from triton.runtime.jit import JITFunction

from atom.config import CompilationLevel, Config
from atom.errors import ConfigError
from atom.kernels.triton import compile_ahead
from atom.kernels.triton.compile_ahead import KernelCompilation, default_processes, recording
from atom.kernels.triton.compile_worker import KernelTarget
from atom.model_engine.model_runner import ModelRunner
from atom.model_engine.runner.device_tables import DeviceTables
from atom.model_engine.runner.warm_up import kernels_ahead, record_launches
from atom.utils.compile_cache import compilation_counter
from atom.utils.debug_helper.files import load as load_dump
from tests.helpers.fake_kernels import job
from tests.helpers.own_process import json_of
from tests.helpers.tiny_model import make_tiny_model

HELPERS = Path(__file__).parents[1] / "helpers"
LIMIT_S = 20.0  # on a busy machine; a second or two otherwise


@pytest.fixture(autouse=True)
def target(monkeypatch):
    monkeypatch.setattr(compile_ahead, "_target", lambda: KernelTarget("cuda", 90, 32))


def eventually(condition):
    until = time.monotonic() + LIMIT_S
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_kernels_are_compiled_by_processes_and_found_by_launches(tmp_path):
    def start():
        return json_of("compile_kernels_ahead.py", tmp_path)

    cold = start()
    # Several batches, one kernel; and the key of one that calls others does not depend on which came before.
    assert cold["jobs"] == ["_choose", "_final_norm", "_final_norm", "gemv_rows", "head_gemm"]
    assert cold["is_complete"] and cold["left"] == cold["here"] == 0
    assert cold["hits"] == [True] * 5  # this process compiled nothing
    warm = start()
    assert warm["jobs"] == [] and warm["is_complete"] and warm["hits"] == [True] * 5


def test_what_a_step_launches_is_recorded_once_and_not_run():
    kernel = SimpleNamespace(fn=test_what_a_step_launches_is_recorded_once_and_not_run)
    with recording() as recorder:
        for number in (3, 3, 4):
            JITFunction.run(kernel, torch.zeros(4), number, grid=(9,), warmup=False, num_warps=2)
    launches = list(recorder.launches.values())
    assert [launch.positional[1] for launch in launches] == [3, 4]
    assert launches[0].options == {"num_warps": 2}


def test_a_kernel_that_cannot_be_compiled_takes_no_other_with_it(tmp_path):
    jobs = [job(tmp_path / str(i), fails=i == 1) for i in range(4)]
    with KernelCompilation(jobs, num_processes=2) as compilation:
        folder = compilation._folder
        assert not compilation.wait(LIMIT_S)  # said, so that launches are known to compile
        assert not compilation.wait(LIMIT_S)
    assert all((tmp_path / str(i)).exists() for i in range(4))
    assert not os.path.exists(folder)


def test_all_done_is_said_once_all_is_done(tmp_path):
    with KernelCompilation([job(tmp_path / "a"), job(tmp_path / "b", 0.2)], num_processes=2) as compilation:
        assert compilation.wait(LIMIT_S) and compilation.wait(LIMIT_S)
    assert (tmp_path / "a").read_text() != (tmp_path / "b").read_text()  # a process each


@pytest.mark.parametrize("how", ["killed", "closed", "too slow"])
def test_compilers_end_with_their_process(tmp_path, how):
    files = [tmp_path / "a", tmp_path / "b"]
    with KernelCompilation([job(file, 60.0) for file in files], num_processes=2) as compilation:
        assert eventually(lambda: all(file.exists() for file in files))
        pids = [compilation.pid, *(int(file.read_text()) for file in files)]
        if how == "killed":
            os.kill(compilation.pid, signal.SIGKILL)
        if how != "closed":
            began = time.monotonic()
            assert not compilation.wait(0.1 if how == "too slow" else LIMIT_S)
            assert time.monotonic() - began < LIMIT_S
    assert eventually(lambda: not any(map(is_alive, pids)))
    assert not os.path.exists(f"/proc/{pids[0]}")  # no zombie either


def test_compilers_end_with_the_engine(tmp_path):
    parent = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.fake_kernels", str(tmp_path / "a")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=HELPERS.parents[1],
    )
    pid = int(parent.stdout.readline())
    assert eventually((tmp_path / "a").exists)
    pids = [pid, int((tmp_path / "a").read_text())]
    assert all(map(is_alive, pids))
    parent.kill()
    parent.communicate()
    assert eventually(lambda: not any(map(is_alive, pids)))


def test_without_processes_launches_compile(tmp_path, monkeypatch):
    with KernelCompilation([job(tmp_path / "a")], num_processes=0) as compilation:
        assert compilation.pid is None and not compilation.wait()
    with KernelCompilation([], num_processes=2) as compilation:
        assert compilation.pid is None and compilation.wait()
    assert not (tmp_path / "a").exists()

    def no_target():
        raise RuntimeError("0 active drivers")

    monkeypatch.setattr(compile_ahead, "_target", no_target)
    with KernelCompilation([job(tmp_path / "a")], num_processes=2) as compilation:
        assert compilation.pid is None and not compilation.wait()


@pytest.mark.parametrize(("cores", "processes"), [(1, 0), (2, 1), (16, 8), (64, 8)])
def test_half_of_the_cores_are_left_to_the_engine(monkeypatch, cores, processes):
    monkeypatch.delenv("ATOM_COMPILE_PROCESSES", raising=False)
    monkeypatch.setattr(compile_ahead, "get_platform", lambda _: SimpleNamespace(default_num_threads=cores))
    assert default_processes() == processes
    monkeypatch.setenv("ATOM_COMPILE_PROCESSES", "3")
    assert default_processes() == 3
    monkeypatch.setenv("ATOM_COMPILE_PROCESSES", "-1")
    with pytest.raises(ConfigError, match="ATOM_COMPILE_PROCESSES.*-1"):
        default_processes()


class FakeForward:
    """Notes the steps that are rehearsed, and how they were recorded."""

    device = torch.device("cuda")
    supports_token_graph = True

    def __init__(self, max_tokens):
        self.model = torch.nn.Module()
        self.model.fused = SimpleNamespace(max_tokens=max_tokens) if max_tokens else None
        self.steps = []
        self.kernel_sizes = set()
        self.run = JITFunction.run

    def prefill_bs(self, num_tokens):
        return num_tokens // 16

    def prefill_kernel_sizes(self):
        return self.kernel_sizes

    def rehearse(self, size, num_tokens, is_prefill):
        self.steps.append(["prefill" if is_prefill else "decode", num_tokens])

    def rehearse_patches(self):
        assert JITFunction.run is not self.run
        self.steps.append(["patches"])

    def run_rehearsed(self):
        self.steps[-1].append("fused" if JITFunction.run is not self.run else "runs")

    def run_modules(self, scope):
        is_free = JITFunction.run is self.run
        with scope():
            self.steps[-1].append("modules" if is_free and JITFunction.run is not self.run else "runs")


def test_prefill_is_recorded_first_then_what_modules_decode_then_what_is_fused():
    forward, sizes = FakeForward(16), [1, 8, 16, 24, 32, 48, 64, 96]
    record_launches(forward, compile_ahead.Recorder(), sizes, 8192)
    modules = [["decode", size, "modules"] for size in (24, 32, 96)]
    fused = [["decode", size, "fused"] for size in (1, 8, 16)]
    prefills = [["prefill", 256, "modules"], ["prefill", 1024, "modules"]]
    assert forward.steps == [*prefills, *modules, ["patches"], *fused]
    forward = FakeForward(0)
    record_launches(forward, compile_ahead.Recorder(), [1, 2], 64)
    assert [step[:2] for step in forward.steps] == [
        ["prefill", 64],
        ["decode", 1],
        ["decode", 2],
        ["patches"],
    ]
    forward = FakeForward(16)
    forward.kernel_sizes = {1024, 4096, 16384}  # of which the last is more than a step has
    record_launches(forward, compile_ahead.Recorder(), sizes, 8192)
    measured = [["prefill", tokens, "modules"] for tokens in (4096, 8192)]
    assert forward.steps == [*prefills, *measured, *modules, ["patches"], *fused]
    forward = FakeForward(16)
    record_launches(forward, compile_ahead.Recorder(), sizes, 8192, runs_modules=False)
    assert forward.steps == [["patches"], *fused]
    forward = FakeForward(16)
    forward.supports_token_graph = (
        False  # attention that reads lengths on the host, where a rehearsal has none
    )
    record_launches(forward, compile_ahead.Recorder(), sizes, 8192)
    assert forward.steps == [["patches"], *fused]


def test_without_a_device_nothing_is_recorded():
    forward = FakeForward(16)
    forward.device = torch.device("cpu")
    sampled = []
    level = CompilationLevel.NO_COMPILATION
    with kernels_ahead(forward, [1, 8], 64, level, lambda: sampled.append(1)) as wait:
        assert wait() is None
    assert forward.steps == [] and not sampled


def worker_with_device_tables(folder, **fields):
    """A worker of four sequences and 32 tokens that has loaded; attention is not computed."""
    worker = ModelRunner(
        Config.build(str(folder), device="cpu", max_num_batched_tokens=32, max_num_seqs=4, **fields)
    )
    worker.load(lambda phase, fraction: None)
    worker.allocate(worker.cache_groups())
    forward = worker._forward
    host = forward.tables
    device = torch.device("cpu")
    forward.tables = DeviceTables(4, host.block_tables[0].shape[1], len(host.block_tables), 16, device)
    for layer in forward.layers.values():  # as a device's: nothing is read on the host
        layer.backend.supports_token_graph = True
        layer.backend.forward = lambda *args: args[-1].zero_()
    return worker


def test_modules_are_rehearsed_on_true_inputs_and_not_traced(tmp_path):
    """A step of nothing but padding through a compiled model's modules, with device tables."""
    worker = worker_with_device_tables(
        make_tiny_model(tmp_path / "model", "qwen3"),
        compilation_config={"level": 3, "use_inductor": False, "cache_dir": str(tmp_path / "cache")},
    )
    forward, calls, seen = worker._forward, [], compilation_counter.num_graphs_seen
    forward.tables._prepares = True  # a launch that nobody lets run leaves no inputs
    worker.model.register_forward_pre_hook(lambda _, args: calls.append([x.tolist() for x in args]))
    recorder = compile_ahead.Recorder()
    with patch.object(DeviceTables, "_prepare") as prepare:
        record_launches(forward, recorder, [1, 3], 32)
    assert [call.args[1] for call in prepare.call_args_list] == [1, 3]
    assert forward.tables._prepares
    zeros = [[[0] * n] * 2 for n in (32, 1, 3)]
    assert calls == zeros
    assert compilation_counter.num_graphs_seen == seen and not worker.model.model.do_not_compile


def test_rehearsals_are_not_dumped_and_the_steps_after_them_are(tmp_path, monkeypatch):
    """A dump's call 0 is the warm-up's prefill on every device, so that dumps of two devices are of the same steps."""
    dumps = tmp_path / "dumps"
    monkeypatch.setenv("ATOM_FWD_DUMP_DIR", str(dumps))
    monkeypatch.setenv("ATOM_FWD_DUMP_ONE_SHOT", "0")
    worker, calls = worker_with_device_tables(make_tiny_model(tmp_path / "model")), []
    worker.model.register_forward_pre_hook(lambda _, args: calls.append(len(args[0])))
    record_launches(worker._forward, compile_ahead.Recorder(), [1], 32)
    worker._forward.rehearse(2, 2, False)
    worker._forward.run_rehearsed()  # as before a recording
    assert calls == [32, 1, 2] and list(dumps.iterdir()) == []
    worker.warm_up(lambda phase, fraction: None)
    assert calls == [32, 1, 2, 32, 1]
    found = {path.name: len(load_dump(path)["hidden_states"]) for path in dumps.iterdir()}
    assert found == {
        f"layer{layer:02d}_LlamaDecoderLayer_rank0_call{call:03d}.pt": num_tokens
        for layer in range(2)
        for call, num_tokens in enumerate((32, 1))
    }
