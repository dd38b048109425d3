"""OpenAI's Responses API over plain HTTP: items, events in order, refusals by name."""

import json

import httpx
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from atom.entrypoints.openai import protocol, responses_chat, responses_protocol, telemetry
from atom.entrypoints.openai.limits import MAX_CONTENT_PARTS, MAX_MESSAGES, MAX_TOOL_CALLS
from atom.entrypoints.openai.reasoning import HARMONY, THINK, ReasoningCounter
from atom.entrypoints.openai.request_log import RequestLog
from tests.entrypoints.test_chat_tools import TEMPLATE, TWO_CALLS, prompt_of, says
from tests.entrypoints.test_serving_guide import GUIDE, fields_of, table
from tests.helpers.fake_engine import ByteTokenizer, FakeEngine, ids_of
from tests.helpers.live_server import LiveServer, wait_for

PATH = "/v1/responses"
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "d",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CLOCK = {"type": "function", "name": "clock", "parameters": {"type": "object"}}
TOOLS = [WEATHER, CLOCK]
CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
LOGPROBS = "message.output_text.logprobs"
EVENT = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def response_server():
    server = LiveServer(FakeEngine(chat_template=TEMPLATE, max_model_len=4096), served_model_name="fake")
    yield server
    server.stop()


@pytest.fixture
def engine(response_server):
    engine = response_server.engine
    engine.script, engine.tokens_per_step, engine.num_cached_tokens = says("Hello"), 1, 0
    engine.max_queue, engine.fail_with, engine.step_s = 10_000, None, 0.0
    engine.requests.clear()
    engine.guides.clear()
    engine.aborted.clear()
    return engine


@pytest.fixture
def http(response_server, engine):
    with httpx.Client(base_url=response_server.url, timeout=10) as client:
        yield client


def created(http: httpx.Client, **body: object) -> dict:
    answer = http.post(PATH, json={"input": "hi", **body})
    assert answer.status_code == 200, answer.text
    Response.model_validate(answer.json())
    return answer.json()


def read_events(text: str) -> list[dict]:
    """Events of a stream, each checked against the type that OpenAI's package has for it."""
    result = []
    for frame in text.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        known = EVENT.validate_python(event)
        assert known.type == event["type"]
        result.append(event)
    assert [event["sequence_number"] for event in result] == list(range(len(result)))
    return result


def streamed(http: httpx.Client, **body: object) -> list[dict]:
    answer = http.post(PATH, json={"input": "hi", **body, "stream": True})
    assert answer.status_code == 200, answer.text
    return read_events(answer.text)


