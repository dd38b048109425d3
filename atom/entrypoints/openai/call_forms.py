"""How each dialect writes a call, in terms that a grammar can enforce: fixed texts around typed values."""

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from atom.entrypoints.openai.tool_parsers import dsml, kimi, kimi_k3, minimax
from atom.entrypoints.openai.tool_parsers.base import ToolParser
from atom.entrypoints.openai.tool_parsers.glm import GlmParser
from atom.entrypoints.openai.tool_parsers.harmony import HarmonyParser
from atom.entrypoints.openai.tool_parsers.hermes import HermesParser
from atom.entrypoints.openai.tool_parsers.llama3 import Llama3Parser
from atom.entrypoints.openai.tool_parsers.mistral import MistralParser
from atom.entrypoints.openai.tool_parsers.qwen import QwenParser
from atom.entrypoints.openai.tool_parsers.values import Schema
from atom.guide import Argument, Tag


@dataclass(frozen=True, slots=True)
class ArgumentForm:
    """One argument as fixed texts around its value: a string as it stands, anything else as JSON.

    KEY stands for its name, IS_STRING for true or false, TYPE for JSON schema's name of its type. ``forbidden``
    is what the parser takes for the value's end.
    """

    begin: str
    end: str
    forbidden: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CallForm:
    """A dialect's calls as fixed texts around arguments. NAME stands for the function's name.

    Attributes:
        trigger: how ``begin`` starts, and nothing but a call; empty if other framing starts so as well.
        argument: None for one JSON object with all arguments.
        json_begin, json_end: around a JSON object with all arguments, where one by one they cannot be written;
            None if the dialect has no such thing.
        opening, separator, closing: before, between and after an answer's calls.
        number_end: if given, the call's number and this text follow ``begin``.
        is_single: the answer ends after one call.
    """

    parser: type[ToolParser]
    begin: str
    end: str
    trigger: str = ""
    argument: ArgumentForm | None = None
    json_begin: str | None = None
    json_end: str = ""
    opening: str = ""
    separator: str = "\n"
    closing: str = ""
    number_end: str = ""
    is_single: bool = False

    def tag(self, function: dict[str, Any]) -> Tag | None:
        """Calls of one function; None if this form has no way to write its arguments."""
        fixed = {"begin": self.begin.replace("NAME", function["name"]), "number_end": self.number_end}
        parameters = function["parameters"]
        if self.argument is None:
            return Tag(**fixed, end=self.end, schema=_json(parameters))
        arguments = _arguments(self.argument, parameters)
        if arguments is not None:
            return Tag(**fixed, end=self.end, arguments=arguments, forbidden=self.argument.forbidden)
        if self.json_begin is None:
            return None
        if self.number_end:
            fixed["number_end"] += self.json_begin
        else:
            fixed["begin"] += self.json_begin
        return Tag(**fixed, end=self.json_end + self.end, schema=_json(parameters))


