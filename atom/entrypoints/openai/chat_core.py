"""From a conversation to a job, and from its deltas to events: what every chat-like API shares.

An API turns its body into a :class:`ChatCompletionRequest`, ``prepare_chat`` makes of it what the engine
runs, and an :class:`AnswerReader` for each answer takes the text apart: reasoning, content, tool calls.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from atom.entrypoints.openai.chat_validation import (
    ToolPolicy,
    check_effort,
    check_messages,
    normalized_tools,
    tool_policy,
)
from atom.entrypoints.openai.context import ServerContext
from atom.entrypoints.openai.forced_calls import (
    calls_guide,
    is_framed_beside_text,
    strict_guide,
    with_tools,
)
from atom.entrypoints.openai.generation import Job
from atom.entrypoints.openai.limits import MAX_TEMPLATE_KWARGS_BYTES
from atom.entrypoints.openai.protocol import ChatCompletionRequest, ChatMessage
from atom.entrypoints.openai.reasoning import (
    HARMONY,
    PROMPT_TAIL_CHARS,
    ReasoningCounter,
    ReasoningDialect,
    StartState,
    start_state,
    stop_gate,
)
from atom.entrypoints.openai.structured import compile_guide, requested_guide
from atom.entrypoints.openai.telemetry import run_staged, stage
from atom.entrypoints.openai.tool_parsers.answer import AnswerParser, make_answer_parser
from atom.entrypoints.openai.tool_parsers.base import (
    ParserEvent,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    ToolParser,
)
from atom.entrypoints.openai.validation import (
    check_context,
    check_free_form,
    is_scoring,
    requested_chat_logprobs,
    sampling_params,
)
from atom.errors import RequestError
from atom.guide import Guide
from atom.model_engine.outputs import RequestOutput
from atom.sampling_params import SamplingParams

if TYPE_CHECKING:
    from atom.entrypoints.openai.answers import AnswerWriter
    from atom.entrypoints.openai.logprobs import TokenBytes
    from atom.model_engine.answer_stops import StopGate
    from atom.model_engine.io_processor import Prompt
    from atom.model_engine.messages import CompiledGuide

NO_TEMPLATE = (
    "This model has no usable chat template, so messages cannot be turned into a prompt. Start the server with "
    "--chat-template FILE, or use /v1/completions"
)
# Template variables by what they switch; a template reads at most one of each line.
TOGGLES = ("enable_thinking", "thinking")
EFFORT_VARIABLES = ("reasoning_effort", "thinking_effort")

_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})?')


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as token ids, and how its prompt's text ends."""

    ids: list[int]
    tail: str
    policy: ToolPolicy
    ignored: list[str]  # fields that this template has no use for


@dataclass(slots=True)
class PreparedChat:
    """A chat request that passed every check.

    Attributes:
        num_logprobs: alternatives to tell a token; None for no log-probabilities.
        dialect, start: how the model marks its thinking, and how every answer starts.
        ignored: fields that have no effect on this model.
    """

    request: ChatCompletionRequest
    prompt: "Prompt"
    params: SamplingParams
    policy: ToolPolicy
    num_logprobs: int | None
    guide: "CompiledGuide | None"
    stop_gate: "StopGate | None"
    make_parser: Callable[[], AnswerParser]
    dialect: ReasoningDialect | None
    start: StartState
    ignored: list[str]

    def readers(self) -> list["AnswerReader"]:
        """One for each of the n answers."""
        return [AnswerReader(self.make_parser(), self.policy.max_calls) for _ in range(self.params.n)]

    def reasoning_counter(self, tokenizer: "TokenBytes") -> ReasoningCounter | None:
        """For one answer; None where no answer can have thinking."""
        if self.dialect is None or self.start == "answer":
            return None
        return ReasoningCounter(self.dialect, self.start, tokenizer)

    def job(self, writer: "AnswerWriter", request_id: str, ignored: list[str]) -> Job:
        """The job whose answers go to ``writer``; ``ignored`` are further fields without effect."""
        return Job(
            [self.prompt],
            self.params,
            writer,
            request_id,
            bool(self.request.stream),
            priority=self.request.priority or 0,
            guide=self.guide,
            stop_gate=self.stop_gate,
            is_scoring=is_scoring(self.request),
            ignored=ignored + self.ignored,
        )


class AnswerReader:
    """Deltas of one answer in, events out; at most ``max_calls`` tool calls, later ones are dropped."""

    def __init__(self, parser: AnswerParser, max_calls: int | None = None):
        self._parser = parser
        self._max_calls = max_calls

    def read(self, output: RequestOutput) -> list[ParserEvent]:
        """What a delta makes certain."""
        return self.read_text(output.text, output.finished)

    def read_text(self, text: str, is_finished: bool) -> list[ParserEvent]:
        events = self._parser.feed(text) if text else []
        if is_finished:
            events += self._parser.finish()
        limit = self._max_calls
        if limit is not None and self._parser.num_calls > limit:
            calls = (ToolCallStart, ToolCallArguments, ToolCallEnd)
            events = [event for event in events if not isinstance(event, calls) or event.index < limit]
        return events

    def finish_reason(self, reason: str | None) -> str | None:
        """The engine's finish reason as a client reads it: an answer that ended with calls says so."""
        return "tool_calls" if reason == "stop" and self._parser.num_calls else reason


