"""The ``openai`` package, unchanged, against a base model."""

import asyncio
import json
from collections.abc import Iterator
from typing import Literal

import openai
import pydantic
import pytest

from tests.clients.conftest import CONTEXT, MODEL
from tests.helpers.server_process import ServerProcess

pytestmark = pytest.mark.real_model

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
# A base model goes on with the next question when it has answered one.
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 12, "stop": ["\nUser:"]}
# A model that was not told what the JSON looks like may write white space for long, which JSON allows.
AS_JSON = 'Describe %s as JSON: {"country": ..., "is_capital": ..., "districts": ...}'
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Rome"]},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


class City(pydantic.BaseModel):
    country: Literal["France", "Italy"]
    is_capital: bool
    districts: Literal[1, 20, 300]


@pytest.fixture
def client(demo: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=demo.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def async_client(demo: ServerProcess) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=demo.url + "/v1", api_key="none", max_retries=0)


def test_the_model_is_listed(client):
    assert [model.id for model in client.models.list()] == [MODEL]


def test_completion_with_logprobs(client):
    answer = client.completions.create(
        model=MODEL, prompt="France: Paris\nItaly: Rome\nJapan:", temperature=0, max_tokens=4, logprobs=2
    )
    choice = answer.choices[0]
    assert choice.text.startswith(" Tokyo") and choice.finish_reason == "length"
    assert "".join(choice.logprobs.tokens) == choice.text
    for token, value, top in zip(
        choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True
    ):
        assert top[token] == value == max(top.values()) <= 0
    assert answer.usage.completion_tokens == 4


def test_chat_streamed_and_plain_say_the_same(client):
    plain = client.chat.completions.create(messages=QUESTION, **GREEDY)
    chunks = list(
        client.chat.completions.create(
            messages=QUESTION, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == plain.choices[0].message.content and text.strip()
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    assert chunks[-2].choices[0].finish_reason == plain.choices[0].finish_reason


def test_async_clients_at_once(async_client):
    async def stream(city: str) -> tuple[str, int]:
        chunks = await async_client.completions.create(
            model=MODEL,
            prompt=f"{city} is a city in",
            temperature=0,
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        text, num_tokens = "", 0
        async for chunk in chunks:
            text += "".join(choice.text for choice in chunk.choices)
            num_tokens = chunk.usage.completion_tokens if chunk.usage else num_tokens
        return text, num_tokens

    async def ask_all() -> list:
        async with async_client:
            plain = async_client.chat.completions.create(messages=QUESTION, n=2, **GREEDY)
            return await asyncio.gather(plain, *map(stream, ("Paris", "Rome", "Berlin", "Madrid")))

    plain, *streams = asyncio.run(ask_all())
    assert [choice.index for choice in plain.choices] == [0, 1]
    assert all(text and num_tokens == 8 for text, num_tokens in streams)
    assert len({text for text, _ in streams}) == 4


def test_stream_that_is_closed_early_ends_at_the_server(client, demo):
    long = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": CONTEXT - 8}
    with client.completions.create(**long, stream=True, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))
    demo.wait_until_idle(2)


def test_forced_tool_call_and_its_result(client):
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Weather in Paris?"}],
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=64,
    )
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls" and len(message.tool_calls) == 1
    call = message.tool_calls[0].function
    assert call.name == "weather" and set(json.loads(call.arguments)) == {"city", "unit"}
    messages = [
        {"role": "user", "content": "Weather in Paris?"},
        message,
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "21 degrees"},
    ]
    last = client.chat.completions.create(messages=messages, tools=[WEATHER], **GREEDY)
    assert last.choices[0].message.content


def test_streamed_tool_call_through_the_helper(client):
    with client.chat.completions.stream(
        model=MODEL,
        messages=[{"role": "user", "content": "Weather in Rome, in celsius?"}],
        tools=[{**WEATHER, "function": {**WEATHER["function"], "strict": True}}],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        temperature=0,
        max_tokens=64,
    ) as stream:
        kinds = {event.type for event in stream}
        call = stream.get_final_completion().choices[0].message.tool_calls[0].function
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert call.parsed_arguments["unit"] in ("celsius", "fahrenheit")


def test_structured_output_is_parsed(client):
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": AS_JSON % "Paris"}],
        response_format=City,
        temperature=0,
        max_tokens=96,
    )
    city = answer.choices[0].message.parsed
    assert isinstance(city, City) and answer.choices[0].finish_reason == "stop"


def test_structured_output_async_and_streamed(async_client):
    async def ask() -> City | None:
        async with async_client:
            async with async_client.chat.completions.stream(
                model=MODEL,
                messages=[{"role": "user", "content": AS_JSON % "Rome"}],
                response_format=City,
                temperature=0,
                max_tokens=96,
            ) as stream:
                async for _ in stream:
                    pass
                return (await stream.get_final_completion()).choices[0].message.parsed

    assert isinstance(asyncio.run(ask()), City)


def test_errors_are_the_packages_own(client):
    with pytest.raises(openai.BadRequestError) as info:
        client.completions.create(model=MODEL, prompt="x", max_tokens=CONTEXT)
    assert info.value.code == "context_length_exceeded" and str(CONTEXT) in info.value.message
    with pytest.raises(openai.NotFoundError, match="gpt"):
        client.chat.completions.create(model="gpt", messages=QUESTION)
