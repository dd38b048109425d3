"""Cases of users of LLM servers, at the HTTP level, with scripted ids. Each test is named after its case."""

import concurrent.futures
import json
import socket
import time

import httpx
import pytest

from tests.entrypoints.conftest import events
from tests.helpers.fake_engine import EOS, EOS_2, FakeEngine, ids_of
from tests.helpers.live_server import LiveServer, wait_for

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER_HI = [{"role": "user", "content": "hi"}]


def says(text: str):
    return lambda prompt, index: [*ids_of(text), EOS]


def streamed_text(chunks: list[dict], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)


def last_choice(chunks: list[dict], index: int = 0) -> dict:
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index][-1]


@pytest.mark.parametrize("tokens_per_step", [1, 2, 5])
def test_T1_stop_string_spans_tokens(http, stream, engine, tokens_per_step):
    engine.script, engine.tokens_per_step = says("one AB two ABC three"), tokens_per_step
    body = {"prompt": "x", "stop": ["ABC"]}
    plain = http.post(COMPLETIONS, json=body).json()["choices"][0]
    chunks = stream(COMPLETIONS, **body)
    assert plain["text"] == streamed_text(chunks) == "one AB two "
    assert plain["finish_reason"] == last_choice(chunks)["finish_reason"] == "stop"
    assert plain["stop_reason"] == last_choice(chunks)["stop_reason"] == "ABC"


def test_T2_only_possible_stop_text_is_held_back_and_no_delta_is_empty(stream, engine):
    engine.script = says("abc\n\nQuest, then \n\nQuestion")
    chunks = stream(CHAT, messages=USER_HI, stop=["\n\nQuestion:"])
    texts = [c["choices"][0]["delta"]["content"] for c in chunks if "content" in c["choices"][0]["delta"]]
    assert texts[0] == ""  # the role chunk
    assert "" not in texts[1:]
    assert texts[1:4] == ["a", "b", "c"]  # not late
    assert "".join(texts) == "abc\n\nQuest, then \n\nQuestion"  # the tail is flushed


def test_T4_ignore_eos_runs_to_the_limit(http, engine):
    engine.script = lambda prompt, index: [EOS, EOS_2, *ids_of("ab")] * 60
    answer = http.post(COMPLETIONS, json={"prompt": "x", "ignore_eos": True, "max_tokens": 200}).json()
    assert answer["usage"]["completion_tokens"] == 200
    assert answer["choices"][0]["finish_reason"] == "length"
    answer = http.post(
        COMPLETIONS, json={"prompt": "x", "ignore_eos": True, "max_tokens": 9, "stop": "b"}
    ).json()
    assert answer["choices"][0] == {
        "index": 0, "text": "a", "logprobs": None, "finish_reason": "stop", "stop_reason": "b",
    }  # fmt: skip


@pytest.mark.parametrize("streamed", [False, True])
def test_T6_token_limit_inside_a_character_is_valid_json(http, engine, streamed):
    engine.script = says("ab🙂")
    for limit in range(3, 7):
        body = {"prompt": "x", "max_tokens": limit, "stream": streamed, "logprobs": 1}
        answer = http.post(COMPLETIONS, json=body)
        answer.content.decode("utf-8")
        chunks = events(answer.text) if streamed else [answer.json()]
        text = streamed_text(chunks)
        assert text == "ab🙂" if limit == 6 else text.startswith("ab") and "🙂" not in text
    engine.script = lambda prompt, index: [0xFF, 0xC3, 0x28, 0xED, 0xA0, 0x80, EOS]
    assert http.post(COMPLETIONS, json={"prompt": "x", "logprobs": 5, "stream": streamed}).status_code == 200


@pytest.mark.parametrize("tokens_per_step", [1, 3])
def test_T7_concurrent_multibyte_streams_equal_the_plain_answers(server, engine, tokens_per_step):
    texts = ["naïve café – 日本語テスト", "příliš žluťoučký 🙂🚀 kůň", "emoji 👨‍👩‍👧‍👦 joined"]
    engine.script = lambda prompt, index: [*ids_of(texts[prompt[-1] - ord("0")]), EOS]
    engine.step_s, engine.tokens_per_step = 0.001, tokens_per_step

    def ask(i: int) -> tuple[str, str]:
        with httpx.Client(base_url=server.url) as client:
            chunks = events(client.post(COMPLETIONS, json={"prompt": f"{i}", "stream": True}).text)
            plain = client.post(COMPLETIONS, json={"prompt": f"{i}"}).json()
        return streamed_text(chunks), plain["choices"][0]["text"]

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        for text, (streamed, plain) in zip(texts, pool.map(ask, range(3)), strict=True):
            assert streamed == plain == text