async def prepare_chat(context: ServerContext, request: ChatCompletionRequest) -> PreparedChat:
    """Check, render, tokenize and compile what a chat request asks for.

    Raises:
        RequestError: something of it cannot run; ``param`` is the field in the chat API's spelling.
    """
    num_logprobs = requested_chat_logprobs(request)
    max_tokens, field = request.max_completion_tokens, "max_completion_tokens"
    if max_tokens is None:
        max_tokens, field = request.max_tokens, "max_tokens"
    if is_scoring(request):
        max_tokens = 1
    params = sampling_params(
        request, max_tokens=max_tokens, logprobs=num_logprobs, vocab_size=context.engine.vocab_size
    )
    rendered = await render(context, request)
    check_context(
        len(rendered.ids),
        max_tokens,
        context.engine.max_model_len,
        min_tokens=request.min_tokens or 0,
        source="messages",
        field=field,
    )
    policy, dialect, ignored = rendered.policy, context.reasoning, rendered.ignored
    start: StartState = start_state(rendered.tail, dialect) if dialect else "answer"
    guide, parser_type = _choose_guide(context, request, policy, ignored)
    if guide is not None and _guide_waits(dialect, start, request, policy):
        guide = msgspec.structs.replace(guide, start_after=dialect.answer_mark or dialect.end)
    shows_special = not params.skip_special_tokens or _has_special_marks(context, parser_type, policy)
    params = msgspec.structs.replace(params, guide=guide, skip_special_tokens=not shows_special)

    def make_parser() -> AnswerParser:
        keeps_calls = policy.mode != "none"
        return make_answer_parser(
            parser_type, dialect, start=start, tools=policy.tools, keeps_calls=keeps_calls
        )

    return PreparedChat(
        request,
        await context.engine.preprocess(rendered.ids, request.cache_salt),
        params,
        policy,
        num_logprobs,
        await _compile(context, guide),
        None if context.stops_in_reasoning else stop_gate(dialect, start),
        make_parser,
        dialect,
        start,
        ignored,
    )


def _choose_guide(
    context: ServerContext,
    request: ChatCompletionRequest,
    policy: ToolPolicy,
    ignored: list[str],
) -> tuple[Guide | None, type[ToolParser] | None]:
    """What the answer must look like, and what reads its calls.

    Calls that have to be made win over a form of the text. Where the model may choose, it either calls or keeps
    to that form.
    """
    asked, dialect = requested_guide(request), context.tool_parser
    template = context.chat_template.source if context.chat_template else ""
    if policy.is_forced:
        return calls_guide(policy, dialect, template)
    if asked is not None and policy.mode == "auto" and dialect and not is_framed_beside_text(dialect):
        try:
            return calls_guide(policy, dialect, template, asked)
        except RequestError as error:
            raise with_tools(asked, error) from error
    is_strict = any(tool.function is not None and tool.function.strict for tool in request.tools or ())
    if is_strict and asked is None and policy.mode == "auto":
        guide = strict_guide(policy, dialect, template)
        if guide is not None:
            return guide, dialect
        ignored.append("tools.function.strict")
    return asked, dialect


async def _compile(context: ServerContext, guide: Guide | None) -> "CompiledGuide | None":
    try:
        return await compile_guide(context.engine, guide)
    except RequestError as error:
        if guide.otherwise is None:
            raise
        raise with_tools(guide.otherwise, error) from error


def _guide_waits(
    dialect: ReasoningDialect | None, start: StartState, request: ChatCompletionRequest, policy: ToolPolicy
) -> bool:
    """Whether the answer's grammar begins after its thinking.

    Where the model may or may not think, the grammar begins at once, which is the only way to enforce it; unless
    the client has asked for thinking.
    """
    if dialect is HARMONY:
        return not policy.is_forced  # a call is framed as the thinking is, beside it
    return dialect is not None and (start == "thinking" or (start == "undecided" and _asks_to_think(request)))


# -- the prompt


