"""The error tree of ATOM. Every message names the field, the limit and the value.

AtomError
├── ConfigError            a flag, field or variable is wrong; the process does not start
│   └── CacheBudgetError   the KV cache does not fit; the message is a table
├── ModelLoadError         a model folder or tensor is missing, truncated or mis-shaped
├── RequestError           one request is wrong; it alone fails (HTTP 4xx)
│   ├── ContextLengthError prompt plus answer exceed the context
│   └── QueueFullError     the server is at its bound (HTTP 429)
└── EngineDeadError        the engine process is gone or does not answer (HTTP 503)
"""


class AtomError(Exception):
    """Base of every error that ATOM raises on purpose."""


class ConfigError(AtomError, ValueError):
    """A configuration value is wrong."""


class CacheBudgetError(ConfigError):
    """The memory budget cannot hold the weights and a usable KV cache."""


class ModelLoadError(AtomError):
    """A checkpoint cannot be read as the model that its configuration declares."""


class RequestError(AtomError, ValueError):
    """One request is invalid; nothing else is lost by it.

    Args:
        message: what is wrong, with field, limit and value.
        param: the request field at fault, as the client spells it.
        status: HTTP status that the server answers with.
        code: machine-readable reason of OpenAI's vocabulary, if there is one.
    """

    status = 400

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int | None = None,
        code: str | None = None,
    ):
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        if status is not None:
            self.status = status


class ContextLengthError(RequestError):
    """Prompt plus requested tokens exceed the model's context."""

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message, param=param, code="context_length_exceeded")


class QueueFullError(RequestError):
    """The queue is at its bound; try again after ``retry_after_s`` seconds."""

    status = 429

    def __init__(self, message: str, *, retry_after_s: float = 1.0):
        super().__init__(message, code="rate_limit_exceeded")
        self.retry_after_s = retry_after_s


class EngineDeadError(AtomError):
    """The engine process has ended or stopped making progress."""
