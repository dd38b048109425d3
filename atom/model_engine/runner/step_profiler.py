"""What a runner does for traces: record them on request, name its steps, and mark modules (``--mark-trace``)."""

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn

from atom.config import Config
from atom.errors import ConfigError
from atom.platforms import Platform
from atom.runtime.annotations import ModuleRanges, StepAnnotations
from atom.runtime.profiler import Profiler, capture_trace, rank_folder
from atom.utils.logging import init_logger

logger = init_logger(__name__)


class StepProfiler:
    """One runner's profiler. While nothing is recorded, a step pays for one attribute.

    Args:
        rank: of this runner among those of its engine.
    """

    def __init__(self, config: Config, platform: Platform, rank: int = 0):
        parallel = config.parallel_config
        dp_rank = parallel.data_parallel_rank if parallel.data_parallel_size > 1 else None
        self._directory = config.torch_profiler_dir
        self._marks = config.mark_trace
        self._platform = platform
        self._rank = rank
        self._folder_name = rank_folder(rank, dp_rank)
        self._annotations = StepAnnotations()
        self.step = self._annotations.step  # what a step runs in, so that traces name it
        self._model: weakref.ref[nn.Module] | None = None  # a closed runner gives its weights back
        self._ranges: ModuleRanges | None = None  # while something is recorded
        self._recording: Profiler | None = None

    def watch(self, model: nn.Module, *, is_compiled: bool = False) -> None:
        """Mark the modules of ``model`` in every trace, if ``--mark-trace`` asks for it; once it is loaded."""
        if not self._marks:
            return
        if not self._directory:
            logger.warning("--mark-trace: graphs leave no trace, for --torch-profiler-dir names no folder")
        if is_compiled:
            logger.warning("--mark-trace: compiled code has no modules to mark; steps and graphs are")
            return
        self._model = weakref.ref(model)

    def start(self, directory: str | None = None) -> None:
        """Record from now on. Raises ConfigError: it is recording, or no folder is known."""
        if self._recording is not None:
            raise ConfigError("a profile is already being recorded")
        directory = directory or self._directory
        if not directory:
            raise ConfigError(
                "torch_profiler_dir (ATOM_TORCH_PROFILER_DIR) must name a folder for the traces"
            )
        self._recording = Profiler(directory, self._folder_name, self._platform)
        self._recording.start()
        self._annotations.start()
        self._start_ranges()

    def stop(self) -> list[str]:
        """End the recording; paths of its traces. Raises ConfigError when there is none."""
        if self._recording is None:
            raise ConfigError("no profile is being recorded")
        recording, self._recording = self._recording, None
        self._annotations.stop()
        self._stop_ranges()
        return [recording.stop()]

    def capture(self, batch_size: int, query_len: int) -> AbstractContextManager[Any]:
        """What the warm-up and the capture of one graph run in: traced where ``--mark-trace`` asks for it.

        A trace that is being recorded, for graphs may come while the engine serves, holds it anyway.
        """
        if not (self._marks and self._directory) or self._recording is not None:
            return nullcontext()
        return self._traced_capture(self._directory, batch_size, query_len)

    @contextmanager
    def _traced_capture(self, directory: str, batch_size: int, query_len: int) -> Iterator[None]:
        with capture_trace(
            directory, self._platform, batch_size=batch_size, query_len=query_len, rank=self._rank
        ):
            self._start_ranges()
            try:
                yield
            finally:
                self._stop_ranges()

    def _start_ranges(self) -> None:
        model = self._model() if self._model is not None else None
        if model is not None:
            self._ranges = ModuleRanges(model)
            self._ranges.start()

    def _stop_ranges(self) -> None:
        if self._ranges is not None:
            self._ranges.stop()
            self._ranges = None
