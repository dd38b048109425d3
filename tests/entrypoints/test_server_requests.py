"""Request fields, answers and errors of the HTTP API."""

import json

import httpx
import pytest

from atom.entrypoints.openai.limits import MAX_BODY_BYTES
from atom.entrypoints.openai.protocol import UNSUPPORTED_CHAT, UNSUPPORTED_COMPLETION, UNSUPPORTED_EVERYWHERE
from atom.errors import AtomError
from tests.helpers.fake_engine import ASSISTANT, BOS, EOS, USER, FakeEngine, ids_of
from tests.helpers.live_server import LiveServer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER_HI = [{"role": "user", "content": "hi"}]


def bad(http: httpx.Client, path: str, status: int = 400, **body: object) -> dict:
    answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in answer.text
    return error


def test_completion_has_the_openai_shape(http):
    answer = http.post(
        COMPLETIONS, json={"prompt": "ab", "model": "fake", "user": "u", "max_tokens": None}
    ).json()
    assert answer.pop("id").startswith("cmpl-") and answer.pop("created") > 0
    choice = {
        "index": 0,
        "text": "Hello, world",
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert answer == {
        "object": "text_completion",
        "model": "fake",
        "choices": [choice],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 13,
            "total_tokens": 16,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_chat_completion_has_the_openai_shape(http, engine):
    answer = http.post(CHAT, json={"messages": USER_HI, "max_completion_tokens": 5, "max_tokens": 99}).json()
    assert answer["id"].startswith("chatcmpl-") and answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Hello"}
    assert answer["choices"][0]["finish_reason"] == "length"
    # One BOS: the template writes it, so the tokenizer must not.
    assert engine.requests[-1][0] == [BOS, USER, *ids_of("hi"), ASSISTANT]


def test_chat_stream_order_is_role_text_finish(stream):
    chunks = [chunk["choices"][0] for chunk in stream(CHAT, messages=USER_HI)]
    assert chunks[0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(c["delta"]) == {"content"} and c["finish_reason"] is None for c in chunks[1:-1])
    assert "".join(c["delta"]["content"] for c in chunks[1:-1]) == "Hello, world"
    assert chunks[-1]["delta"] == {} and chunks[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "prompt, ids",
    [
        ("ab", [[BOS, 97, 98]]),
        (["ab", "c"], [[BOS, 97, 98], [BOS, 99]]),
        ([7, 8], [[7, 8]]),
        ([[7], [8, 9]], [[7], [8, 9]]),
        ([[7]], [[7]]),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_prompt_forms_and_n(http, stream, engine, prompt, ids, streamed):
    engine.script = lambda prompt, index: [*ids_of(f"{prompt[-1]}/{index}"), EOS]
    body = {"prompt": prompt, "n": 2}
    expected = [f"{item[-1]}/{j}" for item in ids for j in range(2)]
    if streamed:
        texts = dict.fromkeys(range(len(expected)), "")
        for chunk in stream(COMPLETIONS, **body):
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert list(texts.values()) == expected
    else:
        choices = http.post(COMPLETIONS, json=body).json()["choices"]
        assert [c["text"] for c in choices] == expected and [c["index"] for c in choices] == [
            *range(len(expected))
        ]
    assert [request[0] for request in engine.requests] == ids


def test_sampling_fields_reach_the_engine(http, engine):
    body = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": -3, "stop": ["a", "b"], "min_tokens": 2,
        "stop_token_ids": [5], "bad_words": ["no"], "ignore_eos": True, "presence_penalty": 1, "max_tokens": 9,
        "frequency_penalty": -1, "repetition_penalty": 1.2, "logit_bias": {"5": -100}, "n": 2, "prompt_logprobs": 1,
    }  # fmt: skip
    http.post(COMPLETIONS, json={"prompt": "x", "logprobs": 2, "priority": -7, **body})
    params = engine.requests[0][1]
    assert engine.priorities == [-7]
    body["stop_strings"], body["logit_bias"] = body.pop("stop"), {5: -100.0}
    for name, value in {**body, "logprobs": 2}.items():
        assert getattr(params, name) == value, name
    http.post(CHAT, json={"messages": USER_HI, "temperature": 0, "logprobs": True, "stop": "x"})
    assert engine.requests[1][1].is_greedy and engine.requests[1][1].num_logprobs == 0
    assert engine.requests[1][1].stop_strings == ["x"]


@pytest.mark.parametrize(
    "field, value, param",
    [
        ("temperature", -1, "temperature"),
        ("temperature", "hot", "temperature"),
        ("top_p", 0, "top_p"),
        ("top_k", 0, "top_k"),
        ("top_k", 2**31, "top_k"),
        ("top_k", 10**30, "top_k"),
        ("min_p", 2, "min_p"),
        ("n", 0, "n"),
        ("n", 129, "n"),
        ("n", 1.5, "n"),
        ("max_tokens", 0, "max_tokens"),
        ("max_tokens", 10**30, "max_tokens"),
        ("max_tokens", "5", "max_tokens"),
        ("seed", 2**63, "seed"),
        ("presence_penalty", 2.1, "presence_penalty"),
        ("repetition_penalty", 0, "repetition_penalty"),
        ("repetition_penalty", 1e-320, "repetition_penalty"),
        ("stop", ["a"] * 65, "stop"),
        ("stop", [""], "stop"),
        ("stop", "s" * 1025, "stop"),
        ("stop", [1], "stop[0]"),
        ("bad_words", ["w" * 1025], "bad_words"),
        ("stop_token_ids", [1] * 65, "stop_token_ids"),
        ("logit_bias", {"1": 101}, "logit_bias"),
        ("logit_bias", {"a": 1}, "logit_bias"),
        ("logit_bias", {str(i): 1 for i in range(301)}, "logit_bias"),
        ("min_tokens", -1, "min_tokens"),
        ("min_tokens", 400, "min_tokens"),
        ("stream", "yes", "stream"),
        ("stream_options", {"include_usage": True}, "stream_options"),
        ("cache_salt", "", "cache_salt"),
        ("cache_salt", "a\nb", "cache_salt"),
        ("cache_salt", "s" * 257, "cache_salt"),
        ("priority", 1001, "priority"),
        ("priority", -(10**20), "priority"),
        ("user", "u" * 513, "user"),
        ("metadata", {str(i): "" for i in range(17)}, "metadata"),
        ("prompt_logprobs", 21, "prompt_logprobs"),
    ],
)
def test_bad_field_is_named_on_both_routes(http, engine, field, value, param):
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": USER_HI})):
        error = bad(http, path, **{**body, field: value})
        assert error["param"] == param and error["type"] == "invalid_request_error"
        assert field in error["message"]
    assert engine.requests == []


@pytest.mark.parametrize(
    "body, param",
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a"] * 513}, "prompt"),
        ({"prompt": ["a"] * 20, "n": 100}, "n"),
        ({"prompt": "x", "logprobs": 6}, "logprobs"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
    ],
)
def test_bad_completion_request(http, engine, body, param):
    assert bad(http, COMPLETIONS, **body)["param"] == param
    assert engine.requests == []


@pytest.mark.parametrize(
    "body, param",
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
        ({"messages": [{"role": "user", "function_call": {"name": "f"}}]}, "messages[0].function_call"),
        ({"messages": USER_HI, "logprobs": 1}, "logprobs"),
        ({"messages": USER_HI, "top_logprobs": 1}, "top_logprobs"),
        ({"messages": USER_HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": USER_HI, "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": USER_HI, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": USER_HI, "chat_template_kwargs": {"add_generation_prompt": 1}}, "chat_template_kwargs"),
        ({"messages": USER_HI, "chat_template_kwargs": {"raise_exception": 1}}, "chat_template_kwargs"),
        ({"messages": USER_HI, "chat_template_kwargs": {"enable_thinkng": 1}}, "chat_template_kwargs"),
    ],
)
def test_bad_chat_request(http, engine, body, param):
    error = bad(http, CHAT, **body)
    assert error["param"] == param
    assert engine.requests == []


WANTED = {
    "best_of": 3, "suffix": "end", "echo": True, "modalities": ["text", "audio"], "function_call": {"name": "f"},
}  # fmt: skip


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_L6_unsupported_field_is_refused_by_name_and_its_defaults_are_not(http, engine, path):
    extra = UNSUPPORTED_COMPLETION if path == COMPLETIONS else UNSUPPORTED_CHAT
    body = {"prompt": "x"} if path == COMPLETIONS else {"messages": USER_HI}
    for field, allowed in (UNSUPPORTED_EVERYWHERE | extra).items():
        error = bad(http, path, **body, **{field: WANTED.get(field, {"some": "thing"})})
        assert error["param"] == field and error["code"] == "unsupported"
        assert error["message"].startswith(f"{field} is not supported")
        for value in (None, *allowed):
            answer = http.post(path, json={**body, "max_tokens": 1, field: value})
            assert answer.status_code == 200, (field, value, answer.text)


def test_unknown_fields_are_ignored(http):
    assert http.post(COMPLETIONS, json={"prompt": "x", "no_such_field": [1]}).status_code == 200


def test_completion_logprobs(http, stream, engine):
    engine.script = lambda prompt, index: [ASSISTANT, *ids_of("aéb"), EOS]
    body = {"prompt": "x", "logprobs": 2, "max_tokens": 5}
    plain = http.post(COMPLETIONS, json=body).json()["choices"][0]["logprobs"]
    assert plain["tokens"] == ["<|assistant|>", "a", "�", "�", "b"]
    assert plain["text_offset"] == [0, 0, 1, 1, 2]  # in "aéb": the special token is not shown
    assert plain["token_logprobs"] == [-0.5] * 5
    assert plain["top_logprobs"][1] == {"a": -0.5, "b": -1.5}
    joined: dict[str, list] = {name: [] for name in plain}
    for chunk in stream(COMPLETIONS, **body):
        for name, values in chunk["choices"][0]["logprobs"].items():
            joined[name] += values
    assert joined == plain  # no token is lost while half a character is held back
    only = http.post(COMPLETIONS, json={**body, "logprobs": 0}).json()["choices"][0]["logprobs"]
    assert only["top_logprobs"] is None and len(only["token_logprobs"]) == 5


def test_chat_logprobs(http, stream, engine):
    engine.script = lambda prompt, index: [*ids_of("é"), EOS]
    body = {"messages": USER_HI, "logprobs": True, "top_logprobs": 2}
    plain = http.post(CHAT, json=body).json()["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in plain] == [[0xC3], [0xA9], list(b"</s>")]
    assert [len(entry["top_logprobs"]) for entry in plain] == [2, 2, 2]
    streamed = [
        entry
        for chunk in stream(CHAT, **body)
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == plain


def test_infinite_logprob_is_a_number(http, engine, monkeypatch):
    from atom.core import TokenLogprobs

    never = TokenLogprobs(97, float("-inf"), 5, [98], [float("nan")])
    monkeypatch.setattr(engine, "_logprobs", lambda token, num_top: never, raising=False)
    logprobs = http.post(COMPLETIONS, json={"prompt": "x", "logprobs": 1}).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][0] == -9999.0 and logprobs["top_logprobs"][0] == {
        "a": -9999.0,
        "b": -9999.0,
    }


def test_prompt_logprobs(http):
    answer = http.post(COMPLETIONS, json={"prompt": "abc", "prompt_logprobs": 1, "max_tokens": 1}).json()
    rows = answer["choices"][0]["prompt_logprobs"]
    assert len(rows) == 4 and rows[0] is None
    assert rows[1] == {"97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}}
    answer = http.post(CHAT, json={"messages": USER_HI, "prompt_logprobs": 0, "max_tokens": 1}).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize("extra", [{}, {"n": 2}, {"max_tokens": 0}, {"max_tokens": 3, "stop": ["Hello"]}])
def test_L2_prompt_logprobs_stream_once_as_they_are_answered(http, stream, extra):
    body = {"prompt": ["abc", "d"], "prompt_logprobs": 1, **extra}
    plain = http.post(COMPLETIONS, json=body).json()["choices"]
    told: dict[int, list] = {}
    for chunk in stream(COMPLETIONS, **body):
        for choice in chunk["choices"]:
            told.setdefault(choice["index"], []).append(choice.get("prompt_logprobs"))
    assert len(told) == len(plain)
    for choice in plain:
        first, *later = told[choice["index"]]
        assert first == choice["prompt_logprobs"] and not any(later)
    body = {"messages": USER_HI, "prompt_logprobs": 1, **extra}
    whole = http.post(CHAT, json=body).json()
    first, *later = stream(CHAT, **body)
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert first["prompt_logprobs"] == whole["prompt_logprobs"]
    assert len(first["prompt_logprobs"]) == whole["usage"]["prompt_tokens"]
    assert not any("prompt_logprobs" in chunk for chunk in later)


def test_chat_template_kwargs_and_generation_prompt(http, engine):
    http.post(CHAT, json={"messages": USER_HI, "chat_template_kwargs": {"enable_thinking": True}})
    assert engine.requests[-1][0] == [BOS, USER, *ids_of("hi<|think|>"), ASSISTANT]
    http.post(CHAT, json={"messages": USER_HI, "add_generation_prompt": False})
    assert engine.requests[-1][0] == [BOS, USER, *ids_of("hi")]


def test_developer_is_system_for_a_template_that_does_not_know_it(http, engine):
    messages = [{"role": "developer", "content": "be brief"}, *USER_HI]
    assert http.post(CHAT, json={"messages": messages}).status_code == 200


def test_unknown_model_is_404(http):
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": USER_HI})):
        error = bad(http, path, 404, model="gpt-9", **body)
        assert (
            error["code"] == "model_not_found" and "gpt-9" in error["message"] and "fake" in error["message"]
        )
        assert http.post(path, json={**body, "model": "fake/", "max_tokens": 1}).status_code == 200
    assert http.get("/v1/models/gpt-9").status_code == 404


def test_routes_that_tell(http, engine):
    listed = http.get("/v1/models").json()
    assert listed["object"] == "list" and [m["id"] for m in listed["data"]] == ["fake"]
    assert http.get("/v1/models/fake").json() == listed["data"][0]
    assert http.get("/health").json() == {"status": "ok"}
    head = http.head("/health")
    assert head.status_code == 200 and head.content == b""
    info = http.get("/server_info").json()
    assert (info["model_id"], info["served_model_name"], info["tp_size"], info["dp_size"]) == (
        "fake/model", "fake", 1, 1,
    )  # fmt: skip
    assert info["device"] == "fake" and info["startup_phases"]["load"] == 1.5
    assert set(http.get("/version").json()) == {"version"}
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    assert http.get("/tokenizer_info").json() == {**tokens, "chat_template": engine.tokenizer.chat_template}


def test_unknown_route_and_method(http):
    for method, path, status in (
        ("GET", "/nope", 404),
        ("GET", "/health/", 404),
        ("GET", COMPLETIONS, 405),
        ("POST", "/health", 405),
    ):
        answer = http.request(method, path)
        assert answer.status_code == status and answer.json()["error"]["type"] == "invalid_request_error"
        assert path in answer.json()["error"]["message"]
    assert http.get(COMPLETIONS).headers["allow"] == "POST"


@pytest.mark.parametrize(
    "content, code",
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b'{"prompt": "x",}', "invalid_json"),
        (b'{"prompt": "\xff"}', "invalid_json"),
        (b'{"prompt": "\\ud800"}', "invalid_json"),
        (b'{"prompt": "x", "a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid_json"),
        (b'{"prompt": "x", "tools": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid_json"),
        (b'{"prompt": "x", "temperature": NaN}', "invalid_json"),
        (b"[1]", None),
        (b"null", None),
    ],
)
def test_body_that_is_no_request(http, content, code):
    answer = http.post(COMPLETIONS, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == code


def test_other_content_types_are_refused(http):
    # What a page in a browser can send across origins without being asked.
    for content_type in ("text/plain", "application/x-www-form-urlencoded", None):
        headers = {"content-type": content_type} if content_type else {}
        answer = http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers)
        assert answer.status_code == 415 and "application/json" in answer.json()["error"]["message"]
    large = {"content-type": "text/plain", "connection": "close"}
    for _ in range(5):  # unread bytes would reset the connection, and the answer with it
        assert http.post(COMPLETIONS, content=b"x" * 2**20, headers=large).status_code == 415
    headers = {"content-type": "application/json; charset=utf-8"}
    assert http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers).status_code == 200


def test_body_over_the_limit_is_413(http):
    text = "x" * MAX_BODY_BYTES
    answer = http.post(COMPLETIONS, json={"prompt": text})
    assert answer.status_code == 413 and str(MAX_BODY_BYTES) in answer.json()["error"]["message"]

    def chunks():
        yield b'{"prompt": "'
        for _ in range(MAX_BODY_BYTES // 2**20 + 1):
            yield b"x" * 2**20

    answer = http.post(COMPLETIONS, content=chunks(), headers={"content-type": "application/json"})
    assert answer.status_code == 413


def test_request_id_is_echoed_or_made(http):
    assert http.get("/health", headers={"x-request-id": "my-id.7"}).headers["x-request-id"] == "my-id.7"
    for given in ("a" * 129, "a b", "a/b", "é".encode(), "{}"):
        made = http.get("/health", headers={"x-request-id": given}).headers["x-request-id"]
        assert made.startswith("req-")
    answer = http.post(COMPLETIONS, json={"prompt": "x"}, headers={"x-request-id": "same"})
    again = http.post(COMPLETIONS, json={"prompt": "x"}, headers={"x-request-id": "same"})
    assert answer.headers["x-request-id"] == "same" and answer.json()["id"] != again.json()["id"]


def test_engine_failure_before_the_first_byte_is_a_status(http, engine):
    engine.fail_with, engine.tokens_per_step = "the sampler met NaN", 1
    error = bad(http, COMPLETIONS, 500, prompt="x")
    assert "NaN" in error["message"] and error["type"] == "server_error"
    engine.fail_with = "unschedulable: 300 blocks, 16 exist"
    assert "16 exist" in bad(http, COMPLETIONS, prompt="x")["message"]


def test_engine_failure_inside_a_stream_is_an_event(http, engine):
    engine.fail_with = "the sampler met NaN"
    answer = http.post(CHAT, json={"messages": USER_HI, "stream": True})
    frames = answer.text.split("\n\n")
    assert answer.status_code == 200 and "[DONE]" not in answer.text
    assert "NaN" in json.loads(frames[-2].removeprefix("data: "))["error"]["message"]


def test_unexpected_exception_is_an_opaque_500_logged_once(http, engine, monkeypatch, caplog):
    def explode(*args, **kwargs):
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(engine, "stream", explode, raising=False)
    with caplog.at_level("INFO", logger="atom.server"):
        error = bad(http, COMPLETIONS, 500, prompt="x")
    assert error["message"] == "Internal server error"
    records = [record for record in caplog.records if record.name == "atom.server"]
    assert len(records) == 1 and records[0].exc_info is not None
    monkeypatch.undo()


def test_chat_without_a_template_says_so():
    server = LiveServer(FakeEngine(chat_template=None))
    answer = httpx.post(server.url + CHAT, json={"messages": USER_HI})
    assert answer.status_code == 400 and "--chat-template" in answer.json()["error"]["message"]
    assert httpx.post(server.url + COMPLETIONS, json={"prompt": "x"}).status_code == 200
    server.stop()


def test_profiler_routes_are_there_with_its_folder():
    engine = FakeEngine()
    called = []

    async def utility(command: str, timeout_s: float = 300.0) -> list[str]:
        called.append(command)
        if len(called) == 4:
            raise TimeoutError
        if len(called) > 2:
            raise AtomError("no profiler runs")
        return ["trace.json.gz"]

    engine.config.torch_profiler_dir, engine.utility = "/traces", utility
    server = LiveServer(engine)
    assert httpx.post(server.url + "/start_profile").json()["status"] == "success"
    assert httpx.post(server.url + "/stop_profile").json()["traces"] == ["trace.json.gz"]
    failed = httpx.post(server.url + "/stop_profile")
    assert failed.status_code == 500 and failed.json()["error"]["message"] == "no profiler runs"
    late = httpx.post(server.url + "/stop_profile")
    assert late.status_code == 500 and "ATOM_PROFILER_TIMEOUT (300 s)" in late.json()["error"]["message"]
    assert called == ["start_profile", "stop_profile", "stop_profile", "stop_profile"]
    server.stop()


def test_openapi_document_tells_the_structs(http):
    document = http.get("/openapi.json").json()
    paths, schemas = document["paths"], document["components"]["schemas"]
    for path in (
        COMPLETIONS,
        CHAT,
        "/v1/models",
        "/v1/models/{model_id}",
        "/health",
        "/metrics",
        "/server_info",
    ):
        assert path in paths
    fields = schemas["ChatCompletionRequest"]["properties"]
    assert fields["messages"]["type"] == "array" and "Not supported" in json.dumps(fields["audio"])
    for reference in set(json.dumps(document).split('"$ref": "')[1:]):
        assert reference.split('"')[0].removeprefix("#/components/schemas/") in schemas
