"""Tool calls that a grammar enforces: ``tool_choice`` required or a named function, and strict tools."""

from dataclasses import dataclass

import msgspec

from atom.entrypoints.openai.chat_validation import ToolPolicy
from atom.entrypoints.openai.tool_parsers.base import ToolParser
from atom.entrypoints.openai.tool_parsers.harmony import HarmonyParser
from atom.entrypoints.openai.tool_parsers.hermes import HermesParser
from atom.entrypoints.openai.tool_parsers.llama3 import Llama3Parser
from atom.entrypoints.openai.tool_parsers.mistral import MistralParser
from atom.guide import Guide, Tag


@dataclass(frozen=True, slots=True)
class CallForm:
    """A dialect's call as fixed texts around the arguments' JSON. ``begin`` starts with ``trigger``."""

    parser: type[ToolParser]
    trigger: str
    begin: str  # NAME stands for the function's name
    end: str
    is_single: bool = False  # the answer ends after one call

    def tag(self, name: str, schema: str) -> Tag:
        return Tag(begin=self.begin.replace("NAME", name), end=self.end, schema=schema)


HERMES = CallForm(
    HermesParser, "<tool_call>", '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"
)
_FORMS = {
    HermesParser: HERMES,
    Llama3Parser: CallForm(Llama3Parser, '{"name": "', '{"name": "NAME", "parameters": ', "}"),
    MistralParser: CallForm(
        MistralParser, "[TOOL_CALLS]", '[TOOL_CALLS][{"name": "NAME", "arguments": ', "}]"
    ),
}
# Ends with one of the model's end tokens, which no grammar may hold.
_HARMONY = CallForm(
    HarmonyParser,
    "<|channel|>commentary to=",
    "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
    "",
    is_single=True,
)


def call_form(dialect: type[ToolParser] | None) -> CallForm:
    """The form of the model's own dialect where its arguments are JSON, else Hermes': a grammar can make a
    model write it whatever it was trained on."""
    if dialect is HarmonyParser:
        return _HARMONY
    return _FORMS.get(dialect, HERMES) if dialect else HERMES


def forced_guide(policy: ToolPolicy, form: CallForm) -> Guide:
    """Makes an answer of one of the policy's tools or, where several calls are allowed, of one after another.

    Raises:
        RequestError: a tool's schema is malformed, or all together are over the limit of a guide.
    """
    return Guide(
        kind="structural",
        tags=tuple(form.tag(*_name_and_schema(tool)) for tool in policy.tools),
        triggers=(form.trigger,),
        at_least_one=True,
        stop_after_first=form.is_single or policy.max_calls == 1,
        field="tools",
    )


def strict_guide(policy: ToolPolicy, form: CallForm) -> Guide:
    """Free text, in which every call keeps to its tool's schema."""
    return Guide(
        kind="structural",
        tags=tuple(form.tag(*_name_and_schema(tool)) for tool in policy.tools),
        triggers=(form.trigger,),
        field="tools",
    )


def has_own_form(dialect: type[ToolParser] | None) -> bool:
    """Whether the calls that the model writes of its own accord can be held to a schema."""
    return dialect in _FORMS


def _name_and_schema(tool: dict) -> tuple[str, str]:
    function = tool["function"]
    return function["name"], msgspec.json.encode(function["parameters"]).decode()
