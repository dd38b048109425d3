"""Anthropic's Messages API: over plain HTTP, and with the ``anthropic`` package unchanged."""

import asyncio
import json

import anthropic
import httpx
import pytest

from atom.entrypoints.openai import anthropic_protocol
from tests.entrypoints.test_chat_tools import TEMPLATE, TWO_CALLS, prompt_of, says
from tests.entrypoints.test_serving_guide import fields_of, table
from tests.helpers.fake_engine import FakeEngine, ids_of
from tests.helpers.live_server import LiveServer

PATH = "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
BODY = {"model": "any-name", "max_tokens": 400, "messages": HI}
TOOLS = [
    {"name": "weather", "description": "d", "input_schema": {"type": "object"}},
    {"name": "clock", "input_schema": {"type": "object"}},
]


@pytest.fixture(scope="module")
def message_server():
    server = LiveServer(FakeEngine(chat_template=TEMPLATE, max_model_len=4096), served_model_name="fake")
    yield server
    server.stop()


@pytest.fixture
def engine(message_server):
    engine = message_server.engine
    engine.script, engine.tokens_per_step, engine.num_cached_tokens = says("Hello"), 1, 0
    engine.max_queue, engine.fail_with = 10_000, None
    engine.requests.clear()
    engine.guides.clear()
    return engine


@pytest.fixture
def http(message_server, engine):
    with httpx.Client(base_url=message_server.url, timeout=10) as client:
        yield client


@pytest.fixture
def client(message_server, engine):
    with anthropic.Anthropic(base_url=message_server.url, api_key="none", max_retries=0) as client:
        yield client


def streamed(http: httpx.Client, **more: object) -> list[dict]:
    answer = http.post(PATH, json={**BODY, **more, "stream": True})
    assert answer.status_code == 200, answer.text
    result = []
    for frame in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        result.append(event)
    return result


def order(events: list[dict]) -> list[str]:
    """Types in order, repetitions and deltas of one kind told once."""
    names = [e.get("delta", {}).get("type", e["type"]) for e in events]
    return [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]]


def refused(http: httpx.Client, status: int = 400, path: str = PATH, **more: object) -> dict:
    answer = http.post(path, json={**BODY, **more})
    body = answer.json()
    assert answer.status_code == status and body["type"] == "error", answer.text
    assert body["request_id"] == answer.headers["request-id"]
    return body["error"]


def test_plain_answer(http, engine):
    engine.num_cached_tokens = 3
    answer = http.post(PATH, json=BODY, headers={"anthropic-version": "2023-06-01", "x-api-key": "k"})
    body = answer.json()
    prompt = len(engine.requests[-1][0])
    assert body["id"].startswith("msg_") and len(body["id"]) == 28
    assert body["content"] == [{"type": "text", "text": "Hello"}]
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", "fake")
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    assert body["usage"] == {
        "input_tokens": prompt - 3,
        "output_tokens": 6,
        "cache_read_input_tokens": 3,
        "cache_creation_input_tokens": 0,
    }
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


