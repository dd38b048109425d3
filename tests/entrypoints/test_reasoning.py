"""Thinking and answer apart: goldens, any cut of the text, start states, the whole pipeline; case T5."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.entrypoints.openai.reasoning import (
    CHANNEL_DIALECT,
    DIALECTS,
    HARMONY,
    MM_THINK,
    THINK,
    UNDECIDED_CHARS,
    detect_reasoning,
    get_reasoning_dialect,
    make_reasoning_parser,
    split_reasoning,
    start_state,
    starts_in_reasoning,
    stop_gate,
)
from atom.entrypoints.openai.tool_parsers.answer import make_answer_parser
from atom.entrypoints.openai.tool_parsers.base import Content, Reasoning, ToolCallStart, collect
from atom.entrypoints.openai.tool_parsers.registry import TOOL_PARSERS
from atom.errors import ConfigError
from atom.model_engine.answer_stops import AnswerStopChecker
from tests.entrypoints.tool_parsers.samples import TOOLS, cut, run

LONG = "x " * UNDECIDED_CHARS

CASES = [
    (THINK, "undecided", "<think>\nhm\n</think>\n\nHi <b>", "hm\n", "Hi <b>"),
    (THINK, "undecided", "\n<think>hm</think>\n    code", "hm", "    code"),
    (THINK, "undecided", "hm, so</think>Hi", "hm, so", "Hi"),
    (THINK, "undecided", "<think>never closed " + LONG, "never closed " + LONG, ""),
    (THINK, "undecided", "Short.", "", "Short."),
    (THINK, "undecided", LONG + "<think> is a tag", "", LONG + "<think> is a tag"),
    (THINK, "undecided", "Well. <think>a</think>b", "a", "Well. b"),
    (THINK, "undecided", "", "", ""),
    (THINK, "thinking", "hm </thin </think>\nHi </think>", "hm </thin ", "Hi </think>"),
    (THINK, "thinking", "<think>\nhm</think>Hi", "hm", "Hi"),
    (THINK, "thinking", LONG + "</think>Hi", LONG, "Hi"),
    (THINK, "thinking", " cut off </thi", " cut off </thi", ""),
    (THINK, "thinking", "a<|tool_calls_section_begin|>b", "a", "<|tool_calls_section_begin|>b"),
    (THINK, "answer", "<think> is a tag, </think> too", "", "<think> is a tag, </think> too"),
    (MM_THINK, "undecided", "<mm:think>a</mm:think>b", "a", "b"),
    (
        CHANNEL_DIALECT,
        "thinking",
        "a<|close|>think<|sep|><|open|>response<|sep|>b",
        "a",
        "<|open|>response<|sep|>b",
    ),
    (
        HARMONY,
        "undecided",
        "<|channel|>analysis<|message|>hm < 1<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>",
        "hm < 1",
        "<|start|>assistant<|channel|>final<|message|>Hi<|return|>",
    ),
    (HARMONY, "thinking", "hm<|end|><|channel|>final<|message|>Hi", "hm", "<|channel|>final<|message|>Hi"),
    (HARMONY, "undecided", "<|channel|>" + "a" * 9000, "", "<|channel|>" + "a" * 9000),
    (HARMONY, "undecided", "just text", "", "just text"),
]


def stream(dialect, start, pieces):
    parser = make_reasoning_parser(dialect, start)
    parts = [parser.feed(piece) for piece in pieces] + [parser.finish()]
    assert parser.finish() == ("", "")
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@pytest.mark.parametrize("dialect, start, text, reasoning, content", CASES)
def test_golden_and_every_cut(dialect, start, text, reasoning, content):
    assert split_reasoning(text, dialect, start) == (reasoning, content)
    for position in range(min(len(text), 600) + 1):
        assert stream(dialect, start, cut(text, [position])) == (reasoning, content)
    assert stream(dialect, start, list(text)) == (reasoning, content)


def test_a_late_end_without_opener_is_seen_in_the_whole_text_alone():
    text = LONG + "</think>Hi"
    assert split_reasoning(text, THINK) == (LONG, "Hi")
    for pieces in ([text], list(text)):
        assert stream(THINK, "undecided", pieces) == ("", text)


FRAGMENTS = ["<think>", "</think>", "<", "</", "think>", "\n", " ", "text", "é🚀", "x" * 60] + [
    token
    for dialect in (CHANNEL_DIALECT, HARMONY)
    for token in (dialect.opener, dialect.end, dialect.answer_mark or "|")
]


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda one: one.name)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), start=st.sampled_from(["thinking", "answer", "undecided"]))
def test_any_text_in_any_cut_reads_alike(dialect, data, start):
    text = "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS), max_size=12)))
    whole = stream(dialect, start, [text])
    positions = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    assert stream(dialect, start, cut(text, positions)) == whole
    assert stream(dialect, start, list(text)) == whole
    before = text.partition(dialect.end)[0]
    if dialect.opener in before or dialect.end not in text or start != "undecided":
        assert split_reasoning(text, dialect, start) == whole


def test_only_a_possible_marker_is_held_back():
    parser = make_reasoning_parser(THINK, "thinking")
    assert parser.feed("hm </thi") == ("hm ", "")
    assert not parser.has_answer
    assert parser.feed("s") == ("</this", "")
    assert parser.feed(" </think>") == (" ", "")
    assert parser.has_answer
    assert parser.feed("\n\nHi </think") == ("", "Hi </think")


def test_undecided_text_is_let_go_after_its_limit():
    parser = make_reasoning_parser(THINK)
    assert parser.feed("y" * UNDECIDED_CHARS) == ("", "")
    assert parser.feed("z") == ("", "y" * UNDECIDED_CHARS + "z")
    assert parser.feed("<") == ("", "<")


def test_the_prompt_tells_how_answers_start():
    assert starts_in_reasoning("... assistant\n<think>\n") and starts_in_reasoning("<|open|>think<|sep|>")
    assert not starts_in_reasoning("<think>\n\n</think>\n\n") and not starts_in_reasoning("")
    assert not starts_in_reasoning("<think>", CHANNEL_DIALECT)
    assert start_state("assistant\n<think>\n", THINK) == "thinking"
    assert start_state("assistant\n<think>\n\n</think>\n\n", THINK) == "answer"
    assert start_state("assistant\n", THINK) == "undecided"
    assert start_state("hi<|end|>", HARMONY) == "undecided"


@pytest.mark.parametrize(
    "template, model_type, name",
    [
        ("<|open|>{{ role }}<think>", None, "channel"),
        ("<mm:think>", None, "mm_think"),
        ("{{ '</think>' }}", None, "think"),
        ("<|channel|>analysis<|message|>", None, "harmony"),
        ("no marks", "qwen3", None),
        (None, "qwen3", "think"),
        (None, "gpt_oss", "harmony"),
        (None, None, None),
    ],
)
def test_detection(template, model_type, name):
    found = detect_reasoning(template, model_type)
    assert (found.name if found else None) == name


def test_an_unknown_name_is_refused_with_the_nearest():
    assert get_reasoning_dialect("think") is THINK
    with pytest.raises(
        ConfigError, match=r"--reasoning-parser must be one of .*'thinkk'; did you mean 'think'\?"
    ):
        get_reasoning_dialect("thinkk")


def test_long_thinking_a_character_at_a_time_takes_linear_time():
    text = "</thin" * 20_000
    started = time.process_time()
    assert stream(THINK, "thinking", list(text + "</think>a")) == (text, "a")
    assert time.process_time() - started < 5


PIPELINES = [
    (
        "hermes",
        THINK,
        'I need the time.</think>\n\nOne moment.<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        "thinking",
        ("I need the time.", "One moment.", ["now"]),
    ),
    (
        "kimi_k3",
        CHANNEL_DIALECT,
        "hm<|close|>think<|sep|><|open|>response<|sep|>Yes<|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="now" index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
        "thinking",
        ("hm", "Yes", ["now"]),
    ),
    (
        "harmony",
        HARMONY,
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.now "
        "<|constrain|>json<|message|>{}<|call|><|start|>assistant<|channel|>analysis<|message|>ok<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Noon.<|return|>",
        "undecided",
        ("hmok", "Noon.", ["now"]),
    ),
]


@pytest.mark.parametrize("name, dialect, text, start, expected", PIPELINES, ids=lambda one: str(one)[:12])
def test_reasoning_content_and_calls_of_one_answer(name, dialect, text, start, expected):
    for position in range(len(text) + 1):
        parser = make_answer_parser(TOOL_PARSERS[name], dialect, start=start, tools=TOOLS)
        events = run(parser, cut(text, [position]))
        reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
        content, calls = collect(events)
        assert (reasoning, content, [call.name for call in calls]) == expected
        assert parser.num_calls == 1


def test_tool_choice_none_drops_calls_and_keeps_text():
    parser = make_answer_parser(TOOL_PARSERS["hermes"], None, tools=TOOLS, keeps_calls=False)
    events = run(parser, ['Hi <tool_call>{"name": "now", "arguments": {}}</tool_call> there'])
    assert "".join(event.text for event in events if isinstance(event, Content)) == "Hi there"
    assert not any(isinstance(event, ToolCallStart) for event in events) and parser.num_calls == 0


def test_without_tools_text_is_searched_only_where_answers_are_framed():
    text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert run(make_answer_parser(TOOL_PARSERS["hermes"], None), [text]) == [Content(text)]
    framed = "<|channel|>final<|message|>Hi<|return|>"
    assert run(make_answer_parser(TOOL_PARSERS["harmony"], HARMONY), [framed]) == [Content("Hi")]


@pytest.mark.parametrize(
    "dialect, start, text, stopped",
    [
        (
            THINK,
            "thinking",
            "Question: what? Question:</think>\nYes. Question: more",
            "Question: what? Question:</think>\nYes. ",
        ),
        (THINK, "undecided", "<think>Question:</think>Yes. Question:", "<think>Question:</think>Yes. "),
        (THINK, "undecided", "Yes. Question: x</think>", "Yes. "),
        (
            HARMONY,
            "undecided",
            "<|channel|>analysis<|message|>Question:<|end|><|start|>assistant<|channel|>final<|message|>Yes Question:",
            "<|channel|>analysis<|message|>Question:<|end|><|start|>assistant<|channel|>final<|message|>Yes ",
        ),
    ],
)
def test_T5_stop_strings_apply_to_the_answer_not_to_the_thinking(dialect, start, text, stopped):
    gate = stop_gate(dialect, start)
    for position in range(len(text) + 1):
        checker = AnswerStopChecker(["Question:"], gate)
        out, matched = "", None
        for piece in cut(text, [position]):
            delta, matched = checker.feed(piece)
            out += delta
            if matched:
                break
        assert (out, matched, checker.matched) == (stopped, "Question:", "Question:")


def test_T5_there_is_no_gate_where_no_thinking_comes():
    assert stop_gate(THINK, "answer") is None and stop_gate(None, "undecided") is None
