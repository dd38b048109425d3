"""A request of Anthropic's Messages API as the chat request that runs it.

Every block is checked here, so that errors name it as the client wrote it.
"""

from atom.entrypoints.openai.anthropic_protocol import (
    Block,
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
    Tool,
)
from atom.entrypoints.openai.anthropic_protocol import ToolChoice as AnthropicToolChoice
from atom.entrypoints.openai.limits import (
    MAX_CONTENT_PARTS,
    MAX_LABEL_CHARS,
    MAX_MESSAGES,
    MAX_STOP_CHARS,
    MAX_TOOL_BYTES,
)
from atom.entrypoints.openai.protocol import (
    CalledFunction,
    ChatCompletionRequest,
    ChatMessage,
    ContentPart,
    FunctionDefinition,
    HistoryToolCall,
    JsonSchemaFormat,
    NamedFunction,
    ResponseFormat,
    Thinking,
    ToolChoice,
    ToolDefinition,
)
from atom.entrypoints.openai.validation import check_free_form, require
from atom.errors import RequestError

BILLING_HEADER = "x-anthropic-billing-header"  # a client's accounting, which changes from call to call
THINKING_TYPES = ("enabled", "disabled", "adaptive")
_MODES = {"auto": "auto", "any": "required", "none": "none"}


def shows_thinking(request: CountTokensRequest) -> bool:
    """Whether the answer tells the model's thinking."""
    asked = request.thinking
    return asked is not None and asked.type in ("enabled", "adaptive") and asked.display != "omitted"


def make_chat_request(request: CountTokensRequest) -> ChatCompletionRequest:
    """Raises RequestError for what has no counterpart, by its name in the Messages API."""
    if request.mcp_servers:
        raise _unsupported("mcp_servers", "the server calls no other servers")
    chat = ChatCompletionRequest(messages=_messages(request))
    chat.tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or ())] or None
    if request.tool_choice is not None:
        chat.tool_choice = _tool_choice(request.tool_choice)
        if request.tool_choice.disable_parallel_tool_use:
            chat.parallel_tool_calls = False
    if request.thinking is not None:
        kind = request.thinking.type
        require(kind in THINKING_TYPES, "thinking.type", f"one of {', '.join(THINKING_TYPES)}", kind[:200])
        if kind != "adaptive":  # which leaves it to the model, as its template does by default
            chat.thinking = Thinking(type=kind)
    config = request.output_config
    if config is not None:
        chat.reasoning_effort = config.effort
        if config.format is not None:
            kind = config.format.type
            require(kind == "json_schema", "output_config.format.type", "json_schema", kind[:200])
            schema = JsonSchemaFormat(schema=config.format.schema)
            chat.response_format = ResponseFormat(type="json_schema", json_schema=schema)
    if isinstance(request, MessagesRequest):
        _set_generation(chat, request)
    return chat


def _set_generation(chat: ChatCompletionRequest, request: MessagesRequest) -> None:
    if request.container is not None:
        raise _unsupported("container", "the server runs no tools")
    last = request.messages[-1].role
    require(last != "assistant", "messages", "ended by a message that is not the assistant's", last)
    for text in request.stop_sequences or ():
        require(
            len(text) <= MAX_STOP_CHARS,
            "stop_sequences",
            f"made of texts up to {MAX_STOP_CHARS} characters",
            len(text),
        )
    chat.user = request.metadata.user_id if request.metadata else None
    length = len(chat.user or "")
    require(length <= MAX_LABEL_CHARS, "metadata.user_id", f"at most {MAX_LABEL_CHARS} characters", length)
    chat.max_tokens, chat.stop, chat.stream = request.max_tokens, request.stop_sequences, request.stream
    chat.temperature, chat.top_p, chat.top_k = request.temperature, request.top_p, request.top_k


def _messages(request: CountTokensRequest) -> list[ChatMessage]:
    count = len(request.messages)
    require(0 < count <= MAX_MESSAGES, "messages", f"a list of 1 to {MAX_MESSAGES}", count)
    result: list[ChatMessage] = []
    if request.system:
        blocks = _blocks(request.system, "system")
        parts = [_text(block, f"system[{i}].text") for i, block in enumerate(blocks)]
        if isinstance(request.system, list):
            parts = [part for part in parts if not (part.text or "").startswith(BILLING_HEADER)]
        if parts:
            result.append(ChatMessage(role="system", content=parts))
    names: dict[str, str] = {}  # of the tools that were called, by the call's id
    for i, message in enumerate(request.messages):
        _add(result, message, f"messages[{i}]", names)
    return result


