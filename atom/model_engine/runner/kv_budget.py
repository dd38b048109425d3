"""How many KV blocks fit, decided before a weight is read, and explained in a table when they do not.

The budget is what the KV cache alone may use: ``--kv-cache-memory`` where given; on a device, the share
``--gpu-memory-utilization`` of its memory, on the CPU ``CPU_SHARE`` of the free RAM, each less weights, activations,
what recorded graphs hold and what fused decode steps write. Every group first gets what one request of
``max_model_len`` needs; the rest is divided so that the groups run full together.
"""

import math
from dataclasses import dataclass, replace

from atom.core import CacheGroupSpec, GroupKind
from atom.errors import CacheBudgetError

CPU_SHARE = 0.4  # of free RAM; the rest stays with the operating system and the front end
DEVICE_RESERVE = 0.02  # of a device's memory, for what the allocator loses
MIN_SLIDING_SHARE = 0.25  # of the full group's tokens: short requests use both groups alike
MIN_CONTEXT = 128  # a context that had to be lowered below this is of no use


@dataclass(frozen=True)
class MemoryFacts:
    """What is known about memory before weights load; bytes."""

    device: str  # "cpu" or a device's name
    total: int
    free: int
    weights: int
    activations: int
    graphs: int = 0  # an upper estimate of what recorded graphs will hold
    buffers: int = 0  # of fused decode steps

    @property
    def taken(self) -> int:
        return self.weights + self.activations + self.graphs + self.buffers


@dataclass(frozen=True)
class CacheLimits:
    """What the cache has to serve."""

    block_size: int
    max_model_len: int
    max_model_len_is_explicit: bool
    max_num_seqs: int
    chunk_tokens: int  # the largest prefill step
    kv_cache_memory: int | None  # --kv-cache-memory
    gpu_memory_utilization: float | None  # None on the CPU


@dataclass(frozen=True)
class CachePlan:
    """Cache groups with their block counts, the context length that they prove, and the budget in bytes."""

    groups: list[CacheGroupSpec]
    max_model_len: int
    budget: int
    num_tokens: int  # KV positions of the full group (or of the smallest one)


def plan_cache(groups: list[CacheGroupSpec], facts: MemoryFacts, limits: CacheLimits) -> CachePlan:
    """Divide the budget among the groups.

    Raises CacheBudgetError when one request of the context length does not fit: always when the length was
    asked for, else only when less than ``MIN_CONTEXT`` tokens would fit (the length is lowered otherwise).
    """
    budget = _budget(facts, limits)
    max_model_len = limits.max_model_len
    if _floor_bytes(groups, limits, max_model_len) > budget:
        fitting = _longest_context(groups, limits, budget)
        if limits.max_model_len_is_explicit or fitting < min(MIN_CONTEXT, max_model_len):
            raise CacheBudgetError(_explain(groups, facts, limits, budget, fitting))
        max_model_len = fitting
    floors = [_floor_blocks(group, limits, max_model_len) for group in groups]
    left = budget - sum(n * group.bytes_per_block for n, group in zip(floors, groups, strict=True))
    shares = [_share(group, limits, max_model_len) for group in groups]
    per_unit = sum(share * group.bytes_per_block for share, group in zip(shares, groups, strict=True))
    units = left / per_unit if per_unit else 0.0
    planned = []
    for group, floor, share in zip(groups, floors, shares, strict=True):
        most = limits.max_num_seqs * _floor_blocks(group, limits, max_model_len)
        planned.append(replace(group, num_blocks=min(floor + int(units * share), max(most, floor))))
    paged = [g.num_blocks for g in planned if g.kind is GroupKind.FULL] or [g.num_blocks for g in planned]
    return CachePlan(planned, max_model_len, budget, min(paged) * limits.block_size)


def with_block_count(plan: CachePlan, num_blocks: int, limits: CacheLimits) -> CachePlan:
    """``--num-kvcache-blocks`` as given, for every paged group, and the context that it can hold."""
    groups = [
        group if group.kind is GroupKind.STATE else replace(group, num_blocks=num_blocks)
        for group in plan.groups
    ]
    tokens = num_blocks * limits.block_size
    return replace(plan, groups=groups, num_tokens=tokens, max_model_len=min(plan.max_model_len, tokens))


