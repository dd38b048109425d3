"""Errors as OpenAI clients expect them: ``{"error": {"message", "type", "param", "code"}}``."""

import logging

import msgspec
from starlette.exceptions import HTTPException

from atom.errors import AtomError, EngineDeadError, QueueFullError, RequestError

logger = logging.getLogger("atom.server")

MAX_MESSAGE_CHARS = 2000  # a message may quote the client's value, which can be long

# What OpenAI's API has beside the routes served here, by the beginning of the path.
OTHER_ROUTES = {
    "/v1/embeddings": "embeddings",
    "/v1/moderations": "moderations",
    "/v1/images": "images",
    "/v1/audio": "audio",
    "/v1/videos": "videos",
    "/v1/realtime": "realtime sessions",
    "/v1/responses/compact": "compaction of conversations",
    "/v1/responses": "stored responses",
    "/v1/files": "files",
    "/v1/uploads": "uploads",
    "/v1/batches": "batches",
    "/v1/fine_tuning": "fine-tuning",
    "/v1/assistants": "assistants",
    "/v1/threads": "threads",
    "/v1/conversations": "stored conversations",
    "/v1/vector_stores": "vector stores",
    "/v1/containers": "containers",
    "/v1/evals": "evals",
    "/v1/organization": "administration",
    "/v1/edits": "edits",
}

_HTTP_MESSAGES = {404: "Unknown route: {method} {path}", 405: "Method {method} is not allowed for {path}"}


class ErrorObject(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    error: ErrorObject


class ServerUnavailableError(AtomError):
    """The server starts, stops or has lost its engine (HTTP 503)."""


class GenerationError(AtomError):
    """The engine gave up one request for a reason of its own (HTTP 500)."""


class ClientDisconnectedError(Exception):
    """The client has closed its connection: nobody reads the answer."""


def error_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def describe_error(error: Exception) -> tuple[int, ErrorBody, dict[str, str]]:
    """HTTP status, body and extra headers of an exception. Unexpected ones become an opaque 500."""
    headers: dict[str, str] = {}
    param = code = None
    message = str(error)
    if isinstance(error, RequestError):
        status, param, code = error.status, error.param, error.code
        if isinstance(error, QueueFullError):
            headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    elif isinstance(error, EngineDeadError):
        status, code = 503, "engine_dead"
        message = message or "The engine has ended"
    elif isinstance(error, ServerUnavailableError):
        status, code = 503, "service_unavailable"
        headers["retry-after"] = "1"
    elif isinstance(error, GenerationError):
        status, code = 500, "generation_failed"
    elif isinstance(error, AtomError):
        status = 500  # made on purpose: its words are for people
    else:
        status, message = 500, "Internal server error"
    body = ErrorBody(ErrorObject(message[:MAX_MESSAGE_CHARS], error_type(status), param, code))
    return status, body, headers


def describe_http_exception(
    error: HTTPException, method: str, path: str
) -> tuple[int, ErrorBody, dict[str, str]]:
    """The same for what the router raises (unknown route, wrong method)."""
    template = _HTTP_MESSAGES.get(error.status_code, "{detail}")
    message = template.format(method=method, path=path, detail=error.detail)
    code = {404: "unknown_route", 405: "method_not_allowed"}.get(error.status_code)
    other = next((start for start in OTHER_ROUTES if path == start or path.startswith(f"{start}/")), None)
    if error.status_code == 404 and other is not None:
        message = f"{path} is not supported: this server generates text, it has no {OTHER_ROUTES[other]}"
        code = "unsupported_route"
    body = ErrorBody(ErrorObject(message[:MAX_MESSAGE_CHARS], error_type(error.status_code), None, code))
    return error.status_code, body, dict(error.headers or {})


def log_error(request_id: str, status: int, error: Exception) -> None:
    """One line for an error made on purpose; a trace only for what nobody expected."""
    if isinstance(error, AtomError):
        message = str(error)[:MAX_MESSAGE_CHARS].replace("\n", " ")
        logger.log(logging.INFO if status < 500 else logging.ERROR, "%s: %d %s", request_id, status, message)
    else:
        logger.error("%s: unexpected error", request_id, exc_info=error)
