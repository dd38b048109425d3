"""Start-up, health under load and memory of users' cases: what is measured from outside the processes."""

import asyncio
import concurrent.futures
import json
import re
import time

import psutil
import pytest

from tests.helpers.server_process import COMPLETIONS, ServerProcess, is_gone, wait_for
from tests.integration.conftest import start_echo_server

SCRIPTED = "atom.model_engine.runner.scripted_worker.ScriptedWorker"
STALLING = "tests.helpers.stalling_workers.StallingWorker"
SLOW_START = "tests.helpers.stalling_workers.SlowStartWorker"

NUM_STREAMS = 256
HEALTH_P99_S = 0.1
NUM_REQUESTS = 3000
MAX_GROWTH_MB = 12  # of a process over NUM_REQUESTS; a leak of 4 KiB a request would be 12


def test_I4_two_servers_share_a_machine(tiny_model):
    """The fraction is of what this process may take, and a size in bytes is one whatever the neighbour has."""
    flags = (("--gpu-memory-utilization", "0.3"), ("--kv-cache-memory", "1MiB"))
    servers = [ServerProcess(tiny_model, *given, wait=False) for given in flags]
    try:
        for server in servers:
            server.wait_until_ready()
        for server in servers:
            server.check_sound()
    finally:
        for server in servers:
            server.kill()


def exported_phases(server: ServerProcess) -> dict[str, float]:
    """The start-up phases that the newest snapshot shows."""
    text = server.http.get("/metrics").text
    return {
        name: float(value) for name, value in re.findall(r'startup_phase_seconds{phase="(.*)"} (.*)', text)
    }


def test_I5_the_phases_explain_the_start_and_the_first_answer_is_fast(tiny_model):
    began = time.monotonic()
    server = ServerProcess(tiny_model, wait=False)
    try:
        wait_for(lambda: server.url or server.process.poll() is not None, 60, "the server is ready")
        wall = time.monotonic() - began
        server.wait_until_ready()
        asked = time.monotonic()
        server.ask(prompt="hello", max_tokens=1)
        assert time.monotonic() - asked < 1.0
        phases = server.http.get("/server_info").json()["startup_phases"]
        explained = sum(seconds for name, seconds in phases.items() if name != "unexplained")
        assert explained >= 0.95 * wall, (phases, wall)
        assert sum(phases.values()) <= wall + 0.05, (phases, wall)
        (line,) = [line for line in server.lines if "] start: " in line]
        for name, seconds in phases.items():
            assert f"{name} {seconds:.2f} s" in line
        wait_for(lambda: len(exported_phases(server)) == len(phases), 5, "a snapshot after the start")
        assert exported_phases(server) == pytest.approx(phases)
        server.check_sound()
    finally:
        server.kill()


def test_I6_a_start_that_takes_too_long_leaves_no_process_behind(echo_model):
    began = time.monotonic()
    server = ServerProcess(
        echo_model, "--ready-timeout", "6", fields={"runner_qualname": SLOW_START}, wait=False
    )
    try:
        wait_for(lambda: psutil.Process(server.process.pid).children(), 5, "the engine process is there")
        pids = [child.pid for child in psutil.Process(server.process.pid).children(recursive=True)]
        assert server.wait_until_gone(30) == 1
        assert 5.5 < time.monotonic() - began < 15
        assert all(is_gone(pid) for pid in pids)
        assert "not ready within --ready-timeout 6 s" in server.lines[-1]
        assert "Traceback" not in server.log
    finally:
        server.kill()


def test_I6_a_start_in_time_is_left_alone(echo_model):
    server = ServerProcess(echo_model, "--ready-timeout", "60", fields={"runner_qualname": SCRIPTED})
    try:
        server.check_sound()
    finally:
        server.kill()


# -- health


class LoadedServer:
    """Streams that are read and thrown away, on one connection each."""

    def __init__(self, server: ServerProcess):
        self.host, self.port = server.url.removeprefix("http://").split(":")

    async def request(self, body: dict, connection=None) -> tuple:
        reader, writer = connection or await asyncio.open_connection(self.host, int(self.port))
        payload = json.dumps(body).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        return reader, writer

    async def health(self) -> tuple[float, int]:
        began = time.monotonic()
        reader, writer = await asyncio.open_connection(self.host, int(self.port))
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return time.monotonic() - began, int(answer.split()[1])


