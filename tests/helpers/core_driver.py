"""Drive an EngineCore by messages and gather what it emits, without processes or text."""

from pathlib import Path
from typing import Any

import numpy as np

from atom.config import Config
from atom.model_engine.engine_core import EngineCore
from atom.model_engine.messages import AddRequests, FromEngine, NewRequest, RequestEvent, StepOutput
from atom.model_engine.runner.worker import Worker
from atom.sampling_params import SamplingParams


class CoreDriver:
    """One core; ``tokens[id]`` and ``events[id]`` grow as it steps."""

    def __init__(self, config: Config, worker: Worker | None = None):
        self.tokens: dict[int, list[int]] = {}
        self.events: dict[int, list[RequestEvent]] = {}
        self.others: list[FromEngine] = []
        self.core = EngineCore(config, self._take, worker=worker)
        self.core.start(lambda phase, fraction: None)

    def _take(self, message: FromEngine) -> None:
        if not isinstance(message, StepOutput):
            self.others.append(message)
            return
        ids = np.frombuffer(message.ids, np.int64).tolist()
        tokens = np.frombuffer(message.token_ids, np.int32).tolist()
        counts = np.frombuffer(message.counts, np.int32).tolist() if message.counts else [1] * len(ids)
        at = 0
        for seq_id, count in zip(ids, counts, strict=True):
            self.tokens.setdefault(seq_id, []).extend(tokens[at : at + count])
            at += count
        for event in message.events:
            self.events.setdefault(ids[event.index], []).append(event)

    def add(
        self,
        prompts: dict[int, list[int]],
        params: SamplingParams,
        stop_ids: list[int] = (),
        bad_word_ids: list[list[int]] = (),
    ) -> None:
        """Queue one request a prompt, all in one message."""
        requests = [
            NewRequest(
                seq_id,
                np.asarray(ids, np.int32).tobytes(),
                params,
                list(stop_ids),
                params.max_tokens,
                0.0,
                bad_word_ids=list(bad_word_ids),
                hash_seed=1,
            )
            for seq_id, ids in prompts.items()
        ]
        self.core.handle(AddRequests(requests, [None] * len(requests)))

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left; fails when that does not happen."""
        for _ in range(max_steps):
            if not self.core.has_work:
                return
            self.core.step()
        raise AssertionError(f"the core still has work after {max_steps} steps")

    def leave_reason(self, seq_id: int) -> str:
        reasons = [event.leave_reason for event in self.events[seq_id] if event.leave_reason]
        assert len(reasons) == 1, reasons
        return reasons[0]

    def check_idle(self) -> None:
        """Nothing runs, no block is used or lost."""
        stats = self.core.scheduler.stats()
        assert stats["running"] == stats["waiting"] == stats["kv_blocks_used"] == 0, stats
        assert self.core.scheduler.check_integrity() == []


def run_to_the_end(
    folder: Path, prompts: dict[int, list[int]], params: SamplingParams, **fields: Any
) -> CoreDriver:
    """A driver whose engine, of a tiny model in fp32, has answered ``prompts`` and holds nothing any more.

    ``fields`` are of the engine's configuration.
    """
    fields = {"dtype": "float32", "prefix_hash_seed": 1, "kv_cache_memory": 2**24, **fields}
    driver = CoreDriver(Config.build(str(folder), **fields))
    driver.add(prompts, params)
    driver.run()
    driver.check_idle()
    return driver
