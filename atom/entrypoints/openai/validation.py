"""Every check of a request, in one place. What passes here cannot hurt the engine.

Each function raises :class:`RequestError` with field, limit and value; ``param`` is the field as the client
spells it. Ranges of the sampling fields are those of :class:`SamplingParams`, which checks them itself.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from atom.entrypoints.openai.protocol import (
    UNSUPPORTED_CHAT,
    UNSUPPORTED_COMPLETION,
    UNSUPPORTED_EVERYWHERE,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    GenerationFields,
)
from atom.errors import ContextLengthError, RequestError
from atom.sampling_params import SamplingParams

MAX_BODY_BYTES = 32 * 2**20
MAX_PROMPTS = 512  # prompts of one completions request
MAX_ANSWERS = 1024  # prompts x n
MAX_MESSAGES = 4096
MAX_CONTENT_PARTS = 4096  # of one message
MAX_ROLE_CHARS = 64
MAX_LABEL_CHARS = 512  # user, and each key and value of metadata
MAX_METADATA = 16
MAX_STOP_CHARS = 1024  # a stop string or bad word
MAX_STOP_TOKEN_IDS = 64
MAX_COMPLETION_LOGPROBS = 5
MAX_TOP_LOGPROBS = 20
MAX_SALT_CHARS = 256
MAX_PRIORITY = 1000
MAX_TOP_K = 2**31 - 1

_SAME_NAME = (
    "temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids", "bad_words", "min_tokens", "ignore_eos",
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "prompt_logprobs",
)  # fmt: skip
_CLIENT_NAME = {"stop_strings": "stop"}
_JSON_PATH = re.compile(r"\$((?:\.\w+|\[\d*\]|\[\.\.\.\])+)")
_REQUIRED = re.compile(r"missing required field `(\w+)`")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
_SALT = re.compile(r"[\x21-\x7e]+")

R = TypeVar("R", bound=GenerationFields)


def _require(ok: bool, field: str, rule: str, value: object) -> None:
    if not ok:
        raise RequestError(f"{field} must be {rule}, got {value!r}", param=field)


def decode_request(body: bytes, request_type: type[R]) -> R:
    """The typed request in ``body``, with every field that needs no engine checked.

    Raises:
        RequestError: not JSON, a field of the wrong type, a field we do not support, or one out of range.
    """
    try:
        request = msgspec.json.decode(body, type=request_type)
    except msgspec.ValidationError as error:
        message = str(error)
        path = _JSON_PATH.search(message)
        missing = _REQUIRED.search(message)
        parts = [path.group(1).lstrip(".")] if path else []
        parts += [missing.group(1)] if missing else []
        raise RequestError(message, param=".".join(parts) or None) from None
    except msgspec.DecodeError as error:
        raise RequestError(f"The body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise RequestError("The body is nested too deeply", code="invalid_json") from None
    if isinstance(request, CompletionRequest):
        _check_supported(request, UNSUPPORTED_EVERYWHERE | UNSUPPORTED_COMPLETION)
    else:
        _check_supported(request, UNSUPPORTED_EVERYWHERE | UNSUPPORTED_CHAT)
    _check_shared(request)
    return request


def _check_supported(request: GenerationFields, table: Mapping[str, Sequence[Any]]) -> None:
    for field, allowed in table.items():
        value = getattr(request, field)
        if value is None or any(value == item and type(value) is type(item) for item in allowed):
            continue
        only = " or ".join(["null", *(msgspec.json.encode(item).decode() for item in allowed)])
        shown = msgspec.json.encode(value).decode()[:200]
        raise RequestError(
            f"{field} is not supported: only {only} is accepted, got {shown}", param=field, code="unsupported"
        )


def _check_shared(request: GenerationFields) -> None:
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream to be true, got false", param="stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise RequestError("prompt_logprobs needs stream to be false, got true", param="prompt_logprobs")
    if request.cache_salt is not None:
        salt = request.cache_salt
        ok = len(salt) <= MAX_SALT_CHARS and _SALT.fullmatch(salt) is not None
        _require(ok, "cache_salt", f"1 to {MAX_SALT_CHARS} visible ASCII characters", salt[:MAX_SALT_CHARS])
    priority = request.priority or 0
    _require(abs(priority) <= MAX_PRIORITY, "priority", f"in [-{MAX_PRIORITY}, {MAX_PRIORITY}]", priority)
    user = request.user or ""
    _require(len(user) <= MAX_LABEL_CHARS, "user", f"at most {MAX_LABEL_CHARS} characters", len(user))
    metadata = request.metadata or {}
    _require(len(metadata) <= MAX_METADATA, "metadata", f"at most {MAX_METADATA} entries", len(metadata))
    for text in (*metadata, *metadata.values()):
        _require(
            len(text) <= MAX_LABEL_CHARS,
            "metadata",
            f"of texts up to {MAX_LABEL_CHARS} characters",
            len(text),
        )
    stop = request.stop if isinstance(request.stop, list) else [request.stop or ""]
    for field, texts in (("stop", stop), ("bad_words", request.bad_words or ())):
        longest = max(map(len, texts), default=0)
        _require(
            longest <= MAX_STOP_CHARS, field, f"made of texts up to {MAX_STOP_CHARS} characters", longest
        )
    count = len(request.stop_token_ids or ())
    _require(count <= MAX_STOP_TOKEN_IDS, "stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} entries", count)


def requested_completion_logprobs(request: CompletionRequest) -> int | None:
    """How many alternatives a token to report; None for no log-probabilities."""
    if request.logprobs is not None:
        ok = 0 <= request.logprobs <= MAX_COMPLETION_LOGPROBS
        _require(ok, "logprobs", f"in [0, {MAX_COMPLETION_LOGPROBS}]", request.logprobs)
    return request.logprobs


def requested_chat_logprobs(request: ChatCompletionRequest) -> int | None:
    """The same for a chat request, where ``logprobs`` switches and ``top_logprobs`` counts."""
    if request.top_logprobs is not None:
        ok = 0 <= request.top_logprobs <= MAX_TOP_LOGPROBS
        _require(ok, "top_logprobs", f"in [0, {MAX_TOP_LOGPROBS}]", request.top_logprobs)
        if request.top_logprobs and not request.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true, got false", param="top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def sampling_params(
    request: GenerationFields, *, max_tokens: int | None, logprobs: int | None, vocab_size: int
) -> SamplingParams:
    """Sampling rules of a request; ids in them are checked against the vocabulary."""
    fields = {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    if request.top_k is not None:
        _require(request.top_k <= MAX_TOP_K, "top_k", f"at most {MAX_TOP_K}", request.top_k)
    stop = [request.stop] if isinstance(request.stop, str) else request.stop
    try:
        params = SamplingParams(max_tokens=max_tokens, stop_strings=stop or None, logprobs=logprobs, **fields)
    except RequestError as error:
        name = _CLIENT_NAME.get(error.param or "")
        if name is None:
            raise
        message = error.message.replace(str(error.param), name, 1)
        raise RequestError(message, param=name) from None
    check_token_ids("stop_token_ids", params.stop_token_ids or (), vocab_size)
    check_token_ids("logit_bias", params.logit_bias or (), vocab_size)
    return params


def check_token_ids(field: str, ids: Sequence[int] | Mapping[int, Any], vocab_size: int) -> None:
    """Refuse ids that the model does not have."""
    if not ids:
        return
    for token in (min(ids), max(ids)):
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{field} holds token id {token}, outside the vocabulary [0, {vocab_size - 1}]", param=field
            )


def split_prompts(request: CompletionRequest, vocab_size: int) -> list[str | list[int]]:
    """The prompts of a completions request: texts or id lists, at least one, none empty."""
    prompt = request.prompt
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif prompt and all(type(item) is int for item in prompt):
        prompts = [prompt]
    else:
        prompts = prompt
        kinds = {type(item) for item in prompts}
        _require(
            len(kinds) == 1, "prompt", "a string, a list of strings, of ids or of id lists", _kinds(kinds)
        )
    _require(len(prompts) <= MAX_PROMPTS, "prompt", f"at most {MAX_PROMPTS} prompts", len(prompts))
    answers = len(prompts) * (request.n or 1)
    _require(answers <= MAX_ANSWERS, "n", f"so that prompts x n is at most {MAX_ANSWERS}", answers)
    for item in prompts:
        _require(len(item) > 0, "prompt", "not empty", item)
        if not isinstance(item, str):
            check_token_ids("prompt", item, vocab_size)
    return prompts


def _kinds(kinds: set[type]) -> str:
    return ", ".join(sorted(kind.__name__ for kind in kinds)) or "nothing"


def check_context(
    num_prompt_tokens: int, request: GenerationFields, max_tokens: int | None, limit: int
) -> None:
    """Refuse a request whose prompt and answer cannot both fit into ``limit`` tokens."""
    field = "max_tokens"
    if isinstance(request, ChatCompletionRequest) and request.max_completion_tokens is not None:
        field = "max_completion_tokens"
    source = "messages" if isinstance(request, ChatCompletionRequest) else "prompt"
    if max_tokens is None and num_prompt_tokens + (request.min_tokens or 0) > limit:
        field, max_tokens = "min_tokens", request.min_tokens
    if num_prompt_tokens >= limit:
        wanted = "an answer" if max_tokens is None else f"the {max_tokens} of {field}"
        raise ContextLengthError(
            f"The context holds {limit} tokens, but the prompt alone has {num_prompt_tokens}: no room for {wanted}",
            param=source,
        )
    if max_tokens is not None and num_prompt_tokens + max_tokens > limit:
        raise ContextLengthError(
            f"The context holds {limit} tokens, but the request needs {num_prompt_tokens + max_tokens}: "
            f"{num_prompt_tokens} of the prompt and {max_tokens} of {field}",
            param=field,
        )


def check_messages(messages: list[ChatMessage]) -> None:
    """Refuse messages that a chat template cannot be given."""
    _require(0 < len(messages) <= MAX_MESSAGES, "messages", f"a list of 1 to {MAX_MESSAGES}", len(messages))
    for i, message in enumerate(messages):
        role = message.role
        _require(
            0 < len(role) <= MAX_ROLE_CHARS, f"messages[{i}].role", f"1 to {MAX_ROLE_CHARS} characters", role
        )
        for field in ("tool_calls", "tool_call_id"):
            if getattr(message, field):
                raise RequestError(
                    f"messages[{i}].{field} is not supported: only null is accepted",
                    param=f"messages[{i}].{field}",
                    code="unsupported",
                )
        parts = message.content if isinstance(message.content, list) else []
        _require(
            len(parts) <= MAX_CONTENT_PARTS,
            f"messages[{i}].content",
            f"at most {MAX_CONTENT_PARTS} parts",
            len(parts),
        )
        for j, part in enumerate(parts):
            where = f"messages[{i}].content[{j}]"
            if part.type != "text":
                raise RequestError(
                    f"{where}.type must be 'text', the only kind that this server reads, got {part.type!r}",
                    param=f"{where}.type",
                    code="unsupported",
                )
            _require(part.text is not None, f"{where}.text", "a string", None)


def check_model(model: str | None, served_name: str) -> None:
    """Refuse a model that is not served; no name at all means the one there is."""
    if model is not None and model.rstrip("/") != served_name.rstrip("/"):
        raise RequestError(
            f"model {model!r} does not exist; this server has {served_name!r}",
            param="model",
            status=404,
            code="model_not_found",
        )


def valid_request_id(value: str | None) -> bool:
    """Whether a client's X-Request-Id may be echoed: opaque, short, no control or separator characters."""
    return value is not None and _REQUEST_ID.fullmatch(value) is not None
