"""Every dialect: golden answers, any cut of the text, hostile text, and the cases F1 to F3."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.entrypoints.openai.tool_parsers.base import Content, ToolCallStart, collect
from atom.entrypoints.openai.tool_parsers.reader import Markers
from atom.entrypoints.openai.tool_parsers.registry import TOOL_PARSERS
from tests.entrypoints.tool_parsers.samples import SAMPLES, TOOLS, Sample, cut, read, run

DIALECTS = sorted(TOOL_PARSERS)
WITH_CALLS = [sample for sample in SAMPLES if sample.calls]
BARE = ('{"parameters"', '{"name"', "to=")  # beginnings that no marker of a dialect stands before


def title(sample: Sample) -> str:
    return f"{sample.dialect}-{sample.text[:24]!r}"


def loaded(calls: list[tuple[str, str]]) -> list[tuple[str, object]]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("sample", SAMPLES, ids=title)
def test_golden_answer(sample):
    content, calls = read(TOOL_PARSERS[sample.dialect](TOOLS), [sample.text])
    assert (content, loaded(calls)) == (sample.content, sample.calls)


@pytest.mark.parametrize("sample", SAMPLES, ids=title)
def test_F2_every_cut_in_two_reads_alike(sample):
    parser = TOOL_PARSERS[sample.dialect]
    whole = read(parser(TOOLS), [sample.text])
    for position in range(len(sample.text) + 1):
        assert read(parser(TOOLS), cut(sample.text, [position])) == whole
    assert read(parser(TOOLS), list(sample.text)) == whole
    assert collect(run(parser(TOOLS), [sample.text]))[0] == parser(TOOLS).parse_all(sample.text)[0]


@pytest.mark.parametrize(
    "sample", [one for one in WITH_CALLS if not one.text.lstrip().startswith(BARE)], ids=title
)
def test_auto_reads_what_the_dialect_reads(sample):
    expected = read(TOOL_PARSERS[sample.dialect](TOOLS), [sample.text])
    auto = TOOL_PARSERS["auto"]
    assert read(auto(TOOLS), [sample.text]) == expected
    parser = auto(TOOLS)
    assert read(parser, list(sample.text)) == expected
    assert parser.num_calls == len(sample.calls)


# What texts are made of that are near a call without being one.
FRAGMENTS = sorted(
    {token for parser in TOOL_PARSERS.values() for token in (*parser.wire_tokens, *parser.openers.literals)}
    | {"<function=", "</function>", "<parameter=a>", "</parameter>", '<parameter name="a">', "</invoke>"}
    | {"<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", ' name="f">', '<invoke name="f">', "[ARGS]"}
    | {'{"name": "now", "arguments": ', '{"name"', '"now"', "{", "}", "[", "]", ",", ";", '"', "\\", ":", "1"}
    | {"call", 'tool="f"', 'key="a"', "argument", "tools", "functions.f:0", "to=functions.f ", "<", ">", "/>"}
    | {"f", "now", " ", "\n", "\u3000", "text", "é🚀", "\ud800", "<a>", "</a>", "null", "\x00"}
)


@pytest.mark.parametrize("dialect", DIALECTS)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_text_in_any_cut_reads_alike_and_never_raises(dialect, data):
    text = "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS), max_size=25)))
    whole = read(TOOL_PARSERS[dialect](TOOLS), [text])
    positions = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    assert read(TOOL_PARSERS[dialect](TOOLS), cut(text, positions)) == whole
    assert read(TOOL_PARSERS[dialect](TOOLS), list(text)) == whole
    content, calls = whole
    if not calls and not TOOL_PARSERS[dialect].frames_answers and dialect != "auto":
        assert content == text  # what is no call is given back, word for word
    for name, arguments in calls:
        assert name
        if dialect not in ("kimi", "auto"):
            assert isinstance(json.loads(arguments), dict)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_golden_answers_in_random_pieces(data):
    sample = data.draw(st.sampled_from(SAMPLES))
    prefix = data.draw(st.sampled_from(["", "Well, ", "\n", "a<b "]))
    text = prefix + sample.text
    positions = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    parser = TOOL_PARSERS[sample.dialect]
    assert read(parser(TOOLS), cut(text, positions)) == read(parser(TOOLS), [text])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("is_name_first", [True, False])
@settings(max_examples=60, deadline=None)
@given(arguments=st.lists(st.dictionaries(st.text(), VALUES, max_size=3), min_size=1, max_size=3))
def test_F1_arguments_survive_whatever_the_key_order(is_name_first, arguments):
    def call(values):
        pairs = [("name", "now"), ("arguments", values)]
        return json.dumps(dict(pairs if is_name_first else pairs[::-1]), ensure_ascii=False)

    text = "".join(f"<tool_call>\n{call(values)}\n</tool_call>\n" for values in arguments)
    clean = json.loads(json.dumps(arguments))
    for pieces in ([text], list(text)):
        content, calls = read(TOOL_PARSERS["hermes"](TOOLS), pieces)
        assert content == ""
        assert loaded(calls) == [("now", values) for values in clean]


def test_F2_two_calls_an_empty_and_a_nested_object():
    texts = {
        "hermes": '<tool_call>{"name": "a", "arguments": {}}</tool_call><tool_call>{"name": "b", "arguments": '
        '{"a":{"b":1}}}</tool_call>',
        "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.a:0<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_call_begin|>functions.b:1<|tool_call_argument_begin|>"
        '{"a":{"b":1}}<|tool_call_end|><|tool_calls_section_end|>',
        "mistral": '[TOOL_CALLS]a[ARGS]{}[TOOL_CALLS]b[ARGS]{"a":{"b":1}}',
    }
    for dialect, text in texts.items():
        for position in range(len(text) + 1):
            _, calls = read(TOOL_PARSERS[dialect](), cut(text, [position]))
            assert loaded(calls) == [("a", {}), ("b", {"a": {"b": 1}})]


@pytest.mark.parametrize("sample", WITH_CALLS, ids=title)
def test_F3_ids_are_unique_and_come_with_the_name_alone(sample):
    starts = []
    for _ in range(2):
        events = run(TOOL_PARSERS[sample.dialect](TOOLS), list(sample.text))
        found = [event for event in events if isinstance(event, ToolCallStart)]
        assert [event.index for event in found] == list(range(len(sample.calls)))
        starts += found
    ids = [event.id for event in starts]
    if sample.dialect == "kimi":
        assert all(event.name in event.id for event in starts)  # as on the wire
    else:
        assert len(set(ids)) == len(ids)
    if sample.dialect == "mistral":
        assert all(len(one) == 9 and one.isalnum() for one in ids)
    elif sample.dialect != "kimi":
        assert all(one.startswith("call_") and len(one) == 37 for one in ids)


def test_kimi_arguments_stream_as_they_come():
    parser = TOOL_PARSERS["kimi"]()
    parser.feed("<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>")
    start, first = parser.feed('{"path": "a')
    assert (start.id, start.name, first.text) == ("functions.f:0", "f", '{"path": "a')
    assert [event.text for event in parser.feed("bc<|tool")] == ["bc<|tool"]  # within a string: no marker
    assert [getattr(event, "text", None) for event in parser.feed('"}<|tool_call_end|>')] == ['"}', None]


def test_kimi_salvages_a_call_that_is_cut_off():
    text = '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": "b'
    _, calls = TOOL_PARSERS["kimi"]().parse_all(text)
    assert [(call.id, call.arguments) for call in calls] == [("functions.f:0", '{"a": "b')]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_plain_text_is_never_delayed(dialect):
    parser = TOOL_PARSERS[dialect](TOOLS)
    for word in ("Hello,", " 1 > 0 and", " so\n\n", "on: {}.", " [x];", "é🚀"):
        assert parser.feed(word) == [Content(word)]
    assert parser.finish() == []


@pytest.mark.parametrize("dialect", DIALECTS)
def test_only_a_possible_marker_is_held_back(dialect):
    opener = TOOL_PARSERS[dialect].openers.literals[0]
    parser = TOOL_PARSERS[dialect](TOOLS)
    assert parser.feed("text" + opener[:-1]) == [Content("text")]
    assert parser.feed("~") == [Content(opener[:-1] + "~")]
    parser = TOOL_PARSERS[dialect](TOOLS)
    parser.feed("x" + opener[:-1])
    assert parser.finish() == [Content(opener[:-1])]
    assert parser.finish() == []


LONG = 100_000
LONG_TEXTS = {
    "hermes": '<tool_call>{"name": "f", "arguments": {"a": "%s"}}</tool_call>',
    "qwen": "<function=f><parameter=a>%s</parameter></function>",
    "glm": "<tool_call>f<arg_key>a</arg_key><arg_value>%s</arg_value></tool_call>",
    "dsml": '<invoke name="f"><parameter name="a">%s</parameter></invoke>',
    "minimax": ']<]minimax[>[<invoke name="f">]<]minimax[>[<a>%s]<]minimax[>[</a>]<]minimax[>[</invoke>',
    "kimi": '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": "%s"}<|tool_call_end|>',
    "kimi_k3": '<|open|>call tool="f"<|sep|><|open|>argument key="a" type="string"<|sep|>%s<|close|>argument'
    "<|sep|><|close|>call<|sep|>",
    "llama3": '<|python_tag|>{"name": "f", "parameters": {"a": "%s"}}',
    "mistral": '[TOOL_CALLS]f[ARGS]{"a": "%s"}',
    "harmony": '<|channel|>commentary to=functions.f<|message|>{"a": "%s"}<|call|>',
}


@pytest.mark.parametrize("dialect", sorted(LONG_TEXTS))
def test_long_arguments_a_character_at_a_time_take_linear_time(dialect):
    filler = "<ab]c/>" * (LONG // 7)
    text = LONG_TEXTS[dialect] % filler
    started = time.process_time()
    _, calls = read(TOOL_PARSERS[dialect](), list(text))
    assert time.process_time() - started < 5
    assert loaded(calls) == [("f", {"a": filler})]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    "unit", ["<", "{", '"', "</parameter>", "<tool_call>", "<invoke", "w", " ", "[{", "<|"]
)
def test_hostile_repetition_takes_linear_time(dialect, unit):
    opener = TOOL_PARSERS[dialect].openers.literals[-1]
    text = (opener + unit * (LONG // len(unit)))[:LONG] + opener * 2000
    started = time.process_time()
    whole = read(TOOL_PARSERS[dialect](TOOLS), [text])
    pieces = [text[start : start + 50] for start in range(0, len(text), 50)]
    assert read(TOOL_PARSERS[dialect](TOOLS), pieces) == whole
    assert time.process_time() - started < 5


@pytest.mark.parametrize("dialect", sorted(set(LONG_TEXTS) - {"kimi"}))
def test_a_call_over_the_limit_is_content_and_so_is_the_rest(dialect):
    text = "Hi " + LONG_TEXTS[dialect] % ("x" * 500) + LONG_TEXTS[dialect] % "y"
    parser = TOOL_PARSERS[dialect]
    for pieces in ([text], list(text), [text[:250], text[250:]]):
        content, calls = read(parser(max_call_chars=400), pieces)
        assert (content, calls) == (text, [])
    assert len(read(parser(max_call_chars=4000), [text])[1]) == 2


def test_no_marker_lies_within_another():
    # Which of two markers starts first must not depend on how the text is cut.
    import importlib
    import pkgutil

    from atom.entrypoints.openai import tool_parsers

    checked = 0
    for info in pkgutil.iter_modules(tool_parsers.__path__, tool_parsers.__name__ + "."):
        module = importlib.import_module(info.name)
        for owner in (module, *(one for one in vars(module).values() if isinstance(one, type))):
            for markers in [one for one in vars(owner).values() if isinstance(one, Markers)]:
                checked += 1
                for one in markers.literals:
                    assert not any(one in other for other in markers.literals if other != one)
    assert checked > 40
