"""Whatever a grammar of calls lets a model write, the dialect's own parser reads as calls after the schema."""

import json
import random
import re

import numpy as np
import pytest

from atom.entrypoints.openai.chat_validation import ToolPolicy
from atom.entrypoints.openai.forced_calls import calls_guide, strict_guide
from atom.entrypoints.openai.tool_parsers.hermes import HermesParser
from atom.entrypoints.openai.tool_parsers.registry import TOOL_PARSERS
from atom.errors import RequestError
from atom.guide import Guide
from atom.model_engine.structured.backend import BACKENDS, Vocabulary, choose_backend, load_backend

# Marks that tokenizers of these models hold as special tokens.
MARKS = (
    "<|open|>", "<|close|>", "<|sep|>", "｜DSML｜", "]<]minimax[>[", "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>",
)  # fmt: skip
EOS = 256
# What could end a value too early, or a call.
PHRASES = [
    "\n</parameter>\n", "</parameter>", "</｜DSML｜parameter>\n", "</arg_value>\n", "</arg_value>",
    "<|close|>argument<|sep|>", "]<]minimax[>[</s>", "]<]minimax[>[</n>", "<parameter=", "</function>",
    "\n</function>\n</tool_call>", "</tool_call>", "<arg_key>", '"', "}", "]", "null", "é",
]  # fmt: skip
PARAMETERS = {
    "type": "object",
    "properties": {
        "s": {"type": "string", "description": "any text"},
        "n": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "i": {"type": "integer", "minimum": -5, "maximum": 40},
        "e": {"enum": ["x", "a b", "</parameter>"]},
        "o": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
        "l": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "r": {"$ref": "#/$defs/pair"},
        "u": {"type": ["boolean", "integer", "string"]},
    },
    "required": ["s", "e"],
    "additionalProperties": False,
    "$defs": {"pair": {"type": "object", "properties": {"z": {"type": "boolean"}}}},
}
LIMITED = {
    "type": "object",
    "properties": {
        "code": {"type": "string", "pattern": "^[A-Z<>/a-z]{2,14}$"},
        "part": {"type": "string", "pattern": "b"},
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "only": {"const": "here"},
        "TYPE": {"type": "string", "maxLength": 20},
    },
    "required": ["code", "part", "name", "only", "TYPE"],
}
NONE = {"type": "object", "properties": {}, "additionalProperties": False}
FREE = {"type": "object", "additionalProperties": {"type": "integer"}}
CASES = [
    (name, template)
    for name in TOOL_PARSERS
    for template in (["", "<minimax:tool_call>", "<｜DSML｜function_calls>"] if name == "dsml" else [""])
]


def tool(name: str, parameters: dict) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.fixture(scope="module")
def vocabulary():
    tokens = [bytes([i]) for i in range(256)] + [b"<eos>"] + [mark.encode() for mark in MARKS]
    return Vocabulary(tokens, list(range(EOS, len(tokens))), [EOS])


@pytest.fixture(scope="module")
def libraries(vocabulary):
    return {name: load_backend(name, vocabulary) for name in BACKENDS}


