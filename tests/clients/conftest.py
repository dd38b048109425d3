"""One server with the demo model for every client, and a folder with its tokenizer for clients that want one."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from atom.model_loader.model_files import ModelFiles
from tests.helpers.server_process import ServerProcess

CHAT_TEMPLATE = Path(__file__).parent / "base_chat.jinja"
MODEL = "demo"
CONTEXT = 1024


@pytest.fixture(scope="session")
def demo_server() -> Iterator[ServerProcess]:
    """``atom serve demo`` with a chat template, which a base model does not have."""
    server = ServerProcess(MODEL, "--max-model-len", str(CONTEXT), "--chat-template", str(CHAT_TEMPLATE))
    yield server
    server.kill()


@pytest.fixture
def demo(demo_server: ServerProcess) -> Iterator[ServerProcess]:
    """The same; at rest again, with every cache block free, after the case."""
    yield demo_server
    demo_server.check_at_rest()


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory) -> Path:
    """The demo model's tokenizer as a folder that transformers reads."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = ModelFiles.resolve(MODEL).load_tokenizer()
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def offline(tmp_path) -> dict[str, str]:
    """An environment for programs of others: they may not ask the network and keep their files here."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