def test_stop_reasons(http, engine):
    cut = http.post(PATH, json={**BODY, "max_tokens": 3}).json()
    assert (cut["stop_reason"], cut["content"][0]["text"]) == ("max_tokens", "Hel")
    stopped = http.post(PATH, json={**BODY, "stop_sequences": ["lo"]}).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "lo")
    assert stopped["content"][0]["text"] == "Hel"
    last = streamed(http, stop_sequences=["lo"])[-2]
    assert last["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "lo"}


def test_an_empty_answer_has_a_block(http, engine):
    engine.script = says("")
    assert http.post(PATH, json=BODY).json()["content"] == [{"type": "text", "text": ""}]
    assert order(streamed(http))[2:4] == ["content_block_start", "content_block_stop"]


@pytest.mark.parametrize("tokens_per_step", [1, 3, 1000])
def test_stream_order_with_thinking_and_tools(http, engine, tokens_per_step):
    engine.script, engine.tokens_per_step = says("<think>hm</think>" + TWO_CALLS), tokens_per_step
    more = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "tools": TOOLS}
    plain = http.post(PATH, json={**BODY, **more})
    body = plain.json()
    assert plain.headers["x-atom-warning"] == "ignored fields: thinking.budget_tokens"
    assert [block["type"] for block in body["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert body["content"][0]["thinking"] == "hm" and body["content"][0]["signature"]
    assert body["content"][2]["input"] == {"city": "Brno", "x": {"b": 1}}
    assert body["content"][3]["input"] == {} and body["stop_reason"] == "tool_use"
    assert "<thinks=True>" in prompt_of(engine)
    events = streamed(http, **more)
    call = ["content_block_start", "input_json_delta", "content_block_stop"]
    assert order(events) == [
        *("message_start", "ping"),
        *("content_block_start", "thinking_delta", "signature_delta", "content_block_stop"),
        *("content_block_start", "text_delta", "content_block_stop"),
        *call,
        *call,
        *("message_delta", "message_stop"),
    ]
    starts = [e["index"] for e in events if e["type"] == "content_block_start"]
    assert starts == [0, 1, 2, 3] == [e["index"] for e in events if e["type"] == "content_block_stop"]
    assert events[0]["message"]["content"] == [] and events[0]["message"]["stop_reason"] is None
    assert events[-2]["delta"]["stop_reason"] == "tool_use" and events[-2]["usage"] == body["usage"]


def test_thinking_that_nobody_asked_for_is_hidden(http, engine):
    engine.script = says("<think>hm</think>Hello")
    body = http.post(PATH, json=BODY).json()
    assert [block["type"] for block in body["content"]] == ["text"]
    events = streamed(http)
    assert "hm" not in "".join(e.get("delta", {}).get("thinking", "") for e in events)
    assert sum(e["type"] == "ping" for e in events) > 1


def test_history_reaches_the_template(http, engine):
    messages = [
        {"role": "user", "content": "time?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "T", "signature": "s"},
                {"type": "text", "text": "ok"},
                {"type": "tool_use", "id": "c1", "name": "clock", "input": {"z": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "bad", "is_error": True},
                {"type": "text", "text": "and?", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {"role": "user", "content": "now"},
    ]
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: v=1"},
        {"type": "text", "text": "Be brief."},
    ]
    body = {**BODY, "messages": messages, "system": system}
    assert http.post(PATH, json=body).status_code == 200
    assert prompt_of(engine) == (
        '[system]Be brief.[user]time?[assistant]ok(clock {"z": 1})~T~[tool=clock]Error:\nbad#c1[user]and?\nnow'
    )
    counted = http.post(PATH + "/count_tokens", json={k: v for k, v in body.items() if k != "max_tokens"})
    assert counted.json() == {"input_tokens": len(engine.requests[-1][0])}


def test_tool_choice(http, engine):
    call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    engine.script = says(call)
    for choice in ({"type": "any"}, {"type": "tool", "name": "clock"}):
        body = http.post(PATH, json={**BODY, "tools": TOOLS, "tool_choice": choice}).json()
        assert body["stop_reason"] == "tool_use" and body["content"][0]["name"] == "clock"
    assert len(engine.guides) == 2
    engine.script = says(call + call)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(http.post(PATH, json={**BODY, "tools": TOOLS, "tool_choice": choice}).json()["content"]) == 1
    http.post(PATH, json={**BODY, "tools": TOOLS, "tool_choice": {"type": "none"}})
    assert "weather" not in prompt_of(engine)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    "more, words",
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),  # over the context: nothing is truncated
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*HI, {"role": "assistant", "content": "pre"}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        ({"stop_sequences": ["x" * 2000]}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"temperature": -1}, "temperature"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
    ],
)
def test_what_cannot_be_is_refused_by_name(http, more, words):
    error = refused(http, **more)
    assert error["type"] == "invalid_request_error" and words in error["message"]
    assert ".function." not in error["message"]


def test_errors_have_anthropics_types(http, engine):
    assert refused(http, 404, path=PATH + "/batches")["type"] == "not_found_error"
    answer = http.get(PATH)
    assert answer.status_code == 405 and answer.json()["error"]["type"] == "invalid_request_error"
    engine.max_queue = 0
    assert refused(http, 429)["type"] == "rate_limit_error"
    engine.max_queue, engine.fail_with = 10_000, "the sampler met NaN"
    assert refused(http, 500)["type"] == "api_error"
    assert streamed(http)[-1]["error"]["type"] == "api_error"


def test_output_config(http, engine):
    engine.script = says("{}")
    config = {"format": {"type": "json_schema", "schema": {"type": "object"}}, "effort": "low"}
    assert http.post(PATH, json={**BODY, "output_config": config}).status_code == 200
    assert len(engine.guides) == 1 and "<effort=low>" in prompt_of(engine)


def test_package(client, engine):
    answer = client.messages.create(**BODY)
    assert answer.content[0].text == "Hello" and answer.stop_reason == "end_turn"
    assert client.messages.count_tokens(model="m", messages=HI).input_tokens == answer.usage.input_tokens
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(**BODY, extra_body={"temperature": -1})
    engine.max_queue = 0
    with pytest.raises(anthropic.RateLimitError):
        client.messages.create(**BODY)


def test_package_streams_text_and_calls(client, engine):
    engine.script, engine.tokens_per_step = says("<think>hm</think>" + TWO_CALLS), 3
    thinking = {"type": "adaptive"}
    with client.messages.stream(**BODY, tools=TOOLS, thinking=thinking) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text.strip() == "Let me see." and message.stop_reason == "tool_use"
    assert message.content[0].thinking == "hm" and message.content[0].signature
    assert [block.input for block in message.content[2:]] == [{"city": "Brno", "x": {"b": 1}}, {}]
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "21"} for block in message.content[2:]
    ]
    engine.script = says("Warm")
    messages = [*HI, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    answer = client.messages.create(**{**BODY, "messages": messages}, tools=TOOLS)
    assert answer.content[0].text == "Warm" and prompt_of(engine).count("]21#") == 2


def test_async_package(message_server, engine):
    engine.script = lambda prompt, index: ids_of("z" * 50)

    async def ask() -> tuple[str, str | None]:
        async with anthropic.AsyncAnthropic(base_url=message_server.url, api_key="none") as client:
            async with client.messages.stream(**{**BODY, "max_tokens": 5}) as stream:
                text = "".join([piece async for piece in stream.text_stream])
                return text, (await stream.get_final_message()).stop_reason

    assert asyncio.run(ask()) == ("zzzzz", "max_tokens")


def test_listed_fields_are_those_of_the_struct():
    listed = {row[0] for row in table("<!-- fields: MessagesRequest -->")}
    assert listed == fields_of(anthropic_protocol.MessagesRequest)
