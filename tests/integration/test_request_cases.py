"""Lengths, ids, templates and usage of users' cases."""

import openai
import pytest

from tests.helpers.server_process import CHAT, COMPLETIONS, finished
from tests.helpers.tiny_model import TOKENIZER_SIZE, VOCAB_SIZE
from tests.integration.conftest import CONTEXT


def prompt_of(num_tokens: int) -> str:
    """A text of that many tokens: its bytes and the begin of text."""
    return "y" * (num_tokens - 1)


@pytest.mark.parametrize("num_prompt, max_tokens", [(500, 20), (CONTEXT, 1), (600, 10), (CONTEXT, None)])
def test_L4_over_the_context_is_refused_with_every_number(server, num_prompt, max_tokens):
    before = len(server.lines)
    answer = server.post(prompt=prompt_of(num_prompt), max_tokens=max_tokens)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["code"] == "context_length_exceeded"
    for number in (CONTEXT, num_prompt, max_tokens):
        assert number is None or str(number) in error["message"], error["message"]
    server.check_sound()
    lines = [line for line in server.lines[before:] if "context" in line]
    assert len(lines) == 1 and "INFO" in lines[0]


def test_L4_what_fits_exactly_is_answered_to_its_end(server):
    for num_prompt, max_tokens in ((500, 12), (CONTEXT - 1, 1), (10, CONTEXT - 10), (CONTEXT - 1, None)):
        answer = server.post(prompt=prompt_of(num_prompt), max_tokens=max_tokens, ignore_eos=True).json()
        assert answer["usage"]["prompt_tokens"] == num_prompt
        assert answer["usage"]["total_tokens"] == CONTEXT
        assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("token_id", [999_999, VOCAB_SIZE, TOKENIZER_SIZE, -1])
def test_L5_ids_outside_the_vocabulary_are_refused(server, token_id):
    for field, value in (
        ("logit_bias", {token_id: 5}),
        ("stop_token_ids", [token_id]),
        ("prompt", [5, token_id]),
    ):
        answer = server.post(**{"prompt": "x", "max_tokens": 2, field: value})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == field
        assert str(token_id) in answer.json()["error"]["message"]


def test_L5_rows_past_the_tokenizer_are_never_sampled(server):
    """The head has 60 rows that no id of the tokenizer belongs to; noise alone would choose one in five times."""
    body = {
        "prompt": "x",
        "max_tokens": 100,
        "temperature": 100,
        "ignore_eos": True,
        "n": 4,
        "seed": 3,
        "logprobs": 5,
    }
    answer = server.post(**body).json()
    for choice in answer["choices"]:
        logprobs = choice["logprobs"]
        assert all(logprobs["tokens"]), "a sampled id has no token"
        assert all(token for entry in logprobs["top_logprobs"] for token in entry)
        assert all(-200 < value <= 0 for value in logprobs["token_logprobs"])


def test_L7_template_that_refuses_a_role_order_is_a_400_in_its_own_words(echo):
    messages = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    answer = echo.post(CHAT, messages=messages)
    assert answer.status_code == 400
    assert "roles must alternate, got two of user" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "content, text",
    [
        ("plain", "plain"),
        ([{"type": "text", "text": "pl"}, {"type": "text", "text": "ain"}], "pl\nain"),
        ("", ""),
        (None, ""),
    ],
)
def test_L7_content_is_null_a_string_or_parts(echo, content, text):
    client = openai.OpenAI(base_url=echo.url + "/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id, messages=[{"role": "user", "content": content}]
    )
    echo.num_answers += 1
    assert answer.choices[0].message.content == f"user: {text};"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("n", [1, 3])
def test_L8_usage_comes_once_when_asked_for(server, path, n):
    body = (
        {"prompt": "count me"}
        if path == COMPLETIONS
        else {"messages": [{"role": "user", "content": "count"}]}
    )
    body |= {"max_tokens": 9, "n": n, "seed": 5, "ignore_eos": True}
    plain = server.post(path, **body).json()["usage"]
    assert plain["completion_tokens"] == 9 * n
    chunks = server.read_stream(path, **body, stream_options={"include_usage": True})
    *others, last = chunks
    assert last["choices"] == [] and all(chunk["choices"] for chunk in others)
    assert all(chunk["usage"] is None for chunk in others)
    told = last["usage"]
    assert [told[key] for key in plain if key.endswith("_tokens")] == [
        plain[key] for key in plain if key.endswith("_tokens")
    ]
    for options in ({}, {"stream_options": {"include_usage": False}}):
        assert all(
            chunk.get("usage") is None and chunk["choices"]
            for chunk in server.read_stream(path, **body, **options)
        )


def test_metrics_count_what_was_answered(server):
    before = server.wait_until_idle()
    server.ask(prompt="12345", max_tokens=7, ignore_eos=True)
    after = server.wait_until_idle()
    gained = {name: after[name] - before.get(name, 0) for name in after}
    assert gained["prompt_tokens_total"] == 6 and gained["generation_tokens_total"] == 7
    assert finished(after, "length") - finished(before, "length") == 1
    assert gained["request_queue_time_seconds_count"] == 1
    assert gained['time_to_first_token_seconds_count{streaming="false"}'] == 1
