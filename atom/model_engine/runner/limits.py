"""The scheduler's limits, from the configuration and what the worker found out about memory and platform."""

from atom.config import Config
from atom.model_engine.runner.step_sizes import StepSizes
from atom.model_engine.scheduling.config import SchedulerConfig
from atom.model_engine.scheduling.prefix_hash import mix_seed


def scheduler_limits(
    config: Config, sizes: StepSizes, *, max_model_len: int, max_consecutive_prefill_steps: int
) -> SchedulerConfig:
    """Settings of ``config``, with those that depend on the machine given as resolved."""
    return SchedulerConfig(
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_model_len=max_model_len,
        max_prefill_tokens=sizes.chunk_tokens,
        max_busy_prefill_tokens=sizes.busy_chunk_tokens,
        half_chunk_depth=sizes.half_chunk_depth,
        block_size=config.kv_cache_block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        enable_chunked_prefill=config.enable_chunked_prefill,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        scheduler_delay_factor=config.scheduler_delay_factor,
        max_consecutive_prefill_steps=max_consecutive_prefill_steps,
        hash_seed=mix_seed(config.prefix_hash_seed or 0),
    )
