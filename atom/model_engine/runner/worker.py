"""The interface between the engine core and whatever computes a step: a model on a device, or a fake."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from atom.core import BatchOutput, CacheGroupSpec, ScheduledBatch, TokenMasks
from atom.errors import ConfigError
from atom.model_engine.scheduler import SchedulerConfig

ReportProgress = Callable[[str, float], None]  # (phase, fraction in [0, 1])


class Worker(ABC):
    """Computes steps. Calls come from one thread, in this order: ``load``, ``cache_groups``, ``allocate``,
    ``warm_up``, ``record_graphs``, then ``launch`` / ``sample`` / ``wait`` for each step, ``record_next_graph``
    between steps, and ``close`` once.

    Steps run in launch order on one stream: what a step frees may be written by the next.
    """

    @abstractmethod
    def load(self, report: ReportProgress) -> None:
        """Build the model and load its weights. Raises ModelLoadError, CacheBudgetError."""

    @abstractmethod
    def cache_groups(self) -> list[CacheGroupSpec]:
        """The model's cache groups with ``num_blocks`` set from the memory budget. Raises CacheBudgetError."""

    @abstractmethod
    def allocate(self, groups: list[CacheGroupSpec]) -> None:
        """Allocate the KV cache and the device tables."""

    @abstractmethod
    def set_vocab_size(self, size: int) -> None:
        """The front end's tokenizer knows ids below ``size``; none from it on may be sampled. Before any request."""

    @abstractmethod
    def warm_up(self, report: ReportProgress) -> None:
        """Run the largest step that the limits allow, so that they are proven."""

    def record_graphs(self, report: ReportProgress) -> None:
        """Record the device graphs that are to be there before the first request."""
        return None

    def record_next_graph(self) -> bool:
        """Record one of those that are made while serving; False when there is none left."""
        return False

    @abstractmethod
    def scheduler_config(self) -> SchedulerConfig:
        """The limits that memory and the platform allow; valid after ``cache_groups``."""

    @abstractmethod
    def uses_overlapped_loop(self) -> bool:
        """Which of the two engine loops suits the platform, unless the configuration says."""

    @abstractmethod
    def launch(self, batch: ScheduledBatch) -> Any:
        """Publish the step's inputs and start the forward pass. Returns a handle; never waits for the device."""

    @abstractmethod
    def needs_late_mask(self, handle: Any) -> bool:
        """Whether sampling has to wait until the step before is committed, because a mask depends on its ids."""

    @abstractmethod
    def sample(self, handle: Any, masks: TokenMasks | None = None) -> None:
        """Start sampling for a launched step; ``masks`` say what guided rows may take."""

    @abstractmethod
    def wait(self, handle: Any) -> BatchOutput:
        """The step's result; the only call that waits for the device."""

    @abstractmethod
    def info(self) -> dict[str, Any]:
        """Device, dtype, backends and memory, for the log, ``/server_info`` and the demo."""

    def metrics(self) -> dict[str, float]:
        """What it measured, by the names of ``/metrics``; histograms in the flat form of ``Histogram.flatten``."""
        return {}

    def start_profile(self, directory: str | None) -> None:
        """Start a profiler that writes to ``directory``. Raises ConfigError where there is none."""
        raise ConfigError(f"{type(self).__name__} has no profiler")

    def stop_profile(self) -> list[str]:
        """Stop it; paths of what it wrote. Raises ConfigError when none runs."""
        raise ConfigError(f"{type(self).__name__} has no profiler")

    def close(self) -> None:
        """Give all memory back."""
        return None
