"""The ``anthropic`` package, unchanged, against a base model."""

import asyncio
from collections.abc import Iterator

import anthropic
import pytest

from tests.clients.conftest import MODEL
from tests.helpers.server_process import ServerProcess

pytestmark = pytest.mark.real_model

ASK = {
    "model": MODEL,
    "max_tokens": 12,
    "system": "Answer in one word.",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "stop_sequences": ["\nUser:"],
    "extra_body": {"temperature": 0},  # which the package itself does not know any more
}
WEATHER = {
    "name": "weather",
    "description": "Weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def client(demo: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=demo.url, api_key="none", max_retries=0) as client:
        yield client


def test_message_and_count(client):
    answer = client.messages.create(**ASK)
    assert answer.content[0].type == "text" and answer.content[0].text
    assert answer.stop_reason in ("max_tokens", "stop_sequence", "end_turn") and answer.model == MODEL
    counted = client.messages.count_tokens(model=MODEL, system=ASK["system"], messages=ASK["messages"])
    assert counted.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens


def test_stream_says_what_the_plain_answer_says(client):
    plain = client.messages.create(**ASK)
    with client.messages.stream(**ASK) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == plain.content[0].text
    assert final.stop_reason == plain.stop_reason
    assert final.usage.output_tokens == plain.usage.output_tokens


def test_forced_tool_and_its_result(client):
    question = {"role": "user", "content": "Weather in Paris?"}
    ask = {**ASK, "max_tokens": 64, "messages": [question], "tools": [WEATHER]}
    answer = client.messages.create(**ask, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    call = answer.content[-1]
    assert answer.stop_reason == "tool_use" and call.type == "tool_use" and call.name == "weather"
    assert call.input["city"] in ("Paris", "Rome")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "21 degrees"}
    messages = [question, {"role": "assistant", "content": answer.content}]
    last = client.messages.create(**{**ask, "messages": [*messages, {"role": "user", "content": [result]}]})
    assert last.content


def test_structured_output(client):
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["capital"],
        "additionalProperties": False,
    }
    ask = {**ASK, "max_tokens": 48}
    answer = client.messages.create(
        **ask, output_config={"format": {"type": "json_schema", "schema": schema}}
    )
    assert answer.content[0].text.replace(" ", "").replace("\n", "") in (
        '{"capital":"Paris"}',
        '{"capital":"Rome"}',
    )


def test_async_streams_at_once(demo):
    async def ask_all() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=demo.url, api_key="none", max_retries=0) as client:

            async def ask(city: str) -> str:
                message = {"role": "user", "content": f"Where is {city}?"}
                async with client.messages.stream(**{**ASK, "messages": [message]}) as stream:
                    text = "".join([piece async for piece in stream.text_stream])
                    assert (await stream.get_final_message()).usage.output_tokens > 0
                    return text

            return await asyncio.gather(*map(ask, ("Paris", "Rome", "Berlin")))

    assert all(asyncio.run(ask_all()))


def test_errors_are_the_packages_own(client):
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**{**ASK, "max_tokens": 2000})
    with pytest.raises(anthropic.BadRequestError, match="image"):
        source = {"type": "base64", "media_type": "image/png", "data": ""}
        image = {"role": "user", "content": [{"type": "image", "source": source}]}
        client.messages.create(**{**ASK, "messages": [image]})
