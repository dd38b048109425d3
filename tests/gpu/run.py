"""The tests that need a GPU, side by side: ``python -m tests.gpu.run [paths or node ids]``, as ``make gpu-test`` does.

Most of their time is compilation, which keeps one core busy and the GPU idle. So the selection is cut into groups of
neighbouring tests, which share what they compile, and as many groups run at once as cores and memory allow, each in
its own pytest process. Needs pytest and what the tests import, no plugin of pytest.

Exit status: 0 all passed, 1 some failed, 2 no GPU or nothing could be collected, 5 nothing ran.
"""

import os
import queue
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from atom.errors import ConfigError
from atom.kernels.cpu.native.build import BuildError, Target, build_library
from atom.platforms import get_platform
from atom.platforms.cpu import cpu_facts, num_usable_cpus
from atom.utils import envs

ROOT = Path(__file__).parents[2]
SELECTION = (
    "tests/gpu",
    "tests/kernels/test_triton_attention.py",
    "tests/kernels/test_triton_decode.py",
    "tests/kernels/test_triton_fused.py",
    "tests/kernels/test_triton_sampling.py",
)
# Tests of a group, fewer where one compiles for long; those groups start first.
TESTS_A_GROUP = {
    "test_cuda_compile.py": 1,
    "test_cuda_structured_output.py": 3,
    "test_cuda_levels.py": 4,
    "test_cuda_engine.py": 6,
    "test_cuda_decode.py": 8,
    "test_triton_decode.py": 14,
    "test_triton_attention.py": 15,
}
OTHER_TESTS_A_GROUP = 16
# What a group may take: a head of 128,256 x 4,096 in fp32 and bf16, and what torch keeps.
DEVICE_BYTES = 8 << 30
HOST_BYTES = 4 << 30
GROUP_TIMEOUT_S = 420
ENVIRONMENT = {
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # whatever is installed there: no plugin is needed
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # a process has its share of the cores, and no more
}
NUM_SLOWEST = 10


@dataclass(frozen=True, slots=True)
class Group:
    """Tests of one file that run in one process, in their order."""

    name: str
    ids: list[str]

    @property
    def file(self) -> str:
        return self.ids[0].split("::")[0]


@dataclass(slots=True)
class Result:
    """How a group ended; times in seconds, ``start`` since the first group's."""

    group: Group
    start: float
    seconds: float
    output: str
    failure: str = ""  # why the process as a whole failed; empty: it reported its tests
    num_passed: int = 0
    num_skipped: int = 0
    failed: list[str] = field(default_factory=list)  # test and first line of its message
    durations: list[tuple[float, str]] = field(default_factory=list)

    @property
    def has_failed(self) -> bool:
        return bool(self.failed or self.failure)

    def line(self) -> str:
        counts = [(self.num_passed, "passed"), (len(self.failed), "failed"), (self.num_skipped, "skipped")]
        text = self.failure or ", ".join(f"{n} {what}" for n, what in counts if n) or "nothing ran"
        slowest = max(self.durations, default=None)
        most = f" ({slowest[0]:.1f} s {slowest[1]})" if slowest else ""
        return f"{self.start:4.0f} s + {self.seconds:5.1f} s  {self.group.name}: {text}{most}"


