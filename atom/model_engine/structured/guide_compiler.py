"""The front end's side of guides: compile in a worker process, within limits, and remember the results.

Every guide costs one job at most: equal ones share it, later ones find its result, good or bad.
"""

import os
import queue
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from atom.errors import AtomError, QueueFullError, RequestError
from atom.guide import Guide
from atom.model_engine.messages import CompiledGuide
from atom.model_engine.structured.backend import Vocabulary, choose_backend
from atom.model_engine.structured.compile_worker import WorkerConfig
from atom.model_engine.structured.frames import Compiled, Job, Loaded, Refused, Reply, read_frame, send_frame
from atom.model_loader.tokenizer import Tokenizer
from atom.runtime.process import ChildProcess, stop_children
from atom.utils.logging import init_logger

logger = init_logger(__name__)

COMPILE_TIME_LIMIT_S = 5.0
MAX_QUEUED_GUIDES = 64
CACHE_BYTES = 128 << 20  # a grammar over 262,144 tokens takes 0.1 to 1 MB
FAILURE_MEMORY_S = 60.0  # a guide that failed is refused at once for so long
MAX_WORDS = 2000  # characters of a library's message
_START_LIMIT_S = 120.0  # importing a library on a busy machine
_DECODER = msgspec.msgpack.Decoder(Reply)


@dataclass(slots=True)
class _Result:
    """What came of a guide: ``data``, or ``failure`` in words until ``expires``."""

    data: bytes = b""
    failure: str = ""
    expires: float = float("inf")

    @property
    def num_bytes(self) -> int:
        return len(self.data) + len(self.failure) + 256


@dataclass(slots=True)
class _Waiter:
    guide: Guide
    future: "Future[CompiledGuide]"


class GuideCompiler:
    """Compiles guides. All methods may be called from any thread.

    Args:
        make_vocabulary: the tokenizer's vocabulary; called once, when the first guide comes.
        prepare_engine: ``(backend, encoded vocabulary)``: returns when the engine can use that library.
        time_limit_s: of one compilation.
        worker_module: what the child runs.
    """

    def __init__(
        self,
        make_vocabulary: Callable[[], Vocabulary],
        prepare_engine: Callable[[str, bytes], None],
        *,
        time_limit_s: float = COMPILE_TIME_LIMIT_S,
        cache_bytes: int = CACHE_BYTES,
        worker_module: str = "atom.model_engine.structured.compile_worker",
    ):
        self._make_vocabulary = make_vocabulary
        self._prepare_engine = prepare_engine
        self._time_limit_s = time_limit_s
        self._cache_bytes = cache_bytes
        self._worker_module = worker_module
        self._lock = threading.Lock()
        self._results: OrderedDict[bytes, _Result] = OrderedDict()
        self._num_bytes = 0
        self._waiters: dict[bytes, list[_Waiter]] = {}
        self._jobs: queue.Queue[tuple[bytes, Job] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._worker: _Worker | None = None
        self._vocabulary = b""
        self._prepared: set[str] = set()
        self._closed = False

    def submit(self, guide: Guide) -> "Future[CompiledGuide]":
        """The compiled guide, or the RequestError that says why there is none. It cannot be cancelled.

        Raises:
            RequestError: no library is installed that can do it.
            QueueFullError: too many guides wait to be compiled.
        """
        backend = choose_backend(guide)
        key = _key_of(guide, backend)
        future: Future[CompiledGuide] = Future()
        future.set_running_or_notify_cancel()
        waiter = _Waiter(guide, future)
        with self._lock:
            if self._closed:
                raise AtomError("the guide compiler is closed")
            result = self._recall(key)
            if result is None and key in self._waiters:
                self._waiters[key].append(waiter)
            elif result is None:
                if len(self._waiters) >= MAX_QUEUED_GUIDES:
                    raise QueueFullError(
                        f"{len(self._waiters)} guides wait to be compiled, the limit is {MAX_QUEUED_GUIDES}"
                    )
                self._waiters[key] = [waiter]
                self._jobs.put((key, Job(backend, guide, self._time_limit_s)))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="guide-compiler", daemon=True)
                    self._thread.start()
        if result is not None:
            _resolve(waiter, key, backend, result)
        return future

    @property
    def cached_bytes(self) -> int:
        return self._num_bytes

    @property
    def worker_pid(self) -> int | None:
        """The child's process id; None while there is none."""
        worker = self._worker
        return worker.pid if worker is not None else None

    def close(self) -> None:
        """End the worker; whoever still waits gets an error. Idempotent."""
        with self._lock:
            self._closed = True
        self._jobs.put(None)
        worker = self._worker
        if worker is not None:
            worker.kill()
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    # -- the cache; called with the lock held

    def _recall(self, key: bytes) -> _Result | None:
        result = self._results.get(key)
        if result is not None and result.expires < time.monotonic():
            self._forget(key)
            return None
        if result is not None:
            self._results.move_to_end(key)
        return result

    def _remember(self, key: bytes, result: _Result) -> None:
        self._results[key] = result
        self._num_bytes += result.num_bytes
        while self._num_bytes > self._cache_bytes:
            self._forget(next(iter(self._results)))

    def _forget(self, key: bytes) -> None:
        self._num_bytes -= self._results.pop(key).num_bytes

    # -- the compiler's thread

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None and not self._closed:
            key, job = item
            try:
                result = self._compile(job)
                if result.data and job.backend not in self._prepared:
                    self._prepare_engine(job.backend, self._vocabulary)
                    self._prepared.add(job.backend)
            except Exception as error:  # not the guide's fault: nothing to remember
                if not self._closed and not isinstance(error, AtomError):
                    logger.exception("a guide could not be compiled")
                self._fail(key, error)
                continue
            with self._lock:
                self._remember(key, result)
                waiters = self._waiters.pop(key)
            for waiter in waiters:
                _resolve(waiter, key, job.backend, result)
        self._stop_worker()
        for key in list(self._waiters):
            self._fail(key, AtomError("the guide compiler is closed"))

    def _fail(self, key: bytes, error: Exception) -> None:
        with self._lock:
            waiters = self._waiters.pop(key)
        for waiter in waiters:
            waiter.future.set_exception(error)

    def _compile(self, job: Job) -> _Result:
        """Raises OSError, TimeoutError when no worker can be started."""
        if not self._vocabulary:
            self._vocabulary = msgspec.msgpack.encode(self._make_vocabulary())
        if self._worker is None or not self._worker.is_alive:
            self._worker = _Worker(self._worker_module, self._vocabulary)
        limit = self._time_limit_s
        try:
            return _Result(self._worker.compile(job))
        except _RefusedError as error:
            failure = str(error)
        except TimeoutError:
            failure = f"it takes longer than the limit of {limit:g} s to compile"
        except (EOFError, ConnectionError):
            failure = "the grammar compiler crashed on it"
        if not self._worker.is_at_rest:
            if not self._closed:
                logger.warning("guide compiler restarts: %s (%s)", failure, job.guide.kind)
            self._stop_worker()
        return _Result(failure=failure, expires=time.monotonic() + FAILURE_MEMORY_S)

    def _stop_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop()


