"""``client.responses`` of the ``openai`` package, unchanged, against the server."""

import asyncio
import json

import openai
import pytest
from pydantic import BaseModel

from tests.entrypoints.test_chat_tools import TEMPLATE, TWO_CALLS, prompt_of, says
from tests.entrypoints.test_responses import CALL, LOGPROBS, TOOLS, WEATHER
from tests.helpers.fake_engine import FakeEngine, ids_of
from tests.helpers.live_server import LiveServer, wait_for


class City(BaseModel):
    name: str
    people: int


@pytest.fixture(scope="module")
def shared_server():
    server = LiveServer(FakeEngine(chat_template=TEMPLATE, max_model_len=4096), served_model_name="fake")
    yield server
    server.stop()


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_create(client, engine):
    response = client.responses.create(
        model="fake",
        input="hi",
        instructions="Be brief.",
        include=[LOGPROBS],
        top_logprobs=2,
        metadata={"a": "b"},
    )
    assert response.output_text == "Hello, world" and response.status == "completed"
    assert response.output[0].content[0].logprobs[0].top_logprobs[0].token == "H"
    assert response.metadata == {"a": "b"} and response.instructions == "Be brief."
    usage = response.usage
    assert usage.input_tokens_details.cached_tokens == 0 and usage.total_tokens == usage.input_tokens + 13
    counted = client.responses.input_tokens.count(model="fake", input="hi", instructions="Be brief.")
    assert counted.input_tokens == usage.input_tokens


def test_stream(client, engine):
    engine.script, engine.tokens_per_step = says("<think>hm</think>Hello"), 3
    events = list(client.responses.create(model="fake", input="hi", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    texts = {"reasoning": "", "output": ""}
    for event in events:
        if event.type == "response.reasoning_text.delta":
            texts["reasoning"] += event.delta
        elif event.type == "response.output_text.delta":
            texts["output"] += event.delta
    assert texts == {"reasoning": "hm", "output": "Hello"}
    last = events[-1]
    assert last.type == "response.completed" and last.response.output_text == "Hello"
    assert last.response.output[0].content[0].text == "hm"
    assert last.response.usage.output_tokens_details.reasoning_tokens == len("<think>hm</think>")


@pytest.mark.parametrize("tokens_per_step", [1, 7, 1000])
def test_streamed_tools_and_the_next_turn(client, engine, tokens_per_step):
    engine.script, engine.tokens_per_step = says("<think>hm</think>" + TWO_CALLS), tokens_per_step
    with client.responses.stream(model="fake", input="hi", tools=TOOLS) as stream:
        snapshots = [e.snapshot for e in stream if e.type == "response.function_call_arguments.delta"]
        response = stream.get_final_response()
    calls = [item for item in response.output if item.type == "function_call"]
    assert json.loads(snapshots[-1]) == {} and [call.name for call in calls] == ["weather", "clock"]
    assert json.loads(calls[0].arguments) == {"city": "Brno", "x": {"b": 1}}
    assert response.output_text.strip() == "Let me see."
    engine.script = says("Warm")
    results = [{"type": "function_call_output", "call_id": c.call_id, "output": "21"} for c in calls]
    history = [{"role": "user", "content": "hi"}, *response.output, *results]
    answer = client.responses.create(model="fake", input=history, tools=TOOLS, store=False)
    assert answer.output_text == "Warm" and answer.store is False
    assert prompt_of(engine).count("]21#") == 2 and "~hm~" in prompt_of(engine)


def test_a_forced_call(client, engine):
    engine.script = says('<tool_call>\n{"name": "weather", "arguments": {"city": "Brno"}}\n</tool_call>')
    choice = {"type": "function", "name": "weather"}
    response = client.responses.create(model="fake", input="hi", tools=TOOLS, tool_choice=choice)
    assert [(item.type, item.name) for item in response.output] == [("function_call", "weather")]
    assert json.loads(response.output[0].arguments) == {"city": "Brno"} and engine.guides[0].tags
    assert response.tool_choice.name == "weather" and response.tools[0].name == WEATHER["name"]


def test_structured_output_is_parsed(client, engine):
    engine.script = says('{"name": "Brno", "people": 400000}')
    response = client.responses.parse(model="fake", input="A city.", text_format=City)
    assert response.output_parsed == City(name="Brno", people=400000)
    assert engine.guides[0].kind == "json_schema" and "people" in engine.guides[0].text
    with client.responses.stream(model="fake", input="A city.", text_format=City) as stream:
        done = [event for event in stream if event.type == "response.output_text.done"]
        assert stream.get_final_response().output_parsed == done[0].parsed == City(name="Brno", people=400000)


def test_an_answer_that_is_cut(client):
    response = client.responses.create(model="fake", input="hi", max_output_tokens=3)
    assert response.output_text == "Hel" and response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    last = list(client.responses.create(model="fake", input="hi", max_output_tokens=3, stream=True))[-1]
    assert last.type == "response.incomplete"


def test_errors(client, engine):
    with pytest.raises(openai.BadRequestError) as info:
        client.responses.create(model="fake", input="hi", previous_response_id="resp_1")
    assert info.value.param == "previous_response_id" and info.value.code == "unsupported"
    with pytest.raises(openai.NotFoundError, match="gpt"):
        client.responses.create(model="gpt", input="hi")
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="stored responses"):
            ask("resp_1")
    engine.max_queue = 0
    with pytest.raises(openai.RateLimitError):
        client.responses.create(model="fake", input="hi", stream=True)
    engine.max_queue, engine.fail_with = 10_000, "the sampler met NaN"
    last = list(client.responses.create(model="fake", input="hi", stream=True))[-1]
    assert last.type == "response.failed" and "NaN" in last.response.error.message


def test_async_client(server, engine):
    async def ask() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
            plain = await client.responses.create(model="fake", input="hi")
            async with client.responses.stream(model="fake", input="hi") as stream:
                pieces = [e.delta async for e in stream if e.type == "response.output_text.delta"]
                assert (await stream.get_final_response()).output_text == "".join(pieces)
        return plain.output_text, "".join(pieces)

    assert asyncio.run(ask()) == ("Hello, world", "Hello, world")


def test_async_client_that_cancels_is_aborted(server, engine):
    engine.script, engine.step_s = lambda prompt, index: ids_of("z" * 200), 0.02

    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(client.responses.create(model="fake", input="hi"), 0.2)

    asyncio.run(ask())
    assert wait_for(lambda: len(engine.aborted) == 1 and not engine.running)


def test_parallel_calls_can_be_refused(client, engine):
    engine.script = says(CALL + CALL)
    asked = {"model": "fake", "input": "hi", "tools": TOOLS}
    assert len(client.responses.create(**asked).output) == 2
    assert len(client.responses.create(**asked, parallel_tool_calls=False).output) == 1
