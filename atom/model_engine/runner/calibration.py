"""How large the CPU's steps may be: measured once for a model on a machine, and kept in the cache folder.

What people notice is time: a prefill step stalls every stream while it runs, and a decode step is the pace of all
of them. So both are bounded in seconds, and a short calibration at the first start says how many tokens that is.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import atom.kernels
from atom.errors import ConfigError
from atom.utils.cache_folder import private_cache_folder
from atom.utils.logging import init_logger

logger = init_logger(__name__)

CHUNK_SECONDS = 0.2  # of a prefill step while streams wait for it, and of a decode step
IDLE_CHUNK_SECONDS = (
    0.8  # of a prefill step while nobody decodes; a request that arrives meanwhile waits as long
)
BUDGET_SECONDS = 0.4  # of the whole calibration; the step that is under way when it ends is finished
MAX_CHUNK_TOKENS = 2048  # what memory is planned for
DEFAULT_CHUNK_TOKENS = 256  # without a calibration
MIN_NUM_SEQS = 64  # a slow machine still batches: its decode steps cost little more than one sequence's
QUIET_SHARE = 0.7  # of the threads' time must have been ours for a measurement to be the last
_PREFILL_SIZES = (64, 128, 256, 512)
_DECODE_SIZES = (1, 16)
_DECODE_SHARE = 0.45
_DECODE_GROWTH = 0.35  # sixteen rows are expected to take 2.6 times as long as one: the weights are read once
# Chunks come from few sizes, so that a machine's mood does not choose another one at each calibration.
_CHUNK_SIZES = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
# Settings that change what a step costs; one that this version of the configuration lacks is left out.
KEY_FIELDS = (
    "lm_head_dtype",
    "cpu_weights",
    "gguf_dtype",
    "deterministic",
    "load_dummy",
    "kv_cache_block_size",
)
_FORMAT = 1
_FOLDER = "calibration"
_KERNELS = Path(atom.kernels.__file__).parent / "cpu"


@dataclass(frozen=True)
class StepTimes:
    """Measured steps, smallest first: (tokens of a prefill from position 0, seconds), (decoding rows, seconds).

    ``is_quiet``: nobody else used the cores meanwhile, so that it need not be repeated.
    """

    prefill: tuple[tuple[int, float], ...]
    decode: tuple[tuple[int, float], ...]
    is_quiet: bool = True

    def limits(self) -> "StepLimits":
        def largest(seconds: float) -> int:
            tokens = _within(self.prefill, seconds)
            return max((size for size in _CHUNK_SIZES if size <= tokens), default=_CHUNK_SIZES[0])

        rows = None
        if len(self.decode) > 1:
            rows = max(MIN_NUM_SEQS, int(_within(self.decode, CHUNK_SECONDS)))
        idle = max(DEFAULT_CHUNK_TOKENS, largest(IDLE_CHUNK_SECONDS))
        return StepLimits(largest(CHUNK_SECONDS), idle, rows)


@dataclass(frozen=True)
class StepLimits:
    """Tokens of a prefill step, tokens of one while nobody decodes, and sequences of a decode step."""

    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    idle_chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    num_seqs: int | None = None  # None: not known


def _within(measured: Sequence[tuple[int, float]], seconds: float) -> float:
    """The size whose step takes ``seconds``: straight lines between the sizes measured and beyond the last."""
    first_size, first_seconds = measured[0]
    if seconds <= first_seconds or len(measured) == 1:
        return first_size * seconds / max(first_seconds, 1e-9)
    pairs = list(zip(measured, measured[1:], strict=False))
    left, right = next((pair for pair in pairs if seconds <= pair[1][1]), pairs[-1])
    slope = (right[1] - left[1]) / (right[0] - left[0])
    # A second step that was no slower than the first says nothing of the slope: no better than in proportion.
    slope = max(slope, right[1] / right[0] / 2)
    return right[0] + (seconds - right[1]) / slope


def measure_steps(
    run_prefill: Callable[[int], None],
    run_decode: Callable[[int], None],
    *,
    max_tokens: int,
    max_rows: int,
    num_threads: int,
    clock: Callable[[], float] = time.perf_counter,
    cpu_clock: Callable[[], float] = time.process_time,
) -> StepTimes:
    """Run decode steps of growing size, then prefill steps, within about ``BUDGET_SECONDS``.

    Decode steps come first, at most three of them: no row has a position yet.

    A smaller one of either is run before, untimed. Sizes that would not end in time are left out, and those that
    are larger than the limits need.
    """
    began, cpu_began = clock(), cpu_clock()

    def timed(run: Callable[[int], None], size: int) -> float:
        start = clock()
        run(size)
        return max(clock() - start, 1e-9)

    def grow(
        run: Callable[[int], None], sizes: Sequence[int], until: float, growth: float
    ) -> tuple[tuple[int, float], ...]:
        run(max(1, sizes[0] // 4))  # what is done once
        found = [(sizes[0], timed(run, sizes[0]))]
        for size in sizes[1:]:
            last_size, last = found[-1]
            expected = last * (size / last_size) ** growth
            if last >= CHUNK_SECONDS or clock() - began + expected > until:
                break
            found.append((size, timed(run, size)))
        return tuple(found)

    rows = [n for n in _DECODE_SIZES if n <= max_rows]
    decode = grow(run_decode, rows, BUDGET_SECONDS * _DECODE_SHARE, _DECODE_GROWTH)
    sizes = [n for n in _PREFILL_SIZES if n <= max_tokens] or [max_tokens]
    prefill = grow(run_prefill, sizes, BUDGET_SECONDS, 1.0)
    used = (cpu_clock() - cpu_began) / (num_threads * max(clock() - began, 1e-9))
    return StepTimes(prefill, decode, used >= QUIET_SHARE)


def calibrated(key: Mapping[str, Any], measure: Callable[[], StepTimes]) -> StepTimes:
    """The times kept for ``key`` (JSON values), or those of ``measure``, which are then kept.

    Where others used the processor meanwhile, the next start measures once more, and the faster of both stays.
    A cache folder that cannot be used, and a file that cannot be read, cost a measurement and nothing else.
    """
    key = {"format": _FORMAT, **key}
    try:
        file = _file(key)
    except ConfigError as error:
        logger.warning("step times are not kept: %s", error)
        return measure()
    kept = _read(file, key)
    if kept is not None and kept.is_quiet:
        return kept
    times = measure()
    if kept is not None:
        times = StepTimes(_faster(kept.prefill, times.prefill), _faster(kept.decode, times.decode))
    _write(file, key, times)
    return times


def _faster(
    left: tuple[tuple[int, float], ...], right: tuple[tuple[int, float], ...]
) -> tuple[tuple[int, float], ...]:
    """The one that reached the larger size, or was faster there."""
    return max(left, right, key=lambda times: (times[-1][0], -times[-1][1]))


def _file(key: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return private_cache_folder(_FOLDER) / f"{digest}.json"


def _read(file: Path, key: Mapping[str, Any]) -> StepTimes | None:
    try:
        found = json.loads(file.read_text())
        if found["key"] != key:
            return None
        return StepTimes(_pairs(found["prefill"]), _pairs(found["decode"]), bool(found["is_quiet"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _pairs(found: list[list[float]]) -> tuple[tuple[int, float], ...]:
    pairs = tuple((int(size), float(seconds)) for size, seconds in found)
    if not pairs or any(size < 1 or not 0 < seconds < 3600 for size, seconds in pairs):
        raise ValueError(f"not step times: {found}")
    return pairs


def _write(file: Path, key: Mapping[str, Any], times: StepTimes) -> None:
    fresh = file.with_name(f".{file.name}-{os.getpid()}")
    try:
        facts = {"prefill": times.prefill, "decode": times.decode, "is_quiet": times.is_quiet}
        fresh.write_text(json.dumps({"key": key, **facts}))
        fresh.replace(file)
    except OSError as error:
        logger.warning("step times cannot be written to %s: %s", file, error.strerror or error)


def sources_stamp() -> str:
    """Changes with the CPU kernels of this installation: their files' names, sizes and times."""
    facts = []
    for file in sorted(_KERNELS.rglob("*.*")):
        if file.suffix in (".py", ".c", ".h"):
            status = file.stat()
            facts.append(f"{file.relative_to(_KERNELS)} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def half_chunk_depth(groups: Sequence[tuple[int, int | None]], num_block_weights: int, width: int) -> int:
    """The position at which a token costs twice what it costs at 0, attention being what grows; 0: never.

    Args:
        groups: (layers, window) of each cache group; a window's keys do not grow in number.
        num_block_weights: elements of the products of all layers.
        width: query heads x head dimension.

    Attention is taken to run at half the rate of the products, as measured on the CPU.
    """
    layers = sum(count for count, window in groups if window is None)
    return num_block_weights // (4 * layers * width) if layers else 0
