"""Tool calls that a grammar enforces: ``tool_choice`` required or a named function, strict tools, and answers that
are either calls or what a ``response_format`` says."""

import msgspec

from atom.entrypoints.openai.call_forms import HERMES, CallForm, call_form
from atom.entrypoints.openai.chat_validation import ToolPolicy
from atom.entrypoints.openai.tool_parsers.base import ToolParser
from atom.entrypoints.openai.tool_parsers.harmony import HarmonyParser
from atom.errors import RequestError
from atom.guide import Guide, Tag
from atom.model_engine.structured.backend import choose_backend


def calls_guide(
    policy: ToolPolicy, dialect: type[ToolParser] | None, template: str, otherwise: Guide | None = None
) -> tuple[Guide, type[ToolParser]]:
    """Makes an answer of calls of the policy's tools or, if given, of ``otherwise`` instead; and the parser that
    reads these calls.

    They are in the model's own dialect. Where it cannot write the arguments of one of the tools in a way that a
    grammar library enforces (arguments whose names are not known beforehand, strings with a ``format``, names with
    odd characters), all are in Hermes' form, whose arguments are JSON.

    Raises:
        RequestError: a tool's schema is malformed or cannot be enforced, or all are over the limit of a guide.
    """
    form = call_form(dialect, template)
    _check_schemas(policy)
    try:
        guide = _calls_guide(policy, form, otherwise)
        if guide is not None:
            choose_backend(guide)
            return guide, form.parser
    except RequestError:
        if form is HERMES:
            raise
    guide = _calls_guide(policy, HERMES, otherwise)
    choose_backend(guide)
    return guide, HERMES.parser


def _calls_guide(policy: ToolPolicy, form: CallForm, otherwise: Guide | None) -> Guide | None:
    tags = _tags(policy, form)
    if tags is None:
        return None
    return Guide(
        kind="calls",
        tags=tags,
        opening=form.opening,
        separator=form.separator,
        closing=form.closing,
        stop_after_first=form.is_single or policy.max_calls == 1,
        otherwise=otherwise,
        field="tools",
    )


def is_framed_beside_text(dialect: type[ToolParser] | None) -> bool:
    """Whether a grammar for the answer's text leaves room for calls, since these stand in messages of their own."""
    return dialect is HarmonyParser


def strict_guide(policy: ToolPolicy, dialect: type[ToolParser] | None, template: str) -> Guide | None:
    """Free text, in which every call keeps to its tool's schema; None where the dialect's calls cannot be told
    from other framing, or a tool's arguments cannot be written in it."""
    form = call_form(dialect, template)
    if form.parser is not dialect or not form.trigger:
        return None
    _check_schemas(policy)
    tags = _tags(policy, form)
    if tags is None:
        return None
    guide = Guide(kind="structural", tags=tags, triggers=(form.trigger,), field="tools")
    choose_backend(guide)
    return guide


def _check_schemas(policy: ToolPolicy) -> None:
    for tool in policy.tools:
        text = msgspec.json.encode(tool["function"]["parameters"]).decode()
        Guide(kind="json_schema", text=text, field="tools")


def _tags(policy: ToolPolicy, form: CallForm) -> tuple[Tag, ...] | None:
    tags = [form.tag(tool["function"]) for tool in policy.tools]
    return None if None in tags else tuple(tags)


def with_tools(asked: Guide, error: RequestError) -> RequestError:
    """The error of a guide for calls or text, in the words of its two fields."""
    return RequestError(f"{asked.field} together with tools cannot be enforced: {error}", param=asked.field)
