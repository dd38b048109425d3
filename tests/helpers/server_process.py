"""A real server for tests: its process, the engine process below it, its log, and the checks after every case."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ROOT = Path(__file__).parents[2]
READY_TIMEOUT_S = 60.0
METRICS_INTERVAL_S = 0.05
# One thread is enough for a tiny model; two would wait for each other wherever the machine has other work.
FLAGS = ("--device", "cpu", "--num-threads", "1", "--server-port", "0")

_READY = re.compile(r"ready: (http://\S+) serves ")
_SAMPLE = re.compile(r"^atom:(\S+) (\S+)$", re.MULTILINE)


def wait_for(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """The first true value of ``condition``; fails with ``what`` when it does not come in time."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.005)
    return value


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet counts as ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Events:
    """A streamed answer while it is read: iterating gives the JSON of each event up to the end mark."""

    def __init__(self, answer: httpx.Response):
        self.answer = answer
        self.times: list[float] = []  # when each event came, ``time.monotonic()``
        self.is_complete = False  # the end mark was read

    def __iter__(self) -> Iterator[dict]:
        for line in self.answer.iter_lines():
            if not line:
                continue
            assert line.startswith("data: "), line
            if line == "data: [DONE]":
                self.is_complete = True
                return
            self.times.append(time.monotonic())
            yield json.loads(line[6:])


class ServerProcess:
    """``atom serve MODEL`` on a free port of loopback.

    Args:
        fields: Config fields that have no flag.
        wait: until it is ready; otherwise the caller does (``wait_until_ready``, ``wait_until_gone``).
    """

    def __init__(
        self,
        model: str | Path,
        *flags: str,
        fields: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        wait: bool = True,
    ):
        entry = ["tests.helpers.serve_with_fields"] if fields else ["atom.cli", "serve"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", *entry, str(model), *FLAGS, *flags],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "CONFIG_FIELDS": json.dumps(fields),
                "ATOM_METRICS_UPDATE_INTERVAL_S": str(METRICS_INTERVAL_S),
                **(env or {}),
            },
        )
        self.lines: list[str] = []  # of the log
        self.url = ""
        self.num_answers = 0  # that the server took on, by this client's count
        self._thread = threading.Thread(target=self._read_log, daemon=True)
        self._thread.start()
        if wait:
            self.wait_until_ready()

    def _read_log(self) -> None:
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            found = _READY.search(line)
            if found:
                self.url = found[1]

    # -- process

    def wait_until_ready(self) -> None:
        try:
            wait_for(
                lambda: self.url or self.process.poll() is not None, READY_TIMEOUT_S, "the server is ready"
            )
            assert self.url, "the server ended before it was ready:\n" + self.log
        except AssertionError:
            self.kill()
            raise
        self.http = httpx.Client(base_url=self.url, timeout=30, limits=httpx.Limits(max_connections=None))
        self.pid = self.process.pid
        self.engine_pid = wait_for(self._find_engine, 5, "the server has an engine process")

    def _find_engine(self) -> int | None:
        children = psutil.Process(self.process.pid).children()
        return children[0].pid if len(children) == 1 else None

    def wait_until_gone(self, timeout_s: float) -> int:
        """The exit code; fails when the server still runs after ``timeout_s`` seconds."""
        self.process.wait(timeout_s)
        self._thread.join(5)  # the log's end; the pipe closes with the last process that holds it
        return self.process.returncode

    def kill(self) -> None:
        """End what is left of it."""
        engine = getattr(self, "engine_pid", None)
        self.process.kill()
        self.process.wait()
        if engine is not None:
            wait_for(lambda: is_gone(engine), 10, "the engine process ends with its server")

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    # -- requests

    def post(self, path: str = COMPLETIONS, **body: Any) -> httpx.Response:
        answer = self.http.post(path, json=body)
        if answer.status_code == 200:
            self.num_answers += len(answer.json()["choices"])
        return answer

    def text(self, path: str = COMPLETIONS, **body: Any) -> str:
        """The first answer's text."""
        return text_of(self.ask(path, **body))

    def ask(self, path: str = COMPLETIONS, **body: Any) -> dict:
        """The first choice of an answer that must succeed."""
        answer = self.post(path, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]

    @contextmanager
    def stream(self, path: str = COMPLETIONS, **body: Any) -> Iterator[Events]:
        with self.http.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            self.num_answers += body.get("n", 1)
            yield Events(answer)

    def read_stream(self, path: str = COMPLETIONS, **body: Any) -> list[dict]:
        """Every event of a stream that must run to its end."""
        with self.stream(path, **body) as events:
            chunks = list(events)
        assert events.is_complete, chunks[-1:]
        return chunks

    # -- checks

    def metrics(self) -> dict[str, float]:
        text = self.http.get("/metrics").text
        return {name: float(value) for name, value in _SAMPLE.findall(text)}

    def health(self) -> httpx.Response:
        return self.http.get("/health")

    def wait_for_metrics(
        self, condition: Callable[[dict[str, float]], bool], timeout_s: float, what: str
    ) -> dict[str, float]:
        """The first scrape that meets ``condition``."""

        def scrape() -> dict[str, float] | None:
            metrics = self.metrics()
            return metrics if condition(metrics) else None

        return wait_for(scrape, timeout_s, what)

    def wait_until_idle(self, timeout_s: float = 5.0) -> dict[str, float]:
        """Metrics of a moment when nothing runs or waits and no request holds a cache block."""
        return self.wait_for_metrics(is_idle, timeout_s, "nothing runs, waits or holds a cache block")

    def check_sound(self) -> None:
        """What must hold after every case: a fresh request works, the metrics add up, no block is lost."""
        fresh = self.ask(prompt="Are you still there?", max_tokens=2, temperature=0, ignore_eos=True)
        assert fresh["finish_reason"] == "length"
        metrics = self.check_at_rest()
        assert finished(metrics) == self.num_answers, (finished(metrics), self.num_answers)

    def check_at_rest(self, timeout_s: float = 5.0) -> dict[str, float]:
        """What must hold when nobody asks for anything: all is idle, no block or request is lost. The metrics."""
        metrics = self.wait_until_idle(timeout_s)
        free, total = metrics["kv_cache_blocks_free"], metrics["kv_cache_blocks_total"]
        assert free == total, f"{free:g} of {total:g} cache blocks can be given out"
        assert metrics["kv_cache_blocks_indexed"] <= total
        assert metrics["cache_integrity_faults_total"] == 0, self.log
        assert metrics["http_requests_in_flight"] == 0
        assert self.health().status_code == 200
        assert "Traceback" not in self.log, self.log
        return metrics


def is_idle(metrics: dict[str, float]) -> bool:
    names = ("requests_running", "requests_waiting", "requests_partial_prefill", "kv_cache_blocks_used")
    return not any(metrics[name] for name in names)


def finished(metrics: dict[str, float], reason: str | None = None) -> float:
    """Answers that ended, for any reason or for one."""
    if reason is not None:
        return metrics.get(f'requests_finished_total{{finished_reason="{reason}"}}', 0.0)
    return sum(value for name, value in metrics.items() if name.startswith("requests_finished_total"))


def text_of(choice: dict) -> str:
    """The text of a choice, plain or streamed, of either API."""
    if "text" in choice:
        return choice["text"]
    return choice.get("message", choice.get("delta"))["content"] or ""


def texts_of(chunks: list[dict], index: int = 0) -> list[str]:
    """The text of each event that tells of answer ``index``; "" where it has none."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return [
        choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices
    ]


def end_of(chunks: list[dict], index: int = 0) -> dict:
    """The last choice of answer ``index`` in a stream."""
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index][-1]