def allowed(matcher, vocabulary) -> list[int]:
    bits = np.zeros((1, -(-len(vocabulary) // 32)), np.int32)
    matcher.fill_mask(bits, 0)
    flags = np.unpackbits(bits[0].view(np.uint8), bitorder="little")
    return np.flatnonzero(flags[: len(vocabulary)]).tolist()


def ids_of(text: str) -> list[int]:
    """Ids of a text, its marks as special tokens."""
    ids: list[int] = []
    for part in re.split("(" + "|".join(map(re.escape, MARKS)) + ")", text):
        ids += [EOS + 1 + MARKS.index(part)] if part in MARKS else part.encode()
    return ids


def fits(grammar, text: str) -> bool:
    matcher = grammar.matcher()
    return all(matcher.accept(token) for token in ids_of(text)) and matcher.is_finished


def walk(grammar, vocabulary, seed: int, phrases=PHRASES, max_tokens: int = 600) -> str | None:
    """A text that the grammar allows, drawn at random; None if it does not end within the limit."""
    matcher, rng, ids = grammar.matcher(), random.Random(seed), []
    while len(ids) < max_tokens:
        for phrase in rng.sample(phrases, 3) if rng.random() < 0.5 else ():
            phrase_ids = ids_of(phrase)
            taken = next((k for k, i in enumerate(phrase_ids) if not matcher.accept(i)), len(phrase_ids))
            if taken < len(phrase_ids):
                matcher.rollback(taken)
            else:
                ids += phrase_ids
        options = allowed(matcher, vocabulary)
        if EOS in options and (len(options) == 1 or rng.random() < 0.4):
            return b"".join(vocabulary.tokens[i] for i in ids).decode()
        options = [i for i in options if i != EOS]
        token = rng.choice(
            [i for i in options if i not in range(128, 256) and chr(i) not in " \t\r"] or options
        )
        assert matcher.accept(token)
        ids.append(token)
    return None


def is_valid(value, schema, root) -> bool:
    """The keywords that the schemas above use."""
    if "$ref" in schema:
        return is_valid(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        return any(is_valid(value, one, root) for one in schema["anyOf"])
    kinds = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
    types = schema.get("type", [])
    kind = kinds.get(type(value), "null")
    if types and kind not in ([types] if isinstance(types, str) else types):
        return False
    if value not in schema.get("enum", [value]) or value != schema.get("const", value):
        return False
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        named = all(is_valid(value[key], properties[key], root) for key in value.keys() & properties.keys())
        extra = value.keys() - properties.keys() if properties else ()
        return named and not extra and value.keys() >= set(schema.get("required", ()))
    if isinstance(value, list):
        return len(value) <= schema["maxItems"] and all(is_valid(v, schema["items"], root) for v in value)
    if isinstance(value, str):
        is_long = len(value) >= schema.get("minLength", 0) and len(value) <= schema.get("maxLength", 10**6)
        return is_long and re.search(schema.get("pattern", ""), value) is not None
    return isinstance(value, bool) or value is None or -5 <= value <= 40 or "minimum" not in schema


def read(parser, tools, text: str):
    """The calls of a whole answer, which must be nothing else and valid."""
    content, calls = parser(tools).parse_all(text + "<|call|>" * (parser.name == "harmony"))
    assert not content.strip() and calls, text
    assert len({call.id for call in calls}) == len(calls)
    schemas = {one["function"]["name"]: one["function"]["parameters"] for one in tools}
    for call in calls:
        schema = schemas[call.name]
        assert is_valid(json.loads(call.arguments), schema, schema), (text, call)
    return calls


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name, template", CASES)
def test_what_the_grammar_allows_the_parser_reads(libraries, vocabulary, name, template, backend):
    tools = (tool("look_up", PARAMETERS), tool("now-2", NONE))
    guide, parser = calls_guide(ToolPolicy(tools, "required"), TOOL_PARSERS[name], template)
    assert parser.name == ("hermes" if name == "auto" else name), "the dialect's own form"
    library = libraries[backend]
    grammar = library.load(library.compile(guide))
    # Only xgrammar keeps a string of a JSON value off the marks that end the value; none may hold a newline.
    phrases = [p for p in PHRASES if backend == "xgrammar" or "</" not in p or "\n" in p]
    texts = [walk(grammar, vocabulary, seed, phrases) for seed in range(12)]
    calls = [call for text in texts if text is not None for call in read(parser, tools, text)]
    assert {call.name for call in calls} == {"look_up", "now-2"} and len(calls) >= 6
    assert not fits(grammar, "hello") and not fits(grammar, "")


@pytest.mark.parametrize("name, template", CASES)
def test_limited_texts_keep_to_their_limits_and_off_the_end_marks(libraries, vocabulary, name, template):
    tools = (tool("f", LIMITED),)
    guide, parser = calls_guide(ToolPolicy(tools, "required", 1), TOOL_PARSERS[name], template)
    assert parser.name == ("hermes" if name == "auto" else name)
    library = libraries[choose_backend(guide)]
    grammar = library.load(library.compile(guide))
    texts = [text for text in (walk(grammar, vocabulary, seed) for seed in range(8)) if text]
    assert texts and all(len(read(parser, tools, text)) == 1 for text in texts)


NATIVE = {
    "qwen": "<tool_call>\n<function=look_up>\n<parameter=s>\n\n5 < 6\n\n</parameter>\n<parameter=e>\na b\n</parameter>"
    '\n<parameter=o>\n{"a": "q"}\n</parameter>\n</function>\n</tool_call>',
    "glm": "<tool_call>look_up\n<arg_key>s</arg_key>\n<arg_value>\n5 < 6\n</arg_value>\n<arg_key>e</arg_key>\n"
    '<arg_value>a b</arg_value>\n<arg_key>o</arg_key>\n<arg_value>{"a": "q"}</arg_value>\n</tool_call>',
    "minimax": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="look_up">]<]minimax[>[<s>\n5 < 6\n]<]minimax[>['
    '</s>]<]minimax[>[<e>a b]<]minimax[>[</e>]<]minimax[>[<o>{"a": "q"}]<]minimax[>[</o>]<]minimax[>[</invoke>\n'
    "]<]minimax[>[</tool_call>",
    "dsml": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="look_up">\n<｜DSML｜parameter name="s" string="true">\n5 < 6\n'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="e" string="true">a b</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="o" string="false">{"a": "q"}</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    "</｜DSML｜tool_calls>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.look_up:0<|tool_call_argument_begin|>"
    '{"s": "\\n5 < 6\\n", "e": "a b", "o": {"a": "q"}}<|tool_call_end|><|tool_calls_section_end|>',
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="look_up" index="1"<|sep|>'
    '<|open|>argument key="s" type="string"<|sep|>\n5 < 6\n<|close|>argument<|sep|>'
    '<|open|>argument key="e" type="string"<|sep|>a b<|close|>argument<|sep|>'
    '<|open|>json<|sep|>{"s": "\\n5 < 6\\n", "e": "a b", "o": {"a": "q"}}<|close|>json<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|>",
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NATIVE)
def test_the_form_is_the_one_that_models_are_trained_on(libraries, name, backend):
    tools = (tool("look_up", {**PARAMETERS, "properties": dict(list(PARAMETERS["properties"].items())[:5])}),)
    guide, parser = calls_guide(ToolPolicy(tools, "required"), TOOL_PARSERS[name], "")
    text = NATIVE[name]
    if name == "kimi_k3":  # arguments of one type each are written one by one, and only so
        start = text.index("<|open|>json")
        typed = '<|open|>argument key="o" type="object"<|sep|>{"a": "q"}<|close|>argument<|sep|>'
        text = text[:start] + typed + text[text.index("<|close|>call") :]
    library = libraries[backend]
    grammar = library.load(library.compile(guide))
    assert fits(grammar, text) and not fits(grammar, text.replace("a b", "b"))
    assert not fits(grammar, text.replace("look_up", "look"))
    (call,) = read(parser, tools, text)
    assert json.loads(call.arguments) == {"s": "\n5 < 6\n", "e": "a b", "o": {"a": "q"}}


@pytest.mark.parametrize(
    "parameters",
    [
        FREE,
        {"type": "object"},
        {"type": "object", "properties": {"a": {"type": "string", "maxLength": 20_000}}},
        {"type": "object", "properties": {"a>b": {"type": "string"}}},
        {"type": "object", "properties": {"when": {"type": "string", "format": "date"}}},
        {"type": "object", "properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "integer"}}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a|b$"}}},
        {"anyOf": [{"type": "object", "properties": {"a": {"type": "integer"}}}]},
    ],
)
@pytest.mark.parametrize("name", ["qwen", "glm", "minimax", "dsml", "kimi_k3"])
def test_arguments_that_cannot_be_written_one_by_one_are_json(parameters, name):
    tools = (tool("f", parameters), tool("g", NONE))
    guide, parser = calls_guide(ToolPolicy(tools, "required"), TOOL_PARSERS[name], "")
    assert guide.tags[0].arguments is None and guide.tags[0].schema
    keeps_own = name in ("dsml", "kimi_k3")  # whose calls may hold one JSON object
    assert (parser is HermesParser) is not keeps_own


@pytest.mark.parametrize("bad", [{"properties": 5}, {"required": [1]}, {"properties": {"a": {"enum": 5}}}])
def test_a_malformed_schema_is_an_error_of_tools(bad):
    for name in ("qwen", "hermes"):
        for make in (calls_guide, strict_guide):
            with pytest.raises(RequestError, match="tools is no JSON schema") as info:
                make(ToolPolicy((tool("f", bad),), "required"), TOOL_PARSERS[name], "")
            assert info.value.param == "tools"


CONTENT = [
    (Guide(kind="json_object"), '{"q": [1]}', "[1]"),
    (Guide(kind="json_schema", text='{"properties": {"x": {"type": "integer"}}}'), '{"x": 1}', '{"x": "1"}'),
    (
        Guide(kind="json_schema", text='{"allOf": [{"type": "integer", "minimum": 7}, {"maximum": 8}]}'),
        "7",
        "9",
    ),
    (Guide(kind="regex", text="[ab/]+\\d."), "a/b1!", "a/b1"),
    (Guide(kind="choice", choices=('"yes"', "no\n")), "no\n", "maybe"),
    (Guide(kind="grammar", text='root ::= "<" tag ">"\ntag ::= [a-c]+\n'), "<ab>", "<d>"),
]


@pytest.mark.parametrize("content, good, bad", CONTENT, ids=[guide.kind for guide, _, _ in CONTENT])
@pytest.mark.parametrize("name", [name for name in TOOL_PARSERS if name != "harmony"])
def test_calls_or_text_after_a_form_is_one_grammar(libraries, vocabulary, name, content, good, bad):
    tools = (tool("look_up", {**PARAMETERS, "properties": {"s": {"type": "string"}}, "required": ["s"]}),)
    guide, parser = calls_guide(ToolPolicy(tools, "auto", 1), TOOL_PARSERS[name], "", content)
    first = choose_backend(guide)
    # llguidance reads the longest word first, so a call that begins as JSON does would hide the JSON.
    begins_as_json = name in ("llama3", "mistral")
    for backend in {first} if begins_as_json else BACKENDS[BACKENDS.index(first) :]:
        library = libraries[backend]
        grammar = library.load(library.compile(guide))
        assert fits(grammar, good) and not fits(grammar, bad) and not fits(grammar, "Well, " + good)
        calls_alone, _ = calls_guide(ToolPolicy(tools, "auto", 1), parser, "")
        text = walk(library.load(library.compile(calls_alone)), vocabulary, 3)
        assert text and fits(grammar, text) and len(read(parser, tools, text)) == 1
        assert not fits(grammar, text + good), "nothing follows a call"


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral", "qwen", "glm", "kimi"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_strict_calls_stand_in_free_text(libraries, name, backend):
    tools = (tool("look_up", {**PARAMETERS, "properties": dict(list(PARAMETERS["properties"].items())[:5])}),)
    guide = strict_guide(ToolPolicy(tools, "auto"), TOOL_PARSERS[name], "")
    library = libraries[backend]
    grammar = library.load(library.compile(guide))
    assert fits(grammar, "Just text.") and fits(grammar, "")
    # A special token between the free text and a call is text to xgrammar alone; the parser needs none there.
    if name in NATIVE and (name, backend) != ("kimi", "llguidance"):
        assert fits(grammar, "I look:\n" + NATIVE[name] + "\n")
        assert not fits(grammar, "I look:\n" + NATIVE[name].replace("a b", "b"))


@pytest.mark.parametrize("name", ["auto", "harmony", "dsml", "minimax", "kimi_k3"])
def test_strict_has_no_grammar_where_a_call_begins_as_other_framing_does(name):
    assert strict_guide(ToolPolicy((tool("f", NONE),), "auto"), TOOL_PARSERS[name], "") is None
