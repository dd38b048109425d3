"""What the engine measures of its steps; pushed to the front end as plain numbers, exported by ``/metrics``."""

from atom.core import ScheduledBatch
from atom.runtime.histogram import Histogram

BATCH_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
TOKEN_BOUNDS = tuple(4**power for power in range(2, 10))  # 16 to 262,144
CONTEXT_BOUNDS = tuple(4**power for power in range(2, 13))  # to 16,777,216


class StepMetrics:
    """Histograms over scheduled steps. ``observe`` costs a few microseconds and runs once a step."""

    def __init__(self) -> None:
        self.decode_batch_size = Histogram(BATCH_BOUNDS)
        self.decode_context_tokens = Histogram(CONTEXT_BOUNDS)
        self.prefill_request_tokens = Histogram(TOKEN_BOUNDS)
        self.prefill_batch_tokens = Histogram(TOKEN_BOUNDS)
        self.prefill_context_tokens = Histogram(CONTEXT_BOUNDS)

    def observe(self, batch: ScheduledBatch) -> None:
        num_prefill, num_seqs = batch.num_prefill_seqs, len(batch.seqs)
        if num_prefill:
            counts = batch.num_scheduled[:num_prefill]
            num_tokens = sum(counts)
            self.prefill_request_tokens.observe_all(counts)
            self.prefill_batch_tokens.observe(num_tokens)
            self.prefill_context_tokens.observe(sum(batch.starts[:num_prefill]) + num_tokens)
        if num_seqs > num_prefill:
            starts = batch.starts[num_prefill:] if num_prefill else batch.starts
            self.decode_batch_size.observe(num_seqs - num_prefill)
            self.decode_context_tokens.observe(sum(starts) + num_seqs - num_prefill)

    def values(self) -> dict[str, float]:
        """All of it in the flat form of ``Histogram.flatten``."""
        flat: dict[str, float] = {}
        for name, histogram in vars(self).items():
            flat |= histogram.flatten(name)
        return flat
