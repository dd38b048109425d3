"""Collectives over one group of ranks; with one rank they return their argument."""

from __future__ import annotations

import torch
import torch.distributed as dist


class Communicator:
    """The ranks that share one dimension of parallelism, as one of them sees it.

    Args:
        rank: this process's place in the group.
        world_size: number of ranks; 1 means that every collective is the identity.
        group: torch's process group; required when ``world_size > 1``.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, group: dist.ProcessGroup | None = None):
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is outside a group of world_size {world_size}")
        if world_size > 1 and group is None:
            raise ValueError(f"a group of world_size {world_size} needs a process group")
        self.rank = rank
        self.world_size = world_size
        self.group = group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks; x itself, overwritten."""
        if self.world_size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The ranks' tensors (of equal shape) side by side along ``dim``, in rank order."""
        if self.world_size == 1:
            return x
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.world_size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim=dim)

    def __repr__(self) -> str:
        return f"Communicator(rank={self.rank}, world_size={self.world_size})"
