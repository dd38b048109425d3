"""OpenAI's Responses API over plain HTTP: items, events in order, refusals by name."""

import json

import httpx
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from atom.entrypoints.openai import responses_protocol, telemetry
from atom.entrypoints.openai.reasoning import HARMONY, THINK, ReasoningCounter
from atom.entrypoints.openai.request_log import RequestLog
from atom.entrypoints.openai.responses_stream import OutputItems
from atom.entrypoints.openai.tool_parsers.base import ToolCallArguments, ToolCallEnd, ToolCallStart
from tests.entrypoints.test_chat_tools import TEMPLATE, TWO_CALLS, prompt_of, says
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
def shared_server():
    server = LiveServer(FakeEngine(chat_template=TEMPLATE, max_model_len=4096), served_model_name="fake")
    yield server
    server.stop()


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
            "content": [{"type": "output_text", "text": "Hello, world", "annotations": [], "logprobs": []}],
        }
    ]
    prompt = len(engine.requests[-1][0])
    assert body["usage"] == {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 13,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + 13,
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
    assert [guide.kind for guide in engine.guides] == ["calls"] * 2
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


def test_a_call_that_is_cut_is_incomplete():
    def items_of(arguments: str) -> list:
        items = OutputItems()
        for event in (ToolCallStart(0, "c", "clock"), ToolCallArguments(0, arguments), ToolCallEnd(0)):
            for told in items.add(event, is_cut=True):
                assert not isinstance(told, responses_protocol.OutputTextDelta)
        list(items.finish(is_cut=True))
        return [(item.status, item.arguments) for item in items.snapshot()]

    assert items_of('{"a": 1}') == [("completed", '{"a": 1}')]
    assert items_of('{"a": ') == [("incomplete", '{"a": ')]


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
