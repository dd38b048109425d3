"""The steps that a worker runs before it serves: the largest prefill, and a decode; their kernels come first."""

import time
from collections.abc import Callable, Iterable, Iterator

from atom.core import ScheduledBatch, Sequence
from atom.model_engine.runner.forward_pass import ForwardPass
from atom.sampling_params import SamplingParams
from atom.utils.logging import init_logger

logger = init_logger(__name__)


def compile_step_kernels(
    forward: ForwardPass, sizes: Iterable[int], rehearse_sampling: Callable[[], None]
) -> None:
    """Compile side by side what sampling launches, and fused decode steps of ``sizes`` sequences, not one by one."""
    from atom.kernels.triton.compile_ahead import compile_launches_of

    fused = forward.model.fused
    most = 0 if fused is None else fused.max_tokens

    def rehearse() -> None:
        rehearse_sampling()
        for size in sorted(set(sizes)):
            if size <= most:
                forward.rehearse(size, size, False)
                forward.run_rehearsed()

    began = time.monotonic()
    count = compile_launches_of(rehearse, forward.device)
    logger.info("%d kernels of decode steps and sampling ready in %.2f s", count, time.monotonic() - began)


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
