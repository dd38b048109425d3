"""Unknown fields, ceilings, tokenizer routes and routes that are refused by name."""

import httpx
import pytest

from atom.entrypoints.openai import limits
from tests.entrypoints.test_server_requests import CHAT, COMPLETIONS, USER_HI, bad
from tests.helpers.fake_engine import ASSISTANT, BOS, USER, FakeEngine, ids_of
from tests.helpers.live_server import LiveServer


def nested(depth: int) -> dict:
    value: dict = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def tool(name: str = "f", **parameters: object) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize("streamed", [False, True])
def test_fields_of_openai_without_effect_are_told_in_a_header(http, streamed):
    body = {
        "messages": USER_HI,
        "verbosity": "low",
        "prompt_cache_key": "k",
        "no_such": 1,
        "stream": streamed,
    }
    answer = http.post(CHAT, json=body)
    assert answer.headers["x-atom-warning"] == "ignored fields: prompt_cache_key, verbosity"
    assert "x-atom-warning" not in http.post(CHAT, json={"messages": USER_HI, "verbosity": None}).headers
    options = {"include_usage": True, "include_obfuscation": True}
    answer = http.post(COMPLETIONS, json={"prompt": "x", "stream": True, "stream_options": options})
    assert answer.headers["x-atom-warning"] == "ignored fields: stream_options.include_obfuscation"


def test_strict_fields_refuses_what_nobody_knows():
    server = LiveServer(FakeEngine(), strict_fields=True)
    with httpx.Client(base_url=server.url) as client:
        error = bad(client, CHAT, messages=USER_HI, temperatur=1)
        assert error["param"] == "temperatur" and error["code"] == "unknown_field"
        assert "did you mean 'temperature'" in error["message"]
        assert client.post(CHAT, json={"messages": USER_HI, "verbosity": "low", "x": None}).status_code == 200
        assert bad(client, "/tokenize", prompt="x", propmt=1)["param"] == "propmt"
    server.stop()


CEILINGS = [
    (COMPLETIONS, {"prompt": "x", "n": 129}, "n"),
    (COMPLETIONS, {"prompt": "x", "best_of": 129}, "best_of"),
    (COMPLETIONS, {"prompt": ["x"] * (limits.MAX_PROMPTS + 1)}, "prompt"),
    (COMPLETIONS, {"prompt": ["x"] * 512, "n": 3}, "n"),
    (COMPLETIONS, {"prompt": ["x"] * 512, "best_of": 3}, "best_of"),
    (COMPLETIONS, {"prompt": "x", "logprobs": limits.MAX_COMPLETION_LOGPROBS + 1}, "logprobs"),
    (COMPLETIONS, {"prompt": "x", "stop": ["s"] * 65}, "stop"),
    (COMPLETIONS, {"prompt": "x", "stop": "s" * (limits.MAX_STOP_CHARS + 1)}, "stop"),
    (COMPLETIONS, {"prompt": "x", "stop": [f"{i:01000d}" for i in range(5)]}, "stop"),
    (COMPLETIONS, {"prompt": "x", "stop_token_ids": [1] * (limits.MAX_STOP_TOKEN_IDS + 1)}, "stop_token_ids"),
    (COMPLETIONS, {"prompt": "x", "bad_words": ["w"] * 65}, "bad_words"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs"),
    (COMPLETIONS, {"prompt": "x", "cache_salt": "s" * (limits.MAX_SALT_CHARS + 1)}, "cache_salt"),
    (COMPLETIONS, {"prompt": "x", "cache_salt": "a b"}, "cache_salt"),
    (COMPLETIONS, {"prompt": "x", "user": "u" * (limits.MAX_LABEL_CHARS + 1)}, "user"),
    (COMPLETIONS, {"prompt": "x", "metadata": {str(i): "" for i in range(17)}}, "metadata"),
    (COMPLETIONS, {"prompt": "x", "priority": limits.MAX_PRIORITY + 1}, "priority"),
    (CHAT, {"messages": USER_HI * (limits.MAX_MESSAGES + 1)}, "messages"),
    (CHAT, {"messages": USER_HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"messages": USER_HI, "tools": [tool(f"f{i}") for i in range(limits.MAX_TOOLS + 1)]}, "tools"),
    (CHAT, {"messages": USER_HI, "tools": [tool(x="y" * limits.MAX_TOOL_BYTES)]}, "tools"),
    (CHAT, {"messages": USER_HI, "tools": [tool(x=nested(limits.MAX_JSON_DEPTH))]}, "tools"),
    (CHAT, {"messages": USER_HI, "tools": [tool("n" * 129)]}, "tools[0].function.name"),
    (
        CHAT,
        {"messages": USER_HI, "chat_template_kwargs": {"enable_thinking": nested(limits.MAX_JSON_DEPTH + 1)}},
        "chat_template_kwargs",
    ),
    (
        CHAT,
        {"messages": USER_HI, "chat_template_kwargs": {"enable_thinking": "x" * 2**16}},
        "chat_template_kwargs",
    ),
    (
        CHAT,
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f"}}] * (limits.MAX_TOOL_CALLS + 1),
                }
            ]
        },
        "messages[0].tool_calls",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 4097}]},
        "messages[0].content",
    ),
    ("/detokenize", {"tokens": [1] * (limits.MAX_DETOKENIZE + 1)}, "tokens"),
]


@pytest.mark.parametrize("path, body, param", CEILINGS)
def test_every_ceiling_is_a_400_that_names_field_and_limit(http, engine, path, body, param):
    error = bad(http, path, **body)
    assert error["param"] == param and any(char.isdigit() for char in error["message"]), error
    assert engine.requests == []


def test_tokenize_and_back(http, engine):
    answer = http.post("/tokenize", json={"prompt": "hé", "model": "fake", "return_token_strs": True}).json()
    assert answer == {
        "count": 4,
        "max_model_len": 256,
        "tokens": [BOS, 104, 0xC3, 0xA9],
        "token_strs": ["<s>", "<0x68>", "<0xC3>", "<0xA9>"],
    }
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "<s>hé"}
    answer = http.post("/tokenize", json={"prompt": "h", "add_special_tokens": False}).json()
    assert answer["tokens"] == [104] and answer["token_strs"] is None


def test_tokenize_messages_is_what_a_chat_request_runs(http, engine):
    http.post(CHAT, json={"messages": USER_HI})
    answer = http.post("/tokenize", json={"messages": USER_HI}).json()
    assert answer["tokens"] == engine.requests[-1][0] == [BOS, USER, *ids_of("hi"), ASSISTANT]
    body = {"messages": USER_HI, "add_generation_prompt": False}
    assert http.post("/tokenize", json=body).json()["count"] == 4


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": USER_HI}, "prompt"),
        ("/tokenize", {"messages": USER_HI, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [261]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_bad_tokenizer_requests(http, path, body, param):
    assert bad(http, path, **body)["param"] == param


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/v1/audio/speech", "/v1/images/generations", "/v1/files"]
)
def test_other_routes_of_openai_are_refused_by_name(http, path):
    error = bad(http, path, 404, input="x")
    assert error["code"] == "unsupported_route" and path in error["message"]
