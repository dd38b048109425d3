"""OpenAI's Responses API as msgspec structs: requests, answers, stream events.

Every optional request field may be null, which means its default.
"""

from typing import Any

import msgspec

from atom.entrypoints.openai.protocol import ChatTokenLogprob, StreamOptions, unsupported_struct

# As for chat: field -> values that ask for nothing. The server keeps no responses and runs no tools.
UNSUPPORTED_RESPONSES: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "store": (False,),
    "background": (False,),
    "background_options": (),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
}
# Hints on how to serve, cache or bill, and bounds of what does not happen here: not used, and said so in the
# X-Atom-Warning header.
IGNORED_RESPONSES = frozenset(
    {
        "access_programs",
        "image",
        "max_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
    }
)
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"


class InputPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct, kw_only=True):
    """One item of any type; which fields it needs depends on ``type``, which a message may leave out."""

    type: str | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    encrypted_content: str | None = None


class ResponsesTool(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class AllowedTool(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None


class ResponsesToolChoice(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A function by its ``name``, or allowed tools by ``mode`` and ``tools``."""

    type: str
    name: str | None = None
    mode: str | None = None
    tools: list[AllowedTool] | None = None


class TextFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True, omit_defaults=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


_ResponsesBase = unsupported_struct("_ResponsesBase", UNSUPPORTED_RESPONSES, msgspec.Struct)


class ResponsesRequest(_ResponsesBase, kw_only=True):
    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: str | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    max_output_tokens: int | None = None
    truncation: str | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    # Of the chat API, beyond OpenAI's
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
    cache_salt: str | None = None
    priority: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class InputTokens(msgspec.Struct):
    input_tokens: int
    object: str = "response.input_tokens"


# -- the answer


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str
    logprobs: list[ChatTokenLogprob]
    annotations: list[Any] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    status: str
    content: list[OutputText]
    role: str = "assistant"


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    """``content`` is the thinking itself; no summary of it is made."""

    id: str
    status: str
    content: list[ReasoningText]
    summary: list[Any] = []


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    id: str
    status: str
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0  # what a provider bills for writing; nothing here


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    reason: str


class ResponseError(msgspec.Struct):
    code: str
    message: str


class ReasoningUsed(msgspec.Struct):
    effort: str | None
    summary: str | None = None


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response at any time of its life, with what was asked for."""

    id: str
    object: str = "response"
    created_at: int
    status: str
    completed_at: int | None = None
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    reasoning: ReasoningUsed
    store: bool = False
    temperature: float
    text: TextConfig
    tool_choice: str | ResponsesToolChoice
    tools: list[ResponsesTool]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None


# -- events of a stream; ``sequence_number`` is set when one is sent


class ResponseCreated(msgspec.Struct, tag_field="type", tag="response.created"):
    response: ResponseObject
    sequence_number: int = 0


class ResponseInProgress(msgspec.Struct, tag_field="type", tag="response.in_progress"):
    response: ResponseObject
    sequence_number: int = 0


class ResponseCompleted(msgspec.Struct, tag_field="type", tag="response.completed"):
    response: ResponseObject
    sequence_number: int = 0


class ResponseIncomplete(msgspec.Struct, tag_field="type", tag="response.incomplete"):
    response: ResponseObject
    sequence_number: int = 0


class ResponseFailed(msgspec.Struct, tag_field="type", tag="response.failed"):
    response: ResponseObject
    sequence_number: int = 0


class ItemAdded(msgspec.Struct, tag_field="type", tag="response.output_item.added"):
    output_index: int
    item: OutputItem
    sequence_number: int = 0


class ItemDone(msgspec.Struct, tag_field="type", tag="response.output_item.done"):
    output_index: int
    item: OutputItem
    sequence_number: int = 0


class PartAdded(msgspec.Struct, tag_field="type", tag="response.content_part.added"):
    item_id: str
    output_index: int
    part: OutputText | ReasoningText
    content_index: int = 0
    sequence_number: int = 0


class PartDone(msgspec.Struct, tag_field="type", tag="response.content_part.done"):
    item_id: str
    output_index: int
    part: OutputText | ReasoningText
    content_index: int = 0
    sequence_number: int = 0


class OutputTextDelta(msgspec.Struct, tag_field="type", tag="response.output_text.delta"):
    item_id: str
    output_index: int
    delta: str
    logprobs: list[ChatTokenLogprob]
    content_index: int = 0
    sequence_number: int = 0


class OutputTextDone(msgspec.Struct, tag_field="type", tag="response.output_text.done"):
    item_id: str
    output_index: int
    text: str
    logprobs: list[ChatTokenLogprob]
    content_index: int = 0
    sequence_number: int = 0


class ReasoningTextDelta(msgspec.Struct, tag_field="type", tag="response.reasoning_text.delta"):
    item_id: str
    output_index: int
    delta: str
    content_index: int = 0
    sequence_number: int = 0


class ReasoningTextDone(msgspec.Struct, tag_field="type", tag="response.reasoning_text.done"):
    item_id: str
    output_index: int
    text: str
    content_index: int = 0
    sequence_number: int = 0


class ArgumentsDelta(msgspec.Struct, tag_field="type", tag="response.function_call_arguments.delta"):
    item_id: str
    output_index: int
    delta: str
    sequence_number: int = 0


class ArgumentsDone(msgspec.Struct, tag_field="type", tag="response.function_call_arguments.done"):
    item_id: str
    output_index: int
    name: str
    arguments: str
    sequence_number: int = 0


ItemEvent = (
    ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | ArgumentsDelta
    | ArgumentsDone
)
ResponseStreamEvent = (
    ResponseCreated | ResponseInProgress | ResponseCompleted | ResponseIncomplete | ResponseFailed | ItemEvent
)
