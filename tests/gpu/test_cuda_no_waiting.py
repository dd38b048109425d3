"""No step waits for the device: launching and sampling, in every graph mode, for every kind of request.

Each engine answers the same prompts twice, whole and in chunks, several to a step: once to compile and load what it
needs, then with PyTorch set to raise where it would wait.
"""

from dataclasses import dataclass

import pytest

from atom.config import Config
from atom.sampling_params import SamplingParams
from tests.helpers.core_driver import CoreDriver
from tests.helpers.no_waiting import steps_that_wait_raise
from tests.helpers.tiny_model import make_tiny_model

pytestmark = pytest.mark.gpu

PROMPTS = [[(i * 37 + j * 11) % 250 + 1 for j in range(5 + 31 * i)] for i in range(1, 8)]
KINDS = {
    "greedy": {},
    "seed": dict(temperature=0.8, seed=3),
    "top-k, top-p, min-p": dict(temperature=0.9, seed=4, top_k=20, top_p=0.9, min_p=0.01),
    "penalties": dict(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.1),
    "bias": dict(logit_bias={7: 5.0, 9: -100.0}),
    "bad words": {},
    "least length": dict(min_tokens=6),
    "log-probabilities": dict(logprobs=3, prompt_logprobs=2),
}


@dataclass
class Engine:
    driver: CoreDriver
    num_runs: int = 0

    def answers(self, params, **fields) -> list[list[int]]:
        """Of all prompts, none of which it has cached."""
        driver = self.driver
        driver.core.scheduler.clear_prefix_cache()
        ids = range(100 * self.num_runs, 100 * self.num_runs + len(PROMPTS))
        self.num_runs += 1
        driver.add(dict(zip(ids, PROMPTS, strict=True)), params, **fields)
        driver.run()
        driver.check_idle()
        return [driver.tokens[i] for i in ids]


@pytest.fixture(scope="module", params=["NONE", "FULL", "TR_HYBRID", "modules"])
def engine(request, tmp_path_factory):
    """In bf16, where a decode step is fused; "modules" in fp32, where it is not."""
    has_modules = request.param == "modules"
    config = Config.build(
        str(make_tiny_model(tmp_path_factory.mktemp("models"), "qwen3")),
        device="cuda",
        dtype="float32" if has_modules else "bfloat16",
        prefix_hash_seed=1,
        max_num_batched_tokens=96,
        max_num_seqs=6,
        kv_cache_memory=2**24,
        compilation_config={
            "level": 0,
            "cudagraph_mode": "FULL" if has_modules else request.param,
            "cudagraph_capture_sizes": (1, 2, 4, 6),
        },
    )
    driver = CoreDriver(config)
    assert (driver.core.worker.model.fused is None) == has_modules
    return Engine(driver)


@pytest.mark.parametrize("kind", KINDS)
def test_launching_and_sampling_wait_for_nothing(engine, kind):
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 12} | KINDS[kind]))
    fields = {}
    if kind == "bad words":  # what would be said, so that bans depend on the ids just sampled
        plain = engine.answers(params)
        fields["bad_word_ids"] = [ids[3:5] for ids in plain] + [plain[0][8:9]]
    if kind == "least length":
        fields["stop_ids"] = list(range(0, 320, 3))
    first = engine.answers(params, **fields)
    if kind == "bad words":
        assert first != plain
    with steps_that_wait_raise():
        assert engine.answers(params, **fields) == first
