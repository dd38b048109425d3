"""Stop strings, ends and text of users' cases, from socket to token and back."""

import concurrent.futures

import pytest

from tests.helpers.server_process import CHAT, COMPLETIONS, end_of, text_of, texts_of
from tests.helpers.tiny_model import EOS_ID, TURN_ID

MANY_WRITINGS = (
    "naïve café – 日本語テスト 中文",
    "příliš žluťoučký 🙂🚀 kůň",
    "emoji 👨‍👩‍👧‍👦 joined, שלום, здравствуй",
)


def both_ways(server, **body) -> tuple[dict, list[dict]]:
    """The plain choice and the events of the same request streamed; their text and end must agree."""
    plain, chunks = server.ask(**body), server.read_stream(**body)
    assert "".join(texts_of(chunks)) == text_of(plain)
    last = end_of(chunks)
    assert (last["finish_reason"], last["stop_reason"]) == (plain["finish_reason"], plain["stop_reason"])
    return plain, chunks


@pytest.mark.parametrize(
    "said, stops, text, stop_reason",
    [
        ("one AB two ABC three", ["ABC"], "one AB two ", "ABC"),
        ("AABABC", ["ABC"], "AAB", "ABC"),
        ("ends with AB", ["ABC"], "ends with AB", None),
        ("first of two: xyz", ["yz", "xy"], "first of two: ", "xy"),
        ("kůň 🙂 and more", ["🙂 and"], "kůň ", "🙂 and"),
        ("before<pad>after", ["<pad>"], "before", "<pad>"),
    ],
)
def test_T1_stop_string_spans_tokens(echo, said, stops, text, stop_reason):
    plain, _ = both_ways(echo, prompt=said, max_tokens=50, stop=stops)
    assert text_of(plain) == text
    assert (plain["finish_reason"], plain["stop_reason"]) == ("stop", stop_reason)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_T2_text_is_held_back_only_while_a_stop_string_is_possible(echo, path):
    said = "word " * 30 + "\n\nQuest, not quite; \n\nQuestion"
    body = {"prompt": said} if path == COMPLETIONS else {"messages": [{"role": "user", "content": said}]}
    with echo.stream(path, **body, stop=["\n\nQuestion:"]) as events:
        chunks = list(events)
    texts = texts_of(chunks)
    if path == CHAT:
        assert texts.pop(0) == ""  # the event that tells the role
        said = f"user: {said};"
    assert "".join(texts) == said  # what was held back at the end is told
    assert all(texts[:-1]), "an event without text"
    assert texts[-1] or end_of(chunks)["finish_reason"] == "stop"
    assert len(texts) > len(said) / 3, "text waits for more than the stop string needs"
    first, last = events.times[1], events.times[-1]
    assert sum(time - first < (last - first) / 2 for time in events.times) > len(texts) / 4


def test_T3_every_listed_end_id_ends_an_answer(server):
    assert f"answers end at token ids [{EOS_ID}, {TURN_ID}]" in server.log
    for end in (EOS_ID, TURN_ID):
        # Overriding another generation setting must not drop the list.
        body = {"prompt": "x", "max_tokens": 20, "logit_bias": {end: 100}, "temperature": 1.0}
        for extra in ({}, {"stop_token_ids": [7]}, {"stop": ["never said"]}):
            plain, _ = both_ways(server, **body, **extra)
            assert (plain["finish_reason"], plain["stop_reason"]) == ("stop", None)
            assert text_of(plain) == ""


def test_T4_ignore_eos_runs_to_the_limit_unless_the_users_stop_matches(server, echo):
    for end in (EOS_ID, TURN_ID):
        answer = server.post(prompt="x", ignore_eos=True, max_tokens=200, logit_bias={end: 100}).json()
        assert answer["usage"]["completion_tokens"] == 200
        assert answer["choices"][0]["finish_reason"] == "length"
    stopped = server.ask(
        prompt="x", ignore_eos=True, max_tokens=200, logit_bias={TURN_ID: 100}, stop=["<turn>"]
    )
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", "<turn>")
    stopped = echo.ask(prompt="abc<eos>def", ignore_eos=True, stop=["ef"])
    assert (stopped["text"], stopped["finish_reason"], stopped["stop_reason"]) == ("abcd", "stop", "ef")


def test_T6_token_limit_inside_a_character_is_valid_json(echo):
    said = "ab🙂"
    for limit in range(2, 8):  # the first token is the text's begin, the last four are one character
        plain, _ = both_ways(echo, prompt=said, max_tokens=limit)
        text = text_of(plain)
        assert plain["finish_reason"] == "length"
        if limit == 7:
            assert text == said
        else:
            assert text.rstrip("\ufffd") == said[: limit - 1].rstrip("🙂")


def test_T6_random_bytes_are_always_valid_json(server):
    answer = server.post(prompt="x", max_tokens=64, temperature=100, n=8, logprobs=5, ignore_eos=True, seed=1)
    assert answer.status_code == 200
    answer.content.decode("utf-8", "strict")
    assert all(len(choice["logprobs"]["tokens"]) == 64 for choice in answer.json()["choices"])
    chunks = server.read_stream(prompt="x", max_tokens=64, temperature=100, n=8, ignore_eos=True, seed=1)
    for choice in answer.json()["choices"]:
        assert "".join(texts_of(chunks, choice["index"])) == text_of(choice)


def test_T7_concurrent_multibyte_streams_equal_the_plain_answers(echo):
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        streams = list(pool.map(lambda text: echo.read_stream(prompt=text), MANY_WRITINGS * 2))
    for said, chunks in zip(MANY_WRITINGS * 2, streams, strict=True):
        assert "".join(texts_of(chunks)) == said == echo.text(prompt=said)


def test_T7_random_bytes_in_a_batch_decode_as_they_do_alone(server):
    bodies = [
        {"prompt": f"prompt {i}", "max_tokens": 60, "temperature": 2.0, "seed": i, "ignore_eos": True}
        for i in range(8)
    ]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        streams = list(pool.map(lambda body: server.read_stream(**body), bodies))
    for body, chunks in zip(bodies, streams, strict=True):
        text = server.text(**body)
        assert "".join(texts_of(chunks)) == text
        assert any(ord(character) > 127 for character in text)
