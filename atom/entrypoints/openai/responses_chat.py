"""A request of OpenAI's Responses API as the chat request that runs it.

Every item is checked here, so that errors name it as the client wrote it.
"""

from atom.entrypoints.openai.chat_validation import TEXT_PARTS
from atom.entrypoints.openai.limits import MAX_CONTENT_PARTS, MAX_MESSAGES, MAX_TOOL_CALLS
from atom.entrypoints.openai.protocol import (
    AllowedTools,
    CalledFunction,
    ChatCompletionRequest,
    ChatMessage,
    ContentPart,
    FunctionDefinition,
    HistoryToolCall,
    JsonSchemaFormat,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    ToolChoice,
    ToolDefinition,
)
from atom.entrypoints.openai.responses_protocol import (
    ENCRYPTED_REASONING,
    LOGPROBS,
    InputItem,
    InputPart,
    ResponsesRequest,
    ResponsesTool,
    ResponsesToolChoice,
    TextFormat,
)
from atom.entrypoints.openai.validation import require
from atom.errors import RequestError

# Fields of the chat API, in which its core speaks, by what they are here.
FIELD_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "tool_choice.allowed_tools": "tool_choice",
}
ROLES = ("user", "assistant", "system", "developer")
TRUNCATIONS = ("disabled", "auto")
ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")
SAME_NAME = (
    "parallel_tool_calls", "stream", "stream_options", "temperature", "top_p", "user", "metadata", "top_k",
    "min_p", "seed", "stop", "stop_token_ids", "bad_words", "min_tokens", "ignore_eos", "skip_special_tokens",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "cache_salt", "priority",
    "chat_template_kwargs",
)  # fmt: skip


# What the chat API calls otherwise, or has alone: easily sent by mistake.
CHAT_ONLY = frozenset(ChatCompletionRequest.__struct_fields__) - frozenset(ResponsesRequest.__struct_fields__)


def fields_without_effect(request: ResponsesRequest) -> list[str]:
    """Parts of the request's fields that the server has no use for."""
    found = []
    if request.reasoning is not None:
        names = ("summary", "generate_summary", "context", "mode")
        found += [f"reasoning.{name}" for name in names if getattr(request.reasoning, name) is not None]
    if request.text is not None and request.text.verbosity is not None:
        found.append("text.verbosity")
    if request.stream_options is not None and request.stream_options.include_obfuscation:
        found.append("stream_options.include_obfuscation")
    if ENCRYPTED_REASONING in (request.include or ()):
        found.append(f"include.{ENCRYPTED_REASONING}")
    if any(item.encrypted_content is not None for item in request.input if isinstance(item, InputItem)):
        found.append("input.encrypted_content")
    return found


def make_chat_request(request: ResponsesRequest) -> ChatCompletionRequest:
    """Raises RequestError for what has no counterpart, by its name in the Responses API."""
    truncation = request.truncation or "disabled"
    require(truncation in TRUNCATIONS, "truncation", " or ".join(TRUNCATIONS), truncation[:200])
    chat = ChatCompletionRequest(messages=_messages(request))
    for name in SAME_NAME:
        setattr(chat, name, getattr(request, name))
    chat.max_completion_tokens = request.max_output_tokens
    chat.tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or ())] or None
    if isinstance(request.tool_choice, ResponsesToolChoice):
        chat.tool_choice = _tool_choice(request.tool_choice)
    else:
        chat.tool_choice = request.tool_choice
    if request.reasoning is not None:
        chat.reasoning_effort = request.reasoning.effort
    if request.text is not None and request.text.format is not None:
        chat.response_format = _format(request.text.format)
    _set_logprobs(chat, request)
    return chat


def _set_logprobs(chat: ChatCompletionRequest, request: ResponsesRequest) -> None:
    for i, name in enumerate(request.include or ()):
        if name not in (LOGPROBS, ENCRYPTED_REASONING):
            raise _unsupported(f"include[{i}]", f"only {LOGPROBS!r} is, got {name[:200]!r}")
    chat.logprobs = LOGPROBS in (request.include or ())
    chat.top_logprobs = request.top_logprobs
    if request.top_logprobs and not chat.logprobs:
        raise RequestError(
            f"top_logprobs needs include to hold {LOGPROBS!r}, got {request.include!r:.200}",
            param="top_logprobs",
        )


def _messages(request: ResponsesRequest) -> list[ChatMessage]:
    turns = _Turns()
    if request.instructions:
        turns.add_text("system", request.instructions, "instructions")
    if isinstance(request.input, str):
        turns.add_text("user", request.input, "input")
        return turns.messages
    count = len(request.input)
    require(0 < count <= MAX_MESSAGES, "input", f"a text or a list of 1 to {MAX_MESSAGES} items", count)
    for i, item in enumerate(request.input):
        turns.add(item, f"input[{i}]")
    return turns.messages


