"""The engine on a CUDA device says what it says on the CPU: every family, both loops, every kind of sampling."""

import pytest

from atom.config import Config
from atom.model_ops.outbox import Outbox
from atom.sampling_params import SamplingParams
from tests.helpers.core_driver import CoreDriver, run_to_the_end
from tests.helpers.tiny_model import FAMILIES, make_tiny_model

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROMPTS = {i: [(i * 37 + j * 11) % 250 + 1 for j in range(6 + 17 * i)] for i in range(1, 7)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {family: make_tiny_model(root / family, family) for family in FAMILIES}


def run(folder, device, params=GREEDY, loop="auto", **fields):
    fields = {"max_num_batched_tokens": 64, "max_num_seqs": 4, **fields}
    return run_to_the_end(folder, PROMPTS, params, device=device, loop=loop, **fields)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("loop", ["plain", "overlapped"])
def test_greedy_equals_the_cpu(folders, family, loop):
    on_cpu = run(folders[family], "cpu", loop="plain")
    on_cuda = run(folders[family], "cuda", loop=loop)
    assert on_cuda.tokens == on_cpu.tokens


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8, seed=3, max_tokens=16),
        SamplingParams(temperature=0.9, top_k=7, seed=4, max_tokens=16),
        SamplingParams(temperature=0.9, top_p=0.8, min_p=0.02, seed=5, max_tokens=16),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5, max_tokens=16),
        SamplingParams(temperature=0.0, logit_bias={7: 5.0, 9: -100.0}, max_tokens=16),
    ],
    ids=["seed", "top_k", "top_p", "penalties", "bias"],
)
def test_sampling_equals_the_cpu(folders, params):
    on_cpu = run(folders["llama"], "cpu", params)
    on_cuda = run(folders["llama"], "cuda", params)
    assert on_cuda.tokens == on_cpu.tokens


def test_logprobs_equal_the_cpu(folders):
    params = SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2, max_tokens=8)
    on_cpu, on_cuda = run(folders["qwen3"], "cpu", params), run(folders["qwen3"], "cuda", params)
    for seq_id, events in on_cpu.events.items():
        for ours, theirs in zip(on_cuda.events[seq_id], events, strict=True):
            for left, right in zip(ours.logprobs or [], theirs.logprobs or [], strict=True):
                assert left.token_id == right.token_id
                assert left.logprob == pytest.approx(right.logprob, abs=1e-3)
            assert len(ours.prompt_logprobs or []) == len(theirs.prompt_logprobs or [])


def test_preemption_changes_nothing(folders):
    roomy = run(folders["gemma3"], "cuda")
    tight = run(folders["gemma3"], "cuda", num_kvcache_blocks=12, max_model_len=160)
    assert tight.core.scheduler.stats()["preemptions"] > 0
    assert tight.tokens == roomy.tokens


def test_ids_left_in_host_memory_and_ids_that_are_copied_take_turns(folders, monkeypatch):
    """Steps of one and two sequences are recorded, those of three and four are not."""
    letters, take = [], Outbox.take
    monkeypatch.setattr(Outbox, "take", lambda self, n: letters.append(take(self, n)) or letters[-1])

    def answers(**compilation):
        fields = {"dtype": "bfloat16", "compilation_config": {"level": 0, **compilation}}
        return run(folders["qwen3"], "cuda", **fields).tokens

    eager = answers(cudagraph_mode="NONE")
    assert letters and not any(letters), "an eager step is not counted"
    assert answers(cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=(1, 2)) == eager
    assert any(letters) and letters[-1] is not None


def test_graphs_recorded_as_sequences_end_leave_the_results_that_wait_alone(folders):
    """Steps of four, three, two sequences and one: each graph is recorded while the step before it is in flight."""
    params = [SamplingParams(temperature=0.0, max_tokens=count) for count in (5, 9, 13, 17)]

    def answers(mode):
        config = Config.build(
            str(folders["qwen3"]),
            device="cuda",
            dtype="bfloat16",
            loop="overlapped",
            prefix_hash_seed=1,
            kv_cache_memory=2**24,
            max_num_batched_tokens=256,
            max_num_seqs=4,
            compilation_config={
                "level": 0,
                "cudagraph_mode": mode,
                "cudagraph_capture_sizes": (1, 2, 3, 4),
                "graph_warmup": "lazy",
            },
        )
        driver = CoreDriver(config)
        for seq_id, param in enumerate(params, 1):
            driver.add({seq_id: PROMPTS[seq_id]}, param)
        driver.run()
        return driver

    eager, recorded = answers("NONE"), answers("FULL_DECODE_ONLY")
    assert recorded.tokens == eager.tokens
    assert [bucket.size for bucket in recorded.core.worker._recorder.recorded] == [4, 3, 2, 1]


def test_memory_is_planned_from_the_utilization(folders):
    driver = run(folders["llama"], "cuda", kv_cache_memory=None, gpu_memory_utilization=0.1)
    info = driver.core.worker.info()
    assert info["device"] == "cuda" and info["loop"] == "overlapped"
    assert info["kv_cache_bytes"] > 0
