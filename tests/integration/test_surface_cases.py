"""Scoring, structured answers, tools and the bound of the queue, over a real model."""

import concurrent.futures
import json
import re
import threading
import time

import pytest

from tests.helpers.server_process import CHAT, COMPLETIONS, ServerProcess
from tests.helpers.tiny_model import CHAT_TEMPLATE

USER_HI = [{"role": "user", "content": "hi"}]
TOOLS_TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHAT_TEMPLATE
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Brno", "Oslo"]}, "big": {"type": "boolean"}},
    "required": ["city", "big"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {**CITY, "required": ["city"]}}}
SLOTS, QUEUE = 2, 4


@pytest.fixture(scope="module")
def tool_server(tiny_model):
    flags = (
        "--chat-template",
        TOOLS_TEMPLATE,
        "--max-num-seqs",
        str(SLOTS),
        "--max-queued-requests",
        str(QUEUE),
    )
    server = ServerProcess(tiny_model, *flags)
    try:
        yield server
        server.check_sound()
    finally:
        server.kill()


def test_L1_scored_answer_has_the_logprobs_it_was_made_with(server):
    prompt = server.http.post("/tokenize", json={"prompt": "hello"}).json()["tokens"]
    body = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    made = server.post(prompt=prompt, **body).json()["choices"][0]["logprobs"]
    echoed = server.post(prompt=prompt, **body, echo=True).json()["choices"][0]["logprobs"]
    n = len(prompt)
    assert echoed["token_logprobs"][0] is None and len(echoed["tokens"]) == n + 8
    assert echoed["tokens"][n:] == made["tokens"]
    whole = server.http.post("/tokenize", json={"prompt": "hello" + "".join(made["tokens"])}).json()["tokens"]
    for max_tokens in (0, 1):
        scored = server.post(prompt=whole, echo=True, logprobs=1, temperature=0, max_tokens=max_tokens).json()
        logprobs = scored["choices"][0]["logprobs"]
        assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == len(whole) + max_tokens
        assert scored["usage"]["completion_tokens"] == max_tokens
        if whole[:n] == prompt and len(whole) == n + 8:  # the answer's bytes are tokens again
            assert logprobs["token_logprobs"][n : n + 8] == pytest.approx(made["token_logprobs"], abs=1e-3)
        assert logprobs["token_logprobs"][1:n] == pytest.approx(echoed["token_logprobs"][1:n], abs=1e-3)


def test_L2_prompt_logprobs_have_a_row_a_token_warm_or_cold(server):
    rows = []
    for _ in range(2):
        answer = server.post(prompt="y" * 100, prompt_logprobs=1, max_tokens=1).json()
        rows.append(answer["choices"][0]["prompt_logprobs"])
        assert len(rows[-1]) == answer["usage"]["prompt_tokens"] and rows[-1][0] is None
        assert all(rows[-1][1:])
    for cold, warm in zip(rows[0][1:], rows[1][1:], strict=True):
        assert {k: v["logprob"] for k, v in warm.items()} == pytest.approx(
            {k: v["logprob"] for k, v in cold.items()}, abs=1e-3
        )


