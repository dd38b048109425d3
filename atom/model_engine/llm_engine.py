"""LLMEngine: the one object that users and the server hold.

    with LLMEngine("path/to/model") as engine:
        for answer in engine.generate(["The capital of France is"], SamplingParams(max_tokens=16)):
            print(answer["text"])

It imports no torch: the model lives in the engine process. One output thread reads what the engine says,
turns it into text and hands it to each request's sink.
"""

import asyncio
import contextlib
import itertools
import queue
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from atom import errors
from atom.config import Config, check_supported
from atom.errors import AtomError, EngineDeadError, RequestError
from atom.guide import Guide
from atom.model_engine.answer_stops import StopGate
from atom.model_engine.engine_client import EngineClient, InProcessClient
from atom.model_engine.io_processor import InputOutputProcessor, Limits, Prompt
from atom.model_engine.messages import (
    Abort,
    AddRequests,
    CompiledGuide,
    Failed,
    Metrics,
    Progress,
    Ready,
    StepOutput,
    Utility,
    UtilityResponse,
)
from atom.model_engine.outputs import RequestOutput
from atom.model_engine.progress import GenerationBar, StartupProgress
from atom.model_engine.request_state import Sink
from atom.model_engine.streams import (
    Answer,
    CallbackSink,
    CollectingSink,
    Latch,
    RequestStream,
    StreamCallback,
)
from atom.model_engine.structured.guide_compiler import GuideCompiler, make_vocabulary
from atom.model_loader.model_files import ModelFiles
from atom.model_loader.tokenizer import Tokenizer
from atom.runtime.histogram import Histogram
from atom.runtime.liveness import Health
from atom.sampling_params import SamplingParams
from atom.utils import envs
from atom.utils.gc_utils import trim_heap
from atom.utils.logging import init_logger

logger = init_logger(__name__)

_POLL_S = 0.2
_PREPARE_POLL_S = 0.02
UTILITY_TIMEOUT_S = 300.0
TRACES_LATE = "the traces are still being written after ATOM_PROFILER_TIMEOUT ({:g} s)"
DETOKENIZE_BOUNDS = (2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)  # s, of a delta

DEFAULT_MODEL = "Qwen/Qwen3-0.6B"
PromptLike = str | list[int]


