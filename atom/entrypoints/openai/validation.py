"""Every check of a request, in one place. What passes here cannot hurt the engine.

Each function raises :class:`RequestError` with field, limit and value; ``param`` is the field as the client
spells it. Ranges of the sampling fields are those of :class:`SamplingParams`, which checks them itself; all
other ceilings are in ``limits``. Messages and tools are checked in ``chat_validation``.
"""

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from atom.entrypoints.openai.limits import (
    MAX_ANSWERS,
    MAX_COMPLETION_LOGPROBS,
    MAX_JSON_DEPTH,
    MAX_LABEL_CHARS,
    MAX_METADATA,
    MAX_PRIORITY,
    MAX_PROMPTS,
    MAX_SALT_CHARS,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_K,
    MAX_TOP_LOGPROBS,
)
from atom.entrypoints.openai.protocol import (
    IGNORED_CHAT,
    IGNORED_COMPLETION,
    UNSUPPORTED_CHAT,
    UNSUPPORTED_COMPLETION,
    UNSUPPORTED_EVERYWHERE,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationFields,
)
from atom.errors import ContextLengthError, RequestError
from atom.sampling_params import MAX_N, SamplingParams
from atom.utils.suggest import suggest

_SAME_NAME = (
    "temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids", "bad_words", "min_tokens", "ignore_eos",
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "prompt_logprobs",
    "skip_special_tokens",
)  # fmt: skip
_CLIENT_NAME = {"stop_strings": "stop"}
_JSON_PATH = re.compile(r"\$((?:\.\w+|\[\d*\]|\[\.\.\.\])+)")
_REQUIRED = re.compile(r"missing required field `(\w+)`")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
_SALT = re.compile(r"[\x21-\x7e]+")
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NULL = msgspec.Raw(b"null")

T = TypeVar("T", bound=msgspec.Struct)
R = TypeVar("R", bound=GenerationFields)


def require(ok: bool, field: str, rule: str, value: object) -> None:
    """Refuse ``field`` unless ``ok``."""
    if not ok:
        raise RequestError(f"{field} must be {rule}, got {value!r}", param=field)


def own_name(field: str, names: Mapping[str, str]) -> str:
    """A field of the chat API as another API calls it; ``names`` maps whole fields or what they begin with."""
    for chat_name, name in names.items():
        if field == chat_name or field.startswith((f"{chat_name}.", f"{chat_name}[")):
            return name + field[len(chat_name) :]
    return field.replace(".function.", ".")


@contextmanager
def own_field_names(names: Mapping[str, str]) -> Iterator[None]:
    """Errors of the chat core, with the fields named as ``names`` has them."""
    try:
        yield
    except RequestError as error:
        param = error.param or ""
        name = own_name(param, names)
        if name == param:
            raise
        message = error.message.replace(param, name, 1)
        raise RequestError(message, param=name, status=error.status, code=error.code) from None


def decode_body(
    body: bytes, request_type: type[T], *, ignored: Iterable[str] = (), strict: bool = False
) -> tuple[T, list[str]]:
    """The typed request in ``body``, and which of the ``ignored`` fields it sets.

    Args:
        ignored: fields of the API that the server does not use and says so.
        strict: refuse any other field that the request type lacks; else it is passed over.

    Raises:
        RequestError: not JSON, a field of the wrong type, or (``strict``) an unknown one.
    """
    try:
        request = msgspec.json.decode(body, type=request_type)
        values = _FIELDS.decode(body)
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
    unknown = {name for name in values.keys() - _names_of(request_type) if values[name] != _NULL}
    told = sorted(unknown.intersection(ignored))
    if strict and len(unknown) > len(told):
        name = min(unknown.difference(ignored))
        near = suggest(name, _names_of(request_type))
        raise RequestError(f"Unknown field {name[:100]!r}{near}", param=name[:100], code="unknown_field")
    return request, told