async def render(context: ServerContext, request: ChatCompletionRequest) -> Rendered:
    """Messages and tools as the model reads them. The template runs off the event loop.

    Raises:
        RequestError: messages, tools or template variables that cannot be, or that the template refuses.
    """
    check_messages(request.messages)
    policy = tool_policy(normalized_tools(request.tools), request.tool_choice, request.parallel_tool_calls)
    template = context.chat_template
    if template is None:
        raise RequestError(NO_TEMPLATE, param="messages", code="no_chat_template")
    own = request.chat_template_kwargs or {}
    check_free_form("chat_template_kwargs", own, MAX_TEMPLATE_KWARGS_BYTES)
    template.check_kwargs(own)
    if policy.mode != "none" and not template.takes_tools:
        raise RequestError(
            "tools is not supported: this model's chat template has no place for them",
            param="tools",
            code="unsupported",
        )
    allowed = template.kwargs_allowed
    kwargs, ignored = _thinking_kwargs(context, request, allowed)
    if isinstance(request.tool_choice, str) and "tool_choice" in allowed:
        kwargs["tool_choice"] = request.tool_choice
    if request.response_format is not None and "response_format" in allowed:
        kwargs["response_format"] = msgspec.to_builtins(request.response_format)

    def work() -> Rendered:
        with stage("api_chat_template"):
            text = template.render(
                template_messages(request.messages, "developer" in template.source),
                tools=list(policy.tools) if policy.mode != "none" else None,
                add_generation_prompt=request.add_generation_prompt is not False,
                kwargs=own | kwargs,
            )
        with stage("api_tokenize"):
            # The template writes the special tokens itself, so the tokenizer must not add any.
            ids = context.engine.tokenizer.encode(text, add_special_tokens=False)
        return Rendered(ids, text[-PROMPT_TAIL_CHARS:], policy, ignored)

    return await run_staged(context.executor, work)


def _thinking_kwargs(
    context: ServerContext, request: ChatCompletionRequest, allowed: frozenset[str]
) -> tuple[dict[str, Any], list[str]]:
    """What ``thinking`` and ``reasoning_effort`` set. What they ask for and the template cannot do is ignored."""
    kwargs: dict[str, Any] = {}
    ignored: list[str] = []
    asked = request.thinking
    field = "reasoning_effort"
    effort = check_effort(field, request.reasoning_effort)
    is_on: bool | None = None if effort is None else effort != "none"
    if asked is not None and asked.effort is not None:
        field, effort = "thinking.effort", check_effort("thinking.effort", asked.effort)
        is_on = effort != "none"
    toggle = next((name for name in TOGGLES if name in allowed), None)
    if asked is not None and asked.type is not None:
        if asked.type not in ("enabled", "disabled"):
            raise RequestError(
                f"thinking.type must be enabled or disabled, got {asked.type[:200]!r}", param="thinking.type"
            )
        is_on = asked.type == "enabled"
        if toggle is None:
            ignored.append("thinking")
    if is_on is not None and toggle is not None:
        kwargs[toggle] = is_on
    if effort is not None:
        variable = next((name for name in EFFORT_VARIABLES if name in allowed), None)
        known = context.reasoning.efforts if context.reasoning else ()
        if variable is not None and (not known or effort in known):
            kwargs[variable] = effort
        elif toggle is None or effort != "none":
            ignored.append(field)
    return kwargs, ignored


def _asks_to_think(request: ChatCompletionRequest) -> bool:
    if request.thinking is not None and request.thinking.type is not None:
        return request.thinking.type == "enabled"
    return request.reasoning_effort not in (None, "none")


def template_messages(messages: list[ChatMessage], knows_developer: bool) -> list[dict[str, Any]]:
    """Messages as templates read them: content is always a string, parts are joined by newlines, arguments of
    calls are objects.

    A template that does not know the role ``developer`` gets it as ``system``, its older name.
    """
    result = []
    for message in messages:
        content = message.content
        if isinstance(content, list):
            content = "\n".join(part.refusal or part.text or "" for part in content)
        role = "system" if message.role == "developer" and not knows_developer else message.role
        item: dict[str, Any] = {"role": role, "content": content or ""}
        reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
        optional = {
            "name": message.name,
            "reasoning_content": reasoning,
            "tool_call_id": message.tool_call_id,
        }
        item |= {key: value for key, value in optional.items() if value is not None}
        if message.tool_calls:
            item["tool_calls"] = [
                {
                    **({"id": call.id} if call.id is not None else {}),
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": decoded_arguments(call.function.arguments),
                    },
                }
                for call in message.tool_calls
            ]
        result.append(item)
    return result


def decoded_arguments(arguments: str | dict[str, Any] | None) -> dict[str, Any]:
    """The arguments of an earlier call as an object.

    Models write backslashes that JSON does not know: those are doubled. What is no JSON object even so is
    ``{"_raw": text}``.
    """
    if not isinstance(arguments, str):
        return arguments or {}
    if not arguments.strip():
        return {}
    for text in (arguments, _ESCAPE.sub(lambda match: "\\\\" if match[0] == "\\" else match[0], arguments)):
        try:
            value = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            continue
        if isinstance(value, dict):
            return value
    return {"_raw": arguments}


def _has_special_marks(
    context: ServerContext, parser_type: type[ToolParser] | None, policy: ToolPolicy
) -> bool:
    """Whether marks that are to be found in the text are special tokens, which are not shown by default."""
    marks: tuple[str, ...] = ()
    if context.reasoning is not None:
        marks += (context.reasoning.opener, context.reasoning.end)
    if parser_type is not None and (policy.tools or parser_type.frames_answers):
        marks += parser_type.wire_tokens
    return any(special in mark for special in _special_texts(context.engine.tokenizer) for mark in marks)


@lru_cache(maxsize=4)
def _special_texts(tokenizer: Any) -> frozenset[str]:
    texts = (tokenizer.token_bytes(i).decode("utf-8", "replace") for i in tokenizer.special_ids)
    return frozenset(text for text in texts if text)
