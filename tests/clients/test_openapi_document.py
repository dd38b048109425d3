"""``schemathesis`` on the OpenAPI document: it is ours, so every 5xx and every answer it does not describe is a bug."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import positive_data_acceptance

from atom.entrypoints.openai.app import make_routes
from atom.entrypoints.openai.context import make_context
from atom.entrypoints.openai.openapi import make_document
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.live_server import LiveServer
from tests.helpers.server_process import ServerProcess

DOCUMENT = make_document([operation for operation, _ in make_routes(make_context(FakeEngine()))])
schema = schemathesis.openapi.from_dict(DOCUMENT)
STREAMING = [
    path
    for path, methods in DOCUMENT["paths"].items()
    if "post" in methods and "text/event-stream" in methods["post"]["responses"]["200"]["content"]
]
# The types in the document do not say which texts make a grammar, or how many tokens the context holds.
NOT_PROMISED = [positive_data_acceptance]
CONVERSATION = [{"role": "user", "content": "hi"}]
common = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def fake_server() -> Iterator[LiveServer]:
    server = LiveServer(FakeEngine(), served_model_name="fake")
    yield server
    server.stop()


@schema.parametrize()
@settings(common, max_examples=25)
def test_answers_are_what_the_document_says(case, fake_server):
    """Bodies after the document, and bodies against it; the latter must be refused."""
    case.call_and_validate(base_url=fake_server.url, excluded_checks=NOT_PROMISED)


def check_generation(path: str, url: str, max_examples: int) -> None:
    """Bodies of which most run: the fields that must be there, and a few others. At least one of each kind does."""
    operation = DOCUMENT["paths"][path]["post"]
    body_schema = resolve(operation["requestBody"]["content"]["application/json"]["schema"])
    limit = next(name for name in ("max_tokens", "max_output_tokens") if name in body_schema["properties"])
    seen: set[bool] = set()

    @settings(common, max_examples=max_examples)
    @given(st.data(), st.booleans())
    def run(data: st.DataObject, is_streamed: bool) -> None:
        case = data.draw(schema[path]["POST"].as_strategy())
        optional = sorted(set(case.body) - set(body_schema["required"]))
        few = data.draw(st.lists(st.sampled_from(optional), max_size=2)) if optional else []
        case.body = {name: case.body[name] for name in [*body_schema["required"], *few]}
        case.body |= {limit: 3, "stream": is_streamed}
        if "messages" in case.body:  # a role is any text in the document, for templates know different ones
            case.body["messages"] = CONVERSATION
        answer = case.call_and_validate(base_url=url, excluded_checks=NOT_PROMISED)
        if answer.status_code == 200:
            seen.add(is_streamed)

    run()
    assert seen == {False, True}, f"no body ran, streamed or not: {seen}"


def resolve(node: dict[str, Any]) -> dict[str, Any]:
    return DOCUMENT["components"]["schemas"][node["$ref"].rsplit("/", 1)[1]] if "$ref" in node else node


@pytest.mark.parametrize("path", STREAMING)
def test_generated_answers_and_events_are_what_the_document_says(path, fake_server):
    check_generation(path, fake_server.url, 60)


@pytest.mark.real_model
@pytest.mark.parametrize("path", STREAMING)
def test_the_same_with_a_real_model(path, demo: ServerProcess):
    check_generation(path, demo.url, 10)
