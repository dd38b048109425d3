"""What travels over HTTP, as msgspec structs: requests, answers, chunks. The OpenAPI document is made of them.

Every request field may be null, which means its default. A field of these structs either works or is listed
in ``UNSUPPORTED_*`` with the only values that are accepted because they ask for nothing.
"""

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

# Field -> accepted values (null always is): each asks for what the server does anyway.
UNSUPPORTED_EVERYWHERE: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "add_special_tokens": (),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "return_token_ids": (False,),
    "kv_transfer_params": (),
    "data_parallel_rank": (),
}
UNSUPPORTED_COMPLETION: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
}
UNSUPPORTED_CHAT: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "store": (False,),
    "logprob_token_ids": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
}

# Fields of OpenAI's API that hint at how to serve or to log, not at what to answer: not used here, and said so
# in the X-Atom-Warning header.
IGNORED_COMPLETION = frozenset({"prompt_cache_key", "safety_identifier", "service_tier"})
IGNORED_CHAT = IGNORED_COMPLETION | {"prediction", "prompt_cache_retention", "verbosity"}


def unsupported_struct(name: str, fields: dict[str, tuple[Any, ...]], base: type[msgspec.Struct]) -> type:
    """A struct that adds ``fields`` to ``base``, each told as not supported but for these values."""

    def field(allowed: tuple[Any, ...]) -> Any:
        values = " or ".join(["null", *(msgspec.json.encode(value).decode() for value in allowed)])
        return Annotated[Any, msgspec.Meta(description=f"Not supported: only {values} is accepted")]

    definition = [(key, field(allowed), None) for key, allowed in fields.items()]
    return msgspec.defstruct(name, definition, bases=(base,), kw_only=True, module=__name__)


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    schema: dict[str, Any] | bool
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """One of these says what the answer must look like."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class GenerationFields(msgspec.Struct, kw_only=True):
    """Request fields that chat and completions share."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None


_CompletionBase = unsupported_struct(
    "_CompletionBase", UNSUPPORTED_EVERYWHERE | UNSUPPORTED_COMPLETION, GenerationFields
)
_ChatBase = unsupported_struct("_ChatBase", UNSUPPORTED_EVERYWHERE | UNSUPPORTED_CHAT, GenerationFields)


class CompletionRequest(_CompletionBase, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class HistoryToolCall(msgspec.Struct, kw_only=True):
    """A call that an earlier assistant message made."""

    function: CalledFunction
    id: str | None = None
    type: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[HistoryToolCall] | None = None
    tool_call_id: str | None = None
    function_call: Any = None
    audio: Any = None


class FunctionDefinition(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(msgspec.Struct, kw_only=True):
    """OpenAI's form (type and function), or Anthropic's (name, description, input_schema)."""

    type: str | None = None
    function: FunctionDefinition | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class NamedFunction(msgspec.Struct):
    name: str


class NamedTool(msgspec.Struct, kw_only=True):
    function: NamedFunction
    type: str = "function"


class AllowedTools(msgspec.Struct, kw_only=True):
    mode: str
    tools: list[NamedTool]


class ToolChoice(msgspec.Struct, kw_only=True):
    type: str = "function"
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


class Thinking(msgspec.Struct, kw_only=True):
    type: str | None = None
    effort: str | None = None


class ChatCompletionRequest(_ChatBase, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    thinking: Thinking | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A prompt, or messages as a chat request has them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[ToolDefinition] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


class DetokenizeResponse(msgspec.Struct):
    prompt: str


class TokenizerInfo(msgspec.Struct):
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None  # Jinja, as chat requests run it


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptTokenLogprob(msgspec.Struct):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptTokenLogprob] | None]  # one entry a prompt token, keyed by token id


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]  # null for the first token of an echoed prompt
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | None | UnsetType = UNSET  # streamed: in an answer's first chunk


class CompletionResponse(msgspec.Struct):
    """A whole completion, or one chunk of a streamed one."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    function: FunctionCall
    type: str = "function"


class AssistantMessage(msgspec.Struct):
    role: str
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None | UnsetType = UNSET


class ChatCompletionResponse(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None | UnsetType = UNSET


class FunctionCallDelta(msgspec.Struct, omit_defaults=True):
    arguments: str
    name: str | None = None


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """``id``, ``type`` and ``function.name`` come with the first delta of a call alone."""

    index: int
    function: FunctionCallDelta
    id: str | None = None
    type: str | None = None


class ChatDelta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET  # first chunk only


class ModelCard(msgspec.Struct):
    id: str
    created: int
    object: str = "model"
    owned_by: str = "atom"
    max_model_len: int | None = None


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"


class HealthStatus(msgspec.Struct, omit_defaults=True):
    status: str
    reason: str = ""


class Version(msgspec.Struct):
    version: str
