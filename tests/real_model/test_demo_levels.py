"""The demo model says the same at every compilation level and under every graph mode."""

import pytest

from atom.config import Config
from atom.sampling_params import SamplingParams
from tests.helpers.core_driver import CoreDriver
from tests.real_model.test_demo_parity import prompts  # noqa: F401

pytestmark = pytest.mark.real_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("compiled"))


def answers(some: dict[int, list[int]], level: int, mode: str, cache_dir: str) -> dict[int, list[int]]:
    config = Config.build(
        "demo",
        device="cpu",
        dtype="float32",
        prefix_hash_seed=1,
        max_num_seqs=4,
        max_model_len=256,
        kv_cache_memory=2**27,
        compilation_config={
            "level": level,
            "cudagraph_mode": mode,
            "cudagraph_capture_sizes": (1, 2, 4),
            "cache_dir": cache_dir,
        },
    )
    driver = CoreDriver(config)
    driver.add(some, GREEDY)
    driver.run()
    driver.check_idle()
    driver.core.close()
    return driver.tokens


@pytest.fixture(scope="module")
def eager(prompts, cache_dir):  # noqa: F811
    some = dict(list(prompts.items())[::4])
    return some, answers(some, 0, "NONE", cache_dir)


@pytest.mark.parametrize("mode", ["NONE", "FULL", "TR_HYBRID"])
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_greedy_text_does_not_depend_on_level_and_mode(eager, cache_dir, level, mode):
    some, expected = eager
    assert answers(some, level, mode, cache_dir) == expected
