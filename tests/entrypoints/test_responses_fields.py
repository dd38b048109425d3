"""Fields of the Responses API: which work, which are refused by name, and what the guide says of them."""

import json

import httpx
import pytest

from atom.entrypoints.openai import protocol, responses_chat, responses_protocol
from atom.entrypoints.openai.limits import MAX_CONTENT_PARTS, MAX_MESSAGES, MAX_TOOL_CALLS
from tests.entrypoints.test_chat_tools import TEMPLATE, prompt_of
from tests.entrypoints.test_responses import CLOCK, LOGPROBS, PATH, TOOLS, WEATHER, created, refused
from tests.entrypoints.test_serving_guide import GUIDE, fields_of, table
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.live_server import LiveServer


@pytest.fixture(scope="module")
def shared_server():
    server = LiveServer(FakeEngine(chat_template=TEMPLATE, max_model_len=4096), served_model_name="fake")
    yield server
    server.stop()


def turns_of(count: int) -> list[dict]:
    """A conversation of ``count`` turns of 100 characters and more, each with a call; the last is the user's."""
    turns = []
    for i in range(count):
        turns += [
            {"role": "user", "content": f"{i}:" + "q" * 60},
            {"type": "function_call", "call_id": f"c{i}", "name": "clock", "arguments": "{}"},
            {"type": "function_call_output", "call_id": f"c{i}", "output": "noon"},
            {"role": "assistant", "content": "a" * 40},
        ]
    return [*turns, {"role": "user", "content": "last"}]


@pytest.mark.parametrize("count, room", [(3, 100), (40, 500), (100, 500), (100, 4000), (101, None)])
def test_truncation_leaves_out_the_earliest_turns(http, engine, count, room):
    items = turns_of(count)
    body = {"input": items, "instructions": "Rules.", "max_output_tokens": room}
    full = http.post(PATH, json=body)
    answer = created(http, **body, truncation="auto")
    assert answer["truncation"] == "auto"
    prompt, limit = prompt_of(engine), 4096 - (512 if room is None else room)
    assert prompt.startswith("[system]Rules.[user]") and prompt.endswith("[user]last")
    kept = [i for i in range(count) if f"]{i}:q" in prompt]
    assert kept == list(range(count - len(kept), count)) and prompt.count("#c") == len(kept)
    assert len(prompt) <= limit
    if len(kept) < count:
        assert full.status_code == 400
        longer = http.post(
            PATH + "/input_tokens", json={**body, "input": items[4 * (count - len(kept) - 1) :]}
        )
        assert longer.json()["input_tokens"] > limit, "one turn more would not fit"
    counted = http.post(PATH + "/input_tokens", json={**body, "truncation": "auto"})
    assert counted.json()["input_tokens"] == answer["usage"]["input_tokens"]


def test_truncation_cannot_shorten_the_last_turn(http):
    error = refused(http, input=[*turns_of(3), {"role": "user", "content": "x" * 5000}], truncation="auto")
    assert error["code"] == "context_length_exceeded" and error["param"] == "input"


def test_sampling_fields_of_chat_work(http, engine):
    created(http, top_k=5, min_p=0.1, seed=7, stop=["lo"], presence_penalty=0.5, top_p=0.5, min_tokens=1)
    params = engine.requests[-1][1]
    assert (params.top_k, params.min_p, params.seed, params.top_p) == (5, 0.1, 7, 0.5)
    assert params.stop_strings == ["lo"] and params.presence_penalty == 0.5 and params.min_tokens == 1
    created(http, chat_template_kwargs={"opens_thinking": True}, reasoning={"effort": "low"})
    assert prompt_of(engine).endswith("<effort=low><think>")


IMAGE = {"type": "input_image", "image_url": "data:", "detail": "auto"}
USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    "body, param",
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [USER] * (MAX_MESSAGES + 1)}, "input"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0].type"),
        ({"input": [USER, {"role": "tool", "content": "x"}]}, "input[1].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"content": "x"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
        (
            {"input": [USER, {"type": "function_call_output", "call_id": "c", "output": ""}]},
            "input[1].call_id",
        ),
        ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        (
            {
                "input": [
                    {"role": "user", "content": [{"type": "text", "text": ""}] * (MAX_CONTENT_PARTS + 1)}
                ]
            },
            "input[0].content",
        ),
        (
            {
                "input": [{"type": "function_call", "call_id": "c", "name": "n", "arguments": ""}]
                * (MAX_TOOL_CALLS + 1)
            },
            f"input[{MAX_TOOL_CALLS}]",
        ),
        ({"input": [{"type": "reasoning", "summary": [{"type": "text"}]}]}, "input[0].summary[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [CLOCK, {"type": "custom", "name": "x"}]}, "tools[1].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        (
            {
                "tools": TOOLS,
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [WEATHER | {"name": "x"}]},
            },
            "tool_choice.tools",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "tools": [CLOCK]}}, "tool_choice.mode"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"input": "x" * 5000}, "input"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_logprobs": 21, "include": [LOGPROBS]}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": [LOGPROBS, "file_search_call.results"]}, "include[1]"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"user": "x" * 513}, "user"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"truncation": "maybe"}, "truncation"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"moderation": {"model": "m"}}, "moderation"),
    ],
)
def test_what_cannot_be_is_refused_by_name(http, body, param):
    error = refused(http, **body)
    assert error["param"] == param and error["type"] == "invalid_request_error", error
    assert ".function." not in error["message"] and "max_tokens" not in error["message"]
    if error["code"] != "context_length_exceeded":
        assert param in error["message"]


