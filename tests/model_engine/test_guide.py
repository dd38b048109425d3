"""What a Guide refuses by itself, at once: sizes, nesting, and texts that are no such thing."""

import json
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom import SamplingParams
from atom.errors import RequestError
from atom.guide import MAX_GUIDE_BYTES, MAX_GUIDE_DEPTH, Guide, Tag
from atom.model_engine.structured.schema import lengths_as_patterns, make_explicit


def refused(match: str, **fields) -> None:
    began = time.perf_counter()
    with pytest.raises(RequestError, match=match) as info:
        Guide(field="response_format", **fields)
    assert time.perf_counter() - began < 0.1
    assert info.value.param == "response_format" and info.value.message.startswith("response_format")


def test_F4_a_doubled_quantifier_is_refused_where_it_stands():
    refused(r"two quantifiers in a row at character 4", kind="regex", text="foo**")
    refused(r"two quantifiers", kind="json_schema", text='{"type": "string", "pattern": "foo**"}')


def test_F5_a_schema_that_holds_no_schema_is_refused_with_its_place():
    text = '{"type": "object", "properties": {"foo": "bar"}}'
    refused(r'#/properties/foo must be an object or a boolean, got "bar"', kind="json_schema", text=text)


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "regex", "text": "(" * 4000 + "a" + ")" * 4000},
        {"kind": "grammar", "text": "root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000},
        {"kind": "json_schema", "text": '{"not":' * 5000 + "{}" + "}" * 5000},
        {"kind": "json_schema", "text": '{"const": ' + "[" * 10_000 + "]" * 10_000 + "}"},
    ],
)
def test_F6_deep_nesting_is_refused_with_the_limit(fields):
    refused(f"at most {MAX_GUIDE_DEPTH} levels of nesting", **fields)


def test_F6_ten_thousand_parentheses_are_too_long_to_be_counted():
    refused("at most 8192 characters, got 20001", kind="regex", text="(" * 10_000 + "a" + ")" * 10_000)


@pytest.mark.parametrize(
    "match, fields",
    [
        (f"at most {MAX_GUIDE_BYTES} bytes, got", {"kind": "grammar", "text": "x" * (MAX_GUIDE_BYTES + 1)}),
        ("at most 1024 choices, got 1025", {"kind": "choice", "choices": tuple(map(str, range(1025)))}),
        ("non-empty choices", {"kind": "choice"}),
        ("non-empty choices", {"kind": "choice", "choices": ("a", "")}),
        ("must have a text", {"kind": "regex", "text": ""}),
        ("must have a text", {"kind": "json_schema", "text": " "}),
        ("is not JSON", {"kind": "json_schema", "text": '{"type":'}),
        ("#/required must be an array", {"kind": "json_schema", "text": '{"required": true}'}),
        ("#/required must hold names", {"kind": "json_schema", "text": '{"required": [1]}'}),
        ("#/anyOf/1 must be", {"kind": "json_schema", "text": '{"anyOf": [{}, 3]}'}),
        ("#/items must be", {"kind": "json_schema", "text": '{"items": "x"}'}),
        ("#/pattern must be a string", {"kind": "json_schema", "text": '{"pattern": 3}'}),
        ("# must be an object", {"kind": "json_schema", "text": "[]"}),
        ("nothing to repeat at character 0", {"kind": "regex", "text": "*a"}),
        ("nothing to repeat at character 2", {"kind": "regex", "text": "a|+"}),
        ("lone surrogate", {"kind": "regex", "text": "\ud800"}),
        ("must have tags", {"kind": "structural"}),
        ("is not JSON", {"kind": "structural", "tags": (Tag(begin="<a>", schema="{"),)}),
        ("1 to 256 characters", {"kind": "json_object", "start_after": ""}),
    ],
)
def test_what_is_malformed_or_over_a_limit_is_refused_by_name(match, fields):
    refused(match, **fields)


@pytest.mark.parametrize(
    "text",
    [r"a*?b", r"\d{2,}?x", r"[*+]*", r"(?:a|b)+", r"a{x}", r"[]*]+", r"(?P<n>a)?", r"\**", r"a{,3}", "}{"],
)
def test_sound_expressions_pass(text):
    assert Guide(kind="regex", text=text).text == text


@given(st.text(alphabet="ab(|)*+?{}1,[]^\\\"'.", max_size=30))
def test_the_check_refuses_no_expression_that_python_takes(pattern):
    """Possessive quantifiers aside, which no grammar library has."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError):
        return
    if pattern.strip() and not re.search(r"[*+?}]\+", pattern):
        try:
            Guide(kind="regex", text=pattern)
        except RequestError as error:
            assert "nothing to repeat" in error.message and "{" in pattern  # Python reads "|{1}" as text


@given(st.text(alphabet='"\\[](){}a', max_size=200))
def test_nesting_is_counted_without_an_end(text):
    try:
        Guide(kind="grammar", text=text or "x")
    except RequestError as error:
        assert "levels of nesting" in error.message or "must have a text" in error.message


def test_counting_is_linear_in_hostile_text():
    began = time.perf_counter()
    Guide(kind="grammar", text='"\\' + '\\"' * 30_000)
    Guide(kind="grammar", text="[" + "\\[" * 30_000)
    assert time.perf_counter() - began < 0.5


def test_a_guide_ends_its_answer_so_ignore_eos_is_refused():
    with pytest.raises(RequestError, match="ignore_eos must be false with a guide"):
        SamplingParams(guide=Guide(kind="json_object"), ignore_eos=True)


def test_open_objects_are_closed_unless_the_schema_speaks_of_others():
    closed = make_explicit({"properties": {"a": {"properties": {"b": {}}}}, "required": ["a", "z"]})
    assert closed["additionalProperties"] is False and closed["properties"]["z"] is True
    assert closed["properties"]["a"]["additionalProperties"] is False
    assert closed["type"] == closed["properties"]["a"]["type"] == "object"
    for schema in (
        {"type": "object"},
        {"type": ["object", "null"], "properties": {"a": {}}, "additionalProperties": {"type": "null"}},
        {"properties": {"a": {}}, "allOf": [{"properties": {"b": {}}}]},
        {"properties": {"a": {}}, "anyOf": [{"required": ["a"]}]},
    ):
        assert make_explicit(json.loads(json.dumps(schema))) == schema


def test_lengths_become_patterns_without_control_characters():
    schema = lengths_as_patterns({"items": {"type": "string", "minLength": 1, "maxLength": 3}})
    pattern = re.compile(schema["items"].pop("pattern"))
    assert schema["items"] == {"type": "string"}
    assert pattern.fullmatch("abc") and pattern.fullmatch("é")
    assert not any(pattern.fullmatch(text) for text in ("", "abcd", "a\n", 'a"', "a\\"))
