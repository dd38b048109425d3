"""EngineCore: one scheduler and one worker, driven by messages.

A step is three named calls, schedule, launch and commit; sampling is a stage of its own between the last
two. Two loops do the same work in two orders:

    plain        schedule N, launch N, sample N, wait N, commit N
    overlapped   schedule N+1, launch N+1, sample N+1, wait N, commit N

In the overlapped loop the host prepares N+1 while the device runs N; ids are read one step late, and the
scheduler assumes that every row in flight goes on (``scheduling`` says what follows from that).
"""

import importlib
import time
from collections.abc import Callable
from typing import Any

from atom.config import Config
from atom.core import ScheduledBatch
from atom.errors import AtomError, ConfigError
from atom.kv_transfer.connector import KVConnector, NullConnector
from atom.model_engine.messages import (
    Abort,
    AddRequests,
    FromEngine,
    Metrics,
    Progress,
    Ready,
    Shutdown,
    ToEngine,
    Utility,
    UtilityResponse,
)
from atom.model_engine.request_intake import make_sequence
from atom.model_engine.runner.worker import ReportProgress, Worker
from atom.model_engine.scheduler import Scheduler, StepResult
from atom.model_engine.step_coordinator import NullCoordinator, StepCoordinator
from atom.model_engine.step_metrics import StepMetrics
from atom.model_engine.structured.guide_manager import GuideManager
from atom.runtime.liveness import LivenessPage
from atom.runtime.startup_phases import StartupPhases, format_phases
from atom.utils import envs
from atom.utils.logging import init_logger

logger = init_logger(__name__)

# A step may take this long before the engine counts as hung: generous, for the slowest machine that is
# still of use, and in proportion to the work so that a short step is noticed soon.
STEP_ALLOWANCE_S = 30.0
STEP_ALLOWANCE_PER_TOKEN_S = 0.25
INTEGRITY_CHECK_INTERVAL_S = 1.0
STEPS_A_GRAPH = 64  # busy, and with graphs left to record: one is recorded every so many steps
_NO_ERRORS: dict[int, str] = {}


def load_worker_class(qualname: str) -> type[Worker]:
    """The worker class named ``package.module.Class``.

    Raises:
        ConfigError: there is none.
        AtomError: there is, and something that it needs is missing or broken.
    """
    module, _, name = qualname.rpartition(".")
    try:
        worker_class = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        is_absent = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        if isinstance(error, ImportError) and not is_absent:
            raise AtomError(f"{module} cannot be imported: {error} (see atom doctor)") from error
        raise ConfigError(f"runner_qualname {qualname!r} cannot be loaded: {error}") from error
    if not (isinstance(worker_class, type) and issubclass(worker_class, Worker)):
        raise ConfigError(f"runner_qualname {qualname!r} is not a Worker")
    return worker_class


