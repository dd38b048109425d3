"""Servers that the cases share, each started once and checked after every case."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.server_process import ServerProcess
from tests.helpers.tiny_model import CHAT_TEMPLATE, EOS_ID, TURN_ID, make_tiny_model

CONTEXT = 512  # of the tiny model
SCRIPTED_CONTEXT = 65536
PACED = {"runner_qualname": "tests.helpers.scripted_workers.PacedWorker"}

# Forbids two turns of one role in a row, in its own words.
ALTERNATING_TEMPLATE = (
    "{% for message in messages %}"
    "{% if not loop.first and message.role == loop.previtem.role %}"
    "{{ raise_exception('roles must alternate, got two of ' + message.role) }}{% endif %}"
    "{{ message.role }}: {{ message.content }};{% endfor %}"
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A model whose answers end at two ids, as chat models' do."""
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), chat_template=CHAT_TEMPLATE)
    generation = {"eos_token_id": [EOS_ID, TURN_ID], "temperature": 0.5}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.fixture(scope="session")
def echo_model(tmp_path_factory) -> Path:
    """The same with one end id, for the worker that answers with the prompt."""
    return make_tiny_model(tmp_path_factory.mktemp("echo"))


@pytest.fixture(scope="session")
def model_server(tiny_model) -> Iterator[ServerProcess]:
    server = ServerProcess(tiny_model)
    yield server
    server.kill()


@pytest.fixture(scope="session")
def echo_server(echo_model) -> Iterator[ServerProcess]:
    server = start_echo_server(echo_model)
    yield server
    server.kill()


def start_echo_server(model: Path) -> ServerProcess:
    """A server that answers with the prompt, a token each 2 ms."""
    flags = ("--max-model-len", str(SCRIPTED_CONTEXT), "--chat-template", ALTERNATING_TEMPLATE)
    flags += ("--max-consecutive-prefill-steps", "1")  # what a real model has on the CPU
    return ServerProcess(model, *flags, fields={**PACED, "num_kvcache_blocks": 8192})


@pytest.fixture
def server(model_server: ServerProcess) -> Iterator[ServerProcess]:
    """The tiny model; sound again after the case."""
    yield model_server
    model_server.check_sound()


@pytest.fixture
def echo(echo_server: ServerProcess) -> Iterator[ServerProcess]:
    """Answers with the prompt, token by token; sound again after the case."""
    yield echo_server
    echo_server.check_sound()