def test_L4_prompt_and_answer_over_the_context(http, engine, caplog):
    for path, source, field in (
        (COMPLETIONS, "prompt", "max_tokens"),
        (CHAT, "messages", "max_completion_tokens"),
    ):
        content = "y" * 200
        body = (
            {"prompt": content}
            if path == COMPLETIONS
            else {"messages": [{"role": "user", "content": content}]}
        )
        length = http.post(path, json={**body, field: 1}).json()["usage"]["prompt_tokens"]
        with caplog.at_level("INFO", logger="atom.server"):
            caplog.clear()
            answer = http.post(path, json={**body, field: 100})
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert (error["param"], error["code"]) == (field, "context_length_exceeded")
        for number in (256, length, 100, length + 100):
            assert str(number) in error["message"]
        lines = [r for r in caplog.records if r.name == "atom.server"]
        assert len(lines) == 1 and lines[0].exc_info is None
        body = json.loads(json.dumps(body).replace(content, "y" * 300))
        answer = http.post(path, json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == source
        assert (
            "256" in answer.json()["error"]["message"]
            and str(length + 100) in answer.json()["error"]["message"]
        )


def test_L4_what_fits_exactly_is_taken_and_an_omitted_limit_means_the_rest(http, engine):
    engine.script = lambda prompt, index: ids_of("z" * 500)
    assert http.post(COMPLETIONS, json={"prompt": [1] * 250, "max_tokens": 6}).status_code == 200
    assert http.post(COMPLETIONS, json={"prompt": [1] * 250, "max_tokens": 7}).status_code == 400
    answer = http.post(COMPLETIONS, json={"prompt": [1] * 250}).json()
    assert answer["usage"]["completion_tokens"] == 6 and answer["choices"][0]["finish_reason"] == "length"
    assert engine.requests[-1][1].max_tokens is None


@pytest.mark.parametrize(
    "field, value",
    [
        ("logit_bias", {"999999": 5}),
        ("logit_bias", {"-1": 5}),
        ("logit_bias", {"261": 1}),
        ("stop_token_ids", [3, 261]),
        ("stop_token_ids", [-5]),
        ("prompt", [1, 2, 261]),
        ("prompt", [[1], [2, -1]]),
        ("prompt", [2**40]),
    ],
)
def test_L5_ids_outside_the_vocabulary(http, engine, field, value):
    before = len(engine.requests)
    answer = http.post(COMPLETIONS, json={"prompt": "x", field: value})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field
    assert (
        "[0, 260]" in answer.json()["error"]["message"] or "at least 0" in answer.json()["error"]["message"]
    )
    assert len(engine.requests) == before


def test_L7_template_error_is_a_400_with_the_templates_words(http):
    twice = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    answer = http.post(CHAT, json={"messages": twice})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "chat template: roles must alternate"
    assert answer.json()["error"]["param"] == "messages"


def test_L7_content_may_be_null_a_string_or_parts(http, engine):
    def prompt_of(content: object) -> list[int]:
        assert http.post(CHAT, json={"messages": [{"role": "user", "content": content}]}).status_code == 200
        return engine.requests[-1][0]

    part = {"type": "text", "text": "hi"}
    assert prompt_of("hi") == prompt_of([part])
    assert prompt_of([part, {**part, "text": "ho"}]) == prompt_of("hi\nho")
    assert prompt_of(None) == prompt_of("") == prompt_of([])


@pytest.mark.parametrize(
    "path, body", [(CHAT, {"messages": USER_HI}), (COMPLETIONS, {"prompt": ["a", "b"], "n": 2})]
)
def test_L8_usage_comes_once_when_asked(http, stream, engine, path, body):
    engine.num_cached_tokens = 1
    plain = http.post(path, json=body).json()["usage"]
    chunks = stream(path, **body, stream_options={"include_usage": True})
    assert [c["usage"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == plain
    assert plain["prompt_tokens_details"]["cached_tokens"] == (1 if path == CHAT else 2)
    for options in ({}, {"stream_options": {"include_usage": False}}, {"stream_options": None}):
        chunks = stream(path, **body, **options)
        assert all("usage" not in c and c["choices"] for c in chunks)


def request_bytes(path: str, body: dict) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


def connect(server: LiveServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=5)


@pytest.mark.parametrize(
    "path, body", [(CHAT, {"messages": USER_HI, "n": 2}), (COMPLETIONS, {"prompt": ["a", "b"]})]
)
@pytest.mark.parametrize("streamed", [False, True])
def test_D1_client_that_leaves_is_aborted_within_a_second(server, engine, http, path, body, streamed):
    engine.script, engine.step_s = lambda prompt, index: ids_of("z" * 200), 0.02
    num_prompts = len(body.get("prompt", [1]))
    with connect(server) as client:
        client.sendall(request_bytes(path, {**body, "stream": streamed}))
        if streamed:
            received = b""
            while received.count(b'"z"') < 5:
                received += client.recv(65536)
        else:
            assert wait_for(lambda: len(engine.running) == num_prompts)
    assert wait_for(lambda: not engine.running and not len(server.context.inflight), 1.0)
    assert len(engine.aborted) == num_prompts


def test_D1_normal_end_aborts_nothing(http, stream, engine):
    http.post(COMPLETIONS, json={"prompt": ["a", "b"], "n": 2})
    stream(CHAT, messages=USER_HI)
    assert engine.aborted == []


def test_D1_slow_reader_costs_no_memory_and_stalls_nobody(server, engine, http):
    engine.script = lambda prompt, index: ids_of("z" * 200)
    with connect(server) as client:
        client.sendall(request_bytes(COMPLETIONS, {"prompt": "x", "n": 100, "stream": True}))
        time.sleep(0.1)  # nothing is read
        started = time.monotonic()
        assert http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 3}).status_code == 200
        assert time.monotonic() - started < 1
    assert wait_for(lambda: not len(server.context.inflight), 1.0)


def test_D2_health_probes_need_no_request(server, engine, http):
    engine.is_paused, engine.max_queue = True, 2
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(httpx.post, server.url + COMPLETIONS, json={"prompt": "x"}) for _ in range(2)]
        assert wait_for(lambda: len(engine.running) == 2)
        assert [http.get("/health").status_code for _ in range(50)] == [200] * 50
        assert len(engine.running) == 2 and len(server.context.inflight) == 2
        assert http.post(COMPLETIONS, json={"prompt": "x"}).status_code == 429
        engine.is_paused = False
        assert [w.result().status_code for w in waiting] == [200, 200]


