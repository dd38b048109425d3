"""``--deterministic``: a request's tokens and log-probabilities, bit by bit, whatever happens around it."""

import random
import struct

import pytest

from atom.config import Config
from atom.errors import ConfigError
from atom.kernels.cpu.native import library as native
from atom.model_engine.runner import determinism
from atom.sampling_params import SamplingParams
from tests.helpers.core_driver import CoreDriver
from tests.helpers.tiny_gguf import write_gguf
from tests.helpers.tiny_model import make_tiny_model

needs_native = pytest.mark.skipif(native.native_library() is None, reason="needs the native library")

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, logprobs=3, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=5, max_tokens=24, logprobs=0, ignore_eos=True)
PLAIN = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)  # the best id, and no logits
IDS = [(7 * i * i + 13 * i) % 250 + 1 for i in range(700)]
PROBE, PROMPT = 1000, IDS[:150]
LONG = IDS[:620]  # crosses a span of the attention

# Fields of the engine by the format of the weights.
FORMATS = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "cpu_weights": "int8"},
    "int8_a8, int8 head": {"dtype": "bfloat16", "cpu_weights": "int8_a8", "lm_head_dtype": "int8"},
    "int4": {"dtype": "bfloat16", "cpu_weights": "int4"},
    "gguf": {"gguf_dtype": "keep"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "max_position_embeddings": 2048}
    vocabularies = {"gemma3": 2048, "qwen3": 320}  # sampled by native kernels, and by the reference
    made = {
        name: make_tiny_model(root / name, name, vocab_size=size, **sizes)
        for name, size in vocabularies.items()
    }
    return made | {"gguf": write_gguf(made["qwen3"], root / "q8.gguf", "Q8_0")}


def new_driver(folder, **fields) -> CoreDriver:
    fields = {"kv_cache_memory": 2**24, "prefix_hash_seed": 1, "num_threads": 2, **fields}
    return CoreDriver(Config.build(str(folder), deterministic=True, device="cpu", **fields))


def bits(driver: CoreDriver, seq_id: int) -> tuple[list[int], list[bytes], list[list[int]]]:
    """Ids, the bits of every log-probability, and the alternatives of a request."""
    scores = [score for event in driver.events.get(seq_id, ()) for score in event.logprobs or ()]
    packed = [
        struct.pack(f"{1 + len(score.top_logprobs)}d", score.logprob, *score.top_logprobs) for score in scores
    ]
    return driver.tokens[seq_id], packed, [list(score.top_ids) for score in scores]


def ask(driver: CoreDriver, prompt, params, seq_id=PROBE):
    driver.add({seq_id: prompt}, params)
    driver.run()
    return bits(driver, seq_id)


def ask_among_others(driver: CoreDriver, prompt, params, seq_id=PROBE, seed=0):
    """As ``ask``, while seven others of all lengths come and go."""
    rng = random.Random(seed)
    arrivals = sorted((rng.randrange(12), i) for i in range(7))
    own = rng.randrange(1, 8)
    for step in range(12):
        for _, i in [arrival for arrival in arrivals if arrival[0] == step]:
            start = rng.randrange(300)
            other = rng.choice([GREEDY, SEEDED, PLAIN])
            driver.add({seq_id + 1 + i: IDS[start : start + rng.choice([1, 9, 33, 150, 301])]}, other)
        if step == own:
            driver.add({seq_id: prompt}, params)
        driver.core.step()
    driver.run()
    return bits(driver, seq_id)


@needs_native
@pytest.mark.parametrize("name", FORMATS)
def test_P1_cold_and_warm_answers_are_equal(folders, name):
    folder = folders["gguf" if name == "gguf" else "gemma3"]
    alone = ask(new_driver(folder, enable_prefix_caching=False, **FORMATS[name]), PROMPT, GREEDY)
    assert len(alone[0]) == len(alone[1]) == 24
    driver = new_driver(folder, **FORMATS[name])
    answers = [ask(driver, PROMPT, GREEDY, PROBE + i) for i in range(5)]  # as the case has it
    cached = [driver.events[PROBE + i][0].num_cached_tokens for i in range(5)]
    assert cached[0] == 0 and min(cached[1:]) > 100
    assert answers == [alone] * 5
    # The next turn of a conversation: what decode steps wrote is read as a prompt's.
    turn = PROMPT + alone[0] + IDS[:5]
    warm = ask(driver, turn, GREEDY, PROBE + 10)
    assert driver.events[PROBE + 10][0].num_cached_tokens > len(PROMPT)
    assert warm == ask(new_driver(folder, **FORMATS[name]), turn, GREEDY)


