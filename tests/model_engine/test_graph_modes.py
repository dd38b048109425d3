"""Steps that replay recorded graphs say what eager steps say: every family, every mode, both loops."""

import gc
import weakref

import pytest
import torch

from atom.benchmarks.instant_device import _Publisher
from atom.config import Config, CUDAGraphMode
from atom.errors import ConfigError
from atom.model_engine.model_runner import ModelRunner
from atom.model_engine.runner import forward_pass
from atom.model_engine.runner.device_tables import DeviceTables
from atom.model_engine.runner.forward_pass import ForwardPass
from atom.model_ops.outbox import SLOTS
from atom.sampling_params import SamplingParams
from tests.helpers.core_driver import run_to_the_end
from tests.helpers.tiny_model import FAMILIES, make_tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = {i: [(i * 37 + j * 11) % 250 + 1 for j in range(6 + 9 * i)] for i in range(1, 6)}
MODES = ["FULL", "TR_HYBRID", "FULL_DECODE_ONLY", "FULL_AND_TR_HYBRID"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {family: make_tiny_model(root / family, family) for family in FAMILIES}


def run(folder, mode, loop="plain", params=GREEDY, compilation=None, **fields):
    fields = {"max_num_batched_tokens": 32, "max_num_seqs": 5, **fields}
    settings = {"cudagraph_mode": mode, "cudagraph_capture_sizes": (1, 2, 4), **(compilation or {})}
    return run_to_the_end(
        folder, PROMPTS, params, device="cpu", loop=loop, compilation_config=settings, **fields
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_greedy_text_does_not_depend_on_the_mode(folders, family, mode):
    eager = run(folders[family], "NONE")
    recorded = run(folders[family], mode)
    assert recorded.tokens == eager.tokens


@pytest.mark.parametrize("mode", ["FULL", "TR_HYBRID"])
def test_the_overlapped_loop_replays_too(folders, mode):
    assert run(folders["qwen3"], mode, "overlapped").tokens == run(folders["qwen3"], "NONE").tokens


@pytest.mark.parametrize("warmup", ["background", "lazy"])
@pytest.mark.parametrize("mode", ["FULL", "TR_HYBRID"])
def test_graphs_may_be_recorded_while_serving(folders, mode, warmup):
    driver = run(folders["llama"], mode, compilation={"graph_warmup": warmup})
    assert driver.tokens == run(folders["llama"], "NONE").tokens
    worker = driver.core.worker
    if warmup == "background":
        while worker.record_next_graph():
            pass
        assert sorted(b.size for b in worker._recorder.recorded) == [1, 2, 4]
    else:  # what no step needed was not recorded
        assert {b.size for b in worker._recorder.recorded} <= {1, 2, 4}
        assert worker._recorder.recorded


@pytest.mark.parametrize("warmup", ["background", "lazy"])
def test_a_recording_runs_no_more_steps_than_the_outbox_has_room_for(folders, monkeypatch, warmup):
    """Of whoever writes results by a count on the device, beside the step whose results still wait to be read."""
    runs = []
    forward, launch, background = ForwardPass._forward, ForwardPass.run, ModelRunner.record_next_graph

    def watched(function):
        def call(*args):
            runs.append(0)
            return function(*args)

        return call

    def counted(self):
        runs[-1] += 1
        return forward(self)

    monkeypatch.setattr(ForwardPass, "_forward", counted)
    monkeypatch.setattr(ForwardPass, "run", watched(launch))
    monkeypatch.setattr(ModelRunner, "record_next_graph", watched(background))
    driver = run(folders["llama"], "FULL", "overlapped", compilation={"graph_warmup": warmup})
    while driver.core.worker.record_next_graph():
        pass
    assert max(runs) == (2 if warmup == "background" else 3) < SLOTS


def test_a_graph_is_recorded_without_gradients_whoever_asks_for_it(folders, monkeypatch):
    driver = run(folders["llama"], "FULL", compilation={"graph_warmup": "background"})
    seen, forward = [], ForwardPass._forward
    monkeypatch.setattr(
        ForwardPass, "_forward", lambda self: seen.append(torch.is_grad_enabled()) or forward(self)
    )
    with torch.enable_grad():
        assert driver.core.worker.record_next_graph()
    assert seen and not any(seen)


def test_sampling_and_preemption_under_graphs(folders):
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, logprobs=2)
    fields = {"num_kvcache_blocks": 7, "max_model_len": 96, "max_num_batched_tokens": 256}
    eager, recorded = (run(folders["gemma3"], mode, params=params, **fields) for mode in ("NONE", "FULL"))
    assert recorded.core.scheduler.stats()["preemptions"] > 0
    assert recorded.tokens == eager.tokens


@pytest.mark.parametrize("mode", ["FULL", "TR_HYBRID"])
def test_steps_are_padded_to_the_next_bucket(folders, mode):
    driver = run(folders["llama"], mode, max_num_batched_tokens=256)
    forward = driver.core.worker._forward
    tables = forward.graphs
    assert tables.mode is CUDAGraphMode[mode]
    assert tables.request_sizes == ({1: [1, 2, 4]} if mode == "FULL" else {})
    assert tuple(tables.decode_tokens) == (() if mode == "FULL" else (1, 2, 4))
    assert tuple(tables.prefill_tokens) == ()  # the CPU's attention reads host data


def test_eager_enforced_records_nothing(folders):
    driver = run(folders["llama"], "FULL", enforce_eager=True)
    assert driver.core.worker._recorder is None


@pytest.mark.parametrize("sizes, recorded", [((4,), [4]), ((2, 8), [2, 5]), ((16, 32), [5])])
def test_capture_sizes_are_taken_as_given_up_to_the_largest_batch(folders, sizes, recorded):
    driver = run(folders["llama"], "FULL", compilation={"cudagraph_capture_sizes": sizes})
    assert [bucket.size for bucket in driver.core.worker._recorder.recorded] == recorded[::-1]
    assert driver.tokens == run(folders["llama"], "NONE").tokens


@pytest.mark.parametrize("warmup", ["startup", "background", "lazy"])
@pytest.mark.parametrize("mode", ["FULL", "TR_HYBRID"])
def test_closing_gives_weights_cache_and_graphs_back(folders, mode, warmup):
    core = run(folders["llama"], mode, compilation={"graph_warmup": warmup}).core
    core.worker.record_next_graph()
    held = {
        "weights": core.worker.model.model,
        "cache": next(iter(core.worker._forward._kv_caches.values())).k_cache,
        "forward pass": core.worker._forward,
    }
    gone = {name: weakref.ref(value) for name, value in held.items()}
    held = None
    gc.disable()
    try:
        core.close()
        assert [name for name, ref in gone.items() if ref() is not None] == []
        assert len(core.worker.req_graph) == 0
    finally:
        gc.enable()


def test_a_mode_that_nobody_asked_for_gives_way_to_one_that_attention_allows(folders, monkeypatch):
    worker = run(folders["llama"], "FULL").core.worker
    monkeypatch.setattr(
        worker, "device", torch.device("cuda", 0)
    )  # where the CPU's attention cannot be recorded
    with pytest.raises(ConfigError, match="cudagraph_mode FULL needs attention that a device graph can hold"):
        worker._new_recorder()
    monkeypatch.setattr(worker, "_is_mode_open", True)
    assert worker._new_recorder().mode is CUDAGraphMode.TR_HYBRID


def test_bad_token_graph_sizes_are_said_before_anything_is_loaded(folders, monkeypatch):
    monkeypatch.setenv("ATOM_TOKEN_GRAPH_SIZES", "256,many")
    with pytest.raises(ConfigError, match="ATOM_TOKEN_GRAPH_SIZES .* got 'many'"):
        ModelRunner(Config.build(str(folders["llama"]), device="cpu"))


@pytest.mark.parametrize("warmup", ["background", "lazy"])
def test_serving_goes_on_when_a_graph_cannot_be_recorded(folders, monkeypatch, warmup):
    asked = []

    def fail_for_four(self):
        size = self._live.mode.running_bs
        asked.append(size)
        if size == 4:
            raise RuntimeError("out of memory")
        record(self)

    record = ForwardPass.record_request
    monkeypatch.setattr(ForwardPass, "record_request", fail_for_four)
    driver = run(folders["llama"], "FULL", compilation={"graph_warmup": warmup}, max_num_seqs=4)
    worker = driver.core.worker
    while worker.record_next_graph():
        pass
    assert driver.tokens == run(folders["llama"], "NONE").tokens
    assert asked.count(4) == 1  # it is not tried again
    assert 4 not in worker._forward.graphs.request_sizes[1]
    assert not worker.record_next_graph()


def test_the_runner_tells_its_graphs_and_fixed_buffers(folders):
    worker = run(folders["gemma3"], "FULL").core.worker
    assert worker.req_graph.sizes() == (1, 2, 4)
    assert set(worker.forward_vars) == {
        "packed_step", "computed", "last_token", "block_tables_0", "block_tables_1",
    }  # fmt: skip
    addresses = {name: buffer.data_ptr() for name, buffer in worker._forward.buffers().items()}
    assert addresses == {name: buffer.data_ptr() for name, buffer in worker.forward_vars.items()}


@pytest.mark.parametrize(
    "family, mode", [("gemma3", "FULL"), ("qwen3", "FULL"), ("llama", "TR_HYBRID"), ("llama", "NONE")]
)
def test_launches_in_place_of_tensor_operations_change_nothing(folders, family, mode, monkeypatch):
    """As on a device: one buffer at a fixed address, and inputs of prefills made inside their recordings."""
    expected = run(folders[family], "NONE").tokens
    made = []

    def device_tables(*sizes):
        tables = DeviceTables(*sizes, torch.device("cpu"))
        tables._prepares = True
        made.append(tables)
        return tables

    prepare, launched = DeviceTables.prepare, []

    def counted(self, packed, inputs):
        launched.append(len(inputs.input_ids))
        return prepare(self, packed, inputs)

    monkeypatch.setenv("ATOM_TOKEN_GRAPH_SIZES", "16,32")
    monkeypatch.setattr(forward_pass, "HostTables", device_tables)
    monkeypatch.setattr(forward_pass, "Publisher", lambda capacity, device: _Publisher(capacity))
    monkeypatch.setattr(DeviceTables, "prepare", counted)
    assert run(folders[family], mode, num_kvcache_blocks=64).tokens == expected
    assert made and launched
