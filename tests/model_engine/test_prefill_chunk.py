"""How long a prefill step the CPU takes by default."""

import pytest

from atom.config import Config
from atom.model_engine.model_runner import ModelRunner
from tests.helpers.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=65536)


def chunk_tokens(folder, **fields) -> int:
    fields = {"device": "cpu", "num_threads": 2, "kv_cache_memory": "64MiB", "max_num_seqs": 16, **fields}
    runner = ModelRunner(Config.build(str(folder), **fields))
    runner.load(lambda phase, fraction: None)
    return runner.scheduler_config().max_num_batched_tokens


def test_a_long_context_shortens_the_default_step(folder):
    """Attention to 65,536 tokens costs a hundred times the weights of this model."""
    assert 256 <= chunk_tokens(folder) <= 2048
    assert chunk_tokens(folder, max_model_len=512) > 16384


def test_a_step_that_was_asked_for_is_taken(folder):
    assert chunk_tokens(folder, max_num_batched_tokens=8192) == 8192
