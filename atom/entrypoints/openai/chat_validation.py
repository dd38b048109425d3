"""Every check of messages and tools: what a chat template, a parser and a grammar are given has a known shape."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from atom.entrypoints.openai.limits import (
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
    MAX_ROLE_CHARS,
    MAX_TOOL_BYTES,
    MAX_TOOL_CALLS,
    MAX_TOOL_NAME_CHARS,
    MAX_TOOLS,
)
from atom.entrypoints.openai.protocol import (
    ChatMessage,
    ToolChoice,
    ToolDefinition,
)
from atom.entrypoints.openai.validation import check_free_form, require
from atom.errors import RequestError

TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]+")

Tool = dict[str, Any]  # {"type": "function", "function": {"name", "description"?, "parameters"?}}


@dataclass(frozen=True, slots=True)
class ToolPolicy:
    """Which tools a request offers and what the model must do with them."""

    tools: tuple[Tool, ...] = ()
    mode: Literal["none", "auto", "required"] = "none"
    max_calls: int | None = None

    @property
    def is_forced(self) -> bool:
        return self.mode == "required"


def check_messages(messages: list[ChatMessage]) -> None:
    """Refuse messages that a chat template cannot be given."""
    require(0 < len(messages) <= MAX_MESSAGES, "messages", f"a list of 1 to {MAX_MESSAGES}", len(messages))
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        rule = f"1 to {MAX_ROLE_CHARS} characters"
        require(0 < len(message.role) <= MAX_ROLE_CHARS, f"{where}.role", rule, message.role[:MAX_ROLE_CHARS])
        for field in ("function_call", "audio"):
            if getattr(message, field) is not None:
                raise _unsupported(f"{where}.{field}", "only null is accepted")
        _check_calls(message, where)
        parts = message.content if isinstance(message.content, list) else []
        count = len(parts)
        require(count <= MAX_CONTENT_PARTS, f"{where}.content", f"at most {MAX_CONTENT_PARTS} parts", count)
        for j, part in enumerate(parts):
            if part.type not in TEXT_PARTS:
                raise _unsupported(
                    f"{where}.content[{j}].type", f"only 'text' is read by this server, got {part.type!r}"
                )
            text = part.refusal if part.type == "refusal" else part.text
            require(text is not None, f"{where}.content[{j}].text", "a string", None)


def _check_calls(message: ChatMessage, where: str) -> None:
    calls = message.tool_calls or []
    field = f"{where}.tool_calls"
    require(not calls or message.role == "assistant", field, "part of an assistant message", message.role)
    require(len(calls) <= MAX_TOOL_CALLS, field, f"at most {MAX_TOOL_CALLS} calls", len(calls))
    for j, call in enumerate(calls):
        if call.type not in (None, "function"):
            raise _unsupported(f"{field}[{j}].type", f"only 'function' is, got {call.type!r}")
        if isinstance(call.function.arguments, dict):
            check_free_form(f"{field}[{j}].function.arguments", call.function.arguments, MAX_TOOL_BYTES)


def _unsupported(field: str, why: str) -> RequestError:
    return RequestError(f"{field} is not supported: {why}", param=field, code="unsupported")


def normalized_tools(tools: list[ToolDefinition] | None) -> tuple[Tool, ...]:
    """Tools in OpenAI's form, whichever form they came in.

    Raises:
        RequestError: too many or too large, a bad or doubled name, another type than function.
    """
    require(len(tools or ()) <= MAX_TOOLS, "tools", f"at most {MAX_TOOLS}", len(tools or ()))
    result: list[Tool] = []
    names: set[str] = set()
    for i, tool in enumerate(tools or ()):
        where = f"tools[{i}]"
        if tool.function is not None and tool.type in (None, "function"):
            field, name = f"{where}.function.name", tool.function.name
            description, parameters = tool.function.description, tool.function.parameters
        elif tool.name is not None and tool.input_schema is not None:
            field, name = f"{where}.name", tool.name
            description, parameters = tool.description, tool.input_schema
        elif tool.type not in (None, "function"):
            raise _unsupported(f"{where}.type", f"only 'function' is, got {tool.type!r}")
        else:
            raise RequestError(f"{where}.function is missing", param=f"{where}.function")
        is_name = _TOOL_NAME.fullmatch(name) is not None and len(name) <= MAX_TOOL_NAME_CHARS
        require(is_name, field, f"1 to {MAX_TOOL_NAME_CHARS} letters, digits, '_' or '-'", name[:200])
        require(name not in names, field, "unique", name)
        names.add(name)
        function: dict[str, Any] = {"name": name}
        if description is not None:
            function["description"] = description
        function["parameters"] = {"type": "object", "properties": {}} if parameters is None else parameters
        result.append({"type": "function", "function": function})
    if result:
        check_free_form("tools", result, MAX_TOOL_BYTES)
    return tuple(result)


def tool_policy(
    tools: tuple[Tool, ...], choice: str | ToolChoice | None, is_parallel: bool | None = None
) -> ToolPolicy:
    """What ``tool_choice`` makes of ``tools``; without one it is auto.

    Raises:
        RequestError: a choice of no known form, or one that needs tools that are not declared.
    """
    max_calls = 1 if is_parallel is False else None
    if choice is None:
        choice = "auto" if tools else "none"
    if isinstance(choice, str):
        require(
            choice in ("none", "auto", "required"),
            "tool_choice",
            "none, auto, required or a function",
            choice[:200],
        )
        return _policy(tools, choice, max_calls)
    if choice.type == "function" and choice.function is not None:
        chosen = _select(tools, [choice.function.name], "tool_choice.function.name")
        return ToolPolicy(chosen, "required", max_calls=1)
    if choice.type == "allowed_tools" and choice.allowed_tools is not None:
        allowed = choice.allowed_tools
        require(
            allowed.mode in ("auto", "required"),
            "tool_choice.allowed_tools.mode",
            "auto or required",
            allowed.mode[:200],
        )
        names = [tool.function.name for tool in allowed.tools]
        return _policy(_select(tools, names, "tool_choice.allowed_tools.tools"), allowed.mode, max_calls)
    raise RequestError(
        f"tool_choice must be none, auto, required or a function, got an object of type {choice.type[:200]!r}",
        param="tool_choice",
    )


def _policy(tools: tuple[Tool, ...], mode: str, max_calls: int | None) -> ToolPolicy:
    if mode == "required":
        require(bool(tools), "tool_choice", "none or auto when there are no tools", mode)
        return ToolPolicy(tools, "required", max_calls=max_calls)
    return ToolPolicy(tools, "auto" if mode == "auto" and tools else "none", max_calls=max_calls)


def _select(tools: tuple[Tool, ...], names: Sequence[str], field: str) -> tuple[Tool, ...]:
    by_name = {tool["function"]["name"]: tool for tool in tools}
    for name in names:
        require(name in by_name, field, f"one of the declared tools {sorted(by_name)[:20]}", name[:200])
    return tuple(by_name[name] for name in dict.fromkeys(names))


def check_effort(field: str, effort: str | None) -> str | None:
    """A reasoning effort of the field's vocabulary, or None."""
    if effort is not None:
        require(effort in EFFORTS, field, f"one of {', '.join(EFFORTS)}", effort[:200])
    return effort