class _Turns:
    """Items gathered to the turns that templates expect: neighbours of one role are one message, and so are an
    assistant's thinking, text and calls. A tool's result is a message of its own."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self._names: dict[str, str] = {}  # of the functions that were called, by the call's id

    def add(self, item: InputItem, where: str) -> None:
        kind = item.type or ("message" if item.role is not None else None)
        require(kind is not None, f"{where}.type", f"one of {', '.join(ITEM_TYPES)}", None)
        if kind == "message":
            require(
                item.role in ROLES, f"{where}.role", f"one of {', '.join(ROLES)}", (item.role or "")[:200]
            )
            require(item.content is not None, f"{where}.content", "a string or a list of parts", None)
            field = f"{where}.content"
            self._extend(self._turn(item.role or ""), _parts(item.content or "", field), field)
        elif kind == "function_call":
            self._add_call(item, where)
        elif kind == "function_call_output":
            self._add_output(item, where)
        elif kind == "reasoning":
            text = _thinking(item, where)
            if text:
                turn = self._turn("assistant")
                turn.reasoning_content = (turn.reasoning_content or "") + text
        else:
            raise _unsupported(f"{where}.type", f"only {', '.join(ITEM_TYPES)} are, got {kind[:200]!r}")

    def add_text(self, role: str, text: str, field: str) -> None:
        self._extend(self._turn(role), [ContentPart("text", text)], field)

    def _turn(self, role: str) -> ChatMessage:
        """The message that is being gathered, or a new one."""
        if self.messages:
            last = self.messages[-1]
            if last.role == role or {last.role, role} == {"system", "developer"}:
                return last
        self.messages.append(ChatMessage(role=role, content=[]))
        return self.messages[-1]

    @staticmethod
    def _extend(turn: ChatMessage, parts: list[ContentPart], field: str) -> None:
        content = turn.content
        assert isinstance(content, list)
        count = len(content) + len(parts)
        require(count <= MAX_CONTENT_PARTS, field, f"at most {MAX_CONTENT_PARTS} parts of one turn", count)
        content += parts

    def _add_call(self, item: InputItem, where: str) -> None:
        for name in ("call_id", "name", "arguments"):
            value = getattr(item, name)
            require(
                value is not None and (name == "arguments" or value), f"{where}.{name}", "a string", value
            )
        call_id, name = item.call_id or "", item.name or ""
        turn = self._turn("assistant")
        call = HistoryToolCall(function=CalledFunction(name, item.arguments), id=call_id, type="function")
        turn.tool_calls = turn.tool_calls or []
        turn.tool_calls.append(call)
        count = len(turn.tool_calls)
        require(count <= MAX_TOOL_CALLS, where, f"one of at most {MAX_TOOL_CALLS} calls of one turn", count)
        self._names[call_id] = name

    def _add_output(self, item: InputItem, where: str) -> None:
        call_id = item.call_id or ""
        known = call_id in self._names
        require(known, f"{where}.call_id", "the call_id of an earlier function_call item", call_id[:200])
        require(item.output is not None, f"{where}.output", "a string or a list of parts", None)
        message = ChatMessage(role="tool", content=[], tool_call_id=call_id, name=self._names[call_id])
        self._extend(message, _parts(item.output or "", f"{where}.output"), f"{where}.output")
        self.messages.append(message)


def _parts(content: str | list[InputPart], field: str) -> list[ContentPart]:
    if isinstance(content, str):
        return [ContentPart("text", content)]
    parts = []
    for i, part in enumerate(content):
        if part.type not in TEXT_PARTS:
            raise _unsupported(f"{field}[{i}].type", f"this server reads text, got {part.type[:200]!r}")
        name = "refusal" if part.type == "refusal" else "text"
        text = getattr(part, name)
        require(text is not None, f"{field}[{i}].{name}", "a string", None)
        parts.append(ContentPart("text", text))
    return parts


def _thinking(item: InputItem, where: str) -> str:
    """The text of a reasoning item; its summary where it has nothing else."""
    if isinstance(item.content, str):
        return item.content
    for field, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        texts = []
        for i, part in enumerate(getattr(item, field) or ()):
            require(part.type == kind, f"{where}.{field}[{i}].type", kind, part.type[:200])
            require(part.text is not None, f"{where}.{field}[{i}].text", "a string", None)
            texts.append(part.text)
        if texts:
            return "\n".join(texts)
    return ""


def _tool(tool: ResponsesTool, field: str) -> ToolDefinition:
    if tool.type != "function":
        raise _unsupported(f"{field}.type", f"only 'function' is, got {tool.type[:200]!r}")
    require(tool.name is not None, f"{field}.name", "a string", None)
    function = FunctionDefinition(
        name=tool.name or "", description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return ToolDefinition(type="function", function=function)


def _tool_choice(choice: ResponsesToolChoice) -> ToolChoice:
    if choice.type == "function":
        require(choice.name is not None, "tool_choice.name", "a string", None)
        return ToolChoice(function=NamedFunction(choice.name or ""))
    if choice.type != "allowed_tools":
        raise _unsupported(
            "tool_choice.type", f"only function and allowed_tools are, got {choice.type[:200]!r}"
        )
    named = []
    for i, tool in enumerate(choice.tools or ()):
        field = f"tool_choice.tools[{i}]"
        if tool.type != "function":
            raise _unsupported(f"{field}.type", f"only 'function' is, got {tool.type[:200]!r}")
        require(tool.name is not None, f"{field}.name", "a string", None)
        named.append(NamedTool(function=NamedFunction(tool.name or "")))
    return ToolChoice(type="allowed_tools", allowed_tools=AllowedTools(mode=choice.mode or "", tools=named))


def _format(asked: TextFormat) -> ResponseFormat:
    if asked.type != "json_schema":
        return ResponseFormat(type=asked.type)
    require(asked.schema is not None, "text.format.schema", "a JSON schema", None)
    schema = JsonSchemaFormat(
        schema=asked.schema or {}, name=asked.name, description=asked.description, strict=asked.strict
    )
    return ResponseFormat(type="json_schema", json_schema=schema)


def _unsupported(field: str, why: str) -> RequestError:
    return RequestError(f"{field} is not supported: {why}", param=field, code="unsupported")
