"""What the scheduler needs to know of the configuration."""

from dataclasses import dataclass

from atom.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits and policy of one scheduler; token counts unless the name says otherwise.

    Raises:
        ConfigError: a value is out of range, or no step could hold one decode row.
    """

    max_num_seqs: int  # rows of the device tables
    max_num_batched_tokens: int  # of one step
    max_model_len: int
    max_prefill_tokens: int = 0  # of a prefill step; 0: no limit of its own
    max_busy_prefill_tokens: int = 0  # of a prefill step that streams wait for; 0: no limit of its own
    half_chunk_depth: int = 0  # position from which a prefill token counts twice, from 2x thrice ...; 0: once
    block_size: int = 16  # tokens of one table column (and of one prefix hash)
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0  # longest chunk of one prompt; 0: no limit of its own
    scheduler_delay_factor: float = 0.0  # admit only after this many prompt latencies; 0: at once
    max_consecutive_prefill_steps: int = 0  # then decodes that wait get a step; 0: prefills always first
    hash_seed: int = 0  # of chains whose request brings none
    num_draft_tokens: int = 0  # k: a decode step verifies up to k drafts
    eos_ids: frozenset[int] = frozenset()  # stop ids that are reported as "eos"

    def __post_init__(self) -> None:
        at_least = {
            "max_num_seqs": 1,
            "max_num_batched_tokens": 1 + self.num_draft_tokens,
            "max_model_len": 1,
            "max_prefill_tokens": 0,
            "max_busy_prefill_tokens": 0,
            "half_chunk_depth": 0,
            "block_size": 1,
            "long_prefill_token_threshold": 0,
            "scheduler_delay_factor": 0,
            "max_consecutive_prefill_steps": 0,
            "num_draft_tokens": 0,
        }
        for name, limit in at_least.items():
            value = getattr(self, name)
            if value < limit:
                raise ConfigError(f"{name} must be at least {limit}, got {value}")

    @property
    def max_running(self) -> int:
        """Sequences that may hold a row: every one of them fits in one decode step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens // (1 + self.num_draft_tokens))
