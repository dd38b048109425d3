"""Which ranks this process works with. Without ``init_distributed`` it works alone."""

from __future__ import annotations

import datetime
import logging

import torch.distributed as dist

from atom.distributed.communicator import Communicator
from atom.errors import ConfigError

log = logging.getLogger(__name__)

_ALONE = Communicator()
_tp_group = _ALONE


def init_distributed(
    rank: int, world_size: int, init_method: str, *, backend: str = "gloo", timeout_s: float = 600.0
) -> None:
    """Join ``world_size`` ranks into one tensor-parallel group. Blocks until all have joined.

    Args:
        init_method: where the ranks meet, e.g. ``tcp://127.0.0.1:29500`` or ``file:///path/not/yet/there``.
        backend: of torch.distributed; the platform names it (``Platform.communication_backend``).

    Raises:
        ConfigError: the rank does not fit the world size, or a group is joined already.
    """
    global _tp_group
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank: {rank} is not below world_size {world_size}")
    if _tp_group is not _ALONE:
        raise ConfigError(f"init_distributed: this process is already {_tp_group}")
    if world_size == 1:
        return
    dist.init_process_group(
        backend,
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    _tp_group = Communicator(rank, world_size, dist.group.WORLD)
    log.info("tensor parallel rank %d of %d joined over %s", rank, world_size, backend)


def destroy_distributed() -> None:
    """Leave the group; does nothing in a process that works alone."""
    global _tp_group
    if _tp_group is _ALONE:
        return
    left, _tp_group = _tp_group, _ALONE
    # NOTE: layers still refer to the communicator. Were it to keep torch's group, gloo's threads would be
    # torn down at the interpreter's end instead of here, which aborts the process now and then.
    left.group = None
    dist.destroy_process_group()


def get_tp_group() -> Communicator:
    """The tensor-parallel group that layers built now belong to."""
    return _tp_group


def shard_size(total: int, num_shards: int, what: str) -> int:
    """``total / num_shards``; a ConfigError that names ``what`` where it does not divide."""
    if total % num_shards:
        raise ConfigError(f"tensor_parallel_size: {num_shards} does not divide {what} {total}")
    return total // num_shards