class _RefusedError(Exception):
    """The library's words."""


class _Worker:
    """One child process and the socket to it.

    Raises TimeoutError, OSError: it does not come up.
    """

    def __init__(self, module: str, vocabulary: bytes):
        self._folder = tempfile.mkdtemp(prefix="atom-guides-")  # 0700
        path = os.path.join(self._folder, "socket")
        self._connection: socket.socket | None = None
        self.is_at_rest = True  # no job is half done
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(1)
            listener.settimeout(0.1)
            self._child = ChildProcess(module, WorkerConfig(path), "GuideCompiler", lambda child: None)
            deadline = time.monotonic() + _START_LIMIT_S
            while self._connection is None:
                try:
                    self._connection, _ = listener.accept()
                except TimeoutError:
                    if not self._child.is_alive or time.monotonic() > deadline:
                        self.stop()
                        raise OSError("the guide compiler's process does not start") from None
        self._connection.settimeout(_START_LIMIT_S)
        send_frame(self._connection, vocabulary)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def is_alive(self) -> bool:
        return self._child.is_alive

    def compile(self, job: Job) -> bytes:
        """Raises _RefusedError; TimeoutError, EOFError, ConnectionError, after which this worker is of no use."""
        connection = self._connection
        self.is_at_rest = False
        connection.settimeout(_START_LIMIT_S)
        send_frame(connection, msgspec.msgpack.encode(job))
        reply = _DECODER.decode(read_frame(connection))
        if isinstance(reply, Loaded):
            connection.settimeout(job.time_limit_s)
            reply = _DECODER.decode(read_frame(connection))
        self.is_at_rest = True
        if isinstance(reply, Refused):
            raise _RefusedError(reply.words[:MAX_WORDS])
        assert isinstance(reply, Compiled)
        return reply.data

    def kill(self) -> None:
        """End the child; whoever waits for it gets EOFError."""
        self._child.signal(signal.SIGKILL)

    def stop(self) -> None:
        self.kill()
        stop_children([self._child], time.monotonic() + 1.0)
        if self._connection is not None:
            self._connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def make_vocabulary(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """The first ``size`` ids of a tokenizer. Raises RequestError for a model whose answers have no end."""
    if not tokenizer.eos_ids:
        raise RequestError("guide needs a model with an end-of-text token; this one has none", param="guide")
    tokens = [tokenizer.token_bytes(i) for i in range(size)]
    special_ids = sorted(i for i in tokenizer.special_ids | set(tokenizer.eos_ids) if i < size)
    return Vocabulary(tokens, special_ids, [i for i in tokenizer.eos_ids if i < size])


def _key_of(guide: Guide, backend: str) -> bytes:
    """Equal for guides with the same grammar."""
    content = (
        backend, guide.kind, guide.text, guide.choices, guide.tags, guide.triggers,
        guide.at_least_one, guide.stop_after_first, guide.opening, guide.separator, guide.closing,
        guide.otherwise and _key_of(guide.otherwise, backend),
    )  # fmt: skip
    return blake2b(msgspec.msgpack.encode(content), digest_size=16).digest()


def _resolve(waiter: _Waiter, key: bytes, backend: str, result: _Result) -> None:
    guide = waiter.guide
    if result.failure:
        waiter.future.set_exception(
            guide.error(f"does not compile as {guide.kind}: {result.failure.strip()}")
        )
    else:
        waiter.future.set_result(
            CompiledGuide(key, backend, result.data, guide.has_json, guide.start_after or "")
        )
