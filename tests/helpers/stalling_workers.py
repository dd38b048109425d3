"""Workers without a model that are slow on purpose, for tests of what watches them."""

import time
from typing import Any

from atom.core import ScheduledBatch
from atom.model_engine import engine_core
from atom.model_engine.runner.scripted_worker import ScriptedWorker
from atom.model_engine.runner.worker import ReportProgress

STALL_PROMPT_TOKENS = 100  # a prompt of at least this many tokens stalls the engine
STALL_S = 2.5


class StallingWorker(ScriptedWorker):
    """Hangs in a step while its process lives and beats, under a step deadline of a fraction of a second."""

    def __init__(self, config: Any):
        super().__init__(config)
        engine_core.STEP_ALLOWANCE_S = 0.3
        engine_core.STEP_ALLOWANCE_PER_TOKEN_S = 0.0

    def launch(self, batch: ScheduledBatch) -> ScheduledBatch:
        if batch.num_prefill_seqs and batch.num_tokens >= STALL_PROMPT_TOKENS:
            time.sleep(STALL_S)
        return super().launch(batch)


class SlowStartWorker(ScriptedWorker):
    """Warms up for a minute."""

    def warm_up(self, report: ReportProgress) -> None:
        report("warm up", 0.1)
        time.sleep(60)