def test_L1_L2_a_prompt_of_one_token_has_its_null(server):
    scored = server.ask(prompt=[65], prompt_logprobs=1, echo=True, logprobs=1, max_tokens=0)
    assert scored["prompt_logprobs"] == [None]
    assert scored["logprobs"]["tokens"] == ["A"] and scored["logprobs"]["token_logprobs"] == [None]
    for path, body in ((COMPLETIONS, {"prompt": [65]}), (CHAT, {"messages": USER_HI})):
        body |= {"prompt_logprobs": 1, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
        plain = server.post(path, **body).json()
        first, *later = server.read_stream(path, **body)
        if path == COMPLETIONS:
            (plain,), (first,) = plain["choices"], first["choices"]
            later = [choice for chunk in later for choice in chunk["choices"]]
        assert first["prompt_logprobs"] == plain["prompt_logprobs"]
        assert not any("prompt_logprobs" in one for one in later)


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"guided_regex": "foo**"}, "guided_regex"),
        ({"guided_regex": "(" * 10_000 + ")" * 10_000}, "guided_regex"),
        ({"guided_grammar": "root ::= nothing_here"}, "guided_grammar"),
        ({"guided_grammar": "root := 'typo'"}, "guided_grammar"),
        ({"guided_json": {"type": "object", "properties": {"foo": "bar"}}}, "guided_json"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no_such_type"}}}},
            "response_format.json_schema.schema",
        ),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_F4_F5_F6_bad_guide_is_a_400_and_hurts_nobody(server, path, fields, param):
    server.post(prompt="x", max_tokens=2, guided_choice=["a"])  # the compiler has started
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: server.post(prompt="x", max_tokens=100, ignore_eos=True))
        began = time.monotonic()
        body = {"prompt": "x"} if path == COMPLETIONS else {"messages": USER_HI}
        answer = server.post(path, **body, **fields)
        assert time.monotonic() - began < 1
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
        assert other.result().json()["usage"]["completion_tokens"] == 100


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(
    "fields, check",
    [
        ({"guided_choice": ["north", "south"]}, lambda text: text in ("north", "south")),
        ({"guided_regex": "[a-c]{3}-[0-9]{2}"}, lambda text: re.fullmatch("[a-c]{3}-[0-9]{2}", text)),
        ({"guided_grammar": 'root ::= "a" [0-9] [0-9] "b"'}, lambda text: re.fullmatch("a[0-9][0-9]b", text)),
        ({"guided_json": CITY}, lambda text: json.loads(text)["city"] in ("Brno", "Oslo")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY}}},
            lambda text: isinstance(json.loads(text)["big"], bool),
        ),
    ],
)
def test_guided_answers_of_a_random_model_are_what_was_asked(server, fields, check, temperature):
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": USER_HI})):
        answer = server.post(
            path,
            **body,
            **fields,
            temperature=temperature,
            seed=1,
            max_tokens=200,
            n=2,
            # A random model may like white space best, which JSON allows for longer than the answer may be.
            logit_bias=dict.fromkeys((9, 10, 13, 32), -100),
        ).json()
        for choice in answer["choices"]:
            text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
            assert check(text), text
            assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look_up"}}])
def test_forced_calls_of_a_random_model_keep_to_the_schema(tool_server, choice):
    answer = tool_server.post(
        CHAT,
        messages=USER_HI,
        tools=[TOOL],
        tool_choice=choice,
        parallel_tool_calls=False,
        temperature=1,
        seed=2,
    ).json()
    told = answer["choices"][0]
    assert told["finish_reason"] == "tool_calls", told
    (call,) = told["message"]["tool_calls"]
    assert call["function"]["name"] == "look_up"
    assert json.loads(call["function"]["arguments"])["city"] in ("Brno", "Oslo")


def test_tools_beside_a_response_format_give_a_call_or_that_form(tool_server):
    seen = set()
    schema = {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY}}
    for seed in range(12):
        told = tool_server.post(
            CHAT,
            messages=USER_HI,
            tools=[TOOL],
            response_format=schema,
            parallel_tool_calls=False,
            temperature=1,
            seed=seed,
            max_tokens=200,
            logit_bias=dict.fromkeys((9, 10, 13, 32), -100) | {60: 2 * (seed % 2) * 5},  # "<" begins a call
        ).json()["choices"][0]
        message, is_call = told["message"], told["finish_reason"] == "tool_calls"
        seen.add(told["finish_reason"])
        text = message["tool_calls"][0]["function"]["arguments"] if is_call else message["content"]
        value = json.loads(text)
        assert value["city"] in ("Brno", "Oslo") and (is_call or isinstance(value["big"], bool)), told
    assert seen == {"tool_calls", "stop"}


def test_D3_queue_is_bounded_and_says_when_to_come_back(tool_server):
    barrier = threading.Barrier(32)

    def ask(i: int):
        barrier.wait()
        return tool_server.post(prompt=f"{i}", max_tokens=60, ignore_eos=True)

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(ask, range(32)))
    by_status = {status: [a for a in answers if a.status_code == status] for status in (200, 429)}
    assert len(by_status[200]) + len(by_status[429]) == 32
    assert len(by_status[200]) >= SLOTS + QUEUE and by_status[429]
    for answer in by_status[429]:
        assert int(answer.headers["retry-after"]) >= 1
        assert f"max_queued_requests {QUEUE}" in answer.json()["error"]["message"]
    text = tool_server.http.get("/metrics").text
    assert f"atom:requests_rejected_total {float(len(by_status[429]))}" in text
