"""A worker without a model: what it "samples" is a function of the request, so everything around it can be
tested to the token and the host's share of a step can be timed.

By default it answers with the prompt itself, then ends: prompt ``[5, 6, 7]`` yields ``5 6 7 <eos>``. Choose
it with ``runner_qualname="atom.model_engine.runner.scripted_worker.ScriptedWorker"``.
"""

from typing import Any

from atom.config import Config
from atom.core import BatchOutput, CacheGroupSpec, GroupKind, ScheduledBatch, Sequence, TokenMasks
from atom.model_engine.runner.input_packer import InputPacker
from atom.model_engine.runner.limits import scheduler_limits
from atom.model_engine.runner.step_sizes import StepSizes
from atom.model_engine.runner.worker import ReportProgress, Worker
from atom.model_engine.scheduler import SchedulerConfig

DEFAULT_BLOCKS = 4096
DEFAULT_CONTEXT = 4096
VOCAB_SIZE = 1 << 20


class ScriptedWorker(Worker):
    """Packs inputs like a real worker and answers from :meth:`next_id`."""

    def __init__(self, config: Config):
        self.config = config
        num_tokens = config.max_num_batched_tokens or 2048
        self._scheduler_config = scheduler_limits(
            config,
            StepSizes(num_tokens, config.max_num_seqs, step_tokens=num_tokens),
            max_model_len=config.max_model_len or DEFAULT_CONTEXT,
            max_consecutive_prefill_steps=config.max_consecutive_prefill_steps or 0,
        )
        self._packer: InputPacker | None = None

    def next_id(self, seq: Sequence, index: int) -> int:
        """The id of output token ``index`` of ``seq``."""
        if index < seq.num_prompt_tokens:
            return seq.token_ids[index]
        return min(seq.stop_ids, default=0)

    def load(self, report: ReportProgress) -> None:
        report("load weights", 1.0)

    def cache_groups(self) -> list[CacheGroupSpec]:
        blocks = self.config.num_kvcache_blocks
        return [
            CacheGroupSpec(GroupKind.FULL, ("layer",), 1, num_blocks=blocks if blocks > 0 else DEFAULT_BLOCKS)
        ]

    def allocate(self, groups: list[CacheGroupSpec]) -> None:
        limits = self._scheduler_config
        max_blocks = -(-limits.max_model_len // limits.block_size) + 1
        self._packer = InputPacker(
            InputPacker.capacity(limits.max_num_seqs, limits.max_num_batched_tokens, max_blocks, len(groups))
        )

    def set_vocab_size(self, size: int) -> None:
        return None

    def warm_up(self, report: ReportProgress) -> None:
        report("warm up", 1.0)

    def scheduler_config(self) -> SchedulerConfig:
        return self._scheduler_config

    def uses_overlapped_loop(self) -> bool:
        return self.config.loop == "overlapped"

    def launch(self, batch: ScheduledBatch) -> ScheduledBatch:
        self._packer.pack(batch)
        return batch

    def needs_late_mask(self, handle: ScheduledBatch) -> bool:
        return False

    def sample(self, handle: ScheduledBatch, masks: TokenMasks | None = None) -> None:
        return None  # what it answers is in the script

    def wait(self, handle: ScheduledBatch) -> BatchOutput:
        next_id = self.next_id
        ids = [
            next_id(seq, start + length - seq.num_prompt_tokens) if samples else 0
            for seq, start, length, samples in zip(
                handle.seqs, handle.starts, handle.num_scheduled, handle.samples, strict=True
            )
        ]
        return BatchOutput(ids)

    def info(self) -> dict[str, Any]:
        return {
            "device": "none",
            "dtype": "none",
            "backends": {"model": "scripted"},
            "max_model_len": self._scheduler_config.max_model_len,
            "vocab_size": VOCAB_SIZE,
        }
