"""A torch profiler that writes gzip Chrome traces: of a span that a person asks for, of one recorded graph."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from atom.utils import envs

if TYPE_CHECKING:
    from atom.platforms import Platform


class Profiler:
    """Records from ``start`` to ``stop``.

    Args:
        directory: created if missing; the trace goes into ``directory/name``.
        name: sub-folder of this rank, of ``rank_folder``.
    """

    def __init__(self, directory: str, name: str, platform: "Platform"):
        self._folder = os.path.join(os.path.abspath(directory), name)
        os.makedirs(self._folder, exist_ok=True)
        self._profile = _new_profile(platform)

    def start(self) -> None:
        self._profile.start()

    def stop(self) -> str:
        """End the recording; path of its trace."""
        self._profile.stop()
        now = time.time()
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now)) + f"-{int(now * 1000) % 1000:03d}"
        path = os.path.join(self._folder, stamp + ".pt.trace.json.gz")
        self._profile.export_chrome_trace(path)
        return path


def rank_folder(rank: int, dp_rank: int | None = None) -> str:
    """``rank_<r>``, or ``dp<d>_tp<r>`` where several engines share the directory."""
    return f"rank_{rank}" if dp_rank is None else f"dp{dp_rank}_tp{rank}"


@contextmanager
def capture_trace(
    directory: str, platform: "Platform", *, batch_size: int, query_len: int, rank: int
) -> Iterator[None]:
    """Record the warm-up and the capture of one graph into ``capture_traces`` below ``directory``.

    Kernels of a replay carry no names of modules; this trace tells which kernels belong to which.
    The file is ``bs_<batch size>_q_<query tokens a sequence>_rank<rank>.json.gz``.
    """
    folder = os.path.join(os.path.abspath(directory), "capture_traces")
    os.makedirs(folder, exist_ok=True)
    with _new_profile(platform) as profile:
        yield
    profile.export_chrome_trace(os.path.join(folder, f"bs_{batch_size}_q_{query_len}_rank{rank}.json.gz"))


def _new_profile(platform: "Platform") -> Any:
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU]
    if platform.device_type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(
        activities=activities,
        record_shapes=envs.ATOM_PROFILER_RECORD_SHAPES,
        with_stack=envs.ATOM_PROFILER_WITH_STACK,
        profile_memory=envs.ATOM_PROFILER_PROFILE_MEMORY,
    )
