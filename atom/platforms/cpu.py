"""The CPU platform: memory within the cgroup, physical cores, and what its instruction sets are good for."""

from __future__ import annotations

import os
import platform as host
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from atom.platforms.interface import Platform, check_feature

if TYPE_CHECKING:
    import torch

_CGROUP = Path("/sys/fs/cgroup")
_CPUINFO = Path("/proc/cpuinfo")
_MEMINFO = Path("/proc/meminfo")


class CpuPlatform(Platform):
    name = "cpu"
    device_type = "cpu"
    communication_backend = "gloo"
    attention_backends = ("cpu_native", "cpu_paged", "reference")

    def is_available(self) -> bool:
        return True

    def describe(self) -> dict[str, str]:
        cpu = cpu_facts()
        isa = [f for f in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16") if f in cpu.flags]
        gib = 1 << 30
        return {
            "device": cpu.model_name,
            "cores": f"{num_physical_cores()} physical, {num_usable_cpus()} usable logical",
            "memory": f"{self.total_memory() / gib:.1f} GiB, {self.free_memory() / gib:.1f} GiB free",
            "instruction sets": " ".join(isa) or "baseline",
        }

    def supports(self, feature: str) -> bool:
        check_feature(feature)
        if feature == "fast_bf16_matmul":
            return cpu_facts().has_fast_bf16
        return feature in ("bf16", "int8_matmul")

    def total_memory(self, index: int = 0) -> int:
        limit = _cgroup_limit()
        physical = _meminfo("MemTotal")
        return physical if limit is None else min(physical, limit)

    def free_memory(self, index: int = 0) -> int:
        available = _meminfo("MemAvailable")
        limit = _cgroup_limit()
        return available if limit is None else max(0, min(available, limit - _cgroup_used()))

    @property
    def default_num_threads(self) -> int:
        return min(num_physical_cores(), num_usable_cpus())

    def device(self, index: int = 0) -> torch.device:
        import torch

        return torch.device("cpu")  # no index: torch.device("cpu", 0) != torch.device("cpu")


class CpuFacts:
    """What ``/proc/cpuinfo`` says of the first processor."""

    def __init__(self, text: str):
        fields: dict[str, str] = {}
        for line in text.splitlines():
            key, colon, value = line.partition(":")
            if colon:
                fields.setdefault(key.strip(), value.strip())
        self.model_name = fields.get("model name") or host.processor() or host.machine() or "unknown CPU"
        self.machine = host.machine()
        self.vendor = fields.get("vendor_id", "")
        self.flags = frozenset((fields.get("flags") or fields.get("Features") or "").split())

    @property
    def has_fast_bf16(self) -> bool:
        """Whether a wide bf16 product beats fp32 here.

        AMX tiles and AMD's AVX512-BF16 double the rate of fp32 or better. Intel cores without AMX issue
        ``vdpbf16ps`` at half rate: measured 170 GFLOP/s against 280 in fp32 on two cores of model 207.
        """
        if "amx_bf16" in self.flags:
            return True
        if "avx512_bf16" in self.flags:
            return self.vendor == "AuthenticAMD"
        return "bf16" in self.flags and "i8mm" in self.flags  # Arm v8.6


@cache
def cpu_facts() -> CpuFacts:
    try:
        return CpuFacts(_CPUINFO.read_text())
    except OSError:
        return CpuFacts("")


def num_usable_cpus() -> int:
    """Logical CPUs that this process may run on, within its affinity mask and the cgroup's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        if quota != "max":
            count = min(count, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return count


@cache
def num_physical_cores() -> int:
    """Cores, counting hyper-threads once, among those this process may run on."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = set()
    for cpu in allowed:
        try:
            topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
            cores.add(topology.read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return max(1, len(cores))


def _meminfo(field: str) -> int:
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_MEMINFO} has no {field}")


def _own_cgroup() -> Path:
    """The deepest memory-limited cgroup that contains this process (v2), or the root."""
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                path = _CGROUP / line[3:].lstrip("/")
                if (path / "memory.max").exists():
                    return path
    except OSError:
        pass
    return _CGROUP


def _cgroup_limit() -> int | None:
    for name in (_own_cgroup() / "memory.max", _CGROUP / "memory" / "memory.limit_in_bytes"):
        try:
            text = name.read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 1 << 60:  # v1 spells "no limit" as a huge number
            return int(text)
    return None


def _cgroup_used() -> int:
    """Bytes charged to the cgroup that cannot simply be dropped: page cache of files is not counted."""
    for folder, current, stat, key in (
        (_own_cgroup(), "memory.current", "memory.stat", "inactive_file"),
        (_CGROUP / "memory", "memory.usage_in_bytes", "memory.stat", "total_inactive_file"),
    ):
        try:
            used = int((folder / current).read_text())
            for line in (folder / stat).read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == key:
                    used -= int(value)
            return max(0, used)
        except (OSError, ValueError):
            continue
    return 0