class EngineCore:
    """Owns the scheduler and the worker of one engine. Every method is called from one thread.

    Args:
        emit: takes each message for the front end.
        page: liveness page to stamp; None in process.
    """

    def __init__(
        self,
        config: Config,
        emit: Callable[[FromEngine], None],
        *,
        phases: StartupPhases | None = None,
        page: LivenessPage | None = None,
        worker: Worker | None = None,
        coordinator: StepCoordinator | None = None,
        connector: KVConnector | None = None,
    ):
        self.config = config
        self.coordinator = coordinator or NullCoordinator()
        self.worker = worker or load_worker_class(config.runner_qualname)(config)
        self.scheduler: Scheduler | None = None
        self._connector = connector or NullConnector()
        self._emit = emit
        self._phases = phases or StartupPhases()
        self._page = page
        self._guides = GuideManager()
        # Launched, not committed (overlapped loop): batch, handle, and why rows failed.
        self._pending: tuple[ScheduledBatch, Any, dict[int, str]] | None = None
        # A plain function: a bound method here would be a cycle, and keep the memory until a full collection.
        self._step: Callable[[EngineCore], bool] = EngineCore._step_plain
        self._num_steps = 0
        self._step_metrics = StepMetrics()
        self._checked_at = 0.0
        self._is_unchecked = False  # whether requests came or went since the last check of the books
        self._metrics_at = 0.0
        self._metrics_interval_s = envs.ATOM_METRICS_UPDATE_INTERVAL_S

    # -- life

    def start(self, report: ReportProgress, settle: Callable[[], object] | None = None) -> None:
        """Load, allocate, warm up, and tell the front end that the engine serves.

        ``settle`` is the last phase before that: what the owner of the process does once its heap is complete.

        Raises ConfigError, ModelLoadError, CacheBudgetError.
        """
        actions: list[tuple[str, Callable[[], object]]] = [
            ("load weights", lambda: self.worker.load(report)),
            ("allocate cache", self._allocate),
            ("warm up", lambda: self.worker.warm_up(report)),
            ("record graphs", lambda: self.worker.record_graphs(report)),
        ]
        if settle is not None:
            actions.append(("settle heap", settle))
        for phase, action in actions:
            self._phases.begin(phase)
            report(phase, 0.0)
            action()
        seconds = self._phases.end()
        logger.info("engine ready: %s", format_phases(seconds))
        self._emit(Metrics(self.stats()))  # before the first scrape: /metrics is never empty
        self._emit(Ready(self.worker.info(), seconds))

    def _allocate(self) -> None:
        groups = self.worker.cache_groups()
        self.worker.allocate(groups)
        self.scheduler = Scheduler(self.worker.scheduler_config(), groups, self._connector)
        if self.worker.uses_overlapped_loop():
            self._step = EngineCore._step_overlapped

    def close(self) -> None:
        self.worker.close()

    # -- messages

    def handle(self, message: ToEngine) -> None:
        """Act on one message. A bad one fails alone: it is answered, never raised."""
        match message:
            case AddRequests():
                for request, chain in zip(message.requests, message.chains, strict=True):
                    guide = message.guides[request.guide] if request.guide >= 0 else None
                    seq = make_sequence(request, chain, self.config.kv_cache_block_size, guide)
                    self.scheduler.add(seq)
                    if guide is not None:
                        self._guides.add(seq)
                self._tell_ended()
            case Abort():
                self._is_unchecked = True
                for seq_id, keep, reason in zip(
                    message.ids, message.keep_tokens, message.reasons, strict=True
                ):
                    self.scheduler.abort(seq_id, keep, reason)
                self._guides.drop_finished()
                self._tell_ended()
            case Utility():
                self._emit(self._run_utility(message))
            case Shutdown():
                pass  # the loop that runs this core ends; nothing is owed to clients that are gone

    def _run_utility(self, message: Utility) -> UtilityResponse:
        action = _UTILITIES.get(message.command)
        if action is None:
            known = ", ".join(sorted(_UTILITIES))
            return UtilityResponse(
                message.call_id, error=f"unknown command {message.command!r}; known: {known}"
            )
        try:
            return UtilityResponse(message.call_id, action(self, **message.args))
        except Exception as error:
            logger.exception("utility %s failed", message.command)
            return UtilityResponse(message.call_id, error=f"{type(error).__name__}: {error}")

    # -- steps

    @property
    def has_work(self) -> bool:
        return self._pending is not None or self.scheduler.has_work

    def step(self) -> bool:
        """One iteration of the chosen loop; False when nothing could run (all that is left waits)."""
        did_work = self._step(self)
        self._num_steps += 1
        if self._page is not None:
            self._page.end_step(self._num_steps)
        self._is_unchecked = True
        if self._num_steps % STEPS_A_GRAPH == 0 and self.has_work:
            self.worker.record_next_graph()
        return did_work

    def _step_plain(self) -> bool:
        batch = self._schedule()
        if batch is None:
            return False
        handle = self.worker.launch(batch)
        self._step_metrics.observe(batch)
        self._commit(batch, handle, self._sample(batch, handle))
        return True

    def _step_overlapped(self) -> bool:
        batch = self._schedule()
        handle = None
        is_late = False
        errors = _NO_ERRORS
        if batch is not None:
            handle = self.worker.launch(batch)
            is_late = self.worker.needs_late_mask(handle) or (
                bool(self._guides.live) and self._guides.needs_masks(batch)
            )
            if not is_late:
                self.worker.sample(handle)
            self._step_metrics.observe(batch)
        if self._pending is not None:
            self._commit(*self._pending)
        if is_late:  # its mask depends on the ids just committed
            errors = self._sample(batch, handle)
        did_work = batch is not None or self._pending is not None
        self._pending = None if batch is None else (batch, handle, errors)
        return did_work

    def _sample(self, batch: ScheduledBatch, handle: Any) -> dict[int, str]:
        """Sample with the masks of guided rows, made while the device computes. Why rows failed, by batch index."""
        if not self._guides.live:
            self.worker.sample(handle)
            return _NO_ERRORS
        masks, errors = self._guides.masks(batch)
        self.worker.sample(handle, masks)
        return errors

    def _schedule(self) -> ScheduledBatch | None:
        batch = self.scheduler.schedule()
        self._tell_ended()
        if batch is not None and self._page is not None:
            self._page.begin_step(STEP_ALLOWANCE_S + STEP_ALLOWANCE_PER_TOKEN_S * batch.num_tokens)
        return batch

    def _commit(self, batch: ScheduledBatch, handle: Any, errors: dict[int, str]) -> None:
        output = self.worker.wait(handle)
        if errors:
            output.errors = (output.errors or {}) | errors
        self.scheduler.commit(batch, output, self._tell)
        if self._guides.live:
            self._guides.drop_finished()

    def _tell(self, result: StepResult) -> None:
        if result.seqs:
            self._emit(result.to_message())

    def _tell_ended(self) -> None:
        """Tell the end of what ended outside of a step; at once, for there may be no step to come."""
        ended = self.scheduler.take_rejected()
        if ended:
            self._emit(StepResult.of_ended(ended).to_message())

    def rest(self) -> None:
        """What is done once no work has come for a while: one more graph is recorded, and the books over the cache
        are checked once after the last step. Not at once: the next request may be on its way, and would wait for it.
        """
        self.worker.record_next_graph()
        now = time.monotonic()
        if not self._is_unchecked or now - self._checked_at < INTEGRITY_CHECK_INTERVAL_S:
            return
        self._checked_at, self._is_unchecked = now, False
        problems = self.scheduler.check_integrity(repair=True)
        if problems:
            logger.error("KV cache accounting was wrong and has been rebuilt: %s", "; ".join(problems[:5]))

    # -- metrics

    def push_metrics_if_due(self, now: float) -> None:
        if now - self._metrics_at >= self._metrics_interval_s:
            self._metrics_at = now
            self._emit(Metrics(self.stats()))

    def stats(self) -> dict[str, float]:
        """Counters and gauges of this engine by the names of ``/metrics``."""
        values = self.scheduler.stats()
        total, queried = values["kv_blocks_total"], values["prefix_query_tokens"]
        return {
            **{name: values[key] for name, key in _METRICS.items()},
            "kv_cache_usage_ratio": values["kv_blocks_used"] / total if total else 0.0,
            "prefix_cache_hit_ratio": values["prefix_hit_tokens"] / queried if queried else 0.0,
            "engine_steps": self._num_steps,
            **self._step_metrics.values(),
            **self.worker.metrics(),
        }

    def _clear_kv_cache(self) -> bool:
        self.scheduler.clear_prefix_cache()
        return True


