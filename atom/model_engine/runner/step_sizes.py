"""The CPU's step sizes for a model: from measured times, the cache groups and the configuration."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from atom.config import Config
from atom.core import CacheGroupSpec, ScheduledBatch
from atom.model_engine.runner import calibration
from atom.model_engine.runner.warm_up import decode_batch, warm_up_batches
from atom.model_loader.hf_config import HFConfig
from atom.utils.logging import init_logger

logger = init_logger(__name__)

_DEFAULT_NUM_SEQS = next(field.default for field in fields(Config) if field.name == "max_num_seqs")


@dataclass(frozen=True)
class StepSizes:
    """Limits of a step. Without a busy limit, and with a depth of 0, all prefill tokens are alike.

    ``chunk_tokens``: of a prefill step; ``busy_chunk_tokens``: of one that streams wait for, 0: as any other;
    ``half_chunk_depth``: see ``SchedulerConfig``.
    """

    chunk_tokens: int
    max_num_seqs: int
    busy_chunk_tokens: int = 0
    half_chunk_depth: int = 0
    step_tokens: int = 0

    @property
    def max_num_batched_tokens(self) -> int:
        """Of any step: a configured limit, or what a prefill, and a decode of every sequence, take."""
        return self.step_tokens or max(self.chunk_tokens, self.max_num_seqs)


def largest_chunk(config: Config) -> int:
    """Tokens of the largest prefill step on the CPU, which memory is planned for."""
    if config.cpu_calibration:
        return calibration.MAX_CHUNK_TOKENS
    return max(calibration.DEFAULT_CHUNK_TOKENS, config.max_num_seqs)


def measured_sizes(
    config: Config,
    model: HFConfig,
    groups: Sequence[CacheGroupSpec],
    facts: Mapping[str, Any],
    run: Callable[[ScheduledBatch], None],
    *,
    chunk_tokens: int,
    max_model_len: int,
    num_threads: int,
) -> StepSizes:
    """Sizes that keep a step's time; see ``calibration``.

    Args:
        facts: what else step times depend on, as JSON values: the machine, the kernels.
        run: computes a step to its end.
        chunk_tokens: what memory is planned for.
    """
    limits = calibration.StepLimits()
    if config.cpu_calibration:
        blocks = min(group.num_blocks for group in groups)

        def measure() -> calibration.StepTimes:
            return calibration.measure_steps(
                lambda size: run(next(warm_up_batches(size, config.kv_cache_block_size, len(groups)))),
                lambda size: run(decode_batch(size, len(groups))),
                max_tokens=min(chunk_tokens, max_model_len - 1, blocks * config.kv_cache_block_size - 1),
                max_rows=min(config.max_num_seqs, blocks),
                num_threads=num_threads,
            )

        limits = calibration.calibrated(_key(config, model, facts), measure).limits()
    num_seqs = config.max_num_seqs
    if num_seqs == _DEFAULT_NUM_SEQS and limits.num_seqs is not None:
        num_seqs = min(num_seqs, limits.num_seqs)
    sizes = StepSizes(
        chunk_tokens=min(limits.idle_chunk_tokens, chunk_tokens),
        max_num_seqs=num_seqs,
        busy_chunk_tokens=min(limits.chunk_tokens, chunk_tokens),
        half_chunk_depth=_half_chunk_depth(model, groups),
    )
    logger.info(
        "steps: prefill of %d tokens, %d while nobody decodes, decode of %d sequences",
        sizes.busy_chunk_tokens,
        sizes.chunk_tokens,
        sizes.max_num_seqs,
    )
    return sizes


def _half_chunk_depth(model: HFConfig, groups: Sequence[CacheGroupSpec]) -> int:
    width = model.num_attention_heads * model.head_dim
    projections = 2 * (width + model.num_key_value_heads * model.head_dim) + 3 * model.intermediate_size
    weights = model.num_hidden_layers * model.hidden_size * projections
    return calibration.half_chunk_depth([(len(g.layer_names), g.window) for g in groups], weights, width)


def _key(config: Config, model: HFConfig, facts: Mapping[str, Any]) -> dict[str, Any]:
    digest = hashlib.sha256(json.dumps(model.to_dict(), sort_keys=True).encode()).hexdigest()
    settings = {name: getattr(config, name, None) for name in calibration.KEY_FIELDS}
    settings["level"] = int(config.compilation_level)
    return {"model": digest, "settings": settings, "sources": calibration.sources_stamp(), **facts}