def order(events: list[dict]) -> list[str]:
    """Types in order without their prefix, repeated deltas told once."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]]


def without_ids(items: list[dict]) -> list[dict]:
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]


def refused(http: httpx.Client, status: int = 400, **body: object) -> dict:
    answer = http.post(PATH, json={"input": "hi", **body})
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def test_plain_answer(http, engine):
    engine.num_cached_tokens = 3
    body = created(http, instructions="Be brief.", metadata={"a": "b"}, user="me", temperature=0.5)
    (item,) = body["output"]
    assert item["id"].startswith("msg_") and body["id"].startswith("resp_")
    assert without_ids([item]) == [
        {
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}],
        }
    ]
    prompt = len(engine.requests[-1][0])
    assert body["usage"] == {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + 6,
    }
    assert (body["object"], body["model"], body["status"]) == ("response", "fake", "completed")
    assert body["store"] is False and body["background"] is False and body["error"] is None
    assert body["incomplete_details"] is None and body["completed_at"] >= body["created_at"]
    asked = {
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "user": "me",
        "temperature": 0.5,
        "top_p": 1.0,
    }
    assert {name: body[name] for name in asked} == asked
    assert (body["tools"], body["tool_choice"], body["parallel_tool_calls"]) == ([], "auto", True)
    assert body["text"] == {"format": {"type": "text"}} and body["truncation"] == "disabled"
    assert prompt_of(engine) == "[system]Be brief.[user]hi"


def test_what_was_asked_comes_back_with_the_answer(http, engine):
    engine.script = says(CALL)
    choice = {"type": "function", "name": "clock"}
    body = created(
        http, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, reasoning={"effort": "low"}
    )
    assert body["tool_choice"] == choice and body["parallel_tool_calls"] is False
    assert [tool["name"] for tool in body["tools"]] == ["weather", "clock"]
    assert body["tools"][0]["parameters"] == WEATHER["parameters"]
    assert body["reasoning"] == {"effort": "low", "summary": None}
    text = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}}
    assert created(http, text=text)["text"] == text


@pytest.mark.parametrize("tokens_per_step", [1, 3, 1000])
def test_events_in_order_and_the_last_equals_the_plain_answer(http, engine, tokens_per_step):
    engine.script, engine.tokens_per_step = says("<think>hm</think>" + TWO_CALLS), tokens_per_step
    body = created(http, tools=TOOLS)
    events = streamed(http, tools=TOOLS)
    arguments = ["function_call_arguments.delta", "function_call_arguments.done"]
    assert order(events) == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", *arguments, "output_item.done"),
        *("output_item.added", *arguments, "output_item.done"),
        "completed",
    ]
    output = body["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", *["function_call"] * 2]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "hm"}] and output[0]["summary"] == []
    assert output[1]["content"][0]["text"].strip() == "Let me see."
    calls = [(item["name"], json.loads(item["arguments"])) for item in output[2:]]
    assert calls == [("weather", {"city": "Brno", "x": {"b": 1}}), ("clock", {})]
    assert {item["status"] for item in output} == {"completed"}
    # Each event tells what the ones before it amount to.
    assert events[0]["response"]["output"] == [] and events[0]["response"]["usage"] is None
    assert events[0]["response"]["status"] == events[1]["response"]["status"] == "in_progress"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    last = events[-1]["response"]
    assert last["output"] == done and without_ids(done) == without_ids(output)
    assert last["usage"] == body["usage"] and last["id"] == events[0]["response"]["id"]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["id"] for item in added] == [item["id"] for item in done]
    for index, item in enumerate(done):
        of_item = [event for event in events if event.get("item_id") == item["id"]]
        assert {event["output_index"] for event in of_item} == {index}
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(event["delta"] for event in of_item if event["type"].endswith(".delta")) == text


def test_reasoning_tokens_are_counted_to_the_closing_mark(http, engine):
    engine.script = says("<think>hm</think>Hello")
    for tokens_per_step in (1, 5, 1000):
        engine.tokens_per_step = tokens_per_step
        usage = created(http)["usage"]
        assert usage["output_tokens_details"] == {"reasoning_tokens": len("<think>hm</think>")}
        assert usage["output_tokens"] == len("<think>hm</think>Hello") + 1
        assert streamed(http)[-1]["response"]["usage"] == usage
    engine.script = says("x" * 150)
    assert created(http)["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize(
    "dialect, start, text, count",
    [
        (THINK, "thinking", "é</think>\n\nyes", 10),
        (THINK, "thinking", "never ends", 10),
        (THINK, "undecided", "plain", 0),
        (HARMONY, "undecided", "<|channel|>analysis<|message|>hm<|end|>", 39),
        (HARMONY, "undecided", "<|channel|>final<|message|>hm", 0),
    ],
)
def test_reasoning_counter(dialect, start, text, count):
    counter = ReasoningCounter(dialect, start, ByteTokenizer())
    for token in ids_of(text):
        counter.add([token])
    whole = ReasoningCounter(dialect, start, ByteTokenizer())
    whole.add(ids_of(text))
    assert counter.num_tokens == whole.num_tokens == count


def test_an_answer_that_is_cut_says_so(http, engine):
    body = created(http, max_output_tokens=3)
    assert body["status"] == "incomplete" and body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][0]["status"] == "incomplete" and body["completed_at"] is None
    assert body["output"][0]["content"][0]["text"] == "Hel" and body["max_output_tokens"] == 3
    last = streamed(http, max_output_tokens=3)[-1]
    assert last["type"] == "response.incomplete" and last["response"]["incomplete_details"]
    assert last["response"]["usage"]["output_tokens"] == 3
    engine.script = says("<think>" + "h" * 500)
    (item,) = created(http, max_output_tokens=50)["output"]
    assert item["type"] == "reasoning" and item["status"] == "incomplete"


def test_an_empty_answer_has_an_item(http, engine):
    engine.script = says("")
    assert created(http)["output"][0]["content"][0]["text"] == ""
    assert order(streamed(http))[2:5] == ["output_item.added", "content_part.added", "output_text.done"]


def test_items_reach_the_template_as_turns(http, engine):
    items = [
        {"role": "developer", "content": "Rules."},
        {"role": "user", "content": [{"type": "input_text", "text": "time?"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "T"}],
        },
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "ok", "annotations": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "clock", "arguments": '{"z": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "noon"}]},
        {"type": "message", "role": "user", "content": "and?"},
        {"type": "message", "role": "user", "content": "now"},
    ]
    created(http, instructions="Be brief.", input=items)
    prompt = '[system]Be brief.\nRules.[user]time?[assistant]ok(clock {"z": 1})~T~[tool=clock]noon#c1[user]and?\nnow'
    assert prompt_of(engine) == prompt
    counted = http.post(PATH + "/input_tokens", json={"instructions": "Be brief.", "input": items})
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": len(prompt)}


def test_a_whole_output_goes_back_in(http, engine):
    engine.script = says("<think>hm</think>" + TWO_CALLS)
    output = created(http, tools=TOOLS)["output"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "21"} for item in output[2:]
    ]
    engine.script = says("Warm")
    body = created(http, tools=TOOLS, input=[{"role": "user", "content": "hi"}, *output, *results])
    assert body["output"][0]["content"][0]["text"] == "Warm"
    prompt = prompt_of(engine)
    assert prompt.count("[assistant]") == 1 and "~hm~" in prompt and prompt.count("]21#") == 2


def test_thinking_of_others_is_a_summary_or_nothing(http, engine):
    items = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "S"}]},
        {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "gAAA"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    answer = http.post(PATH, json={"input": items, "include": ["reasoning.encrypted_content"]})
    assert prompt_of(engine) == "[user]a[assistant]b~S~[user]c"
    warning = "ignored fields: include.reasoning.encrypted_content, input.encrypted_content"
    assert answer.headers["x-atom-warning"] == warning


def test_tool_choice(http, engine):
    engine.script = says(CALL)
    for choice in ("required", {"type": "function", "name": "clock"}):
        (item,) = created(http, tools=TOOLS, tool_choice=choice)["output"]
        assert (item["type"], item["name"], item["arguments"]) == ("function_call", "clock", "{}")
    assert [guide.kind for guide in engine.guides] == ["structural"] * 2
    assert len(engine.guides[0].tags) == 2 and len(engine.guides[1].tags) == 1
    engine.script = says(CALL + CALL)
    assert len(created(http, tools=TOOLS)["output"]) == 2
    assert len(created(http, tools=TOOLS, parallel_tool_calls=False)["output"]) == 1
    created(http, tools=TOOLS, tool_choice="none")
    assert "weather" not in prompt_of(engine)
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "clock"}]}
    assert created(http, tools=TOOLS, tool_choice=allowed)["tool_choice"] == allowed
    assert "weather" not in prompt_of(engine) and "clock" in prompt_of(engine)


def test_text_format_is_enforced(http, engine):
    engine.script = says("{}")
    created(http, text={"format": {"type": "text"}})
    assert not engine.guides
    created(http, text={"format": {"type": "json_object"}})
    created(http, text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}})
    assert [guide.kind for guide in engine.guides] == ["json_object", "json_schema"]


def test_log_probabilities_are_those_of_the_text(http, engine):
    engine.script = says("<think>hm</think>Hi" + CALL)
    more = {"include": [LOGPROBS], "top_logprobs": 2, "tools": TOOLS}
    for engine.tokens_per_step in (1, 19):
        body = created(http, **more)
        assert body["top_logprobs"] == 2
        part = next(item for item in body["output"] if item["type"] == "message")["content"][0]
        assert [entry["token"] for entry in part["logprobs"]] == ["H", "i"]
        assert len(part["logprobs"][0]["top_logprobs"]) == 2 and part["logprobs"][0]["bytes"]
        events = streamed(http, **more)
        told = [e["logprobs"] for e in events if e["type"] == "response.output_text.delta"]
        assert sum(told, []) == part["logprobs"]
        done = next(event for event in events if event["type"] == "response.output_text.done")
        assert done["logprobs"] == part["logprobs"]
    assert created(http)["output"][-1]["content"][0]["logprobs"] == []


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
        ({"tools": TOOLS, "text": {"format": {"type": "json_object"}}}, "text.format"),
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
        ({"truncation": "auto"}, "truncation"),
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


def test_unknown_fields_are_refused_where_the_server_is_strict():
    server = LiveServer(FakeEngine(), strict_fields=True)
    try:
        answer = httpx.post(server.url + PATH, json={"input": "hi", "max_output_token": 3})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "unknown_field" and "max_output_tokens" in error["message"]
        hint = httpx.post(server.url + PATH, json={"input": "hi", "safety_identifier": "x"})
        assert hint.status_code == 200 and "safety_identifier" in hint.headers["x-atom-warning"]
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


def test_errors_before_and_inside_a_stream(http, engine):
    engine.max_queue = 0
    assert refused(http, 429, stream=True)["type"] == "rate_limit_error"
    engine.max_queue, engine.fail_with = 10_000, "the sampler met NaN"
    assert "NaN" in refused(http, 500)["message"]
    engine.script, engine.tokens_per_step = says("H" * 200), 150
    events = streamed(http)
    assert order(events)[-2:] == ["output_text.delta", "failed"]
    response = events[-1]["response"]
    assert response["status"] == "failed" and response["usage"] is None
    assert response["error"]["code"] == "server_error" and "NaN" in response["error"]["message"]
    (item,) = response["output"]
    assert item["status"] == "incomplete" and item["content"][0]["text"] == "H" * 150


def test_streams_end_with_the_reason_when_the_engine_dies():
    engine = FakeEngine(script=lambda prompt, index: ids_of("z" * 200), step_s=0.02)
    server = LiveServer(engine)
    try:
        with httpx.stream(
            "POST", server.url + PATH, json={"input": "hi", "stream": True}, timeout=10
        ) as answer:
            text = ""
            for piece in answer.iter_text():
                if not text:
                    server.call(engine.die)
                text += piece
        last = read_events(text)[-1]
        assert last["type"] == "response.failed"
        assert "the engine process ended" in last["response"]["error"]["message"]
    finally:
        server.stop()


def test_a_client_that_leaves_ends_its_request(http, engine):
    engine.script, engine.step_s = lambda prompt, index: ids_of("z" * 500), 0.01
    with http.stream("POST", PATH, json={"input": "hi", "stream": True}) as answer:
        next(answer.iter_bytes())
    assert wait_for(lambda: len(engine.aborted) == 1 and not engine.running)
    assert engine.aborted[0].startswith("resp_")


def test_keys_and_metrics_hold_here_too():
    server = LiveServer(FakeEngine(), "--api-key", "sk-one")
    try:
        assert httpx.post(server.url + PATH, json={"input": "hi"}).status_code == 401
        headers = {"authorization": "Bearer sk-one"}
        assert httpx.post(server.url + PATH, json={"input": "hi"}, headers=headers).status_code == 200
        told = httpx.get(server.url + "/metrics", headers=headers).text
        assert 'atom:requests_finished_total{finished_reason="stop"} 1' in told
    finally:
        server.stop()


def test_log_and_traces_know_the_route(tmp_path):
    path = tmp_path / "requests.jsonl"
    server = LiveServer(FakeEngine(), request_log=RequestLog(str(path)))
    try:
        text = httpx.post(server.url + PATH, json={"input": "hi", "stream": True}).text
    finally:
        server.stop()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["path"] == PATH and lines[0]["data"] == {"input": "hi", "stream": True}
    assert "".join(line["data"] for line in lines[1:]) == text and lines[-1]["status"] == 200
    assert telemetry.OPERATIONS[PATH] == "chat"


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