def test_fields_that_ask_for_nothing_are_accepted(http):
    nothing = {"store": False, "background": False, "truncation": "disabled", "previous_response_id": None}
    answer = http.post(PATH, json={"input": "hi", "model": "fake", **nothing})
    assert answer.status_code == 200 and "x-atom-warning" not in answer.headers
    assert refused(http, 404, model="gpt-5")["code"] == "model_not_found"


def test_fields_without_effect_are_told(http):
    body = {
        "prompt_cache_key": "k",
        "service_tier": "auto",
        "max_tool_calls": 3,
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"verbosity": "low"},
        "stream_options": {"include_obfuscation": True},
        "stream": True,
        "who_knows": 1,
    }
    answer = http.post(PATH, json={"input": "hi", **body})
    assert answer.status_code == 200
    assert answer.headers["x-atom-warning"] == (
        "ignored fields: max_tool_calls, prompt_cache_key, service_tier, reasoning.summary, text.verbosity, "
        "stream_options.include_obfuscation"
    )


def test_fields_of_chat_that_have_other_names_here_are_told(http, engine):
    body = {"max_tokens": 3, "response_format": {"type": "json_object"}, "n": 2, "messages": None}
    answer = http.post(PATH, json={"input": "hi", **body})
    assert answer.headers["x-atom-warning"] == "ignored fields: max_tokens, n, response_format"
    assert len(engine.requests) == 1 and not engine.guides


def deep(levels: int) -> dict:
    value: dict = {"type": "object"}
    for _ in range(levels):
        value = {"properties": {"a": value}}
    return value


@pytest.mark.parametrize("levels", [40, 120, 450])
def test_nothing_is_too_deep_to_be_told_back(http, levels):
    for kind in ("text", "json_object"):
        text = {"format": {"type": kind, "name": "n", "schema": deep(levels)}}
        assert created(http, text=text)["text"] == {"format": {"type": kind}}
    for more in (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": deep(levels)}}},
        {"tools": [CLOCK | {"parameters": deep(levels)}], "tool_choice": "none"},
    ):
        assert "nest" in refused(http, **more)["message"]


def test_unknown_fields_are_refused_where_the_server_is_strict():
    server = LiveServer(FakeEngine(), strict_fields=True)
    try:
        answer = httpx.post(server.url + PATH, json={"input": "hi", "max_output_token": 3})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "unknown_field" and "max_output_tokens" in error["message"]
        hint = httpx.post(server.url + PATH, json={"input": "hi", "safety_identifier": "x"})
        assert hint.status_code == 200 and "safety_identifier" in hint.headers["x-atom-warning"]
        assert httpx.post(server.url + PATH, json={"input": "hi", "max_tokens": 3}).status_code == 400
    finally:
        server.stop()


@pytest.mark.parametrize(
    "method, path, words",
    [
        ("GET", "/resp_1", "stored responses"),
        ("DELETE", "/resp_1", "stored responses"),
        ("POST", "/resp_1/cancel", "stored responses"),
        ("GET", "/resp_1/input_items", "stored responses"),
        ("POST", "/compact", "compaction"),
    ],
)
def test_nothing_is_stored(http, method, path, words):
    answer = http.request(method, PATH + path)
    error = answer.json()["error"]
    assert answer.status_code == 404 and error["code"] == "unsupported_route"
    assert words in error["message"] and PATH + path in error["message"]


def test_document_tells_the_events(http):
    document = http.get("/openapi.json").json()
    operation = document["paths"][PATH]["post"]
    kinds = operation["responses"]["200"]["content"]
    assert set(kinds) == {"application/json", "text/event-stream"}
    assert "ResponsesRequest" in json.dumps(operation["requestBody"])
    schema = document["components"]["schemas"]["ResponsesRequest"]["properties"]["store"]
    assert schema["description"] == "Not supported: only null or false is accepted"


def test_listed_fields_are_those_of_the_struct():
    refused_fields = set(responses_protocol.UNSUPPORTED_RESPONSES)
    struct_fields = fields_of(responses_protocol.ResponsesRequest)
    assert {row[0] for row in table("<!-- fields: ResponsesRequest -->")} == struct_fields - refused_fields
    rows = {row[0]: row[1] for row in table("<!-- unsupported: ResponsesRequest -->")}
    assert rows == {
        name: ", ".join(json.dumps(value) for value in allowed)
        for name, allowed in responses_protocol.UNSUPPORTED_RESPONSES.items()
    }
    section = GUIDE[GUIDE.index("## OpenAI's Responses API") : GUIDE.index("## Anthropic's API")]
    assert all(f"`{name}`" in section for name in responses_protocol.IGNORED_RESPONSES)


def test_fields_named_as_in_chat_are_fields_of_chat():
    chat, own = fields_of(protocol.ChatCompletionRequest), fields_of(responses_protocol.ResponsesRequest)
    assert set(responses_chat.SAME_NAME) <= chat & own
