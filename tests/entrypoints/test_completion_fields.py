"""Echo, scoring, best_of and prompt log-probabilities of /v1/completions."""

import pytest

from atom.core import TokenLogprobs
from tests.entrypoints.test_server_requests import bad
from tests.helpers.fake_engine import ASSISTANT, BOS, EOS, ids_of

COMPLETIONS = "/v1/completions"


def joined(chunks: list[dict], index: int = 0) -> tuple[str, dict[str, list]]:
    text, logprobs = "", {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                text += choice["text"]
                for name, values in (choice["logprobs"] or {}).items():
                    logprobs.setdefault(name, []).extend(values or [])
    return text, logprobs


@pytest.mark.parametrize("prompt", ["aéb", [BOS, *ids_of("aéb")]])
def test_L1_echo_with_no_tokens_scores_the_prompt(http, engine, prompt):
    body = {"prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": 1}
    answer = http.post(COMPLETIONS, json=body).json()
    choice = answer["choices"][0]
    assert choice["text"] == "aéb" and choice["finish_reason"] == "length" and choice["stop_reason"] is None
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["<s>", "a", "�", "�", "b"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert logprobs["text_offset"] == [0, 0, 1, 1, 2]
    assert logprobs["top_logprobs"][0] is None and logprobs["top_logprobs"][1] == {"a": -0.5}
    assert answer["usage"]["completion_tokens"] == 0 and answer["usage"]["prompt_tokens"] == 5
    assert "prompt_logprobs" not in choice  # not asked for by that name
    assert engine.requests[-1][1].max_tokens == 1


@pytest.mark.parametrize("extra", [{"max_tokens": 3}, {"max_tokens": 0}, {"max_tokens": 3, "n": 2}])
def test_L1_echo_streams_what_it_answers(http, stream, extra):
    body = {"prompt": ["xy", "z"], "echo": True, "logprobs": 2, **extra}
    plain = http.post(COMPLETIONS, json=body).json()["choices"]
    chunks = stream(COMPLETIONS, **body)
    for choice in plain:
        text, logprobs = joined(chunks, choice["index"])
        assert text == choice["text"] and logprobs == choice["logprobs"]
    assert plain[0]["text"] == "xy" + ("Hel" if extra["max_tokens"] else "")
    assert plain[0]["logprobs"]["text_offset"] == ([0, 0, 1, 2, 3, 4] if extra["max_tokens"] else [0, 0, 1])


def test_L1_offsets_follow_special_tokens_that_the_prompt_shows(http):
    body = {"prompt": "a<|user|>b", "echo": True, "max_tokens": 1, "logprobs": 0}
    choice = http.post(COMPLETIONS, json=body).json()["choices"][0]
    assert choice["text"] == "a<|user|>bH"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 9, 10]


def test_no_tokens_needs_echo_or_prompt_logprobs(http):
    assert bad(http, COMPLETIONS, prompt="x", max_tokens=0)["param"] == "max_tokens"
    answer = http.post(COMPLETIONS, json={"prompt": "xy", "max_tokens": 0, "prompt_logprobs": 0})
    assert len(answer.json()["choices"][0]["prompt_logprobs"]) == 3
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}
    both = {**body, "max_completion_tokens": 2, "prompt_logprobs": 0}  # the newer name wins
    assert http.post("/v1/chat/completions", json=both).json()["usage"]["completion_tokens"] == 2
    assert bad(http, "/v1/chat/completions", **body)["param"] == "max_tokens"
    answer = http.post("/v1/chat/completions", json={**body, "prompt_logprobs": 0}).json()
    assert answer["choices"][0]["message"]["content"] == "" and answer["usage"]["completion_tokens"] == 0
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


def test_L2_prompt_logprobs_beside_a_wider_echo(http):
    body = {"prompt": "ab", "echo": True, "logprobs": 3, "prompt_logprobs": 1, "max_tokens": 1}
    choice = http.post(COMPLETIONS, json=body).json()["choices"][0]
    assert [len(row or ()) for row in choice["prompt_logprobs"]] == [0, 1, 1]
    assert [len(top or ()) for top in choice["logprobs"]["top_logprobs"]] == [0, 3, 3, 3]


def test_best_of_tells_the_likeliest_by_mean(http, engine, monkeypatch):
    engine.script = lambda prompt, index: [*ids_of(f"{index}"), EOS]
    means = {"0": -3.0, "1": -1.0, "2": -2.0, "3": -4.0}

    def logprobs(token: int, num_top: int) -> TokenLogprobs:
        return TokenLogprobs(token, means.get(chr(token % 256), 0.0), 1, [], [])

    monkeypatch.setattr(engine, "_logprobs", logprobs, raising=False)
    answer = http.post(COMPLETIONS, json={"prompt": ["x", "y"], "best_of": 4, "n": 2}).json()
    assert [c["text"] for c in answer["choices"]] == ["1", "2", "1", "2"]
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert answer["choices"][0]["logprobs"] is None  # not asked for
    assert answer["usage"]["completion_tokens"] == 16  # all that was made
    same = http.post(COMPLETIONS, json={"prompt": "x", "best_of": 4, "n": 4}).json()
    assert [c["text"] for c in same["choices"]] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    "fields", [{"n": 3, "best_of": 2}, {"best_of": 129}, {"best_of": 0}, {"best_of": 2, "stream": True}]
)
def test_bad_best_of(http, fields):
    assert bad(http, COMPLETIONS, prompt="x", **fields)["param"] == "best_of"


def test_special_tokens_are_shown_when_asked_for_but_not_the_end(http, engine):
    engine.script = lambda prompt, index: [ASSISTANT, *ids_of("hi"), EOS]
    body = {"prompt": "x", "logprobs": 0}
    assert http.post(COMPLETIONS, json=body).json()["choices"][0]["text"] == "hi"
    choice = http.post(COMPLETIONS, json={**body, "skip_special_tokens": False}).json()["choices"][0]
    assert choice["text"] == "<|assistant|>hi"
    assert choice["logprobs"]["text_offset"] == [0, 13, 14, 15]


def test_usage_of_every_chunk_when_asked_for(stream):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(COMPLETIONS, prompt="x", max_tokens=3, stream_options=options)
    assert [c["usage"]["completion_tokens"] for c in chunks] == [1, 2, 3, 3]
    chunks = stream(
        "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], stream_options=options
    )
    assert all(chunk["usage"]["prompt_tokens"] for chunk in chunks)
