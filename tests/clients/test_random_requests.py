"""Ten thousand random requests, many at once: the server answers each, goes on serving, and gets everything back."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest

from tests.clients.conftest import CHAT_TEMPLATE
from tests.clients.random_requests import CONTEXT, RandomRequest, RequestMaker
from tests.helpers.server_process import ServerProcess, wait_for
from tests.helpers.tiny_model import make_tiny_model

SEED = 20
NUM_REQUESTS = 10_000
NUM_AT_ONCE = 48
ANSWER_TIMEOUT_S = 60.0
# 128 blocks: two of the longest requests, so that running ones are thrown out and computed again.
FLAGS = ("--max-num-seqs", "32", "--kv-cache-memory", "1MiB", "--chat-template", str(CHAT_TEMPLATE))
FLAGS += ("--disable-uvicorn-access-log",)


@pytest.fixture
def server(tmp_path) -> Iterator[ServerProcess]:
    """The whole engine with a model of random weights."""
    server = ServerProcess(make_tiny_model(tmp_path, max_position_embeddings=CONTEXT), *FLAGS)
    yield server
    server.kill()


@dataclass(slots=True)
class Answer:
    status: int
    body: bytes


async def send(host: str, port: int, request: RandomRequest) -> Answer | None:
    """The whole answer; None when the client leaves before."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        head = f"{request.method} {request.path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        if request.content_type:
            head += f"Content-Type: {request.content_type}\r\n"
        head += f"Content-Length: {len(request.body)}\r\n\r\n"
        leaves = request.leaves_after
        writer.write(
            head.encode() + (request.body if leaves is None or leaves >= 0 else request.body[:leaves])
        )
        await writer.drain()
        if leaves is not None:
            if leaves > 0:
                await reader.read(leaves)
            return None
        return parse(await reader.read(-1))
    finally:
        writer.transport.abort()


def parse(raw: bytes) -> Answer:
    head, _, body = raw.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    if b"transfer-encoding: chunked" not in head.lower():
        return Answer(status, body)
    pieces = []
    while True:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            return Answer(status, b"".join(pieces))
        pieces.append(body[:length])
        body = body[length + 2 :]


def fault(request: RandomRequest, answer: Answer) -> str | None:
    """What is wrong with an answer."""
    if answer.status >= 500:
        return f"status {answer.status}"
    if request.must_work and answer.status != 200:
        return f"refused with {answer.status}"
    if answer.status != 200:
        error = json.loads(answer.body)["error"]
        return None if error["message"] and error["type"] else "an error without words"
    if not request.is_streamed:
        return None
    frames = answer.body.decode().split("\n\n")
    if frames.pop() != "":
        return "the stream ends within an event"
    if request.path == "/v1/messages":
        return None if "message_stop" in frames[-1] else "the stream has no end"
    if request.path == "/v1/responses":
        return None if '"type":"response.' in frames[-1].replace(" ", "") else "the stream has no end"
    return None if frames[-1] == "data: [DONE]" else "the stream has no end"


async def send_all(url: str) -> tuple[Counter[str], list[str]]:
    """How many requests ended how, and what was wrong with which."""
    host, port = url.removeprefix("http://").split(":")
    maker, ends, faults = RequestMaker(SEED), Counter[str](), []
    requests = (maker.make() for _ in range(NUM_REQUESTS))

    async def work() -> None:
        for request in requests:
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    answer = await send(host, int(port), request)
                wrong = None if answer is None else fault(request, answer)
            except Exception as error:
                answer, wrong = None, repr(error)
            ends["left" if answer is None else str(answer.status)] += 1
            if wrong:
                told = answer.body[-300:] if answer else b""
                faults.append(f"{wrong}: {request.method} {request.path} {request.body[:400]!r} -> {told!r}")

    await asyncio.gather(*(work() for _ in range(NUM_AT_ONCE)))
    return ends, faults


@pytest.mark.timeout(600)
def test_ten_thousand_random_requests_leave_nothing_behind(server):
    num_threads = psutil.Process(server.pid).num_threads()
    ends, faults = asyncio.run(send_all(server.url))
    assert not faults, f"{len(faults)} of {NUM_REQUESTS}:\n" + "\n".join(faults[:20]) + server.log[-3000:]
    assert sum(ends.values()) == NUM_REQUESTS
    # The mixture is one: most run, many are refused, some clients leave.
    assert ends["200"] > 0.4 * NUM_REQUESTS and ends["400"] > 0.1 * NUM_REQUESTS, ends
    assert ends["left"] > 0.05 * NUM_REQUESTS, ends
    metrics = server.check_at_rest()
    assert metrics["preemptions_total"] > 0, "the cache was never short"
    assert (
        server.ask(prompt="Are you still there?", max_tokens=3, ignore_eos=True)["finish_reason"] == "length"
    )
    server.check_at_rest()
    process = psutil.Process(server.pid)
    # One may stay open: that over which the metrics are read.
    wait_for(
        lambda: num_connections(process) <= 1, 10, "the server has closed the connections of its clients"
    )
    assert process.num_threads() <= num_threads + 8


def num_connections(process: psutil.Process) -> int:
    return sum(c.status == psutil.CONN_ESTABLISHED for c in process.net_connections("tcp"))
