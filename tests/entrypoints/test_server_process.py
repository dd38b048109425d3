"""The server as a process: start, signals, death of the engine, exit codes."""

import concurrent.futures
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from atom.entrypoints import openai_server
from atom.entrypoints.openai.sockets import bind_socket, raise_file_limit
from atom.errors import ConfigError
from atom.model_engine.arg_utils import EngineArgs
from tests.helpers.live_server import wait_for

COMPLETIONS = "/v1/completions"
ROOT = Path(__file__).parents[2]


@contextmanager
def running_server(
    *flags: str, name: str = "fake", shutdown_timeout_s: float = 5, **engine: object
) -> Iterator[tuple]:
    env = {
        **os.environ,
        "FAKE_ENGINE": json.dumps(engine),
        "ATOM_SHUTDOWN_TIMEOUT_S": str(shutdown_timeout_s),
    }
    command = [
        sys.executable,
        "-m",
        "tests.helpers.serve_fake",
        "--model",
        "fake",
        "--server-port",
        "0",
        *flags,
    ]
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        url = None
        while url is None:
            line = process.stderr.readline()
            assert line, "the server ended before it was ready"
            found = re.search(rf"ready: (http://\S+) serves {name}", line)
            url = found and found[1]
        yield process, url
    finally:
        process.kill()
        process.communicate()


def read_stream(url: str) -> list[str]:
    body = {"prompt": "x", "stream": True, "max_tokens": 50}
    with httpx.stream("POST", url + COMPLETIONS, json=body, timeout=20) as answer:
        return [line for line in answer.iter_lines() if line]


def start_streams(
    pool: concurrent.futures.Executor, url: str, number: int
) -> list[concurrent.futures.Future]:
    streams = [pool.submit(read_stream, url) for _ in range(number)]
    metric = re.compile(r"^atom:http_requests_in_flight (\d+)", re.MULTILINE)
    assert wait_for(lambda: int(float(metric.search(httpx.get(url + "/metrics").text)[1])) == number, 5)
    return streams


def test_D6_sigterm_lets_streams_end_refuses_new_ones_and_exits_0():
    with concurrent.futures.ThreadPoolExecutor(3) as pool, running_server(step_s=0.02) as (process, url):
        streams = start_streams(pool, url, 3)
        process.send_signal(signal.SIGTERM)
        assert wait_for(lambda: httpx.get(url + "/health").status_code == 503)
        refused = httpx.post(url + COMPLETIONS, json={"prompt": "x"})
        assert refused.status_code == 503 and "stopping" in refused.json()["error"]["message"]
        for stream in streams:
            frames = stream.result(10)
            assert frames[-1] == "data: [DONE]" and len(frames) == 51
        out, err = process.communicate(timeout=5)
        assert process.returncode == 0 and out == "engine closed\n"
        assert "Traceback" not in err


@pytest.mark.parametrize("by_second_signal", [False, True])
def test_D6_deadline_or_second_signal_ends_streams_with_an_event(by_second_signal):
    timeout_s = 60 if by_second_signal else 0.3
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        with running_server(shutdown_timeout_s=timeout_s, step_s=1.0) as (process, url):
            streams = start_streams(pool, url, 2)
            process.send_signal(signal.SIGINT)
            if by_second_signal:
                assert wait_for(lambda: httpx.get(url + "/health").status_code == 503)
                process.send_signal(signal.SIGINT)
            started = time.monotonic()
            for stream in streams:
                frames = stream.result(10)
                assert "stopped before" in json.loads(frames[-1].removeprefix("data: "))["error"]["message"]
            out, _ = process.communicate(timeout=5)
            assert time.monotonic() - started < 3
            assert process.returncode == 0 and out == "engine closed\n"


def test_D4_process_leaves_when_its_engine_dies():
    with running_server(step_s=0.02, die_after_s=0.3) as (process, url):
        frames = read_stream(url)
        assert "error" in json.loads(frames[-1].removeprefix("data: "))
        _, err = process.communicate(timeout=5)
        assert process.returncode == 1
        assert "leaving: the engine process ended" in err and "Traceback" not in err


def test_name_template_and_log_flags():
    flags = ("--served-model-name", "short", "--chat_template", "{{ messages[0].content }}{{ tail }}")
    flags += ("--default-chat-template-kwargs", '{"tail": "!"}', "--disable-uvicorn-access-log")
    with running_server(*flags, name="short") as (process, url):
        body = {"model": "short", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 1}
        answer = httpx.post(url + "/v1/chat/completions", json=body).json()
        assert answer["usage"]["prompt_tokens"] == 4
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=5)
        assert "POST" not in err


@pytest.mark.parametrize("template", ["/no/such/file", "{% if %}"])
def test_bad_template_is_told_before_the_engine_starts(template, monkeypatch):
    monkeypatch.setattr(EngineArgs, "create_engine", lambda self: pytest.fail("the engine was started"))
    with pytest.raises(ConfigError, match="template"):
        openai_server.main(["--model", "fake", "--server-port", "0", "--chat-template", template])


def test_access_lines_by_default():
    with running_server() as (process, url):
        httpx.get(url + "/version")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=5)
        assert '"GET /version HTTP/1.1" 200' in err


def test_taken_port_and_unknown_address_are_told_before_the_engine_starts():
    with bind_socket("127.0.0.1", 0) as sock:
        sock.listen()
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--server-port {port}.*in use"):
            bind_socket("127.0.0.1", port)
    with pytest.raises(ConfigError, match="--host"):
        bind_socket("no-such-host.invalid", 8000)
    with pytest.raises(ConfigError, match="--server-port.*99999"):
        bind_socket("127.0.0.1", 99999)


def test_file_limit_is_raised():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256 or hard <= 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_server_process_imports_neither_torch_nor_transformers():
    code = (
        "import sys, atom.entrypoints.openai_server, atom.entrypoints.openai.serving;"
        "print(sorted(m for m in ('torch', 'transformers', 'pydantic', 'fastapi') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
