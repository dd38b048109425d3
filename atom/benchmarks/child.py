"""Measuring in a fresh process: how the child prints its result, or line after line, and the parent reads it."""

import json
import os
import subprocess
import sys
import time
from typing import Any, TypeVar

import msgspec

_MARK = "RESULT "
_LINE_MARK = "LINE "
_TIMEOUT_S = 600.0
_SHOWN = 2000  # characters of a failed child's output that an error shows

T = TypeVar("T", bound=msgspec.Struct)


class ChildError(RuntimeError):
    """A child failed or printed no result; the message ends with the end of its output."""


def print_result(result: msgspec.Struct) -> None:
    """In the child: hand ``result`` to the parent."""
    print(_MARK + msgspec.json.encode(result).decode(), flush=True)


def parse_result(output: str, type_: type[T]) -> T | None:
    """The last result in a child's output, or None. A result of another shape raises ChildError."""
    lines = [line for line in output.splitlines() if line.startswith(_MARK)]
    if not lines:
        return None
    try:
        return msgspec.json.decode(lines[-1].removeprefix(_MARK), type=type_)
    except msgspec.DecodeError as error:
        raise ChildError(f"not a {type_.__name__} ({error}): {lines[-1]}") from error


def thread_environment(num_threads: int) -> dict[str, str]:
    """Variables that keep an engine to ``num_threads`` compute threads, and to this machine."""
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def run_child(
    module: str,
    args: list[str],
    type_: type[T],
    num_threads: int,
    environment: dict[str, str] | None = None,
    interpreter: str = sys.executable,
) -> T:
    """Run ``python -m module`` with ``num_threads`` compute threads and wait for its result.

    ``environment``: variables beside those that the child inherits. ``interpreter``: of another environment.
    """
    env = os.environ | (environment or {}) | thread_environment(num_threads)
    command = [interpreter, "-m", module, *args]
    try:
        child = subprocess.run(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise ChildError(f"{' '.join(command)}: no result after {_TIMEOUT_S:.0f} s") from error
    result = parse_result(child.stdout, type_)
    if result is None or child.returncode != 0:
        raise ChildError(f"{' '.join(command)}: exit code {child.returncode}\n{child.stdout[-_SHOWN:]}")
    return result


def print_line(line: dict[str, Any]) -> None:
    """In the child: hand one of several results to the parent."""
    print(_LINE_MARK + json.dumps(line), flush=True)


def lines_of_child(module: str, args: list[str], label: str) -> list[dict[str, Any]]:
    """Run ``python -m module`` and pass on what it prints, all but its lines, which are returned.

    A child that fails loses only the lines that it had not printed; its exit status is told beside ``label``.
    """
    began, lines = time.monotonic(), []
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", module, *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        for text in child.stdout:
            if text.startswith(_LINE_MARK):
                lines.append(json.loads(text.removeprefix(_LINE_MARK)))
            else:
                print(text, end="", flush=True)
    print(f"[{label}: {time.monotonic() - began:.0f} s, exit status {child.returncode}]", flush=True)
    return lines
