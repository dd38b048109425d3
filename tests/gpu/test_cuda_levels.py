"""Levels and graph modes on a CUDA device: every family says what it says eagerly on the CPU."""

import pytest

from atom.config import Config
from atom.sampling_params import SamplingParams
from tests.helpers.core_driver import CoreDriver, run_to_the_end
from tests.helpers.tiny_model import FAMILIES, make_tiny_model

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
PROMPTS = {i: [(i * 37 + j * 11) % 250 + 1 for j in range(5 + 31 * i)] for i in range(1, 8)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {family: make_tiny_model(root / family, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def expected(folders):
    return {family: run(folders[family], "cpu", 0, "NONE").tokens for family in FAMILIES}


def run(folder, device, level, mode, loop="auto", params=GREEDY, **fields):
    fields = {"max_num_batched_tokens": 96, "max_num_seqs": 6, **fields}
    compilation = {
        "level": level,
        "cudagraph_mode": mode,
        "cudagraph_capture_sizes": (1, 2, 4, 6),
        "cache_dir": str(folder / "compiled"),
    }
    return run_to_the_end(
        folder, PROMPTS, params, device=device, loop=loop, compilation_config=compilation, **fields
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["NONE", "FULL", "TR_HYBRID", "FULL_DECODE_ONLY", "FULL_AND_TR_HYBRID"])
def test_modes_without_compilation(folders, expected, family, mode, monkeypatch):
    monkeypatch.setenv("ATOM_TOKEN_GRAPH_SIZES", "32,64,96")
    driver = run(folders[family], "cuda", 0, mode)
    assert driver.tokens == expected[family]
    recorder = driver.core.worker._recorder
    if mode == "NONE":
        assert recorder is None
    else:
        kinds = {bucket.kind for bucket in recorder.recorded}
        assert kinds == ({"decode"} if mode == "FULL_DECODE_ONLY" else {"decode", "prefill"})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("level", [1, 2, 3])
def test_levels(folders, expected, family, level, monkeypatch):
    monkeypatch.setenv("ATOM_TOKEN_GRAPH_SIZES", "64")
    for mode in ("FULL", "TR_HYBRID", "NONE"):  # which share what the first compiles
        assert run(folders[family], "cuda", level, mode).tokens == expected[family], mode


def test_a_second_start_compiles_nothing(folders):
    from atom.utils.compile_cache import compilation_counter

    run(folders["llama"], "cuda", 3, "NONE", max_num_seqs=5)
    before = compilation_counter.num_compiled
    run(folders["llama"], "cuda", 3, "NONE", max_num_seqs=5)
    assert compilation_counter.num_compiled == before


@pytest.mark.parametrize("warmup", ["background", "lazy"])
def test_graphs_recorded_while_serving(folders, expected, warmup, monkeypatch):
    monkeypatch.setenv("ATOM_TOKEN_GRAPH_SIZES", "32,96")
    config = Config.build(
        str(folders["qwen3"]),
        device="cuda",
        dtype="float32",
        prefix_hash_seed=1,
        max_num_batched_tokens=96,
        max_num_seqs=6,
        kv_cache_memory=2**24,
        compilation_config={
            "cudagraph_mode": "FULL",
            "cudagraph_capture_sizes": (1, 2, 4, 6),
            "graph_warmup": warmup,
        },
    )
    driver = CoreDriver(config)
    while warmup == "background" and driver.core.worker.record_next_graph():
        pass
    driver.add(PROMPTS, GREEDY)
    driver.run()
    assert driver.tokens == expected["qwen3"]
    assert driver.core.worker._recorder.recorded


def test_h2d_section_by_section_says_the_same(folders, expected, monkeypatch):
    monkeypatch.setenv("ATOM_H2D_BACKEND", "direct")
    assert run(folders["gemma3"], "cuda", 0, "FULL").tokens == expected["gemma3"]


def test_random_sampling_and_preemption_under_graphs(folders):
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=16)
    fields = {"num_kvcache_blocks": 24, "max_model_len": 300}
    eager = run(folders["llama"], "cpu", 0, "NONE", params=params, **fields)
    recorded = run(folders["llama"], "cuda", 0, "FULL", params=params, **fields)
    assert recorded.core.scheduler.stats()["preemptions"] > 0
    assert recorded.tokens == eager.tokens
