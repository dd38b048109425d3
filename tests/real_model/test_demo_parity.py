"""The demo model says exactly what transformers says, however its requests are run.

Weights are the dequantised GGUF in fp32 on both sides. transformers checks a whole answer in one pass: if every
token is the arg-max after the tokens before it, greedy generation would have produced it.
"""

import pytest
import torch

from atom.config import Config
from atom.model_loader.model_files import ModelFiles
from atom.sampling_params import SamplingParams
from tests.helpers.core_driver import CoreDriver
from tests.helpers.hf_demo import load_hf_demo

pytestmark = pytest.mark.real_model

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "Water boils at 100 degrees Celsius because",
    "def fibonacci(n):\n    ",
    "Die Hauptstadt von Deutschland ist",
    "La vie est belle quand",
    "1, 1, 2, 3, 5, 8, 13,",
    "Q: What is the largest planet?\nA:",
    "The quick brown fox jumps over the lazy dog. The lazy dog",
    "こんにちは、私の名前は",
    "Шла Саша по шоссе и",
    "<html>\n<head>\n<title>",
    "Dear Sir or Madam,\n\nI am writing to",
    "SELECT name, age FROM users WHERE",
    "In 1969, the first human being",
    "To make a good omelette you need eggs, butter and",
    "E = mc^2 means that",
    "🎉 Congratulations on your",
    "The derivative of x^2 with respect to x is",
    "According to all known laws of aviation, there is no way that a bee",
]
NUM_NEW = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW)


@pytest.fixture(scope="module")
def prompts() -> dict[int, list[int]]:
    tokenizer = ModelFiles.resolve("demo").load_tokenizer()
    return {i: tokenizer.encode(text) for i, text in enumerate(PROMPTS, 1)}


def make_driver(**fields) -> CoreDriver:
    fields = {"max_num_seqs": 8, "max_model_len": 2048, "kv_cache_memory": 2**29, **fields}
    return CoreDriver(Config.build("demo", device="cpu", dtype="float32", prefix_hash_seed=1, **fields))


@pytest.fixture(scope="module")
def driver() -> CoreDriver:
    return make_driver()


@pytest.fixture(scope="module")
def alone(driver, prompts) -> dict[int, list[int]]:
    """Every answer, computed with nobody else in the batch and nothing in the cache."""
    for seq_id, ids in prompts.items():
        driver.core.scheduler.clear_prefix_cache()
        driver.add({seq_id: ids}, GREEDY)
        driver.run()
    return {seq_id: driver.tokens[seq_id] for seq_id in prompts}


def test_alone_equals_transformers(alone, prompts):
    model = load_hf_demo(torch.float32)
    wrong = []
    for seq_id, ids in prompts.items():
        answer = alone[seq_id]
        assert len(answer) == NUM_NEW
        with torch.inference_mode():
            logits = model(torch.tensor([ids + answer])).logits[0, len(ids) - 1 : -1]
        if logits.argmax(-1).tolist() != answer:
            wrong.append(PROMPTS[seq_id - 1])
    assert wrong == []


def test_batched_equals_alone(driver, alone, prompts):
    driver.core.scheduler.clear_prefix_cache()
    driver.add({100 + i: ids for i, ids in prompts.items()}, GREEDY)  # eight rows: seven others each
    driver.run()
    assert {i: driver.tokens[100 + i] for i in prompts} == alone


def test_prefix_hit_equals_cold(driver, alone, prompts):
    """A second turn: the prompt and half the answer are found in the cache."""
    keep = NUM_NEW // 2
    some = list(prompts)[::4]
    driver.add(
        {200 + i: prompts[i] + alone[i][:keep] for i in some},
        SamplingParams(temperature=0.0, max_tokens=NUM_NEW - keep),
    )
    driver.run()
    assert all(driver.events[200 + i][0].num_cached_tokens >= 16 for i in some)
    assert {i: driver.tokens[200 + i] for i in some} == {i: alone[i][keep:] for i in some}


def test_chunked_equals_whole(alone, prompts):
    """Prompt and part of the answer prefilled a few tokens at a time."""
    driver = make_driver(max_num_batched_tokens=16, max_num_seqs=4)
    keep = 40
    some = list(prompts)[::5]
    driver.add(
        {i: prompts[i] + alone[i][:keep] for i in some},
        SamplingParams(temperature=0.0, max_tokens=NUM_NEW - keep),
    )
    driver.run()
    assert {i: driver.tokens[i] for i in some} == {i: alone[i][keep:] for i in some}


@pytest.mark.parametrize("loop", ["plain", "overlapped"])
def test_preempted_equals_roomy(loop, alone, prompts):
    """So few blocks that requests are thrown out and computed again."""
    driver = make_driver(num_kvcache_blocks=12, max_model_len=128, loop=loop)
    some = list(prompts)[::3]
    driver.add({i: prompts[i] for i in some}, GREEDY)
    driver.run()
    assert driver.core.scheduler.stats()["preemptions"] > 0
    assert {i: driver.tokens[i] for i in some} == {i: alone[i] for i in some}
    driver.check_idle()