def test_D3_full_queue_is_a_429_that_says_when(http, engine):
    engine.max_queue = 0
    answer = http.post(COMPLETIONS, json={"prompt": "x"})
    assert answer.status_code == 429 and answer.headers["retry-after"] == "2"
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"


def test_D3_batch_that_is_refused_half_way_leaves_nothing_running(http, engine):
    engine.max_queue, engine.is_paused = 2, True
    assert http.post(COMPLETIONS, json={"prompt": ["a", "b", "c"]}).status_code == 429
    assert wait_for(lambda: not engine.running) and len(engine.aborted) == 2


def test_D4_dead_engine_ends_streams_health_and_server():
    server = LiveServer(FakeEngine(script=lambda prompt, index: ids_of("z" * 200), step_s=0.02))
    with httpx.Client(base_url=server.url) as client:
        with client.stream("POST", COMPLETIONS, json={"prompt": "x", "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            died = time.monotonic()
            server.loop.call_soon_threadsafe(server.engine.die)
            frames = [line for line in lines if line]
            assert time.monotonic() - died < 1
        error = json.loads(frames[-1].removeprefix("data: "))["error"]
        assert "code -9" in error["message"] and error["type"] == "server_error"
        health = client.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "dead"
        assert "code -9" in health.json()["reason"]
        assert client.post(COMPLETIONS, json={"prompt": "x"}).status_code == 503
        assert time.monotonic() - died < 1
    assert server.join(5) and server.exit_code == 1


def test_D4_plain_request_fails_with_503_when_the_engine_dies():
    server = LiveServer(FakeEngine(script=lambda prompt, index: ids_of("z" * 200), step_s=0.02))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(httpx.post, server.url + CHAT, json={"messages": USER_HI})
        assert wait_for(lambda: len(server.engine.running) == 1)
        server.loop.call_soon_threadsafe(server.engine.die)
        assert answer.result(2).status_code == 503
        assert answer.result().json()["error"]["code"] == "engine_dead"
    assert server.join(5)
