"""The ``openai`` package, unchanged, against the server."""

import asyncio

import openai
import pytest

from tests.helpers.fake_engine import EOS, ids_of

USER_HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(client):
    answer = client.chat.completions.create(
        model="fake", messages=USER_HI, logprobs=True, top_logprobs=2, seed=1
    )
    choice = answer.choices[0]
    assert choice.message.content == "Hello, world" and choice.finish_reason == "stop"
    assert choice.logprobs.content[0].top_logprobs[0].token == "H"
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_stream(client):
    chunks = list(
        client.chat.completions.create(
            model="fake", messages=USER_HI, stream=True, stream_options={"include_usage": True}, max_tokens=5
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 5 and chunks[-1].choices == []


def test_completions(client, engine):
    engine.script = lambda prompt, index: [*ids_of(f"{prompt[-1]}"), EOS]
    answer = client.completions.create(model="fake", prompt=["a", "b"], n=2, logprobs=1, max_tokens=4)
    assert [c.text for c in answer.choices] == ["97", "97", "98", "98"]
    assert answer.choices[0].logprobs.tokens[:2] == ["9", "7"]
    texts = [c.choices[0].text for c in client.completions.create(model="fake", prompt="a", stream=True)]
    assert "".join(texts) == "97"


def test_models_and_errors(client):
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "atom"
    with pytest.raises(openai.BadRequestError) as info:
        client.chat.completions.create(model="fake", messages=USER_HI, temperature=200)
    assert info.value.param == "temperature" and info.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt", messages=USER_HI)
    with pytest.raises(openai.BadRequestError, match="audio"):
        client.chat.completions.create(model="fake", messages=USER_HI, modalities=["text", "audio"])


def test_queue_full_is_the_clients_rate_limit_error(client, engine):
    engine.max_queue = 0
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="fake", messages=USER_HI)


def test_error_inside_a_stream_is_raised(client, engine):
    engine.fail_with = "the sampler met NaN"
    with pytest.raises(openai.APIError, match="NaN"):
        list(client.chat.completions.create(model="fake", messages=USER_HI, stream=True))


def test_async_client(server):
    async def ask() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
            plain = await client.chat.completions.create(model="fake", messages=USER_HI)
            parts = []
            async for chunk in await client.chat.completions.create(
                model="fake", messages=USER_HI, stream=True
            ):
                parts.append(chunk.choices[0].delta.content or "")
        return plain.choices[0].message.content, "".join(parts)

    assert asyncio.run(ask()) == ("Hello, world", "Hello, world")


def test_async_client_that_cancels_is_aborted(server, engine):
    engine.script, engine.step_s = lambda prompt, index: ids_of("z" * 200), 0.02

    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
            request = client.chat.completions.create(model="fake", messages=USER_HI)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(request, 0.2)
            await asyncio.sleep(0.2)
        assert len(engine.aborted) == 1 and not engine.running

    asyncio.run(ask())
