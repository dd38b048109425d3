"""Names, detection, conversion of values, and that the guide lists what the registry has."""

import re
from pathlib import Path

import pytest

from atom.entrypoints.openai.reasoning import REASONING_DIALECTS
from atom.entrypoints.openai.tool_parsers.registry import (
    MODEL_TYPES,
    TEMPLATE_MARKS,
    TOOL_PARSERS,
    detect_parser,
    get_tool_parser,
)
from atom.entrypoints.openai.tool_parsers.values import (
    Schema,
    convert,
    declared_parameters,
    dump_json,
    load_json,
)
from atom.errors import ConfigError

GUIDE = Path(__file__).parents[3].joinpath("docs/tool_calling_guide.md").read_text()


def test_every_name_gives_its_parser():
    for name, parser in TOOL_PARSERS.items():
        assert get_tool_parser(name) is parser and parser.name == name


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(
        ConfigError, match=r"--tool-call-parser must be one of .*'hermse'; did you mean 'hermes'\?"
    ):
        get_tool_parser("hermse")
    with pytest.raises(ConfigError, match="got 'zzz'$"):
        get_tool_parser("zzz")


def test_all_names_in_the_detection_tables_exist():
    assert {name for _, name in TEMPLATE_MARKS} | set(MODEL_TYPES.values()) <= set(TOOL_PARSERS)


@pytest.mark.parametrize(
    "template, model_type, name",
    [
        ("{{ '<tool_call>\\n<function=' + call.name }}", "qwen3_moe", "qwen"),
        ("{{ '<tool_call>\\n{\"name\": ' }}", "qwen2", "hermes"),
        ("<tool_call>{{ name }}<arg_key>", "glm4_moe", "glm"),
        ("<|tool_calls_section_begin|>", "deepseek_v3", "kimi"),
        ("]<]minimax[>[<tool_call>", None, "minimax"),
        ("<minimax:tool_call>", None, "dsml"),
        ("{%- set mark = '｜DSML｜' %}", None, "dsml"),
        ("<|start|>assistant<|channel|>", None, "harmony"),
        ("[AVAILABLE_TOOLS]", None, "mistral"),
        ("<|start_header_id|>ipython<|end_header_id|>", None, "llama3"),
        ("no tools in here", "qwen3_moe", "hermes"),
        (None, "qwen3_5_moe", "qwen"),
        (None, "kimi_k3", "kimi_k3"),
        (None, "gpt_oss", "harmony"),
        ("plain", "gemma3_text", None),
        (None, None, None),
    ],
)
def test_detection(template, model_type, name):
    assert detect_parser(template, model_type) == name


@pytest.mark.parametrize(
    "text, schema, value",
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("5.0", {"type": "integer"}, 5),
        ("5.5", {"type": "integer"}, "5.5"),
        ("five", {"type": "integer"}, "five"),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("1e999", {"type": "number"}, "1e999"),
        ("NaN", {"type": "number"}, "NaN"),
        ("3", {"type": "number"}, 3),
        (" TRUE\n", {"type": "boolean"}, True),
        ("1", {"type": "boolean"}, "1"),
        ("None", {"type": ["string", "null"]}, None),
        ("7", {"anyOf": [{"type": "null"}, {"type": "integer"}]}, 7),
        ("7", {"enum": ["7", "8"]}, "7"),
        ('{"a": 1}', {"properties": {}}, {"a": 1}),
        ("[1]", {"type": "object"}, "[1]"),
        ("[1]", None, [1]),
        ("__import__('os')", None, "__import__('os')"),
        ("[" * 100_000, None, "[" * 100_000),
        ("true", {}, True),
    ],
)
def test_conversion(text, schema, value):
    converted = convert(text, Schema(schema))
    assert converted == value and type(converted) is type(value)


def test_references_are_followed_and_end():
    schema = Schema({"$defs": {"a": {"$ref": "#/$defs/a"}, "n": {"type": "integer"}}, "$ref": "#/$defs/a"})
    assert schema.types == set()
    inner = Schema({"$defs": {"n": {"type": "integer"}}, "properties": {"x": {"$ref": "#/$defs/n"}}})
    assert convert("4", inner.property("x")) == 4
    assert Schema({"$ref": "#/nowhere/at/all"}).types == set()


def test_odd_tools_do_no_harm():
    tools = [
        None,
        1,
        {},
        {"function": None},
        {"function": {"name": 3}},
        {"name": "a", "input_schema": {"x": 1}},
    ]
    assert declared_parameters(tools) == {"a": {"x": 1}}


def test_text_is_sendable_whatever_the_value():
    assert dump_json({"a": "\ud800é"}) == '{"a": "\ufffdé"}'
    with pytest.raises(ValueError):
        load_json("[-Infinity]")


def rows(heading: str) -> list[list[str]]:
    lines = GUIDE[GUIDE.index(heading) :].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    table = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])])
    return table


def test_the_guide_lists_the_dialects():
    listed = {row[0].strip("`") for row in rows("<!-- tool parsers -->")}
    assert listed == set(TOOL_PARSERS)


def test_the_guide_lists_the_model_types():
    listed = {
        kind.strip(" `"): row[0].strip("`")
        for row in rows("<!-- model types -->")
        for kind in row[1].split(",")
    }
    assert listed == MODEL_TYPES


def test_the_guide_lists_the_reasoning_dialects():
    listed = {
        row[0].strip("`"): [cell.strip("`").replace("\\|", "|") for cell in row[1:3]]
        for row in rows("<!-- reasoning -->")
    }
    assert listed == {one.name: [one.opener, one.end] for one in REASONING_DIALECTS.values()}


def test_the_guides_example_is_read_as_it_says():
    blocks = re.findall(r"```text\n(.*?)```\n+reads as `(\w+)` with `(\{.*?\})`", GUIDE, re.S)
    assert len(blocks) >= 2
    for text, name, arguments in blocks:
        _, calls = TOOL_PARSERS["auto"]().parse_all(text)
        assert [(call.name, load_json(call.arguments)) for call in calls] == [(name, load_json(arguments))]