def test_D5_health_is_fast_while_many_streams_run(echo):
    """Polled each 100 ms while 256 streams are under way and the engine has work in every step."""
    load = LoadedServer(echo)

    async def stream() -> None:
        reader, writer = await load.request({"prompt": "w" * 1000, "stream": True, "max_tokens": 1000})
        while (line := await reader.read(65536)) and b"[DONE]" not in line:
            pass
        writer.close()

    async def run() -> list[tuple[float, int]]:
        streams = [asyncio.create_task(stream()) for _ in range(NUM_STREAMS)]
        polls = []
        while len(polls) < 100 and not all(task.done() for task in streams):
            polls.append(await load.health())
            await asyncio.sleep(max(0.0, 0.1 - polls[-1][0]))
        await asyncio.gather(*streams)
        return polls

    slowest = []
    for _ in range(3):  # the best of three: the machine may have had other work
        polls = asyncio.run(run())
        echo.num_answers += NUM_STREAMS
        assert all(status == 200 for _, status in polls) and len(polls) >= 15, len(polls)
        times = sorted(seconds for seconds, _ in polls)
        slowest.append(times[int(0.99 * (len(times) - 1))])
        if slowest[-1] < HEALTH_P99_S:
            break
    assert min(slowest) < HEALTH_P99_S, slowest


def test_D5_a_step_that_hangs_is_told_although_the_process_beats(echo_model):
    server = ServerProcess(echo_model, fields={"runner_qualname": STALLING})
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(server.read_stream, prompt="y" * 200, max_tokens=1)
            sick = wait_for(
                lambda: (probe := server.health()).status_code == 503 and probe, 2.4, "the hung step is told"
            )
            assert re.search(r"step \d+ is \d\.\d s past its deadline", sick.json()["reason"])
            assert answer.result(5)  # it was only slow
        wait_for(lambda: server.health().status_code == 200, 1, "well again")
        server.check_sound()
    finally:
        server.kill()


# -- metrics and memory


def test_M1_waiting_and_running_requests_show_their_age(echo_model):
    server = start_echo_server(echo_model)
    try:
        before = server.metrics()
        assert before["requests_oldest_waiting_seconds"] == before["requests_oldest_running_seconds"] == 0
        with server.stream(prompt="z" * 3000, n=128) as first, server.stream(prompt="z" * 3000, n=128):
            iterator = iter(first)
            next(iterator)
            server.wait_for_metrics(lambda m: m["requests_oldest_running_seconds"] > 0.3, 5, "an age shows")
            metrics = server.metrics()
            assert metrics['scheduler_requests{state="running"}'] > 0
            states = [
                metrics[f'scheduler_kv_cache_blocks{{state="{s}"}}'] for s in ("used", "evictable", "vacant")
            ]
            assert sum(states) == metrics['scheduler_kv_cache_blocks{state="total"}']
        server.wait_until_idle()
        assert server.metrics()["requests_oldest_running_seconds"] == 0
        assert server.metrics()["decode_batch_size_count"] > 0
        server.check_sound()
    finally:
        server.kill()


def private_mb(pid: int) -> float:
    """Anonymous memory of a process, swapped out or not."""
    with open(f"/proc/{pid}/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "VmSwap")) / 1024


def test_M3_memory_does_not_grow_with_the_number_of_requests(echo_model):
    """Streamed and plain, on kept connections; bound: 12 MB a process over 3,000 requests, after 1,000 of warm-up."""
    server = ServerProcess(
        echo_model,
        "--disable-uvicorn-access-log",
        fields={"runner_qualname": SCRIPTED, "num_kvcache_blocks": 256},
    )
    load = LoadedServer(server)

    async def client(number: int, requests: int) -> None:
        connection = None
        for i in range(requests):
            body = {"prompt": f"{number} {i} abc", "max_tokens": 4, "stream": i % 2 == 0}
            connection = reader, _ = await load.request(body, connection)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            if b"chunked" in head.lower():
                await reader.readuntil(b"\r\n0\r\n\r\n")
            else:
                await reader.readexactly(int(re.search(rb"content-length: (\d+)", head)[1]))
        connection[1].close()

    async def run(requests: int) -> None:
        await asyncio.gather(*(client(number, requests // 20) for number in range(20)))
        server.num_answers += requests

    try:
        asyncio.run(run(1000))
        pids = {"server": server.pid, "engine": server.engine_pid}
        before = {name: private_mb(pid) for name, pid in pids.items()}
        asyncio.run(run(NUM_REQUESTS))
        growth = {name: private_mb(pid) - before[name] for name, pid in pids.items()}
        print({name: f"{mb:+.1f} MB" for name, mb in growth.items()})
        assert all(mb < MAX_GROWTH_MB for mb in growth.values()), growth
        server.check_sound()
    finally:
        server.kill()
