"""Workers without a model for tests of a whole server: the answer is the prompt, and time is part of the script."""

import time

from atom.core import ScheduledBatch
from atom.model_engine.runner.scripted_worker import ScriptedWorker

STEP_S = 0.002  # of every step: an answer of n tokens takes at least n times this
PREFILL_TOKEN_S = 20e-6  # of every prompt token on top: a step of 2048 of them takes 41 ms


class PacedWorker(ScriptedWorker):
    """Answers with the prompt at the speed of a device that is neither too fast to watch nor slow."""

    def launch(self, batch: ScheduledBatch) -> ScheduledBatch:
        num_prefill_tokens = sum(batch.num_scheduled[: batch.num_prefill_seqs])
        time.sleep(STEP_S + num_prefill_tokens * PREFILL_TOKEN_S)
        return super().launch(batch)