HERMES = CallForm(
    HermesParser,
    begin='<tool_call>\n{"name": "NAME", "arguments": ',
    end="}\n</tool_call>",
    trigger="<tool_call>",
)
LLAMA3 = CallForm(
    Llama3Parser,
    begin='{"name": "NAME", "parameters": ',
    end="}",
    trigger='{"name": "',
    separator="; ",
)
MISTRAL = CallForm(
    MistralParser,
    begin='[TOOL_CALLS][{"name": "NAME", "arguments": ',
    end="}]",
    trigger="[TOOL_CALLS]",
    separator="",
)
# Ends with one of the model's end tokens, which no grammar may hold.
HARMONY = CallForm(
    HarmonyParser,
    begin="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
    end="",
    is_single=True,
)
KIMI = CallForm(
    kimi.KimiParser,
    begin=f"{kimi.CALL}functions.NAME:",
    end=kimi.CALL_END,
    trigger=kimi.CALL,
    opening=kimi.SECTIONS[0],
    separator="",
    closing=kimi.SECTION_ENDS[0],
    number_end=kimi.ARGUMENTS,
)
QWEN = CallForm(
    QwenParser,
    begin="<tool_call>\n<function=NAME>\n",
    end="</function>\n</tool_call>",
    trigger="<tool_call>",
    argument=ArgumentForm("<parameter=KEY>\n", "\n</parameter>\n", ("</parameter>",)),
)
GLM = CallForm(
    GlmParser,
    begin="<tool_call>NAME\n",
    end="</tool_call>",
    trigger="<tool_call>",
    argument=ArgumentForm("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n", ("</arg_value>",)),
)
# Values that are arrays or objects may also be elements within elements; as JSON they are one grammar.
MINIMAX = CallForm(
    minimax.MinimaxParser,
    begin=f'{minimax.MARK}<invoke name="NAME">',
    end=f"{minimax.MARK}</invoke>",
    argument=ArgumentForm(f"{minimax.MARK}<KEY>", f"{minimax.MARK}</KEY>", (minimax.MARK,)),
    opening=f"{minimax.MARK}<tool_call>\n",
    closing=f"\n{minimax.MARK}</tool_call>",
)
KIMI_K3 = CallForm(
    kimi_k3.KimiK3Parser,
    begin=f'{kimi_k3.OPEN}call tool="NAME" index="',
    end=f"{kimi_k3.CLOSE}call{kimi_k3.SEP}",
    argument=ArgumentForm(
        f'{kimi_k3.OPEN}argument key="KEY" type="TYPE"{kimi_k3.SEP}',
        f"{kimi_k3.CLOSE}argument{kimi_k3.SEP}",
        (kimi_k3.CLOSE,),
    ),
    json_begin=f"{kimi_k3.OPEN}json{kimi_k3.SEP}",
    json_end=f"{kimi_k3.CLOSE}json{kimi_k3.SEP}",
    opening=f"{kimi_k3.OPEN}tools{kimi_k3.SEP}",
    separator="",
    closing=f"{kimi_k3.CLOSE}tools{kimi_k3.SEP}",
    number_end=f'"{kimi_k3.SEP}',
)


def _dsml(mark: str, section: str, stated: str) -> CallForm:
    return CallForm(
        dsml.DsmlParser,
        begin=f'<{mark}invoke name="NAME">\n',
        end=f"</{mark}invoke>",
        argument=ArgumentForm(
            f'<{mark}parameter name="KEY"{stated}>', f"</{mark}parameter>\n", dsml.PARAMETER_END.literals
        ),
        json_begin="",
        json_end="\n",
        opening=f"<{section}>\n",
        closing=f"\n</{section}>",
    )


_FORMS = {form.parser: form for form in (HERMES, LLAMA3, MISTRAL, HARMONY, KIMI, QWEN, GLM, MINIMAX, KIMI_K3)}


def call_form(dialect: type[ToolParser] | None, template: str = "") -> CallForm:
    """The form of the model's own dialect; Hermes' where it is not known: a grammar can make a model write that
    whatever it was trained on. ``template``, the chat template's text, tells the variants of one dialect apart.
    """
    if dialect is dsml.DsmlParser:
        if "<minimax:tool_call>" in template:
            return _dsml("", "minimax:tool_call", "")
        section = next((name for name in dsml.SECTIONS if dsml.MARK + name in template), dsml.SECTIONS[0])
        return _dsml(dsml.MARK, dsml.MARK + section, ' string="IS_STRING"')
    return _FORMS.get(dialect, HERMES) if dialect else HERMES


# -- arguments one by one

# Of a schema of arguments, beside annotations: with anything else, which arguments there are depends on more than
# their names, or the names are not known beforehand.
_OF_ARGUMENTS = frozenset(("type", "properties", "required", "additionalProperties", "$defs", "definitions"))
_ANNOTATIONS = frozenset(
    ("$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated", "strict")
)
_VALUES = ("enum", "const")
MAX_COUNTED_CHARS = 128  # llguidance keeps a state a character, times those that look for the end mark
_KEY = re.compile(r"[\w.\-]{1,128}", re.ASCII)
_REFERENCE = re.compile(r'"\$ref":"([^"]*)"')
_ANCHORS = re.compile(r"\\.|\[\^?\]?(?:[^\]\\]|\\.)*+\]|(?P<anchor>[$^])", re.DOTALL)