def cut(ids: Sequence[str]) -> list[Group]:
    """Groups of neighbouring tests of one file, those of slow tests first."""
    by_file: dict[str, list[str]] = {}
    for test_id in ids:
        by_file.setdefault(test_id.split("::")[0], []).append(test_id)

    def limit(file: str) -> int:
        return TESTS_A_GROUP.get(Path(file).name, OTHER_TESTS_A_GROUP)

    groups = []
    for file, own in sorted(by_file.items(), key=lambda item: limit(item[0])):
        count = -(-len(own) // limit(file))
        for i in range(count):
            part = own[len(own) * i // count : len(own) * (i + 1) // count]
            groups.append(Group(file if count == 1 else f"{file} {i + 1}/{count}", part))
    return groups


def pytest_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]


def collect(selection: Sequence[str]) -> list[str]:
    """Node ids of the selected tests. Raises RuntimeError with pytest's words when there are none."""
    command = pytest_command("-o", "addopts=", "--collect-only", "-q", "--disable-warnings", *selection)
    done = subprocess.run(command, cwd=ROOT, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    ids = [line for line in done.stdout.splitlines() if line.split("::")[0].endswith(".py") and "::" in line]
    if done.returncode or not ids:
        raise RuntimeError(done.stdout + done.stderr)
    return ids


def build_cpu_kernels() -> None:
    """Build what tests that compare with the CPU need, on all cores; groups would wait for one of them to do so."""
    if envs.ATOM_CPU_NATIVE:
        with suppress(BuildError, ConfigError, OSError):  # groups say why, and do without
            build_library(Target.of(cpu_facts()))


def run_group(
    group: Group, folder: Path, begun: float, timeout: float, running: list[subprocess.Popen]
) -> Result:
    """Run a group to its end, or kill it after ``timeout`` seconds. It is in ``running`` meanwhile."""
    start = time.monotonic()
    report = folder / "report.xml"
    arguments = [f"--basetemp={folder / 'tmp'}", f"--junit-xml={report}", "--durations=5"]
    environment = os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    process = subprocess.Popen(
        pytest_command(*arguments, *group.ids), cwd=ROOT, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    running.append(process)
    failure = ""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill([process])
        output, _ = process.communicate()
        failure = f"killed after {timeout:.0f} s"
    running.remove(process)
    result = Result(group, start - begun, time.monotonic() - start, output, failure)
    if not failure and not report.exists():
        result.failure = f"its process ended with status {process.returncode} before it reported"
    if report.exists():
        read_report(report, result)
    if process.returncode and not result.has_failed:
        result.failure = f"pytest ended with status {process.returncode}"
    return result


def read_report(report: Path, result: Result) -> None:
    """Take over outcomes and times from a JUnit report."""
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("name", "")
        result.durations.append((float(case.get("time", 0)), name))
        bad = [part for part in case if part.tag in ("failure", "error")]
        if bad:
            lines = bad[0].get("message", "").splitlines()
            result.failed.append(f"{result.group.file}::{name}: {lines[0] if lines else bad[0].tag}")
        elif case.find("skipped") is not None:
            result.num_skipped += 1
        else:
            result.num_passed += 1


def kill(processes: Sequence[subprocess.Popen]) -> None:
    """End processes with all that they started."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def run_groups(groups: Sequence[Group], num_processes: int, timeout: float = GROUP_TIMEOUT_S) -> list[Result]:
    """Run the groups, ``num_processes`` at a time, each on its own cores; prints how each ended, and why.

    A group that takes more than ``timeout`` seconds has failed. Interrupted, it ends what it started.
    """
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, num_usable_cpus() // num_processes)
    sets: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    for i in range(num_processes):
        first = len(cores) * i // num_processes
        sets.put(cores[first : first + share])

    def pin() -> None:
        os.sched_setaffinity(0, sets.get())  # of this thread, and of what it starts

    results: list[Result] = []
    running: list[subprocess.Popen] = []
    with (
        tempfile.TemporaryDirectory(prefix="gpu-test-") as root,
        ThreadPoolExecutor(num_processes, initializer=pin) as pool,
    ):
        begun = time.monotonic()
        runs = []
        for i, group in enumerate(groups):
            folder = Path(root) / str(i)
            folder.mkdir()
            runs.append(pool.submit(run_group, group, folder, begun, timeout, running))
        try:
            for run in as_completed(runs):
                result = run.result()
                results.append(result)
                if result.has_failed:
                    print(f"\n{'=' * 20} {result.group.name}\n{result.output}")
                print(f"[{len(results):2}/{len(groups)}] {result.line()}", flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            kill(running)
            raise
    return results


def summarize(results: Sequence[Result], seconds: float) -> int:
    """Print slowest groups and tests, and what failed. Returns the exit status."""
    print("\nslowest groups (start + duration):")
    for result in sorted(results, key=lambda result: -result.seconds)[:NUM_SLOWEST]:
        print("  " + result.line())
    print("slowest tests:")
    durations = [(s, f"{r.group.file}::{name}") for r in results for s, name in r.durations]
    for duration, name in sorted(durations, reverse=True)[:NUM_SLOWEST]:
        print(f"  {duration:6.1f} s  {name}")
    failed = [line for result in results for line in result.failed]
    broken = [f"{result.group.name}: {result.failure}" for result in results if result.failure]
    for line in failed + broken:
        print(f"FAILED {line}")
    num_passed = sum(result.num_passed for result in results)
    num_skipped = sum(result.num_skipped for result in results)
    counts = f"{num_passed} passed, {len(failed)} failed, {num_skipped} skipped, {len(broken)} groups broken"
    print(f"{counts}: {len(results)} groups in {seconds:.0f} s")
    if failed or broken:
        return 1
    return 0 if num_passed else 5


def num_processes_for(num_groups: int, num_cores: int, device_bytes: int, host_bytes: int) -> int:
    """As many as there are cores, and as the free memory of device and host has room for."""
    return max(1, min(num_groups, num_cores, device_bytes // DEVICE_BYTES, host_bytes // HOST_BYTES))


def main(arguments: Sequence[str]) -> int:
    import torch

    if not torch.cuda.is_available():
        print(
            f"no GPU that torch {torch.__version__} can use: nothing was tested (make test runs what needs none)"
        )
        return 2
    begun = time.monotonic()
    try:
        with ThreadPoolExecutor(1) as pool:
            built = pool.submit(build_cpu_kernels)
            groups = cut(collect(arguments or SELECTION))
    except RuntimeError as error:
        print(f"nothing was collected:\n{error}")
        return 2
    built.result()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    free = torch.cuda.mem_get_info()[0], get_platform("cpu").free_memory()
    num_processes = num_processes_for(len(groups), num_usable_cpus(), *free)
    num_tests = sum(len(group.ids) for group in groups)
    print(f"{num_tests} tests in {len(groups)} groups, {num_processes} at a time", flush=True)
    return summarize(run_groups(groups, num_processes), time.monotonic() - begun)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
