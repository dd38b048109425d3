"""Time the front end alone: streamed tokens a second through the real HTTP server, on one core.

An engine without a model hands out one token a stream and step, and makes the next step only when every
token of the last has been written: each token is an event of its own. The client is another process.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from atom.entrypoints.openai.context import make_context
from atom.entrypoints.openai.serving import HttpServer
from atom.entrypoints.openai.sockets import bind_socket
from atom.model_engine.detokenizer import DetokenizerFactory
from atom.model_engine.io_processor import Prompt
from atom.model_engine.messages import RequestEvent
from atom.model_engine.request_state import AnswerState, RequestState, make_stop_checker
from atom.model_engine.streams import RequestStream
from atom.model_loader.tokenizer import Tokenizer, byte_characters
from atom.runtime.liveness import Health
from atom.sampling_params import SamplingParams

NUM_STREAMS = 64
TOKENS_PER_STREAM = 512
TARGET_TOKENS_PER_S = 20_000
WORD = list(b"the quick brown fox ")
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Go on."}]}),
    "completions": ("/v1/completions", {"prompt": "Go on."}),
}


@dataclass(frozen=True)
class StreamResult:
    route: str
    num_streams: int
    num_tokens: int
    tokens_per_s: float  # of wall time
    tokens_per_cpu_s: float  # of the server process's CPU time: what one core gives


class ScriptedFrontEnd:
    """The part of ``LLMEngine`` that the server uses. Starts when ``num_streams`` requests are there."""

    max_model_len = 2**20

    def __init__(self, num_streams: int, num_tokens: int):
        self.tokenizer = _byte_tokenizer()
        self.vocab_size = self.tokenizer.vocab_size
        self.config = SimpleNamespace(model="scripted", torch_profiler_dir=None)
        self.wall_s = self.cpu_s = 0.0
        self._num_streams = num_streams
        self._num_tokens = num_tokens
        self._detokenizers = DetokenizerFactory(self.tokenizer)
        self._open: list[tuple[AnswerState, RequestStream]] = []

    async def preprocess(self, prompt: str | list[int], cache_salt: str | None = None) -> Prompt:
        return Prompt(
            self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt, b""
        )  # goes nowhere

    def stream(
        self, prompt: Prompt, params: SamplingParams, *, request_id: str, stop_gate: Any = None, **_: Any
    ) -> RequestStream:
        stream = RequestStream(1, lambda: None, asyncio.get_running_loop())
        request = RequestState(request_id, params, len(prompt), frozenset(), stream, time.monotonic())
        stops = make_stop_checker(params.stop_strings, stop_gate)
        answer = AnswerState(len(self._open), 0, request, self._detokenizers.create(), stops, {})
        self._open.append((answer, stream))
        if len(self._open) == self._num_streams:
            self._task = asyncio.get_running_loop().create_task(self._run())
        return stream

    async def _run(self) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        for step in range(self._num_tokens):
            ids = [WORD[step % len(WORD)]]
            event = RequestEvent(0, "max_tokens") if step + 1 == self._num_tokens else None
            for answer, stream in self._open:
                stream.deliver(answer.advance(ids, event))
            while any(stream.has_unread for _, stream in self._open):
                await asyncio.sleep(0)
        self.wall_s, self.cpu_s = time.perf_counter() - wall, time.process_time() - cpu

    def health(self) -> Health:
        return Health(True, "ready", "", 0.0, 0)

    def stats(self) -> dict[str, float]:
        return {}

    def info(self) -> dict[str, Any]:
        return {}

    def on_death(self, callback: Callable[[], None]) -> None:
        pass


def _byte_tokenizer() -> Tokenizer:
    """Byte-level BPE without merges: id i is byte i."""
    backend = Backend(models.BPE(vocab={char: i for i, char in enumerate(byte_characters())}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return Tokenizer(backend, eos_token="</s>", chat_template=template)


async def measure(route: str, num_streams: int, num_tokens: int) -> StreamResult:
    """Stream ``num_streams`` answers of ``num_tokens`` tokens each.

    Raises:
        RuntimeError: the client did not get one event a token.
    """
    engine = ScriptedFrontEnd(num_streams, num_tokens)
    path, fields = REQUESTS[route]
    with bind_socket("127.0.0.1", 0) as sock:
        server = HttpServer(make_context(engine), sock, access_log=False)
        serving = asyncio.create_task(server.serve())
        body = json.dumps({**fields, "stream": True, "ignore_eos": True, "max_tokens": num_tokens})
        arguments = (
            "atom.benchmarks.stream_client",
            str(sock.getsockname()[1]),
            path,
            str(num_streams),
            body,
        )
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *arguments, stdout=asyncio.subprocess.PIPE
        )
        output, _ = await client.communicate()
        server.stop()
        await serving
    due = num_tokens + (2 if route == "chat" else 0)  # the role and the finish reason come on their own
    counts = json.loads(output or b"[]")
    if counts != [due] * num_streams:
        raise RuntimeError(f"the client got {sorted(set(counts))} events a stream, {due} were due")
    total = num_streams * num_tokens
    return StreamResult(route, num_streams, total, total / engine.wall_s, total / engine.cpu_s)


def run(num_streams: int = NUM_STREAMS, num_tokens: int = TOKENS_PER_STREAM) -> list[StreamResult]:
    """One result a route."""
    try:
        import uvloop

        loop_factory = uvloop.new_event_loop
    except ImportError:
        loop_factory = None
    results = []
    for route in REQUESTS:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            results.append(runner.run(measure(route, num_streams, num_tokens)))
    return results


def format_table(results: list[StreamResult]) -> str:
    """Streamed tokens a second, one row a route."""
    lines = [f"{'streamed tokens/s':<28}{'wall time':>14}{'one core':>14}"]
    for result in results:
        name = f"{result.route}, {result.num_streams} streams"
        lines.append(f"{name:<28}{result.tokens_per_s:>14,.0f}{result.tokens_per_cpu_s:>14,.0f}")
    lines.append(f"{'target':<28}{'':>14}{TARGET_TOKENS_PER_S:>14,}")
    return "\n".join(lines)