def _arguments(form: ArgumentForm, parameters: dict[str, Any]) -> tuple[Argument, ...] | None:
    """The arguments in the schema's order; None if they cannot be written one by one."""
    properties = parameters.get("properties", {})
    required = parameters.get("required", [])
    known = parameters.keys() <= _OF_ARGUMENTS | _ANNOTATIONS and isinstance(properties, dict)
    is_open = not properties and parameters.get("additionalProperties", "properties" not in parameters)
    if not known or parameters.get("type", "object") != "object" or is_open or not isinstance(required, list):
        return None
    others = parameters.get("additionalProperties", True)
    missing = {key: {} if others is False else others for key in required if key not in properties}
    arguments = [
        _argument(form, key, schema, key not in required, parameters)
        for key, schema in (properties | missing).items()
    ]
    return None if None in arguments else tuple(arguments)


def _argument(
    form: ArgumentForm, key: str, schema: Any, is_optional: bool, root: dict[str, Any]
) -> Argument | None:
    if not _KEY.fullmatch(key):
        return None  # the dialects have no escapes for what ends a name
    types = Schema(schema, root).types
    is_string = types in ({"string"}, {"string", "null"}) and _is_text(schema)
    if types == {"string"} and not is_string:
        return None  # would be read with the quotes of its JSON
    if "TYPE" in form.begin and len(types) != 1 and not is_string:
        return None
    kind = "string" if is_string else next(iter(types), "")
    begin = form.begin.replace("TYPE", "number" if kind == "integer" else kind)
    fixed = {
        "begin": begin.replace("IS_STRING", "true" if is_string else "false").replace("KEY", key),
        "end": form.end.replace("KEY", key),
        "is_optional": is_optional,
    }
    if not is_string:
        text = _with_definitions(schema, root)
        return None if text is None else Argument(**fixed, schema=text)
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        choices = [value for value in values if isinstance(value, str) and _is_writable(value, form)]
        return Argument(**fixed, choices=tuple(choices)) if choices else None
    patterns = _patterns(schema)
    return None if patterns is None else Argument(**fixed, patterns=patterns)


def _is_text(schema: Any) -> bool:
    """Whether any text that fits is a valid value, a string or null, however the parser reads it."""
    if not isinstance(schema, dict):
        return False
    kind = schema.get("type")
    if kind == "string" or (kind is None and not schema.keys().isdisjoint(_VALUES)):
        allowed = (_VALUES[:1], _VALUES[1:], ("pattern", "minLength", "maxLength"))
        return any(schema.keys() <= {"type", *keywords} | _ANNOTATIONS for keywords in allowed)
    if isinstance(kind, list):
        return schema.keys() <= {"type"} | _ANNOTATIONS
    options = schema.get("anyOf")
    return (
        isinstance(options, list)
        and schema.keys() <= {"anyOf"} | _ANNOTATIONS
        and all(
            isinstance(one, dict)
            and one.get("type") in ("string", "null")
            and one.keys() <= {"type"} | _ANNOTATIONS
            for one in options
        )
    )


def _is_writable(value: str, form: ArgumentForm) -> bool:
    return bool(value) and not any(text in value for text in form.forbidden)


def _patterns(schema: dict[str, Any]) -> tuple[str, ...] | None:
    """Regular expressions for what a schema says of a string; None if one has an anchor within or a length too
    large to count."""
    patterns = []
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if not isinstance(least, int) or not isinstance(most or 0, int):
        return None
    if max(least, most or 0) > MAX_COUNTED_CHARS:
        return None
    if least or most != "":
        patterns.append(rf"(.|\n){{{least},{most}}}")
    if "pattern" in schema:
        pattern = schema["pattern"]
        anchors = [match.start() for match in _ANCHORS.finditer(pattern) if match["anchor"]]
        is_start, is_end = pattern.startswith("^"), len(pattern) - 1 in anchors and pattern.endswith("$")
        if len(anchors) != is_start + is_end or (anchors and "|" in pattern):
            return None
        inner = pattern[is_start : len(pattern) - is_end]
        patterns.append(("" if is_start else r"(.|\n)*") + f"({inner})" + ("" if is_end else r"(.|\n)*"))
    return tuple(patterns)


def _with_definitions(schema: Any, root: dict[str, Any]) -> str | None:
    """A property's schema as JSON that stands alone; None if it refers to other places than definitions."""
    text = _json(schema)
    if '"$ref"' not in text:
        return text
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    whole = _json({**schema, **definitions})
    references = _REFERENCE.findall(whole)
    return whole if all(one.startswith(("#/$defs/", "#/definitions/")) for one in references) else None


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
