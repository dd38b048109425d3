"""Waiting out the NCCL watchdog before a device graph is captured.

torch's watchdog thread polls an event of every eager collective until that is done. A collective that is being
captured joins its NCCL stream into the capture; if the watchdog then polls an event of that stream, the poll fails
and the capture is void. Synchronising the device does not help: the watchdog forgets finished work at its own pace.
"""

import time

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

# Several passes of the watchdog (0.1 s apart), for a group that cannot be asked.
WATCHDOG_WAIT_S = 0.5


def drain_nccl_works() -> None:
    """Return when the watchdog has no eager NCCL work left in any group of this rank. Every capture begins with it.

    Returns at once in a process without NCCL groups. Not to be called while capturing: it synchronises the device.
    """
    groups = _nccl_groups()
    if not groups:
        return
    torch.cuda.synchronize()
    has_waited = [_wait(group) for group in groups]
    if not all(has_waited):
        time.sleep(WATCHDOG_WAIT_S)


def _nccl_groups() -> list[dist.ProcessGroup]:
    if not (dist.is_available() and dist.is_initialized()):
        return []
    backends = distributed_c10d._world.pg_backend_config  # group -> such as "cpu:gloo,cuda:nccl"
    return [group for group, names in backends.items() if "nccl" in str(names).lower()]


def _wait(group: dist.ProcessGroup) -> bool:
    """Whether the group could tell that the watchdog is done with its work (RCCL is called NCCL too)."""
    wait = getattr(group, "_wait_for_pending_works", None)
    if wait is None:
        return False
    try:
        wait()
    except RuntimeError:  # the group's default backend is another one
        return False
    return True