@needs_native
@pytest.mark.parametrize("loop", ["plain", "overlapped"])
@pytest.mark.parametrize("name", FORMATS)
def test_P5_an_answer_does_not_depend_on_the_batch(folders, name, loop):
    folder = folders["gguf" if name == "gguf" else "gemma3"]
    drivers = [
        new_driver(folder, loop=loop, **FORMATS[name]),
        new_driver(folder, loop=loop, max_num_batched_tokens=48, **FORMATS[name]),
    ]
    alone = new_driver(folder, **FORMATS[name])
    for params in (GREEDY, SEEDED, PLAIN):
        wanted = ask(alone, PROMPT, params)
        alone.tokens.pop(PROBE), alone.events.pop(PROBE)
        for seed, driver in enumerate(drivers):
            assert ask_among_others(driver, PROMPT, params, seed=seed) == wanted
            driver.tokens.clear(), driver.events.clear()
    assert drivers[0].core.scheduler.check_integrity() == []


@needs_native
@pytest.mark.parametrize("family", ["gemma3", "qwen3"])
def test_chunks_spans_and_threads_do_not_matter(folders, family):
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    wanted = None
    for budget, num_threads in ((1024, 2), (1024, 1), (64, 2), (201, 2)):
        driver = new_driver(
            folders[family], dtype="bfloat16", max_num_batched_tokens=budget, num_threads=num_threads
        )
        found = ask(driver, LONG, params)
        scores = next(event.prompt_logprobs for event in driver.events[PROBE] if event.prompt_logprobs)
        found = *found, [struct.pack("d", score.logprob) for score in scores]
        assert wanted is None or found == wanted
        wanted = found
    assert len(wanted[-1]) == len(LONG) - 1


@needs_native
@pytest.mark.parametrize("loop", ["plain", "overlapped"])
def test_preempted_requests_answer_as_alone(folders, loop):
    params = SamplingParams(temperature=0.0, max_tokens=60, logprobs=0, ignore_eos=True)
    prompts = {i: IDS[20 * i : 20 * i + 60] for i in range(1, 7)}
    fields = {"dtype": "bfloat16", "loop": loop, "max_model_len": 128}
    driver = new_driver(folders["qwen3"], num_kvcache_blocks=20, **fields)
    driver.add(prompts, params)
    driver.run()
    assert driver.core.stats()["preemptions"] > 0
    alone = new_driver(folders["qwen3"], **fields)
    for seq_id, prompt in prompts.items():
        assert bits(driver, seq_id) == ask(alone, prompt, params, seq_id)


@pytest.mark.parametrize(
    ("fields", "platform", "message"),
    [
        ({}, "cuda", "--device cpu, got cuda"),
        ({"compilation_config": {"level": 3}}, "cpu", "--level 0, got 3"),
        ({"compilation_config": {"cudagraph_mode": "FULL"}}, "cpu", "--cudagraph-mode NONE"),
        ({"mark_trace": True}, "cpu", "no --mark-trace"),
    ],
)
def test_what_cannot_keep_it_is_refused_by_name(fields, platform, message):
    config = Config.build("m", deterministic=True, **fields)
    with pytest.raises(ConfigError, match=f"--deterministic needs {message}"):
        determinism.check_deterministic(config, platform)
    determinism.check_deterministic(config.replace(deterministic=False), platform)


def test_a_machine_without_native_kernels_refuses(monkeypatch):
    monkeypatch.setattr(determinism, "native_library", lambda: None)
    with pytest.raises(ConfigError, match="--deterministic needs the native kernels"):
        determinism.check_deterministic(Config.build("m", deterministic=True), "cpu")


@needs_native
def test_a_model_that_no_native_step_runs_is_refused(folders, monkeypatch):
    monkeypatch.setattr(
        "atom.model_ops.fused_cpu._why_not", lambda decoder: "a weight is packed for another kernel"
    )
    with pytest.raises(
        ConfigError, match="--deterministic needs steps .*a weight is packed for another kernel"
    ):
        new_driver(folders["qwen3"], dtype="float32")
