"""An engine without a model: it answers with scripted ids, in milliseconds, through the real text pipeline.

Ids below 256 are bytes; the special tokens follow. The surface is the part of ``LLMEngine`` that the server
uses.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

from atom.errors import ContextLengthError, EngineDeadError, QueueFullError, RequestError
from atom.guide import Guide
from atom.model_engine.answer_stops import StopGate
from atom.model_engine.detokenizer import DetokenizerFactory
from atom.model_engine.io_processor import Prompt
from atom.model_engine.messages import Logprobs, RequestEvent
from atom.model_engine.request_state import AnswerState, RequestState, make_stop_checker
from atom.model_engine.stop_strings import special_stop_ids
from atom.model_engine.streams import RequestStream
from atom.runtime.liveness import Health
from atom.sampling_params import SamplingParams

BOS, EOS, EOS_2, USER, ASSISTANT = 256, 257, 258, 259, 260
SPECIAL = {BOS: "<s>", EOS: "</s>", EOS_2: "<|end|>", USER: "<|user|>", ASSISTANT: "<|assistant|>"}
VOCAB_SIZE = 261

CHAT_TEMPLATE = """{{ bos_token }}{% for message in messages %}
{%- if message.role not in ["system", "user", "assistant"] %}{{ raise_exception("role " + message.role) }}{% endif %}
{%- if not loop.first and message.role == loop.previtem.role %}{{ raise_exception("roles must alternate") }}{% endif %}
{{- "<|user|>" if message.role != "assistant" else "<|assistant|>" }}{{ message.content }}{% endfor %}
{%- if enable_thinking %}<|think|>{% endif %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


def ids_of(text: str) -> list[int]:
    return list(text.encode())


class ByteTokenizer:
    """One id a byte, and five special tokens."""

    vocab_size = VOCAB_SIZE
    special_ids = frozenset(SPECIAL)
    bos_id, eos_ids = BOS, [EOS, EOS_2]
    bos_token, eos_token = SPECIAL[BOS], SPECIAL[EOS]

    def __init__(self, chat_template: str | None = None):
        self.chat_template = chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = [BOS] if add_special_tokens else []
        while text:
            special = next((i for i, token in SPECIAL.items() if text.startswith(token)), None)
            if special is None:
                ids += text[0].encode()
                text = text[1:]
            else:
                ids.append(special)
                text = text[len(SPECIAL[special]) :]
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        keep = [i for i in ids if i < 256 or not skip_special_tokens]
        return b"".join(map(self.token_bytes, keep)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else SPECIAL[token_id].encode()

    def id_to_token(self, token_id: int) -> str:
        return SPECIAL.get(token_id) or f"<0x{token_id:02X}>"

    def token_to_id(self, token: str) -> int | None:
        return next((i for i, text in SPECIAL.items() if text == token), None)


@dataclass
class FakeEngine:
    """Answers every prompt with ``script(prompt_ids, index)``, ``tokens_per_step`` ids every ``step_s`` seconds."""

    script: Callable[[list[int], int], list[int]] = lambda prompt, index: [*ids_of("Hello, world"), EOS]
    chat_template: str | None = CHAT_TEMPLATE
    max_model_len: int = 256
    step_s: float = 0.0
    tokens_per_step: int = 1
    max_queue: int = 10_000
    num_cached_tokens: int = 0
    fail_with: str | None = None  # reason with which every answer fails after its first tokens
    vocab_size: int = VOCAB_SIZE
    aborted: list[str] = field(default_factory=list)
    requests: list[tuple[list[int], SamplingParams]] = field(default_factory=list)
    priorities: list[int] = field(default_factory=list)
    guides: list[Guide] = field(default_factory=list)  # that were compiled
    closed: bool = False

    def __post_init__(self) -> None:
        self.config = SimpleNamespace(
            model="fake/model",
            tensor_parallel_size=1,
            parallel_config=SimpleNamespace(data_parallel_size=1),
            max_num_seqs=4,
            enable_prefix_caching=True,
            torch_profiler_dir=None,
        )
        self.tokenizer = ByteTokenizer(self.chat_template)
        self.running: dict[str, asyncio.Future] = {}
        self._detokenizers = DetokenizerFactory(self.tokenizer)
        self._streams: dict[str, RequestStream] = {}
        self._death: str | None = None
        self._on_death: list[Callable[[], None]] = []
        self.is_paused = False

    async def preprocess(self, prompt, cache_salt=None) -> Prompt:
        await asyncio.sleep(0)
        return Prompt(
            self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt, b""
        )  # goes nowhere

    async def compile_guide(self, guide: Guide) -> Guide:
        self.guides.append(guide)
        return guide

    def stream(
        self, prompt, params, *, request_id, cache_salt=None, priority=0, stop_gate=None, guide=None
    ) -> RequestStream:
        prompt = prompt.token_ids
        if self._death:
            raise EngineDeadError(self._death)
        if len(self.running) >= self.max_queue:
            raise QueueFullError(f"the queue holds {self.max_queue} requests, its limit", retry_after_s=2.0)
        if len(prompt) + (params.max_tokens or 1) > self.max_model_len:
            raise ContextLengthError("the engine would not take this")
        if any(not 0 <= i < VOCAB_SIZE for i in prompt):
            raise RequestError("the server let a bad id through")
        if guide is not params.guide:
            raise RequestError("a guide has to be compiled first")
        self.requests.append((prompt, params))
        self.priorities.append(priority)
        stream = RequestStream(params.n, lambda: self.abort(request_id), asyncio.get_running_loop())
        self._streams[request_id] = stream
        ends = frozenset() if params.ignore_eos else frozenset(self.tokenizer.eos_ids)
        request = RequestState(request_id, params, len(prompt), ends, stream, time.monotonic())
        answers = (self._answer(request, index, prompt, stream, stop_gate) for index in range(params.n))
        task = self.running[request_id] = asyncio.ensure_future(asyncio.gather(*answers))
        task.add_done_callback(lambda task: self._forget(request_id, task))
        return stream

    def _forget(self, request_id: str, task: asyncio.Future) -> None:
        del self.running[request_id], self._streams[request_id]
        with contextlib.suppress(asyncio.CancelledError):
            task.result()

    async def _answer(
        self,
        request: RequestState,
        index: int,
        prompt: list[int],
        stream: RequestStream,
        stop_gate: StopGate | None,
    ) -> None:
        params = request.params
        answer = AnswerState(
            index,
            index,
            request,
            self._detokenizers.create(params.skip_special_tokens),
            make_stop_checker(params.stop_strings, stop_gate),
            special_stop_ids(params.stop_strings, self.tokenizer),
        )
        limit = min(params.max_tokens or self.max_model_len, self.max_model_len - len(prompt))
        script = self.script(prompt, index)[:limit]
        scheduled = time.monotonic()
        for at in range(0, len(script), self.tokens_per_step):
            await asyncio.sleep(self.step_s)
            while self.is_paused:
                await asyncio.sleep(0.005)
            ids, event = [], RequestEvent(0)
            for token in script[at : at + self.tokens_per_step]:
                ids.append(token)
                event.leave_reason = self._reason(token, params)
                if event.leave_reason:
                    break
            if answer.num_output_tokens + len(ids) == len(script):
                event.leave_reason = event.leave_reason or "max_tokens"
            if params.num_logprobs >= 0:
                event.logprobs = [self._logprobs(token, params.num_logprobs) for token in ids]
            if at == 0:
                event.num_cached_tokens, event.first_scheduled_time = self.num_cached_tokens, scheduled
                if params.prompt_logprobs is not None:
                    event.prompt_logprobs = [self._logprobs(i, params.prompt_logprobs) for i in prompt[1:]]
            if self.fail_with and at > 0:
                event.leave_reason = self.fail_with
            output = answer.advance(ids, event)
            stream.deliver(output)
            if output.finished:
                return

    def _reason(self, token: int, params: SamplingParams) -> str:
        if token in (params.stop_token_ids or ()) or token in special_stop_ids(
            params.stop_strings, self.tokenizer
        ):
            return f"stop_{token}"
        return "eos" if token in self.tokenizer.eos_ids and not params.ignore_eos else ""

    @staticmethod
    def _logprobs(token: int, num_top: int) -> Logprobs:
        others = [(token + k) % VOCAB_SIZE for k in range(num_top)]
        return Logprobs(token, -0.5, 1, others, [-0.5 - k for k in range(num_top)])

    def abort(self, request_id: str) -> None:
        task = self.running.get(request_id)
        if task is not None:
            self.aborted.append(request_id)
            task.cancel()

    def die(self, reason: str = "the engine process ended with code -9") -> None:
        """On the event loop: what happens when the engine process is gone."""
        self._death = reason
        for stream in list(self._streams.values()):
            stream.fail(EngineDeadError(reason))
        for task in list(self.running.values()):
            task.cancel()
        for callback in self._on_death:
            callback()

    def health(self) -> Health:
        if self._death:
            return Health(False, "dead", self._death, 9.0, 1)
        return Health(True, "ready", "", 0.01, 1)

    def stats(self) -> dict[str, float]:
        return {
            "requests_running": len(self.running),
            "requests_waiting": 0,
            "kv_cache_blocks_total": 16,
            "kv_cache_blocks_used": 4,
            "preemptions": 3,
        }

    def info(self) -> dict:
        return {"device": "fake", "startup_phases": {"imports": 0.5, "load": 1.5}, "taken_at": time.time()}

    def on_death(self, callback: Callable[[], None]) -> None:
        self._on_death.append(callback)

    def close(self) -> None:
        self.closed = True
