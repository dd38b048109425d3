"""The steps that a worker runs before it serves: the largest prefill, and a decode; their kernels come first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from atom.config import CompilationLevel
from atom.core import ScheduledBatch, Sequence
from atom.model_engine.runner.forward_pass import ForwardPass
from atom.model_ops.linear import LinearBase
from atom.sampling_params import SamplingParams
from atom.utils.decorators import compilation_paused
from atom.utils.logging import init_logger

if TYPE_CHECKING:
    from atom.kernels.triton.compile_ahead import Recorder

logger = init_logger(__name__)

REHEARSED_PREFILLS = (256, 1024)  # tokens: kernels depend on few classes of the number
REHEARSED_DECODES = (1, 8, 32)  # and the largest: attention's kernels depend on few classes of it


@contextmanager
def kernels_ahead(
    forward: ForwardPass,
    decode_sizes: Iterable[int],
    prefill_tokens: int,
    level: CompilationLevel,
    sample: Callable[[], None],
) -> Iterator[Callable[[], object]]:
    """Let processes compile what steps will launch and Triton's folder does not have.

    Yields what waits for them. Without a device there is nothing to compile, nor to wait for.

    Args:
        decode_sizes: sequences of decode steps.
        prefill_tokens: of the largest prefill step.
        sample: launches what sampling may launch.
    """
    if forward.device.type != "cuda":
        yield lambda: None
        return
    from atom.kernels.triton.compile_ahead import KernelCompilation, Recorder, missing_kernels, recording

    began = time.monotonic()
    recorder = Recorder()
    try:
        # At level 1 any call of the model is traced, and there are no kernels in traces.
        runs_modules = level != CompilationLevel.DYNAMO_AS_IS
        record_launches(forward, recorder, decode_sizes, prefill_tokens, runs_modules)
        with recording(recorder):
            sample()
    except Exception as error:  # the steps that follow say it again
        logger.debug("not every launch is known ahead: %s: %s", type(error).__name__, error)
    jobs = missing_kernels(list(recorder.launches.values()))
    seconds = time.monotonic() - began
    logger.info(
        "kernels of steps: %d launches, %d to compile, found in %.2f s",
        len(recorder.launches),
        len(jobs),
        seconds,
    )
    del recorder
    with KernelCompilation(jobs) as compilation:
        yield compilation.wait


def record_launches(
    forward: ForwardPass,
    recorder: Recorder,
    decode_sizes: Iterable[int],
    prefill_tokens: int,
    runs_modules: bool = True,
) -> None:
    """Let ``recorder`` see what a prefill and decodes of these sizes launch, prefill first: it is needed first.

    ``runs_modules`` False: only what a fused decoder launches.
    """
    from atom.kernels.triton.compile_ahead import recording

    sizes, fused = sorted(set(decode_sizes)), forward.model.fused
    most = 0 if fused is None else fused.max_tokens
    if runs_modules and forward.supports_token_graph:  # otherwise attention reads what a rehearsal lacks
        with compilation_paused(forward.model):
            prefills = {*REHEARSED_PREFILLS, *forward.prefill_kernel_sizes()}
            for tokens in sorted({min(tokens, prefill_tokens) for tokens in prefills}):
                forward.rehearse(forward.prefill_bs(tokens), tokens, True)
                forward.run_modules(lambda: recording(recorder))
            by_modules = [size for size in sizes if size > most]
            for size in sorted({*by_modules[:1], *by_modules[-1:], *set(by_modules) & {*REHEARSED_DECODES}}):
                forward.rehearse(size, size, False)
                forward.run_modules(lambda: recording(recorder))
    with recording(recorder):
        for layer in forward.model.modules():
            if isinstance(layer, LinearBase):
                layer.kernel.rehearse(layer.packed, max([prefill_tokens, *sizes]))
        forward.rehearse_patches()
    for size in sizes:
        if size <= most:
            forward.rehearse(size, size, False)
            with recording(recorder):
                forward.run_rehearsed()


_FIRST_BLOCK_END = 15  # the upper bound of a decode row's position that the host knows


def warm_up_batches(num_tokens: int, block_size: int, num_groups: int) -> Iterator[ScheduledBatch]:
    """A prefill of ``num_tokens`` tokens in row 0, then a decode of that row.

    They use the first blocks of each group, which nobody owns yet and nobody will find: nothing is published.
    """
    seq = Sequence(0, [0] * num_tokens, SamplingParams(temperature=0.0), max_output_tokens=2)
    seq.row = 0
    num_blocks = -(-(num_tokens + 1) // block_size)
    patches = [[(0, column, column) for column in range(num_blocks)] for _ in range(num_groups)]
    yield _batch([seq], 0, num_tokens, 1, [seq], patches)
    last = num_blocks - 1  # said again, so that a decode step has patches too
    yield _batch([seq], num_tokens, 1, 0, [], [[(0, last, last)] for _ in range(num_groups)])


def decode_batch(num_rows: int, num_groups: int) -> ScheduledBatch:
    """A decode of rows 0 and on, each somewhere in a first block of its own: they have decoded and nothing else."""
    params = SamplingParams(temperature=0.0)
    seqs = [Sequence(row, [0], params, max_output_tokens=2) for row in range(num_rows)]
    for row, seq in enumerate(seqs):
        seq.row = row
    patches = [[(row, 0, row) for row in range(num_rows)] for _ in range(num_groups)]
    return _batch(seqs, _FIRST_BLOCK_END, 1, 0, seqs, patches)


def _batch(
    seqs: list[Sequence], start: int, count: int, num_prefill: int, new_seqs: list[Sequence], patches: list
) -> ScheduledBatch:
    return ScheduledBatch(
        step=0,
        seqs=seqs,
        epochs=[seq.epoch for seq in seqs],
        rows=[seq.row for seq in seqs],
        starts=[start] * len(seqs),
        num_scheduled=[count] * len(seqs),
        samples=[True] * len(seqs),
        num_prefill_seqs=num_prefill,
        num_tokens=count * len(seqs),
        new_seqs=new_seqs,
        patches=patches,
    )
