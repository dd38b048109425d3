"""Tools, tool_choice, reasoning and guides of chat, with scripted ids."""

import json

import httpx
import openai
import pytest

from atom.errors import RequestError
from tests.entrypoints.conftest import events
from tests.entrypoints.test_server_requests import bad
from tests.helpers.fake_engine import EOS, FakeEngine, ids_of
from tests.helpers.live_server import LiveServer

CHAT = "/v1/chat/completions"
USER_HI = [{"role": "user", "content": "hi"}]
TEMPLATE = """{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}
{%- for m in messages %}[{{ m.role }}{% if m.name %}={{ m.name }}{% endif %}]{{ m.content }}
{%- for call in m.tool_calls or [] %}({{ call.function.name }} {{ call.function.arguments | tojson }}){% endfor %}
{%- if m.reasoning_content %}~{{ m.reasoning_content }}~{% endif %}
{%- if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}{% endfor %}
{%- if enable_thinking is defined %}<thinks={{ enable_thinking }}>{% endif %}
{%- if reasoning_effort %}<effort={{ reasoning_effort }}>{% endif %}
{%- if opens_thinking %}<think>{% endif %}{# </think> #}"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "d",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TWO_CALLS = (
    'Let me see.\n<tool_call>\n{"arguments": {"city": "Brno", "x": {"b": 1}}, "name": "weather"}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def tool_server():
    server = LiveServer(FakeEngine(chat_template=TEMPLATE, max_model_len=4096), served_model_name="fake")
    yield server
    server.stop()


@pytest.fixture
def engine(tool_server):
    engine = tool_server.engine
    engine.script, engine.tokens_per_step = says("Hello"), 1
    engine.requests.clear()
    engine.guides.clear()
    return engine


@pytest.fixture
def http(tool_server):
    with httpx.Client(base_url=tool_server.url, timeout=10) as client:
        yield client


@pytest.fixture
def client(tool_server):
    with openai.OpenAI(base_url=tool_server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def says(text: str):
    return lambda prompt, index: [*ids_of(text), EOS]


def prompt_of(engine: FakeEngine) -> str:
    return bytes(engine.requests[-1][0]).decode()


def streamed(http: httpx.Client, **body: object) -> list[dict]:
    answer = http.post(CHAT, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    return events(answer.text)


def joined(chunks: list[dict], index: int = 0) -> dict:
    """What a client makes of the deltas of one answer; checks their form."""
    message: dict = {"content": "", "reasoning_content": "", "tool_calls": [], "finish_reason": None}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            assert message["finish_reason"] is None, "nothing follows the finish reason"
            message["finish_reason"] = choice["finish_reason"]
            for field in ("content", "reasoning_content"):
                message[field] += delta.get(field, "")
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(message["tool_calls"]):
                    assert call["id"] and call["type"] == "function" and call["function"]["name"]
                    message["tool_calls"].append({"id": call["id"], **call["function"]})
                else:
                    assert call["index"] == len(message["tool_calls"]) - 1
                    assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                    message["tool_calls"][-1]["arguments"] += call["function"]["arguments"]
    return message


@pytest.mark.parametrize("tokens_per_step", [1, 3, 1000])
def test_F1_F2_F3_streamed_calls_equal_the_plain_answer(http, engine, tokens_per_step):
    engine.script, engine.tokens_per_step = says(TWO_CALLS), tokens_per_step
    body = {"messages": USER_HI, "tools": [WEATHER, CLOCK]}
    choice = http.post(CHAT, json=body).json()["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and message["content"].strip() == "Let me see."
    calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message["tool_calls"]]
    assert calls == [("weather", {"city": "Brno", "x": {"b": 1}}), ("clock", {})]
    assert len({c["id"] for c in message["tool_calls"]}) == 2
    chunks = streamed(http, **body)
    told = joined(chunks)
    assert told["content"] == message["content"] and told["finish_reason"] == "tool_calls"
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert [(c["name"], json.loads(c["arguments"])) for c in told["tool_calls"]] == calls


def test_F3_openai_client_assembles_the_stream(client, engine):
    engine.script = says(TWO_CALLS)
    with client.chat.completions.stream(
        model="fake", messages=USER_HI, tools=[WEATHER, CLOCK], n=1
    ) as stream:
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert [call.function.name for call in calls] == ["weather", "clock"]
    assert json.loads(calls[0].function.arguments)["city"] == "Brno"
    assert final.choices[0].finish_reason == "tool_calls"


def test_calls_without_text_have_null_content(http, engine):
    engine.script = says('<tool_call>{"name": "clock", "arguments": {}}</tool_call>')
    message = http.post(CHAT, json={"messages": USER_HI, "tools": [CLOCK]}).json()["choices"][0]["message"]
    assert message["content"] is None and len(message["tool_calls"]) == 1


def test_answer_cut_by_the_limit_says_length(http, engine):
    engine.script = says(TWO_CALLS)
    choice = http.post(CHAT, json={"messages": USER_HI, "tools": [WEATHER], "max_tokens": 60}).json()[
        "choices"
    ][0]
    assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_parallel_tool_calls_false_tells_one(http, engine, is_streamed):
    engine.script = says(TWO_CALLS)
    body = {"messages": USER_HI, "tools": [WEATHER, CLOCK], "parallel_tool_calls": False}
    if is_streamed:
        calls = [call["name"] for call in joined(streamed(http, **body))["tool_calls"]]
    else:
        message = http.post(CHAT, json=body).json()["choices"][0]["message"]
        calls = [call["function"]["name"] for call in message["tool_calls"]]
    assert calls == ["weather"]


def test_tool_choice_none_hides_the_tools_and_drops_calls(http, engine):
    engine.script = says(TWO_CALLS)
    body = {"messages": USER_HI, "tools": [WEATHER, CLOCK], "tool_choice": "none"}
    choice = http.post(CHAT, json=body).json()["choices"][0]
    assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
    assert choice["message"]["content"].strip() == "Let me see."
    assert "weather" not in prompt_of(engine)


def test_tools_reach_the_template_in_one_form(http, engine):
    shaped = {"name": "weather", "description": "d", "input_schema": WEATHER["function"]["parameters"]}
    prompts = []
    for tools in ([WEATHER], [shaped]):
        http.post(CHAT, json={"messages": USER_HI, "tools": tools})
        prompts.append(prompt_of(engine))
    assert prompts[0] == prompts[1]
    assert json.loads(prompts[0].split("<tool_call>")[1].split("[user]")[0]) == [WEATHER]


@pytest.mark.parametrize(
    "choice, names, is_single",
    [
        ("required", ["weather", "clock"], False),
        ({"type": "function", "function": {"name": "clock"}}, ["clock"], True),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "clock"}}],
                },
            },
            ["clock"],
            False,
        ),
    ],
)
def test_forced_calls_are_a_grammar(http, engine, choice, names, is_single):
    engine.script = says('<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>')
    body = {"messages": USER_HI, "tools": [WEATHER, CLOCK], "tool_choice": choice}
    answer = http.post(CHAT, json=body).json()["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    guide = engine.requests[-1][1].guide
    assert guide.kind == "calls" and guide.otherwise is None and guide.stop_after_first is is_single
    assert [tag.begin for tag in guide.tags] == [
        f'<tool_call>\n{{"name": "{n}", "arguments": ' for n in names
    ]
    assert engine.guides == [guide]
    http.post(CHAT, json={**body, "parallel_tool_calls": False})
    assert engine.requests[-1][1].guide.stop_after_first


def test_strict_tools_are_a_grammar_that_leaves_text_free(http, engine):
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    http.post(CHAT, json={"messages": USER_HI, "tools": [strict, CLOCK]})
    guide = engine.requests[-1][1].guide
    assert not guide.at_least_one and json.loads(guide.tags[0].schema) == WEATHER["function"]["parameters"]
    http.post(CHAT, json={"messages": USER_HI, "tools": [WEATHER]})
    assert engine.requests[-1][1].guide is None


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [CLOCK, CLOCK]}, "tools[1].function.name"),
        ({"tools": [CLOCK], "tool_choice": "sometimes"}, "tool_choice"),
        (
            {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
        ),
        ({"tools": [CLOCK], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": {}}, "tools"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"guided_choice": []}, "guided_choice"),
        ({"store": True}, "store"),
    ],
)
def test_bad_tool_and_answer_fields(http, engine, fields, param):
    assert bad(http, CHAT, messages=USER_HI, **fields)["param"] == param
    assert engine.requests == []


def test_template_without_tools_refuses_them():
    server = LiveServer(FakeEngine())
    with httpx.Client(base_url=server.url) as client:
        error = bad(client, CHAT, messages=USER_HI, tools=[CLOCK])
        assert error["param"] == "tools" and "template" in error["message"]
        body = {"messages": USER_HI, "tools": [CLOCK], "tool_choice": "none"}
        assert client.post(CHAT, json=body).status_code == 200
    server.stop()


def test_history_of_calls_reaches_the_template(http, engine):
    def call(arguments: object) -> dict:
        return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}

    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "name": "Eva",
        },
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call('{"x": 1}')]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {
            "role": "assistant",
            "tool_calls": [call(r'{"p": "C:\dir"}'), call("not json"), call(""), call({"y": 2})],
        },
    ]
    assert http.post(CHAT, json={"messages": messages}).status_code == 200
    text = prompt_of(engine)
    assert '[user=Eva]a\nb[assistant](f {"x": 1})~hm~[tool]42#c1' in text
    assert r'(f {"p": "C:\\dir"})(f {"_raw": "not json"})(f {})(f {"y": 2})' in text


@pytest.mark.parametrize("tokens_per_step", [1, 4, 1000])
def test_reasoning_is_a_field_of_its_own(http, engine, tokens_per_step):
    engine.tokens_per_step = tokens_per_step
    for script, body in (
        ("<think>\nhm\n</think>\n\nAnswer", {"messages": USER_HI}),
        ("hm\n</think>\n\nAnswer", {"messages": USER_HI, "chat_template_kwargs": {"opens_thinking": True}}),
    ):
        engine.script = says(script)
        message = http.post(CHAT, json={**body, "n": 2}).json()["choices"][1]["message"]
        assert message["content"] == "Answer" and message["reasoning_content"].strip() == "hm"
        chunks = streamed(http, **body, n=2)
        for index in range(2):  # every answer starts where the prompt ends
            told = joined(chunks, index)
            assert told["content"] == "Answer" and told["reasoning_content"].strip() == "hm"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_T5_stop_strings_apply_to_the_answer(http, engine, is_streamed):
    engine.script = says("I repeat: Question: x</think>Yes. Question: and more")
    body = {
        "messages": USER_HI, "stop": ["Question:"], "chat_template_kwargs": {"opens_thinking": True},
    }  # fmt: skip
    if is_streamed:
        told = joined(streamed(http, **body))
    else:
        choice = http.post(CHAT, json=body).json()["choices"][0]
        told = {**choice["message"], "finish_reason": choice["finish_reason"]}
        assert choice["stop_reason"] == "Question:"
    assert told["reasoning_content"] == "I repeat: Question: x" and told["content"] == "Yes. "
    assert told["finish_reason"] == "stop"


def test_T5_switch_applies_them_to_the_reasoning_too():
    engine = FakeEngine(chat_template=TEMPLATE, script=says("I repeat: Question: x</think>Yes."))
    server = LiveServer(engine, stops_in_reasoning=True)
    with httpx.Client(base_url=server.url) as client:
        body = {
            "messages": USER_HI, "stop": "Question:", "chat_template_kwargs": {"opens_thinking": True},
        }  # fmt: skip
        message = client.post(CHAT, json=body).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "", "reasoning_content": "I repeat: "}
    server.stop()


@pytest.mark.parametrize(
    "fields, shown, ignored",
    [
        ({}, "", None),
        ({"reasoning_effort": "high"}, "<thinks=True><effort=high>", None),
        ({"reasoning_effort": "none"}, "<thinks=False><effort=none>", None),
        ({"thinking": {"type": "disabled"}}, "<thinks=False>", None),
        (
            {"thinking": {"type": "enabled", "effort": "low"}, "reasoning_effort": "high"},
            "<thinks=True><effort=low>",
            None,
        ),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "<thinks=False>", None),
    ],
)
def test_thinking_reaches_the_template(http, engine, fields, shown, ignored):
    answer = http.post(CHAT, json={"messages": USER_HI, **fields})
    assert answer.status_code == 200, answer.text
    assert prompt_of(engine).removeprefix("[user]hi") == shown
    assert answer.headers.get("x-atom-warning") == ignored


def test_thinking_that_the_template_cannot_switch_is_told(http):
    server = LiveServer(FakeEngine(chat_template="{{ messages[0].content }}"))
    with httpx.Client(base_url=server.url) as client:
        body = {"messages": USER_HI, "reasoning_effort": "low", "thinking": {"type": "enabled"}}
        answer = client.post(CHAT, json=body)
        assert answer.headers["x-atom-warning"] == "ignored fields: thinking, reasoning_effort"
    server.stop()


def test_parsers_can_be_named_or_switched_off():
    script = says("<think>a</think>" + TWO_CALLS)
    engine = FakeEngine(chat_template=TEMPLATE, script=script, max_model_len=4096)
    server = LiveServer(engine, tool_parser="none", reasoning_parser="none")
    with httpx.Client(base_url=server.url) as client:
        message = client.post(CHAT, json={"messages": USER_HI, "tools": [CLOCK]}).json()["choices"][0][
            "message"
        ]
    assert message == {"role": "assistant", "content": "<think>a</think>" + TWO_CALLS}
    server.stop()


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
GUIDES = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, ("json_object", "response_format")),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
            }
        },
        ("json_schema", "response_format.json_schema.schema"),
    ),
    ({"guided_json": SCHEMA}, ("json_schema", "guided_json")),
    ({"guided_json": json.dumps(SCHEMA)}, ("json_schema", "guided_json")),
    ({"guided_regex": "a+"}, ("regex", "guided_regex")),
    ({"guided_choice": ["a", "b"]}, ("choice", "guided_choice")),
    ({"guided_grammar": 'root ::= "a"'}, ("grammar", "guided_grammar")),
    ({"structured_outputs": {"json": SCHEMA}}, ("json_schema", "structured_outputs.json")),
    ({"structured_outputs": {"json_object": True}}, ("json_object", "structured_outputs.json_object")),
    ({"structured_outputs": {"choice": ["a"]}}, ("choice", "structured_outputs.choice")),
]


ASKED = [(fields, expected) for fields, expected in GUIDES if expected]


@pytest.mark.parametrize("fields, expected", ASKED)
def test_a_form_of_the_answer_beside_tools_leaves_calls_or_that_form(http, engine, fields, expected):
    body = {"messages": USER_HI, "tools": [WEATHER, CLOCK], **fields}
    engine.script = says('<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>')
    called = http.post(CHAT, json=body).json()["choices"][0]
    assert called["finish_reason"] == "tool_calls" and called["message"]["content"] is None
    guide = engine.requests[-1][1].guide
    assert guide.kind == "calls" and (guide.otherwise.kind, guide.otherwise.field) == expected
    assert len(guide.tags) == 2 and not guide.stop_after_first and engine.guides == [guide]
    engine.script = says('{"a": 1}')
    answered = joined(streamed(http, **body))
    assert answered["content"] == '{"a": 1}' and answered["finish_reason"] == "stop"
    http.post(CHAT, json={**body, "parallel_tool_calls": False})
    assert engine.requests[-1][1].guide.stop_after_first


def test_a_choice_of_tools_outranks_the_form_of_the_answer(http, engine):
    body = {"messages": USER_HI, "tools": [WEATHER, CLOCK], "response_format": {"type": "json_object"}}
    http.post(CHAT, json={**body, "tool_choice": "none"})
    assert engine.requests[-1][1].guide.kind == "json_object"
    for choice in ("required", {"type": "function", "function": {"name": "clock"}}):
        http.post(CHAT, json={**body, "tool_choice": choice})
        guide = engine.requests[-1][1].guide
        assert guide.kind == "calls" and guide.otherwise is None
    thinks = {"chat_template_kwargs": {"opens_thinking": True}}
    http.post(CHAT, json={**body, **thinks})
    assert engine.requests[-1][1].guide.start_after == "</think>"


def test_a_form_that_cannot_stand_beside_calls_names_both_fields(http, engine, monkeypatch):
    needs_llguidance = {"allOf": [{"type": "integer", "minimum": 7}, {"maximum": 8}]}
    monkeypatch.setattr("atom.model_engine.structured.backend.installed_backends", lambda: ["xgrammar"])
    error = bad(http, CHAT, messages=USER_HI, tools=[CLOCK], guided_json=needs_llguidance)
    assert error["param"] == "guided_json" and "guided_json together with tools" in error["message"]
    assert "xgrammar ignores #/allOf" in error["message"]

    async def refuse(guide):
        raise guide.error("does not compile")

    monkeypatch.setattr(engine, "compile_guide", refuse, raising=False)
    error = bad(http, CHAT, messages=USER_HI, tools=[CLOCK], guided_regex="a")
    assert error["param"] == "guided_regex" and "guided_regex together with tools" in error["message"]
    assert engine.requests == []


@pytest.mark.parametrize("fields, expected", GUIDES)
def test_guides_reach_the_engine_from_both_routes(http, engine, fields, expected):
    for path, body in ((CHAT, {"messages": USER_HI}), ("/v1/completions", {"prompt": "x"})):
        answer = http.post(path, json={**body, **fields})
        assert answer.status_code == 200, answer.text
        guide = engine.requests[-1][1].guide
        assert (None if guide is None else (guide.kind, guide.field)) == expected
        if expected and expected[0] == "json_schema":
            assert json.loads(guide.text) == SCHEMA


def test_F4_F5_guide_that_does_not_compile_is_a_400_in_the_compilers_words(http, engine, monkeypatch):
    async def refuse(guide):
        raise RequestError(f"{guide.field} does not compile as {guide.kind}: bad repeat", param=guide.field)

    monkeypatch.setattr(engine, "compile_guide", refuse, raising=False)
    error = bad(http, CHAT, messages=USER_HI, guided_regex="foo")
    assert error["param"] == "guided_regex" and "bad repeat" in error["message"]
    assert engine.requests == []


def test_a_guide_waits_for_the_end_of_the_thinking(http, engine):
    body = {"messages": USER_HI, "response_format": {"type": "json_object"}}
    http.post(CHAT, json=body)
    assert engine.requests[-1][1].guide.start_after is None
    http.post(CHAT, json={**body, "chat_template_kwargs": {"opens_thinking": True}})
    assert engine.requests[-1][1].guide.start_after == "</think>"
