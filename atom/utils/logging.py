"""Loggers whose lines say which process speaks.

``ATOM_LOG_MORE`` adds id, request, path, line and function, and the lines that only help to find a fault (DEBUG).
"""

import logging
import sys
from contextvars import ContextVar

from atom.utils import envs

_SHORT = "%(asctime)s %(levelname)s [%(atom_process)s] %(message)s"
_LONG = (
    "%(asctime)s %(levelname)s [%(atom_process)s pid=%(process)d%(atom_request)s] "
    "%(pathname)s:%(lineno)d %(funcName)s: %(message)s"
)
_ROOT = "atom"
_process_name = ""
# The id of the request that the running code works for; long lines name it.
log_request_id: ContextVar[str] = ContextVar("log_request_id", default="")


def init_logger(name: str) -> logging.Logger:
    """The logger of a module below ``atom``. Lines go to standard error at level INFO (DEBUG) and above.

    A program that has configured the root logger itself gets the lines there, and only there.
    """
    root = logging.getLogger(_ROOT)
    if not any(isinstance(handler, _StderrHandler) for handler in root.handlers):
        handler = _StderrHandler()
        handler.setFormatter(_Formatter(_LONG if envs.ATOM_LOG_MORE else _SHORT, "%H:%M:%S"))
        root.addHandler(handler)
        if root.level == logging.NOTSET:
            root.setLevel(logging.DEBUG if envs.ATOM_LOG_MORE else logging.INFO)
    return logging.getLogger(name if name.split(".")[0] == _ROOT else f"{_ROOT}.{name}")


def set_process_name(name: str) -> None:
    """What the lines of this process are marked with, after ``ATOM_PROCESS_NAME_PREFIX``."""
    global _process_name
    _process_name = name


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        prefix = envs.ATOM_PROCESS_NAME_PREFIX
        record.atom_process = f"{prefix}::{_process_name}" if _process_name else prefix
        request_id = log_request_id.get()
        record.atom_request = f" request={request_id}" if request_id else ""
        return super().format(record)


class _StderrHandler(logging.StreamHandler):
    """Writes to whatever ``sys.stderr`` is at that moment, so that a redirected stream is honoured."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self):  # type: ignore[no-untyped-def]
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.root.handlers:
            super().emit(record)
