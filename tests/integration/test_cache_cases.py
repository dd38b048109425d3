"""Prefix cache, preemption and memory of users' cases."""

import concurrent.futures
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.helpers.server_process import ROOT, ServerProcess, text_of
from tests.helpers.tiny_model import NUM_BYTES, TOKENIZER_SIZE

# Answers of ASCII alone: their text can be a prompt again, token for token.
ASCII_ONLY = dict.fromkeys(range(128, TOKENIZER_SIZE), -100)
GREEDY = {"temperature": 0, "ignore_eos": True, "logit_bias": ASCII_ONLY}
NUM_BLOCKS, BLOCK_BYTES = 12, 8192
SMALL_CONTEXT = 160


def ask(server: ServerProcess, prompt: str, salt: str, **body) -> tuple[dict, int]:
    """The choice, and how many tokens of the prompt came from the cache."""
    answer = server.post(prompt=prompt, cache_salt=salt, **{**GREEDY, **body})
    assert answer.status_code == 200, answer.text
    answer = answer.json()
    return answer["choices"][0], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_P1_a_warm_answer_equals_the_cold_one(server):
    prompt = "The same question as always, long enough for a few blocks of the cache. " * 2
    answers = [ask(server, prompt, "p1", max_tokens=48, logprobs=2) for _ in range(5)]
    (cold, num_cold), *warm = answers
    assert num_cold == 0
    for choice, num_cached in warm:
        assert num_cached > 100
        assert choice["text"] == cold["text"]
        assert choice["logprobs"]["tokens"] == cold["logprobs"]["tokens"]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(
            cold["logprobs"]["token_logprobs"], abs=1e-3
        )


@pytest.mark.parametrize("streamed", [False, True])
def test_P2_a_stop_string_leaves_nothing_in_the_cache_that_was_not_answered(server, streamed):
    prompt = "A prompt that is continued further than its first reader wanted: "
    whole = ask(server, prompt, f"p2 cold {streamed}".replace(" ", "-"), max_tokens=100)[0]["text"]
    # Stops where this answer has the text first, so that the tokens up to it are known.
    stop = next(whole[i : i + 3] for i in range(40, 90) if whole.index(whole[i : i + 3]) == i)
    salt = f"p2-{streamed}"
    body = {"prompt": prompt, "cache_salt": salt, **GREEDY, "max_tokens": 100, "stop": [stop]}
    if streamed:
        server.read_stream(**body)
    else:
        assert server.text(**body) == whole[: whole.index(stop)]
    metrics = server.wait_until_idle()
    assert metrics["cache_integrity_faults_total"] == 0
    # The cache may know the prompt and the answer up to the stop, not what was computed behind it.
    longer = prompt + whole + " and more"
    for text in (prompt, longer):
        num_known = 1 + len(prompt) + whole.index(stop) + len(stop)
        cold, num_cold = ask(server, text, f"{salt}-cold-{len(text)}", max_tokens=60, logprobs=2)
        warm, num_warm = ask(server, text, salt, max_tokens=60, logprobs=2)
        assert num_cold == 0 < num_warm <= num_known
        assert warm["text"] == cold["text"]
        assert warm["logprobs"]["token_logprobs"] == pytest.approx(
            cold["logprobs"]["token_logprobs"], abs=1e-3
        )


@pytest.fixture(scope="module")
def small_server(tiny_model) -> Iterator[ServerProcess]:
    """A cache of 12 blocks: one request of the whole context and little more."""
    flags = ("--kv-cache-memory", str(NUM_BLOCKS * BLOCK_BYTES), "--max-model-len", str(SMALL_CONTEXT))
    server = ServerProcess(tiny_model, *flags)
    assert server.metrics()["kv_cache_blocks_total"] == NUM_BLOCKS
    yield server
    server.kill()