@functools.cache
def _names_of(request_type: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(field.encode_name for field in msgspec.structs.fields(request_type))


def decode_request(body: bytes, request_type: type[R], strict: bool = False) -> tuple[R, list[str]]:
    """A generating request with every field that needs no engine checked, and its fields that are ignored.

    Raises:
        RequestError: as :func:`decode_body`; or a field that we do not support, or one out of range.
    """
    is_chat = issubclass(request_type, ChatCompletionRequest)
    ignored = IGNORED_CHAT if is_chat else IGNORED_COMPLETION
    request, told = decode_body(body, request_type, ignored=ignored, strict=strict)
    check_supported(
        request, UNSUPPORTED_EVERYWHERE | (UNSUPPORTED_CHAT if is_chat else UNSUPPORTED_COMPLETION)
    )
    check_shared(request)
    if request.stream_options is not None and request.stream_options.include_obfuscation:
        told.append("stream_options.include_obfuscation")
    return request, told


def check_free_form(field: str, value: Any, max_bytes: int) -> None:
    """Refuse a value of no fixed shape that is too large or nested too deeply."""
    try:
        size = len(msgspec.json.encode(value))
    except RecursionError:
        raise RequestError(f"{field} must be nested at most {MAX_JSON_DEPTH} deep", param=field) from None
    require(size <= max_bytes, field, f"at most {max_bytes} bytes of JSON", size)
    depth, level = 0, [value]
    while level:
        depth += 1
        require(depth <= MAX_JSON_DEPTH + 1, field, f"nested at most {MAX_JSON_DEPTH} deep", depth)
        level = [
            item
            for outer in level
            if isinstance(outer, (dict, list))
            for item in (outer.values() if isinstance(outer, dict) else outer)
        ]


def check_supported(request: msgspec.Struct, table: Mapping[str, Sequence[Any]]) -> None:
    """Refuse a field of ``table`` that asks for anything but its values."""
    for field, allowed in table.items():
        value = getattr(request, field)
        if value is None or any(value == item and type(value) is type(item) for item in allowed):
            continue
        only = " or ".join(["null", *(msgspec.json.encode(item).decode() for item in allowed)])
        shown = msgspec.json.encode(value).decode()[:200]
        raise RequestError(
            f"{field} is not supported: only {only} is accepted, got {shown}", param=field, code="unsupported"
        )


def check_shared(request: GenerationFields) -> None:
    """Refuse a generating request whose labels, stops or priority are out of range."""
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream to be true, got false", param="stream_options")
    if request.cache_salt is not None:
        salt = request.cache_salt
        ok = len(salt) <= MAX_SALT_CHARS and _SALT.fullmatch(salt) is not None
        require(ok, "cache_salt", f"1 to {MAX_SALT_CHARS} visible ASCII characters", salt[:MAX_SALT_CHARS])
    priority = request.priority or 0
    require(abs(priority) <= MAX_PRIORITY, "priority", f"in [-{MAX_PRIORITY}, {MAX_PRIORITY}]", priority)
    metadata = request.metadata or {}
    require(len(metadata) <= MAX_METADATA, "metadata", f"at most {MAX_METADATA} entries", len(metadata))
    stop = request.stop if isinstance(request.stop, list) else [request.stop or ""]
    for field, texts, limit in (
        ("user", [request.user or ""], MAX_LABEL_CHARS),
        ("metadata", [*metadata, *metadata.values()], MAX_LABEL_CHARS),
        ("stop", stop, MAX_STOP_CHARS),
        ("bad_words", request.bad_words or (), MAX_STOP_CHARS),
    ):
        longest = max(map(len, texts), default=0)
        require(longest <= limit, field, f"made of texts up to {limit} characters", longest)
    count = len(request.stop_token_ids or ())
    require(count <= MAX_STOP_TOKEN_IDS, "stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} entries", count)


def requested_completion_logprobs(request: CompletionRequest) -> int | None:
    """How many alternatives a token to report; None for no log-probabilities."""
    if request.logprobs is not None:
        ok = 0 <= request.logprobs <= MAX_COMPLETION_LOGPROBS
        require(ok, "logprobs", f"in [0, {MAX_COMPLETION_LOGPROBS}]", request.logprobs)
    return request.logprobs


def requested_choices(request: CompletionRequest) -> tuple[int, int]:
    """How many answers a prompt are told, and among how many candidates they are the likeliest."""
    n, best_of = 1 if request.n is None else request.n, request.best_of
    if best_of is None or best_of == n:
        return n, n
    require(n <= best_of <= MAX_N, "best_of", f"in [n, {MAX_N}], where n is {n}", best_of)
    if request.stream:
        raise RequestError(f"best_of must equal n ({n}) when stream is true, got {best_of}", param="best_of")
    return n, best_of


def is_scoring(request: GenerationFields) -> bool:
    """Whether the prompt alone is of interest: no tokens, but its echo or log-probabilities."""
    limit = getattr(request, "max_completion_tokens", None)
    limit = request.max_tokens if limit is None else limit
    return limit == 0 and bool(getattr(request, "echo", None) or request.prompt_logprobs is not None)


def requested_chat_logprobs(request: ChatCompletionRequest) -> int | None:
    """The same for a chat request, where ``logprobs`` switches and ``top_logprobs`` counts."""
    if request.top_logprobs is not None:
        ok = 0 <= request.top_logprobs <= MAX_TOP_LOGPROBS
        require(ok, "top_logprobs", f"in [0, {MAX_TOP_LOGPROBS}]", request.top_logprobs)
        if request.top_logprobs and not request.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true, got false", param="top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def sampling_params(
    request: GenerationFields, *, max_tokens: int | None, logprobs: int | None, vocab_size: int, **more: Any
) -> SamplingParams:
    """Sampling rules of a request (``more`` wins over its fields); ids in them are checked against the vocabulary."""
    fields = {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None} | more
    if request.top_k is not None:
        require(request.top_k <= MAX_TOP_K, "top_k", f"at most {MAX_TOP_K}", request.top_k)
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
        require(
            len(kinds) == 1, "prompt", "a string, a list of strings, of ids or of id lists", _kinds(kinds)
        )
    require(len(prompts) <= MAX_PROMPTS, "prompt", f"at most {MAX_PROMPTS} prompts", len(prompts))
    for field, count in (("n", request.n), ("best_of", request.best_of)):
        answers = len(prompts) * (count or 1)
        rule = f"so that prompts x {field} is at most {MAX_ANSWERS}"
        require(answers <= MAX_ANSWERS, field, rule, answers)
    for item in prompts:
        require(len(item) > 0, "prompt", "not empty", item)
        if not isinstance(item, str):
            check_token_ids("prompt", item, vocab_size)
    return prompts


def _kinds(kinds: set[type]) -> str:
    return ", ".join(sorted(kind.__name__ for kind in kinds)) or "nothing"


def check_context(
    num_prompt_tokens: int,
    max_tokens: int | None,
    limit: int,
    *,
    min_tokens: int = 0,
    source: str = "prompt",
    field: str = "max_tokens",
) -> None:
    """Refuse a request whose prompt and answer cannot both fit into ``limit`` tokens.

    ``source`` and ``field`` are what the client calls the prompt and ``max_tokens``.
    """
    if max_tokens is None and min_tokens and num_prompt_tokens + min_tokens > limit:
        field, max_tokens = "min_tokens", min_tokens
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