def _budget(facts: MemoryFacts, limits: CacheLimits) -> int:
    if limits.kv_cache_memory is not None:
        return limits.kv_cache_memory
    if limits.gpu_memory_utilization is None:
        return max(0, int((facts.free - facts.taken) * CPU_SHARE))
    allowed = facts.total * (limits.gpu_memory_utilization - DEVICE_RESERVE)
    return max(0, int(min(allowed, facts.free) - facts.taken))


def _floor_blocks(group: CacheGroupSpec, limits: CacheLimits, max_model_len: int) -> int:
    """Blocks that one request of ``max_model_len`` holds at once."""
    if group.kind is GroupKind.STATE:
        return 1
    tokens = max_model_len
    if group.kind is GroupKind.SLIDING:
        # While a chunk runs, its own tokens and the window before it; both ends may cut a block.
        tokens = min(tokens, group.window + limits.chunk_tokens + 2 * limits.block_size)
    return math.ceil(tokens / limits.block_size) + 1


def _share(group: CacheGroupSpec, limits: CacheLimits, max_model_len: int) -> float:
    if group.kind is GroupKind.STATE:
        return limits.block_size / max_model_len
    if group.kind is GroupKind.SLIDING:
        return min(1.0, max(MIN_SLIDING_SHARE, (group.window + limits.chunk_tokens) / max_model_len))
    return 1.0


def _floor_bytes(groups: list[CacheGroupSpec], limits: CacheLimits, max_model_len: int) -> int:
    return sum(_floor_blocks(group, limits, max_model_len) * group.bytes_per_block for group in groups)


def _longest_context(groups: list[CacheGroupSpec], limits: CacheLimits, budget: int) -> int:
    """The longest context, in whole blocks, of which one request fits into ``budget``; 0 if none does."""
    low, high = 0, limits.max_model_len // limits.block_size
    while low < high:
        middle = (low + high + 1) // 2
        if _floor_bytes(groups, limits, middle * limits.block_size) <= budget:
            low = middle
        else:
            high = middle - 1
    return low * limits.block_size


def format_bytes(n: float) -> str:
    """``n`` bytes for a person: 1.50 GiB, 320 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024 or unit == "GiB":
            return f"{n:.2f} {unit}" if unit == "GiB" else f"{n:.0f} {unit}"
        n /= 1024
    raise AssertionError("unreachable")


def _explain(
    groups: list[CacheGroupSpec], facts: MemoryFacts, limits: CacheLimits, budget: int, fitting: int
) -> str:
    need = _floor_bytes(groups, limits, limits.max_model_len)
    per_token = sum(g.bytes_per_block for g in groups if g.kind is not GroupKind.STATE) / limits.block_size
    rows = [
        (f"total memory ({facts.device})", format_bytes(facts.total)),
        ("free memory", format_bytes(facts.free)),
        ("weights", format_bytes(facts.weights)),
        ("activations", format_bytes(facts.activations)),
        *([("recorded graphs", format_bytes(facts.graphs))] if facts.graphs else []),
        *([("decode steps' buffers", format_bytes(facts.buffers))] if facts.buffers else []),
        ("KV cache per token", format_bytes(per_token)),
        ("KV cache budget", format_bytes(budget)),
        (f"one request of {limits.max_model_len} tokens", format_bytes(need)),
    ]
    width = max(len(name) for name, _ in rows)
    table = "\n".join(f"  {name:<{width}}  {value:>10}" for name, value in rows)
    return (
        f"the KV cache cannot hold one request of {limits.max_model_len} tokens:\n{table}\n"
        f"What would fit: {'; '.join(_remedies(facts, limits, need, fitting))}"
    )


def _remedies(facts: MemoryFacts, limits: CacheLimits, need: int, fitting: int) -> list[str]:
    remedies = []
    used = facts.taken
    if need + used <= facts.free:
        mib = math.ceil(need / 2**20)
        remedies.append(f"--kv-cache-memory {mib}MiB")
        if limits.gpu_memory_utilization is not None and limits.kv_cache_memory is None:
            share = math.ceil(((need + used) / facts.total + DEVICE_RESERVE) * 100) / 100
            if share <= 1:
                remedies.append(f"--gpu-memory-utilization {share:.2f}")
    if fitting >= MIN_CONTEXT:
        remedies.append(f"--max-model-len {fitting}")
    if not remedies:
        remedies.append("nothing on this device: free memory binds, raising a share will not help")
    return remedies