def test_L3_prompt_logprobs_survive_chunks_and_preemption(tiny_model, server):
    flags = ("--kv-cache-memory", str(NUM_BLOCKS * BLOCK_BYTES), "--max-model-len", str(SMALL_CONTEXT))
    small = ServerProcess(tiny_model, *flags, "--max-num-batched-tokens", "16")
    prompts = [f"{i}: a prompt that comes in several chunks, and its answer" for i in range(6)]
    bodies = [{"prompt": p, "prompt_logprobs": 2, "max_tokens": 90, **GREEDY} for p in prompts]
    try:
        with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
            crowded = list(pool.map(lambda body: small.ask(**body), bodies))
        assert small.wait_until_idle()["preemptions_total"] > 0
        small.check_sound()
    finally:
        small.kill()
    for body, choice in zip(bodies, crowded, strict=True):
        alone = server.ask(**body)
        assert len(choice["prompt_logprobs"]) == len(alone["prompt_logprobs"]) > 48
        for ours, theirs in zip(choice["prompt_logprobs"][1:], alone["prompt_logprobs"][1:], strict=True):
            assert {k: v["logprob"] for k, v in ours.items()} == pytest.approx(
                {k: v["logprob"] for k, v in theirs.items()}, abs=1e-3
            )
        assert choice["text"] == alone["text"]


def run_both(small: ServerProcess, roomy: ServerProcess, bodies: list[dict], max_preemptions: int) -> None:
    """All requests at once in the small cache, one after another in the roomy one: the same answers."""
    before = small.wait_until_idle()["preemptions_total"]
    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda body: small.post(**body), bodies))
    preemptions = small.wait_until_idle()["preemptions_total"] - before
    small.check_sound()
    for body, answer in zip(bodies, answers, strict=True):
        expected = roomy.post(**body).json()
        answer = answer.json()
        assert answer["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
        for choice, other in zip(answer["choices"], expected["choices"], strict=True):
            assert choice["finish_reason"] == other["finish_reason"]
            assert text_of(choice) == text_of(other)
    assert 0 < preemptions <= max_preemptions, preemptions


def test_P3_preempted_requests_finish_with_the_same_text(small_server, server):
    bodies = [
        {"prompt": f"request {i} of six, not short", "max_tokens": 120, "temperature": 0, "ignore_eos": True}
        for i in range(6)
    ]
    run_both(small_server, server, bodies, max_preemptions=24)


def test_P3_a_shared_prefix_is_found_again_after_a_preemption(small_server, server):
    shared = "All six begin with these same sixty-four characters, which cached: "
    bodies = [
        {"prompt": f"{shared}{i}", "max_tokens": 80, "temperature": 0, "ignore_eos": True} for i in range(6)
    ]
    run_both(small_server, server, bodies, max_preemptions=24)


def test_P4_two_answers_each_progress_and_complete(small_server, server):
    bodies = [
        {
            "prompt": f"request {i}",
            "max_tokens": 130,
            "temperature": 1.0,
            "seed": i,
            "n": 2,
            "ignore_eos": True,
            "logit_bias": dict.fromkeys(range(NUM_BYTES, TOKENIZER_SIZE), -100),
        }
        for i in range(6)
    ]
    run_both(small_server, server, bodies, max_preemptions=48)


CYCLES = '''
import json, sys, time
import psutil
from atom import LLMEngine, SamplingParams

me = psutil.Process()
params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
cycles = []

def num_threads():
    """A joined thread is done for Python a moment before it is for the system."""
    found = []
    while len(found) < 20 and (not cycles or min(found, default=99) > cycles[0]["threads"]):
        time.sleep(0.02)
        found.append(me.num_threads())
    return min(found, default=0)

for _ in range(5):
    with LLMEngine(sys.argv[1], device="cpu", num_threads=1, in_process=sys.argv[2] == "True") as engine:
        text = engine.generate("again and again", params, use_tqdm=False)[0]["text"]
    cycles.append({"text": text, "children": len(me.children()), "rss": me.memory_info().rss,
                   "threads": num_threads(), "files": me.num_fds()})
print(json.dumps(cycles))
'''


@pytest.mark.parametrize("in_process", [False, True])
def test_M4_closed_engines_leave_nothing(tiny_model, in_process):
    command = [sys.executable, "-c", CYCLES, str(tiny_model), str(in_process)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, *others = json.loads(done.stdout)
    for cycle in others:
        assert cycle["text"] == first["text"]
        assert cycle["children"] == 0
        assert cycle["rss"] < 1.05 * first["rss"]
        assert cycle["threads"] <= first["threads"] and cycle["files"] <= first["files"]
