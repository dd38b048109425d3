"""The steps that a worker runs before it serves: the largest prefill, and a decode."""

from collections.abc import Iterator

from atom.core import ScheduledBatch, Sequence
from atom.sampling_params import SamplingParams


def warm_up_batches(num_tokens: int, block_size: int, num_groups: int) -> Iterator[ScheduledBatch]:
    """A prefill of ``num_tokens`` tokens in row 0, then a decode of that row.

    They use the first blocks of each group, which nobody owns yet and nobody will find: nothing is published.
    """
    seq = Sequence(0, [0] * num_tokens, SamplingParams(temperature=0.0), max_output_tokens=2)
    seq.row = 0
    num_blocks = -(-(num_tokens + 1) // block_size)
    patches = [[(0, column, column) for column in range(num_blocks)] for _ in range(num_groups)]
    yield _batch(seq, 0, num_tokens, 1, [seq], patches)
    yield _batch(seq, num_tokens, 1, 0, [], [[] for _ in range(num_groups)])


def _batch(
    seq: Sequence, start: int, count: int, num_prefill: int, new_seqs: list[Sequence], patches: list
) -> ScheduledBatch:
    return ScheduledBatch(
        step=0,
        seqs=[seq],
        epochs=[seq.epoch],
        rows=[seq.row],
        starts=[start],
        num_scheduled=[count],
        samples=[True],
        num_prefill_seqs=num_prefill,
        num_tokens=count,
        new_seqs=new_seqs,
        patches=patches,
    )
