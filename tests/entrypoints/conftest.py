import json
from collections.abc import Iterator

import httpx
import pytest

from tests.helpers.fake_engine import FakeEngine
from tests.helpers.live_server import LiveServer


@pytest.fixture(scope="session")
def shared_server() -> Iterator[LiveServer]:
    server = LiveServer(FakeEngine(), served_model_name="fake")
    yield server
    server.stop()


@pytest.fixture
def server(shared_server: LiveServer) -> LiveServer:
    """A running server whose engine has its defaults again."""
    engine, fresh = shared_server.engine, FakeEngine()
    names = (
        "script",
        "step_s",
        "tokens_per_step",
        "max_queue",
        "num_cached_tokens",
        "fail_with",
        "is_paused",
    )
    for name in names:
        setattr(engine, name, getattr(fresh, name))
    engine.requests.clear()
    engine.priorities.clear()
    engine.guides.clear()
    engine.aborted.clear()
    return shared_server


@pytest.fixture
def engine(server: LiveServer) -> FakeEngine:
    return server.engine


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=10) as client:
        yield client
        server.engine.is_paused = False
        # Whatever a test did, the server still serves.
        answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert answer.status_code in (200, 429), answer.text


def events(text: str) -> list[dict]:
    """The JSON of each event of a complete stream; checks its form and end."""
    frames = text.split("\n\n")
    assert frames.pop() == "" and frames.pop() == "data: [DONE]", text[-200:]
    assert all(frame.startswith("data: {") and "\n" not in frame for frame in frames)
    return [json.loads(frame[6:]) for frame in frames]


@pytest.fixture
def stream(http: httpx.Client):
    """Post a streamed request; its events."""

    def post(path: str, **body: object) -> list[dict]:
        answer = http.post(path, json={**body, "stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        return events(answer.text)

    return post
