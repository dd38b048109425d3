"""The scheduler's limits, from the configuration and what the worker found out about memory and platform."""

from atom.config import Config
from atom.model_engine.scheduling.config import SchedulerConfig
from atom.model_engine.scheduling.prefix_hash import mix_seed


def scheduler_limits(
    config: Config,
    *,
    max_model_len: int,
    max_num_batched_tokens: int,
    max_consecutive_prefill_steps: int,
    max_num_seqs: int | None = None,
    max_prefill_tokens: int = 0,
    max_busy_prefill_tokens: int = 0,
    half_chunk_depth: int = 0,
) -> SchedulerConfig:
    """Settings of ``config``, with those that depend on the machine given as resolved."""
    return SchedulerConfig(
        max_num_seqs=max_num_seqs or config.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        max_prefill_tokens=max_prefill_tokens,
        max_busy_prefill_tokens=max_busy_prefill_tokens,
        half_chunk_depth=half_chunk_depth,
        block_size=config.kv_cache_block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        enable_chunked_prefill=config.enable_chunked_prefill,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        scheduler_delay_factor=config.scheduler_delay_factor,
        max_consecutive_prefill_steps=max_consecutive_prefill_steps,
        hash_seed=mix_seed(config.prefix_hash_seed or 0),
    )
