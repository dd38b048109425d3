"""Steps that replay recorded graphs say what eager steps say: every family, every mode, both loops."""

import pytest

from atom.config import Config, CUDAGraphMode
from atom.sampling_params import SamplingParams
from tests.helpers.core_driver import CoreDriver
from tests.helpers.tiny_model import FAMILIES, make_tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = {i: [(i * 37 + j * 11) % 250 + 1 for j in range(6 + 9 * i)] for i in range(1, 6)}
MODES = ["FULL", "TR_HYBRID", "FULL_DECODE_ONLY", "FULL_AND_TR_HYBRID"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {family: make_tiny_model(root / family, family) for family in FAMILIES}


def run(folder, mode, loop="plain", params=GREEDY, compilation=None, **fields):
    fields = {"max_num_batched_tokens": 32, "max_num_seqs": 5, "kv_cache_memory": 2**24, **fields}
    settings = {"cudagraph_mode": mode, "cudagraph_capture_sizes": (1, 2, 4), **(compilation or {})}
    config = Config.build(
        str(folder),
        device="cpu",
        dtype="float32",
        loop=loop,
        prefix_hash_seed=1,
        compilation_config=settings,
        **fields,
    )
    driver = CoreDriver(config)
    driver.add(PROMPTS, params)
    driver.run()
    driver.check_idle()
    return driver


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