# Name in /metrics -> key of Scheduler.stats().
_METRICS = {
    "requests_running": "running",
    "requests_waiting": "waiting",
    "requests_partial_prefill": "partial",
    "requests_parked_kv_load": "parked",
    "requests_oldest_waiting_seconds": "oldest_waiting_s",
    "requests_oldest_running_seconds": "oldest_running_s",
    "preemptions": "preemptions",
    "kv_cache_blocks_used": "kv_blocks_used",
    "kv_cache_blocks_free": "kv_blocks_free",
    "kv_cache_blocks_evictable": "kv_blocks_cached",
    "kv_cache_blocks_total": "kv_blocks_total",
    "kv_cache_blocks_indexed": "kv_blocks_indexed",
    "prefix_cache_requests": "prefix_requests",
    "prefix_cache_cached_tokens": "prefix_hit_tokens",
    "prefix_cache_full_tokens": "prefix_query_tokens",
    "cache_integrity_faults": "integrity_faults",
}

_UTILITIES: dict[str, Callable[..., Any]] = {
    "set_vocab_size": lambda core, size: core.worker.set_vocab_size(size),
    "clear_kv_cache": EngineCore._clear_kv_cache,
    "get_cache_statistics": lambda core: core.scheduler.stats(),
    "get_metrics_statistics": lambda core: core.stats(),
    "check_integrity": lambda core: core.scheduler.check_integrity(),
    "prepare_guides": lambda core, backend, vocabulary=b"": core._guides.prepare(backend, vocabulary),
    "start_profile": lambda core, directory=None: core.worker.start_profile(directory),
    "stop_profile": lambda core: core.worker.stop_profile(),
}


def make_in_process_core(config: Config, emit: Callable[[FromEngine], None]) -> EngineCore:
    """Build and start a core for an InProcessClient."""
    core = EngineCore(config, emit)
    core.start(lambda phase, fraction: emit(Progress(phase, fraction)))
    return core
