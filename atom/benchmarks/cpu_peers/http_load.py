"""Sixteen requests at once against a server that this process starts: ATOM's, or llama-server."""

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from atom.benchmarks.cpu_peer import NUM_CONCURRENT, NUM_INPUT, NUM_OUTPUT, PromptMaker, peak_rss_of_tree
from atom.benchmarks.cpu_peers.workspace import PeerUnavailable

START_TIMEOUT_S = 120.0
_REQUEST_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Dialect:
    """How a server is asked for greedy tokens after token ids."""

    path: str
    fields: Mapping[str, Any]
    prompt_field: str
    length_fields: tuple[str, ...]

    def body(self, prompt: list[int], num_tokens: int) -> bytes:
        fields = {**self.fields, self.prompt_field: prompt}
        return json.dumps(fields | dict.fromkeys(self.length_fields, num_tokens)).encode()

    def num_output(self, answer: dict[str, Any]) -> int:
        """Tokens that an answer reports."""
        return answer["usage"]["completion_tokens"] if "usage" in answer else answer["tokens_predicted"]


ATOM_DIALECT = Dialect(
    "/v1/completions", {"temperature": 0, "ignore_eos": True}, "prompt", ("max_tokens", "min_tokens")
)
LLAMA_DIALECT = Dialect(
    "/completion",
    {"temperature": 0, "ignore_eos": True, "cache_prompt": False},
    "prompt",
    ("n_predict",),
)


@dataclass(frozen=True)
class HttpResult:
    """Output tokens a second over the whole wall time, and the server's peak memory with its children."""

    tok_s: float
    peak_rss_bytes: int


def measure_server(
    command: list[str], port: int, dialect: Dialect, environment: Mapping[str, str]
) -> HttpResult:
    """Start the server, warm it up, and send 16 requests at once; the mean of two rounds.

    Raises PeerUnavailable: it does not start, or an answer has another length than was asked for.
    """
    make = PromptMaker().make
    with _running(command, port, environment) as process:
        _post(port, dialect, make(NUM_INPUT), 4)
        _burst(port, dialect, [make(NUM_INPUT) for _ in range(NUM_CONCURRENT)], 4)
        prompts = [[make(NUM_INPUT) for _ in range(NUM_CONCURRENT)] for _ in range(2)]
        seconds = sum(_burst(port, dialect, group, NUM_OUTPUT) for group in prompts)
        peak = peak_rss_of_tree(process.pid)
    return HttpResult(len(prompts) * NUM_CONCURRENT * NUM_OUTPUT / seconds, peak)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _burst(port: int, dialect: Dialect, prompts: list[list[int]], num_tokens: int) -> float:
    """Seconds until every one of the requests, sent at once, is answered."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        began = time.perf_counter()
        list(pool.map(lambda prompt: _post(port, dialect, prompt, num_tokens), prompts))
        return time.perf_counter() - began


def _post(port: int, dialect: Dialect, prompt: list[int], num_tokens: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_REQUEST_TIMEOUT_S)
    try:
        body = dialect.body(prompt, num_tokens)
        connection.request("POST", dialect.path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise PeerUnavailable(f"POST {dialect.path}: {error}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise PeerUnavailable(f"POST {dialect.path}: status {response.status}: {str(answer)[:200]}")
    if (got := dialect.num_output(answer)) != num_tokens:
        raise PeerUnavailable(f"POST {dialect.path}: asked for {num_tokens} tokens, got {got}")


@contextmanager
def _running(
    command: list[str], port: int, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """The server once ``/health`` answers 200; ended afterwards, with everything that it started."""
    process = subprocess.Popen(
        command,
        env=os.environ | dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _is_healthy(port):
            if process.poll() is not None:
                raise PeerUnavailable(f"{command[0]} ended with {process.returncode} before it served")
            if time.monotonic() > deadline:
                raise PeerUnavailable(f"{command[0]} did not serve within {START_TIMEOUT_S:.0f} s")
            time.sleep(0.02)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