def _add(result: list[ChatMessage], message: InputMessage, where: str, names: dict[str, str]) -> None:
    """Append a message, or several: a tool's result is a message of its own. Neighbours of one role are joined.

    The order of the blocks is kept, so results come right after their calls, where templates expect them.
    """
    role = message.role
    require(role in ("user", "assistant", "system"), f"{where}.role", "user, assistant or system", role[:200])
    blocks = _blocks(message.content, f"{where}.content")
    require(bool(blocks), f"{where}.content", "not empty", [])
    for j, block in enumerate(blocks):
        field = f"{where}.content[{j}]"
        if role == "user" and block.type == "tool_result":
            result.append(_tool_result(block, field, names))
            continue
        target = result[-1] if len(result) > 0 and result[-1].role == role else None
        if target is None:
            target = ChatMessage(role=role, content=[])
            result.append(target)
        if role == "assistant" and block.type == "tool_use":
            target.tool_calls = [*(target.tool_calls or ()), _call(block, field, names)]
        elif role == "assistant" and block.type == "thinking":
            target.reasoning_content = (target.reasoning_content or "") + (block.thinking or "")
        elif role != "assistant" or block.type != "redacted_thinking":
            part = _text(block, field)
            if isinstance(target.content, list):
                target.content.append(part)


def _blocks(content: str | list[Block], field: str) -> list[Block]:
    if isinstance(content, str):
        return [Block(type="text", text=content)]
    require(len(content) <= MAX_CONTENT_PARTS, field, f"at most {MAX_CONTENT_PARTS} blocks", len(content))
    return content


def _text(block: Block, field: str) -> ContentPart:
    if block.type != "text":
        raise _unsupported(f"{field}.type", f"{block.type[:200]!r} cannot stand here; this server reads text")
    require(block.text is not None, f"{field}.text", "a string", None)
    return ContentPart("text", block.text)


def _call(block: Block, field: str, names: dict[str, str]) -> HistoryToolCall:
    require(bool(block.id), f"{field}.id", "a string", block.id)
    require(bool(block.name), f"{field}.name", "a string", block.name)
    check_free_form(f"{field}.input", block.input, MAX_TOOL_BYTES)
    names[block.id or ""] = block.name or ""
    function = CalledFunction(block.name or "", block.input or {})
    return HistoryToolCall(function=function, id=block.id, type="function")


def _tool_result(block: Block, field: str, names: dict[str, str]) -> ChatMessage:
    call_id = block.tool_use_id or ""
    require(call_id in names, f"{field}.tool_use_id", "the id of an earlier tool_use block", call_id[:200])
    blocks = _blocks(block.content or "", f"{field}.content")
    parts = [_text(inner, f"{field}.content[{k}]") for k, inner in enumerate(blocks)]
    if block.is_error:  # templates know no failed results
        parts.insert(0, ContentPart("text", "Error:"))
    return ChatMessage(role="tool", content=parts, tool_call_id=call_id, name=names[call_id])


def _tool(tool: Tool, field: str) -> ToolDefinition:
    if tool.type not in (None, "custom"):
        raise _unsupported(f"{field}.type", f"only 'custom' is, got {tool.type[:200]!r}")
    require(tool.input_schema is not None, f"{field}.input_schema", "a JSON schema", None)
    return ToolDefinition(
        type="function",
        function=FunctionDefinition(
            name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
        ),
    )


def _tool_choice(choice: AnthropicToolChoice) -> str | ToolChoice:
    if choice.type == "tool":
        require(choice.name is not None, "tool_choice.name", "a string", None)
        return ToolChoice(function=NamedFunction(choice.name or ""))
    require(choice.type in _MODES, "tool_choice.type", "auto, any, tool or none", choice.type[:200])
    return _MODES[choice.type]


def _unsupported(field: str, why: str) -> RequestError:
    return RequestError(f"{field} is not supported: {why}", param=field, code="unsupported")