class LLMEngine:
    """An engine, its tokenizer and the requests in flight. A context manager; ``close`` gives all memory back.

    Args:
        model: folder, GGUF file, hub name, or ``demo``.
        config: a whole configuration instead of ``model`` and fields.
        in_process: compute in this process, on the output thread (tests and scripts).
        tokenizer: used instead of the model's own.
        **fields: fields of :class:`atom.config.Config`.

    Raises:
        ConfigError, CacheBudgetError, ModelLoadError: it cannot start; nothing is left behind.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: Config | None = None,
        in_process: bool = False,
        tokenizer: Tokenizer | None = None,
        show_progress: bool | None = None,
        **fields: Any,
    ):
        if config is None:
            config = Config.build(model or DEFAULT_MODEL, **fields)
        check_supported(config)
        envs.warn_ineffective()
        if config.prefix_hash_seed is None:
            config = config.replace(prefix_hash_seed=secrets.randbits(63))
        self.config = config
        self.start_time = time.monotonic()
        self.phases: dict[str, float] = {}
        self._info: dict[str, Any] = {}
        self._snapshot: dict[str, float] = {}
        self._detokenize_time = Histogram(DETOKENIZE_BOUNDS)
        self._utilities: dict[int, Future] = {}
        self._call_ids = itertools.count(1)
        self._request_ids = itertools.count(1)
        self._ended: queue.SimpleQueue[Answer] = queue.SimpleQueue()  # of requests without a callback
        self._death_callbacks: list[Callable[[], None]] = []
        self._death: EngineDeadError | None = None
        self._closing = False
        # The engine process starts first: it has the longest way to go.
        self._client = self._make_client(in_process)
        self._executor = ThreadPoolExecutor(max_workers=2, thread_name_prefix="preprocess")
        try:
            files = ModelFiles.resolve(config.model)
            self._model_type: str | None = files.hf_config.get("model_type")
            self.tokenizer = tokenizer or files.load_tokenizer()
            trim_heap()
            self._io = InputOutputProcessor(config, self.tokenizer, self.tokenizer.eos_ids)
            engine = weakref.proxy(self)  # a cycle would keep a closed engine until a full collection
            self._guides = GuideCompiler(
                lambda: make_vocabulary(engine.tokenizer, engine.vocab_size),
                lambda backend, vocabulary: engine._prepare_guides(backend, vocabulary),
            )
            self._wait_until_ready(StartupProgress(show_progress))
        except BaseException:
            self._client.stop(time.monotonic() + envs.ATOM_SHUTDOWN_TIMEOUT_S)
            self._executor.shutdown(wait=False)
            raise
        logger.info("answers end at token ids %s", sorted(self._io.eos_ids))
        self._thread = threading.Thread(target=self._run_output, name="engine-output", daemon=True)
        self._thread.start()

    def _make_client(self, in_process: bool) -> EngineClient:
        if in_process:
            from atom.model_engine.engine_core import make_in_process_core

            return InProcessClient(self.config, make_in_process_core)
        from atom.model_engine.engine_core_mgr import CoreManager

        return CoreManager(self.config)

    def _wait_until_ready(self, progress: StartupProgress) -> None:
        with progress:
            while True:
                for message in self._client.receive(_POLL_S):
                    match message:
                        case Progress():
                            progress.update(message.phase, message.fraction)
                        case Failed():
                            raise _as_error(message)
                        case Metrics():
                            self._snapshot = message.values
                        case Ready():
                            self._on_ready(message)
                        case UtilityResponse():
                            return

    def _on_ready(self, message: Ready) -> None:
        self._info = message.info
        self.phases = message.phases
        self.max_model_len: int = message.info["max_model_len"]
        self.vocab_size: int = min(message.info["vocab_size"], self.tokenizer.vocab_size)
        self._io.limits = Limits(self.max_model_len, self.vocab_size)
        # Only the front end reads the tokenizer; ids past its size must not be sampled. The answer ends the wait.
        self._client.send_control(Utility(0, "set_vocab_size", {"size": self.vocab_size}))

    # -- requests

    async def preprocess(self, prompt: PromptLike, cache_salt: str | None = None) -> Prompt:
        """Tokenize and hash a prompt off the event loop. Raises RequestError."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._io.tokenize, prompt, cache_salt)

    async def compile_guide(self, guide: Guide) -> CompiledGuide:
        """Compile a guide in a process of its own, or find it compiled; for :meth:`stream`.

        Raises:
            RequestError: it does not compile (in the library's words), takes too long, or no library is installed.
            QueueFullError: too many guides wait.
        """
        # Shielded: others may wait for the same guide.
        return await asyncio.shield(asyncio.wrap_future(self._guides.submit(guide)))

    def _prepare_guides(self, backend: str, vocabulary: bytes) -> None:
        """Wait until the engine has loaded a grammar library. Raises AtomError with the engine's words."""
        args: dict[str, Any] = {"vocabulary": vocabulary}
        while not self.call_utility("prepare_guides", backend=backend, **args):
            args = {}
            time.sleep(_PREPARE_POLL_S)

    def stream(
        self,
        prompt: Prompt | PromptLike,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        stop_gate: StopGate | None = None,
        guide: CompiledGuide | None = None,
    ) -> RequestStream:
        """Start a request; iterate over its deltas. Call on an event loop, with what ``preprocess`` gave
        (anything else is tokenized here and now). Stop strings sleep until ``stop_gate`` says that the answer
        begins. ``guide`` is what :meth:`compile_guide` made of ``params.guide``.

        Raises RequestError, ContextLengthError, QueueFullError at once, EngineDeadError when the engine is gone.
        """
        if not isinstance(prompt, Prompt):
            prompt = self._io.tokenize(prompt, cache_salt)
        request_id = request_id or self._next_request_id()
        stream = RequestStream(params.n, lambda: self._forget(request_id), asyncio.get_running_loop())
        self._check_alive()
        message = self._io.add(
            [prompt], [params], [stream], [request_id], priority, stop_gate, is_bounded=True, guides=[guide]
        )
        self._start(message)
        return stream

    def add_request(
        self,
        prompts: PromptLike | list[PromptLike],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        stream_callback: StreamCallback | list[StreamCallback | None] | None = None,
        request_ids: list[str] | None = None,
    ) -> list[str]:
        """Submit requests without waiting; returns their ids.

        ``stream_callback(RequestOutput)`` is called on the output thread for each delta. Without one, the
        answers are what :meth:`step` returns as they end.
        """
        prompts, params, request_ids = self._as_lists(prompts, sampling_params, request_ids)
        callbacks = stream_callback if isinstance(stream_callback, list) else [stream_callback] * len(prompts)
        _check_length("stream_callback", len(callbacks), len(prompts))
        sinks: list[Sink] = [
            (
                CallbackSink(request_id, callback)
                if callback
                else CollectingSink(param.n, on_answer=self._ended.put)
            )
            for param, callback, request_id in zip(params, callbacks, request_ids, strict=True)
        ]
        self._submit([self._io.tokenize(prompt) for prompt in prompts], params, sinks, request_ids)
        return request_ids

    def step(self, timeout_s: float = _POLL_S) -> list[RequestOutput]:
        """Answers of requests added without a callback that have ended; waits up to ``timeout_s`` for one.

        Raises EngineDeadError when the engine is gone.
        """
        answers = []
        try:
            answers.append(self._ended.get(timeout=timeout_s))
            while True:
                answers.append(self._ended.get_nowait())
        except queue.Empty:
            if not answers and self._death is not None:
                raise self._death from None
        return [answer.output for answer in answers]

    def is_finished(self) -> bool:
        """Whether no request is in flight and no ended answer waits for :meth:`step`."""
        return not self._io.requests and self._ended.empty()

    def generate(
        self,
        prompts: PromptLike | list[PromptLike],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        request_ids: list[str] | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[dict[str, Any]]:
        """Generate for every prompt and wait. One dict an answer, in prompt order (n answers a prompt follow
        each other): text, token_ids, logprobs, prompt_logprobs, finish_reason, stop_reason, index, request_id,
        num_tokens_input, num_tokens_output, num_cached_tokens, and latency, ttft, tpot in seconds.

        Args:
            prompts: text or token ids, one or a list.
            sampling_params: one for all, or a list of the same length.
            use_tqdm: a progress bar; None shows one on a terminal.

        Raises:
            RequestError: a prompt or its parameters are invalid; nothing was started.
            EngineDeadError: the engine is gone.
        """
        prompts, params, request_ids = self._as_lists(prompts, sampling_params, request_ids)
        started = time.monotonic()
        with GenerationBar(sum(param.n for param in params), use_tqdm) as bar:
            ended = Latch(len(params))
            sinks = [CollectingSink(p.n, on_delta=bar.on_delta, on_end=ended.count_down) for p in params]
            self._submit([self._io.tokenize(prompt) for prompt in prompts], params, sinks, request_ids)
            try:
                while not ended.wait(_POLL_S):
                    pass  # a timed wait lets Ctrl-C through
            except BaseException:
                for request_id in request_ids:
                    self._forget(request_id)
                raise
        for sink in sinks:
            if sink.error is not None:
                raise sink.error
        return [_as_dict(sink.answers[i], started) for sink in sinks for i in sorted(sink.answers)]

    def abort(self, request_id: str) -> None:
        """End a request; its blocks are free before the next step. Unknown ids are ignored: it has ended.

        Whoever waits for it gets what there is, with finish reason ``abort``. May be called on any thread.
        """
        self._send_abort(self._io.abort(request_id))

    def _forget(self, request_id: str) -> None:
        """End a request that nobody waits for any more."""
        self._send_abort(self._io.forget(request_id))

    def _send_abort(self, message: Abort | None) -> None:
        if message is not None:
            with contextlib.suppress(EngineDeadError):  # which has ended its requests
                self._client.send(message)

    def _submit(
        self,
        prompts: list[Prompt],
        params: list[SamplingParams],
        sinks: list[Sink],
        request_ids: list[str],
    ) -> None:
        self._check_alive()
        pending = [param.guide and self._guides.submit(param.guide) for param in params]
        guides = [future and future.result() for future in pending]
        self._start(self._io.add(prompts, params, sinks, request_ids, guides=guides))

    def _start(self, message: AddRequests) -> None:
        """Send requests that have just been registered. Raises EngineDeadError where nobody would answer them."""
        try:
            self._check_alive()  # once more: an engine that died meanwhile has failed what was registered then
        except EngineDeadError as error:
            self._io.fail_all(error)
            raise
        self._client.send(message)

    def _check_alive(self) -> None:
        if self._death is not None:
            raise self._death
        if self._closing:
            raise EngineDeadError("the engine was closed")

    def _as_lists(self, prompts, sampling_params, request_ids):
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        params = sampling_params if isinstance(sampling_params, list) else None
        if params is None:
            params = [sampling_params or SamplingParams()] * len(prompts)
        _check_length("sampling_params", len(params), len(prompts))
        if request_ids is None:
            request_ids = [self._next_request_id() for _ in prompts]
        _check_length("request_ids", len(request_ids), len(prompts))
        return prompts, params, request_ids

    def _next_request_id(self) -> str:
        return f"request-{next(self._request_ids)}"

    # -- the output thread

    def _run_output(self) -> None:
        try:
            while not self._closing:
                for message in self._client.receive(_POLL_S):
                    self._on_message(message)
        except EngineDeadError as error:
            if not self._closing:
                self._on_death(error)
        except Exception as error:
            logger.exception("the output thread failed")
            self._on_death(EngineDeadError(f"the output thread failed: {error}"))

    def _on_message(self, message) -> None:
        match message:
            case StepOutput():
                began = time.perf_counter()
                outputs, abort = self._io.process(message)
                if outputs:
                    each = (time.perf_counter() - began) / len(outputs)
                    self._detokenize_time.observe(each, len(outputs))
                self._send_abort(abort)
                deliver(outputs)
            case Metrics():
                own = self._detokenize_time.flatten("api_detokenize_chunk_seconds")
                self._snapshot = message.values | own
            case UtilityResponse():
                future = self._utilities.pop(message.call_id, None)
                if future is not None and message.error:
                    future.set_exception(AtomError(message.error))
                elif future is not None:
                    future.set_result(message.result)
            case Failed():
                raise EngineDeadError(message.message)

    def _on_death(self, error: EngineDeadError) -> None:
        logger.error("%s", error)
        self._death = error
        self._io.fail_all(error)
        while self._utilities:
            self._utilities.popitem()[1].set_exception(error)
        for callback in self._death_callbacks:
            callback()

    # -- control and facts

    def call_utility(self, command: str, timeout_s: float = UTILITY_TIMEOUT_S, **args: Any) -> Any:
        """Run a command on the engine's loop and wait.

        Raises AtomError with the engine's words, TimeoutError where it takes longer.
        """
        return self._start_utility(command, args).result(timeout_s)

    async def utility(self, command: str, timeout_s: float = UTILITY_TIMEOUT_S, **args: Any) -> Any:
        """:meth:`call_utility` for an event loop."""
        return await asyncio.wait_for(asyncio.wrap_future(self._start_utility(command, args)), timeout_s)

    def _start_utility(self, command: str, args: dict[str, Any]) -> Future:
        self._check_alive()
        call_id = next(self._call_ids)
        future = self._utilities[call_id] = Future()
        self._client.send_control(Utility(call_id, command, args))
        return future

    def start_profile(self) -> None:
        """Start the torch profiler in the engine (``torch_profiler_dir``)."""
        self.call_utility("start_profile")

    def stop_profile(self) -> list[str]:
        """Stop it; paths of the traces. Raises AtomError when they take longer than ``ATOM_PROFILER_TIMEOUT``."""
        timeout_s = envs.ATOM_PROFILER_TIMEOUT
        try:
            return self.call_utility("stop_profile", timeout_s)
        except TimeoutError:
            raise AtomError(TRACES_LATE.format(timeout_s)) from None

    def get_cache_statistics(self) -> dict[str, float]:
        """Prefix-cache and block counts of this moment."""
        return self.call_utility("get_cache_statistics")

    def get_metrics_statistics(self) -> dict[str, float]:
        """Every counter and gauge of this moment."""
        return self.call_utility("get_metrics_statistics")

    def health(self) -> Health:
        """Whether the engine serves; read from shared memory, never asked."""
        if self._death is not None:
            return Health(False, "dead", str(self._death), 0.0, 0)
        if self._closing:
            return Health(False, "stopping", "the engine is stopping", 0.0, 0)
        return self._client.health()

    def stats(self) -> dict[str, float]:
        """The engine's latest counters and gauges, by the names of ``/metrics``; costs no message."""
        return self._snapshot

    def info(self) -> dict[str, Any]:
        """Model type, device, dtype, backends, cache size and start-up phases (seconds)."""
        return {**self._info, "model_type": self._model_type, "startup_phases": self.phases}

    def on_death(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, from the output thread, when the engine dies."""
        self._death_callbacks.append(callback)

    def close(self) -> None:
        """End every request and the engine process, within ``ATOM_SHUTDOWN_TIMEOUT_S``. Idempotent."""
        if self._closing:
            return
        self._closing = True
        deadline = time.monotonic() + envs.ATOM_SHUTDOWN_TIMEOUT_S
        self._thread.join(timeout=2 * _POLL_S + envs.ATOM_SHUTDOWN_TIMEOUT_S)
        self._io.fail_all(EngineDeadError("the engine was closed"))
        self._guides.close()
        self._client.stop(deadline)
        self._executor.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> "LLMEngine":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


LLM = LLMEngine


def deliver(outputs: list[tuple[Sink, RequestOutput]]) -> None:
    """Hand a step's deltas over: one call per event loop for all of its streams, so that they stay in order."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[RequestStream, RequestOutput]]] = {}
    for sink, output in outputs:
        if isinstance(sink, RequestStream):
            by_loop.setdefault(sink.loop, []).append((sink, output))
        else:
            sink.put(output)
    for loop, pairs in by_loop.items():
        try:
            loop.call_soon_threadsafe(_deliver_on_loop, pairs)
        except RuntimeError:
            logger.warning("an event loop closed with %d streams open", len(pairs))


def _deliver_on_loop(pairs: list[tuple[RequestStream, RequestOutput]]) -> None:
    for stream, output in pairs:
        stream.deliver(output)


def _as_error(message: Failed) -> Exception:
    kind = getattr(errors, message.kind, EngineDeadError)
    return kind(message.message)


def _as_dict(answer: Answer, started: float) -> dict[str, Any]:
    output = answer.output
    steps = output.num_output_tokens - 1
    return {
        "request_id": output.request_id,
        "index": output.index,
        "text": output.text,
        "token_ids": output.output_tokens,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "error": output.error,
        "logprobs": output.logprobs,
        "prompt_logprobs": output.prompt_logprobs,
        "num_tokens_input": output.num_prompt_tokens,
        "num_tokens_output": output.num_output_tokens,
        "num_cached_tokens": output.num_cached_tokens,
        "latency": answer.last_token_time - started,
        "ttft": answer.first_token_time - started,
        "tpot": (answer.last_token_time - answer.first_token_time) / steps if steps > 0 else 0.0,
    }


def _check_length(field: str, given: int, wanted: int) -> None:
    if given != wanted:
        raise RequestError(f"{field} must hold one entry per prompt ({wanted}), got {given}", param=field)
