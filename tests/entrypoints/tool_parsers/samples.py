"""Texts of every dialect, shared by the parser tests, and how to run a parser over cut text."""

import json
from dataclasses import dataclass, field
from typing import Any

from atom.entrypoints.openai.tool_parsers.base import (
    Content,
    ParserEvent,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    ToolParser,
    collect,
)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "exact": {"type": "boolean"},
                    "zip": {"type": "string"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "where": {"$ref": "#/$defs/where"},
                },
                "$defs": {"where": {"type": "object", "properties": {"lat": {"type": "number"}}}},
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "write_file",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
DSML = "｜DSML｜"
NS = "]<]minimax[>["


@dataclass
class Sample:
    """A whole answer, and what it must be read as."""

    dialect: str
    text: str
    content: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)


CODE = 'if a < b:\n    print("</tool_call>", "{", \'}\')\n# čau 🚀'
CODE_JSON = json.dumps(CODE, ensure_ascii=False)

SAMPLES = [
    # hermes
    Sample(
        "hermes",
        'Sure.\n<tool_call>\n{"arguments": {"city": "Paris"}, "name": "get_weather"}\n</tool_call>',
        "Sure.\n",
        [("get_weather", {"city": "Paris"})],
    ),
    Sample(
        "hermes",
        '\n<tool_call>{"name": "now", "arguments": {}}</tool_call>\n'
        '<tool_call>{"name": "get_weather", "arguments": {"a":{"b":1}}}</tool_call>\nDone.',
        "Done.",
        [("now", {}), ("get_weather", {"a": {"b": 1}})],
    ),
    Sample(
        "hermes",
        f'<tool_call>{{"name": "write_file", "arguments": {{"text": {CODE_JSON}}}}}</tool_call>',
        "",
        [("write_file", {"text": CODE})],
    ),
    Sample(
        "hermes",
        '<tool_call>{"name": "now", "arguments": "{\\"x\\": [1, null]}"}',
        "",
        [("now", {"x": [1, None]})],
    ),
    Sample(
        "hermes",
        '<tool_call>{"name": "a", "arguments": {"x": 1}</tool_call> <tool_call>{"name":"now"}</tool_call>',
        '<tool_call>{"name": "a", "arguments": {"x": 1}</tool_call> ',
        [("now", {})],
    ),
    Sample("hermes", 'Write <tool_call> and {"a": 1}', 'Write <tool_call> and {"a": 1}'),
    Sample("hermes", '<tool_call>{"name": "now", "argum', '<tool_call>{"name": "now", "argum'),
    Sample("hermes", '<tool_call>{"name": 7, "arguments": {}}</tool_call>', None),
    Sample("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>', None),
    Sample("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', None),
    Sample("hermes", "<tool_call>" + "[" * 500, None),
    Sample(
        "hermes",
        '<tool_call>{"name": "now", "arguments": {"x": "\\ud800"}}</tool_call>',
        "",
        [("now", {"x": "\ufffd"})],
    ),
    # qwen
    Sample(
        "qwen",
        "Let me look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=zip>\n007\n</parameter>\n<parameter=exact>\nTrue\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>\n",
        "Let me look.\n\n",
        [("get_weather", {"city": "Paris", "days": 3, "zip": "007", "exact": True}), ("now", {})],
    ),
    Sample(
        "qwen",
        f"<function=write_file><parameter=text>{CODE}\n</parameter> </parameter>\n</parameter></function>",
        "",
        [("write_file", {"text": f"{CODE}\n</parameter> </parameter>"})],
    ),
    Sample(
        "qwen",
        "<function=other><parameter=a>{'x': 1}</parameter><parameter=b>[1]</parameter></function>",
        "",
        [("other", {"a": "{'x': 1}", "b": [1]})],
    ),
    Sample("qwen", "<function=f><parameter=a>1</parameter>", None),
    Sample("qwen", "a <function=f b <function= c", None),
    # glm
    Sample(
        "glm",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>42</arg_value>\n<arg_key>days</arg_key>"
        "<arg_value>2.0</arg_value><arg_key>where</arg_key><arg_value>"
        '{"lat": 1.5}</arg_value>\n</tool_call>\n<tool_call>now</tool_call>',
        "",
        [("get_weather", {"city": "42", "days": 2, "where": {"lat": 1.5}}), ("now", {})],
    ),
    Sample(
        "glm",
        f"ok <tool_call>write_file<arg_key>text</arg_key><arg_value>{CODE}</arg_value></arg_value></tool_call>",
        "ok ",
        [("write_file", {"text": f"{CODE}</arg_value>"})],
    ),
    Sample("glm", "<tool_call>two words</tool_call>", None),
    Sample("glm", "<tool_call>f<arg_key>k</arg_key><arg_value>v", None),
    # dsml
    Sample(
        "dsml",
        f'Hm.<{DSML}tool_calls>\n<{DSML}invoke name="get_weather">\n'
        f'<{DSML}parameter name="city" string="true">12</{DSML}parameter>\n'
        f'<{DSML}parameter name="tags" string="false">["a", "b"]</{DSML}parameter>\n'
        f'</{DSML}invoke>\n<{DSML}invoke name="now"/>\n</{DSML}tool_calls>',
        "Hm.",
        [("get_weather", {"city": "12", "tags": ["a", "b"]}), ("now", {})],
    ),
    Sample(
        "dsml",
        '<minimax:tool_call><invoke name="x"><parameter name="n">5</parameter></invoke></minimax:tool_call>',
        "",
        [("x", {"n": 5})],
    ),
    Sample(
        "dsml",
        f'<{DSML}invoke name="now">\n{{"a": "</invoke>", "b": {{}}}}\n</{DSML}invoke>',
        "",
        [("now", {"a": "</invoke>", "b": {}})],
    ),
    Sample(
        "dsml",
        '<invoke><parameter name="path">/a</parameter><parameter name="text">1</parameter></invoke>',
        "",
        [("write_file", {"path": "/a", "text": "1"})],
    ),
    Sample(
        "dsml",
        '<invoke name="now"><parameter name="arguments">{"input": {"z": 1}}</parameter></invoke>',
        "",
        [("now", {"z": 1})],
    ),
    Sample("dsml", '<invoke><parameter name="nowhere">1</parameter></invoke>', None),
    Sample("dsml", "the <tool_calls> tag, an <invoker name='a'>, <invoke", None),
    # minimax
    Sample(
        "minimax",
        f'Go.\n{NS}<tool_call>\n{NS}<invoke name="get_weather">{NS}<city>Oslo{NS}</city>\n'
        f"{NS}<tags>{NS}<item>1{NS}</item>{NS}<item>b{NS}</item>{NS}</tags>"
        f"{NS}<where>{NS}<lat>1e1{NS}</lat>{NS}</where>{NS}</invoke>\n"
        f'{NS}<invoke name="now">{NS}</invoke>\n{NS}</tool_call>',
        "Go.\n",
        [("get_weather", {"city": "Oslo", "tags": ["1", "b"], "where": {"lat": 10.0}}), ("now", {})],
    ),
    Sample(
        "minimax",
        f'<tool_call>\n{NS}<invoke name="write_file">{NS}<text>{CODE}{NS}</text>{NS}</invoke>{NS}</tool_call>',
        "",
        [("write_file", {"text": CODE})],
    ),
    Sample("minimax", f'a {NS} b {NS}<invoke name="f">text{NS}</invoke>', None),
    Sample("minimax", f'{NS}<invoke name="f">' + f"{NS}<a>" * 40, None),
    # kimi
    Sample(
        "kimi",
        "Yes.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "<|tool_call_end|>\\""}<|tool_call_end|>'
        "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|> {} <|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "Yes.",
        [("get_weather", {"city": '<|tool_call_end|>"'}), ("now", {})],
    ),
    Sample(
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>now:3<|tool_call_argument_begin|><|tool_call_end|>"
        '<|tool_call_begin|>functions.now:4<|tool_call_argument_begin|>{"a": 1}',
        "",
        [("now", {}), ("now", {"a": 1})],
    ),
    Sample("kimi", "<|tool_calls_section_begin|>nothing<|tool_calls_section_end|>", None),
    Sample("kimi", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>text", None),
    # kimi_k3
    Sample(
        "kimi_k3",
        "<|open|>response<|sep|>Sure, 1 < 2.<|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="get_weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>42<|close|>argument<|sep|>'
        '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
        '<|open|>argument key="where" type="object"<|sep|>{"lat":2}<|close|>argument<|sep|>'
        '<|close|>call<|sep|><|open|>call tool="now" index="2"<|sep|>'
        '<|open|>json type="object"<|sep|>{"x": []}<|close|>json<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>",
        "Sure, 1 < 2.",
        [("get_weather", {"city": "42", "days": 3, "where": {"lat": 2}}), ("now", {"x": []})],
    ),
    Sample("kimi_k3", "plain<|close|> response <|sep|><|close|>mess", "plain"),
    Sample("kimi_k3", "<|open|> response <|sep|>a<|close|>x < y", "a<|close|>x < y"),
    Sample("kimi_k3", '<|open|>call tool="f"<|sep|><|open|>argument key="a"<|sep|>1', None),
    # llama3
    Sample(
        "llama3",
        '\n{"parameters": {"city": "Rome"}, "name": "get_weather"}; {"name": "now", "parameters": {}}',
        "",
        [("get_weather", {"city": "Rome"}), ("now", {})],
    ),
    Sample(
        "llama3",
        'Hm <|python_tag|>{"type": "function", "name": "f", "parameters": {"a": "{"}}',
        "Hm ",
        [("f", {"a": "{"})],
    ),
    Sample("llama3", '{"name": "Bob", "parameters": {}}', None),
    Sample("llama3", ' {"answer": 42}', None),
    Sample("llama3", '<|python_tag|>search.call(query="x")', None),
    Sample("llama3", '{"name": "now", "parameters": {}}; and more', "; and more", [("now", {})]),
    # mistral
    Sample(
        "mistral",
        'Ok[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "]["}}, '
        '{"arguments": {}, "name": "now"}]',
        "Ok",
        [("get_weather", {"city": "]["}), ("now", {})],
    ),
    Sample(
        "mistral",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "[TOOL_CALLS]"}[TOOL_CALLS]now[CALL_ID]abc[ARGS]{}',
        "",
        [("get_weather", {"city": "[TOOL_CALLS]"}), ("now", {})],
    ),
    Sample("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}', None),
    Sample("mistral", "[TOOL_CALLS]", None),
    # harmony
    Sample(
        "harmony",
        "<|channel|>commentary<|message|>Looking.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "<|call|>"}<|call|>'
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|><|call|>",
        "Looking.",
        [("get_weather", {"city": "<|call|>"}), ("now", {})],
    ),
    Sample(
        "harmony",
        ' to=functions.now<|channel|>commentary json<|message|>{"a": 1}<|call|>',
        "",
        [("now", {"a": 1})],
    ),
    Sample("harmony", "<|channel|>final<|message|>x < y\n<|return|>", "x < y\n"),
    Sample("harmony", 'to=functions.now<|channel|>commentary<|message|>{"a": ', None),
    Sample("harmony", "<|channel|>final<|message|>Done.<|end|><|start|>assist", "Done."),
    # plain
    *(
        Sample(name, "Plain text, {braces} and a < b > c, čau 🚀.\n\n")
        for name in ("hermes", "qwen", "glm", "dsml", "minimax", "kimi", "kimi_k3", "llama3", "mistral")
    ),
    *(Sample(name, "  \n") for name in ("hermes", "qwen", "kimi_k3", "llama3", "harmony", "auto")),
]
for _sample in SAMPLES:
    if _sample.content is None or (not _sample.content and not _sample.calls):
        _sample.content = _sample.text  # no call: not a character is lost


def cut(text: str, positions: list[int]) -> list[str]:
    bounds = [0, *sorted(positions), len(text)]
    return [text[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]


def run(parser: Any, pieces: list[str]) -> list[ParserEvent]:
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    check_order(events)
    return events


def check_order(events: list[ParserEvent]) -> None:
    """Indices count up, a call's events stand together and in order, nothing is empty."""
    open_call, num_calls = None, 0
    for event in events:
        match event:
            case Content(text) | Reasoning(text):
                assert text and open_call is None
            case ToolCallStart(index, call_id, name):
                assert open_call is None and index == num_calls and call_id and name
                open_call, num_calls = index, num_calls + 1
            case ToolCallArguments(index, text):
                assert index == open_call and text
            case ToolCallEnd(index):
                assert index == open_call
                open_call = None
    assert open_call is None


def read(parser: ToolParser, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Content, and name and arguments of each call, of a text that comes in pieces."""
    content, calls = collect(run(parser, pieces))
    return content, [(call.name, call.arguments) for call in calls]
