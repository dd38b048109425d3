"""A torch profiler that writes one gzip Chrome trace per recording."""

import os
import time
from typing import TYPE_CHECKING

from atom.utils import envs

if TYPE_CHECKING:
    from atom.platforms import Platform


class Profiler:
    """Records from ``start`` to ``stop``.

    Args:
        directory: created if missing; the trace goes into ``directory/name``.
        name: sub-folder of this rank, e.g. ``rank_0``.
    """

    def __init__(self, directory: str, name: str, platform: "Platform"):
        import torch

        self._folder = os.path.join(os.path.abspath(directory), name)
        os.makedirs(self._folder, exist_ok=True)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if platform.device_type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(
            activities=activities,
            record_shapes=envs.ATOM_PROFILER_RECORD_SHAPES,
            with_stack=envs.ATOM_PROFILER_WITH_STACK,
            profile_memory=envs.ATOM_PROFILER_PROFILE_MEMORY,
        )

    def start(self) -> None:
        self._profile.start()

    def stop(self) -> str:
        """End the recording; path of its trace."""
        self._profile.stop()
        path = os.path.join(self._folder, time.strftime("%Y%m%d-%H%M%S") + ".pt.trace.json.gz")
        self._profile.export_chrome_trace(path)
        return path
