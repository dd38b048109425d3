"""Every configuration dataclass of the engine. Frozen, checked when built, and plain JSON when sent. No torch.

``Config.build(model, **fields)`` is the door for people: it also reads the environment. ``Config(...)`` and
``Config.from_dict(...)`` take what they are given, so that a configuration means the same in every process.
"""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Self

from atom.config_fields import check_fields, from_dict, nested, opt, parse_bytes, to_dict
from atom.config_parts import (
    CompilationConfig,
    CompilationLevel,
    CUDAGraphMode,
    DCPConfig,
    DSparkConfig,
    EPLBConfig,
    KVCacheConfig,
    KVCacheTensor,
    KVEventsConfig,
    OnlineQuantConfig,
    ParallelConfig,
    SpeculativeConfig,
    read_object,
)
from atom.errors import ConfigError
from atom.utils import envs

__all__ = [
    "check_supported",
    "CompilationConfig",
    "CompilationLevel",
    "Config",
    "CUDAGraphMode",
    "DCPConfig",
    "DEFAULT_MAX_NUM_BATCHED_TOKENS",
    "DSparkConfig",
    "EPLBConfig",
    "get_current_atom_config",
    "get_current_rank",
    "KVCacheConfig",
    "KVCacheTensor",
    "KVEventsConfig",
    "OnlineQuantConfig",
    "ParallelConfig",
    "set_current_atom_config",
    "SpeculativeConfig",
]

logger = logging.getLogger("atom.config")

DEFAULT_MAX_NUM_BATCHED_TOKENS = 4096  # of a step on a device: measured, see docs/performance.md
FALLBACK_MAX_MODEL_LEN = 8192


@dataclass(frozen=True)
class Config:
    """Everything an engine needs to know to start."""

    # model
    model: str
    trust_remote_code: bool = opt(False, "Allow code from the model folder; no model here needs any.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = opt(
        "auto", "Data type of weights and activations; auto follows model and device."
    )
    load_dummy: Literal["empty", "zero", "xavier"] | None = opt(None, "Invented weights of this kind.")
    hf_overrides: dict[str, Any] | None = opt(None, "Changes to the model's own configuration.")
    quant_config: dict[str, Any] | None = opt(None, "Quantisation, when the model's own is not to be used.")
    online_quant_config: OnlineQuantConfig | None = opt(
        None, "Quantise weights while loading.", coerce=nested(OnlineQuantConfig, optional=True)
    )
    lm_head_dtype: Literal["auto", "int8"] = opt("auto", "Storage of the output head; int8 on the CPU.")
    gguf_dtype: Literal["auto", "keep", "dequantize"] = opt(
        "auto",
        "Whether a GGUF file's blocks stay packed or are widened; auto: packed on the CPU if it has a compiler.",
    )
    cpu_weights: Literal["bf16", "int8", "int8_a8", "int8_g32", "int4"] | None = opt(
        None, "Round weights to this while loading, on the CPU; None: as the model stores them."
    )

    deterministic: bool = opt(
        False, "Answers whose bits do not depend on batch, chunks, prefix cache or preemption; on the CPU."
    )
    attention_backend: Literal[
        "auto", "cpu_native", "cpu_paged", "flash_attention", "reference", "triton"
    ] = opt("auto", "How attention is computed; auto: the device's first that supports the model.")

    # device and memory
    device: Literal["auto", "cpu", "cuda", "rocm"] = opt("auto", "Where the model runs.")
    num_threads: int | None = opt(None, "CPU threads; None: the physical cores.", lo=1)
    gpu_memory_utilization: float = opt(0.9, "Share of device memory that may be used.", above=0, hi=1)
    kv_cache_memory: int | None = opt(
        None, "Bytes for the KV cache, or '2GiB'; None: what the device leaves.", above=0, coerce=parse_bytes
    )
    kv_cache_block_size: int = opt(16, "Tokens in a cache block: a multiple of 16, or 1.", lo=1)
    num_kvcache_blocks: int = opt(-1, "Blocks of the cache; -1: from the memory.", lo=-1)
    kv_cache_dtype: Literal["bf16", "fp8"] = opt("bf16", "Storage of keys and values.")
    index_cache_dtype: Literal["bf16", "fp8", "fp4"] | None = opt(
        None, "Storage of a sparse indexer's keys; None: as kv_cache_dtype."
    )

    # scheduling
    max_model_len: int | None = opt(None, "Longest prompt plus answer; None: the model's own limit.", lo=1)
    max_num_seqs: int = opt(512, "Most requests that run at once.", lo=1)
    max_queued_requests: int = opt(4096, "Most answers that wait at a server; beyond it: HTTP 429.", lo=1)
    max_queued_tokens: int = opt(
        4_194_304, "Most prompt tokens of those that wait at a server; beyond it: HTTP 429.", lo=1
    )
    max_num_batched_tokens: int | None = opt(
        None, "Most tokens in a step; None: 4096, and on the CPU about 200 ms of work.", lo=1
    )
    cpu_calibration: bool = opt(
        True, "Size the CPU's steps by a short measurement at a model's first start; False: 256 tokens."
    )
    enable_chunked_prefill: bool = opt(True, "Cut long prompts over several steps.")
    long_prefill_token_threshold: int = opt(0, "Most prompt tokens of one request in a step; 0: any.", lo=0)
    attn_prefill_chunk_size: int = opt(16384, "Cached-prefix tokens that MLA expands at a time.", lo=1)
    scheduler_delay_factor: float = opt(0.0, "Wait this many prefill times before the next prefill.", lo=0)
    max_consecutive_prefill_steps: int | None = opt(
        None, "Prefill steps before a decode step; 0: any; None: any, and 1 on the CPU.", lo=0
    )
    enable_dynamic_chunking: bool = opt(
        False, "Shrink later chunks of a long prompt to equal time (PP only)."
    )
    dynamic_chunking_smooth_factor: float | None = opt(None, "From no (0) to full (1) shrinking.", lo=0, hi=1)
    dynamic_chunking_min_chunk_size: int = opt(4096, "Smallest such chunk.", lo=1)
    dynamic_chunking_base_size: int = opt(0, "First chunk; 0: the token budget.", lo=0)
    dynamic_chunking_calibration: tuple[float, ...] | None = opt(None, "Cost a,b,c,gamma; None: measured.")
    dynamic_chunking_calibration_logging: bool = opt(False, "Log that measurement.")
    loop: Literal["auto", "plain", "overlapped"] = opt(
        "auto", "Whether the next step is prepared while one runs; auto: plain on the CPU, else overlapped."
    )

    # prefix cache and state
    enable_prefix_caching: bool = opt(True, "Reuse the KV of prompts that begin alike.")
    prefix_hash_seed: int | None = opt(
        None, "Key of the prefix hash; None: a random one for each server.", lo=0, hi=2**64 - 1
    )
    state_checkpoint_interval_tokens: int = opt(8192, "Tokens between saved states; 0 none, -1 ends.", lo=-1)
    state_checkpoint_demand: bool = opt(True, "Save a state where a hit was lost for want of one.")
    kv_transfer_config: dict[str, Any] = opt(dict, "KV connector and its settings.", coerce=read_object)
    kv_events_config: KVEventsConfig = opt(
        KVEventsConfig, "Cache events; from ATOM_KV_EVENTS_*.", coerce=nested(KVEventsConfig)
    )

    # parallelism
    tensor_parallel_size: int = opt(1, "Devices that share each layer.", lo=1, hi=8)
    pipeline_parallel_size: int = opt(1, "Devices in a row, each with some of the layers.", lo=1)
    prefill_context_parallel_size: int = opt(1, "Devices that share a prompt.", lo=1)
    decode_context_parallel_size: int = opt(1, "TP devices that share a context; divides TP.", lo=1)
    dcp_config: DCPConfig = opt(DCPConfig, "How a context is spread.", coerce=nested(DCPConfig))
    parallel_config: ParallelConfig = opt(
        ParallelConfig, "Data parallelism; ATOM_DP_* override it.", coerce=nested(ParallelConfig)
    )
    enable_dp_attention: bool = opt(False, "Attention data-parallel over the TP devices.")
    dp_load_balance: Literal["round_robin", "least_requests", "least_tokens"] = opt(
        "least_requests", "How requests are spread over data-parallel ranks."
    )
    enable_expert_parallel: bool = opt(False, "Spread whole experts over the devices.")
    moe_backend: Literal["standard", "mega"] = opt("standard", "Expert exchange.")
    fake_eplb: bool = opt(False, "Benchmarks: a router that spreads tokens evenly.")
    eplb_enable: bool = opt(False, "Move experts to even out their load.")
    eplb_config: EPLBConfig = opt(EPLBConfig, "When and how they move.", coerce=nested(EPLBConfig))
    enable_tbo: bool = opt(False, "Overlap two halves of a prefill batch.")
    enable_tbo_decode: bool = opt(False, "The same for decode batches.")
    enable_low_latency: bool = opt(False, "Expert exchange made for few tokens.")
    dp_logical_size: int = opt(0, "Data-parallel ranks inside an expert group; 0: set by the engine.", lo=0)
    moe_ep_flatten_tp_across_dp: bool = opt(False, "Spread experts over TP and DP ranks together.")

    # compilation and speculation
    enforce_eager: bool = opt(False, "Neither compilation nor graphs.")
    compilation_config: CompilationConfig = opt(
        CompilationConfig, "Compilation and graphs.", coerce=nested(CompilationConfig)
    )
    speculative_config: SpeculativeConfig | None = opt(
        None, "Drafting; None: off.", coerce=nested(SpeculativeConfig, optional=True)
    )
    dspark: DSparkConfig = opt(DSparkConfig, "Settings of the dspark drafter.", coerce=nested(DSparkConfig))

    # prefill and decode in two engines on one device
    enable_rapidserve: bool = opt(False, "Separate prefill and decode engines on one device.")
    disagg_constrained: bool = opt(False, "Share out the compute units between the two.")
    disagg_prefill_max_num_seqs: int | None = opt(None, "Most requests of the prefill engine.", lo=1)

    # logging, profiling and internals
    enable_log_stats: bool = opt(True, "Log throughput now and then.")
    throughput_log_interval: float = opt(10.0, "Seconds between two such lines.", above=0)
    cache_hit_rate_window: int = opt(1000, "Requests over which the hit rate is taken.", lo=1)
    torch_profiler_dir: str | None = opt(None, "Folder for traces; None: ATOM_TORCH_PROFILER_DIR.")
    mark_trace: bool = opt(False, "Mark modules in traces, and trace the capture of each graph.")
    port: int = opt(
        8006, "Port of the engine's own rendezvous; the HTTP port is --server-port.", lo=1, hi=65535
    )
    master_addr: str = opt("127.0.0.1", "Address of that rendezvous.")
    asyncio_mode: bool = opt(False, "The engine serves an event loop.")
    runner_qualname: str = opt("atom.model_engine.model_runner.ModelRunner", "Class that runs the model.")

    # set by the engine from the model folder
    hf_config: dict[str, Any] | None = opt(None, "The model's configuration.")
    generation_config: dict[str, Any] | None = opt(None, "The model's generation defaults.")
    torch_dtype: str | None = opt(None, "Data type named by the model's configuration.")
    bos_token_id: int = opt(-1, "First token of a text; -1: none.", lo=-1)
    eos_token_id: int = opt(-1, "The tokenizer's end of text; -1: none.", lo=-1)
    stop_token_ids: tuple[int, ...] = opt((), "Further ids that end an answer.")
    pool_entries: dict[str, int] = opt(dict, "State slots by pool.")
    pool_entries_per_req: dict[str, int] = opt(dict, "State slots of one request by pool.")

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.model:
            raise ConfigError("model must be a folder or a name, got ''")
        if self.gguf_dtype == "keep" and self.cpu_weights is not None:
            raise ConfigError(
                f"gguf_dtype must not be 'keep' with cpu_weights {self.cpu_weights!r}; got both"
            )
        if self.online_quant_config is not None and self.cpu_weights is not None:
            raise ConfigError(
                f"online_quant_config rounds weights already: cpu_weights must be None, got {self.cpu_weights!r}"
            )
        self._check_lengths()
        self._check_parallel()
        self._check_speculation()
        # A copy: what compiling gathers belongs to one engine. Its own checks have settled the splitting ops,
        # the graph mode and the sizes; which of the sizes are recorded is known here.
        object.__setattr__(self, "compilation_config", dataclasses.replace(self.compilation_config))
        self._set_cudagraph_sizes()
        self.compilation_config.init_with_cudagraph_sizes(self.capture_sizes)
        parallel = self.parallel_config
        if parallel.decode_context_parallel_size != self.decode_context_parallel_size:
            size = self.decode_context_parallel_size
            object.__setattr__(
                self,
                "parallel_config",
                dataclasses.replace(parallel, decode_context_parallel_size=size),
            )

    def _check_lengths(self) -> None:
        block = self.kv_cache_block_size
        if block != 1 and block % 16:
            raise ConfigError(f"kv_cache_block_size must be 1 or a multiple of 16, got {block}")
        threshold = self.long_prefill_token_threshold
        if threshold and threshold < block:
            raise ConfigError(
                f"long_prefill_token_threshold must be 0 or at least kv_cache_block_size ({block}), got {threshold}"
            )
        if threshold and self.max_model_len is not None and threshold > self.max_model_len:
            raise ConfigError(
                f"long_prefill_token_threshold must be at most max_model_len ({self.max_model_len}), "
                f"got {threshold}"
            )
        calibration = self.dynamic_chunking_calibration
        if calibration is not None and len(calibration) != 4:
            raise ConfigError(
                f"dynamic_chunking_calibration must be four numbers a,b,c,gamma, got {list(calibration)}"
            )

    def _check_parallel(self) -> None:
        tp, dcp = self.tensor_parallel_size, self.decode_context_parallel_size
        if tp % dcp:
            raise ConfigError(
                f"decode_context_parallel_size must divide tensor_parallel_size ({tp}), got {dcp}"
            )
        interleave = self.dcp_config.interleave_size
        if self.kv_cache_block_size % interleave:
            raise ConfigError(
                f"dcp_config.interleave_size must divide kv_cache_block_size ({self.kv_cache_block_size}), "
                f"got {interleave}"
            )
        pp = self.pipeline_parallel_size
        if pp > 1 and self.parallel_config.data_parallel_size > 1:
            dp = self.parallel_config.data_parallel_size
            raise ConfigError(f"pipeline_parallel_size must be 1 with data_parallel_size {dp}, got {pp}")
        if self.enable_dp_attention:
            for name in ("pipeline_parallel_size", "prefill_context_parallel_size"):
                if getattr(self, name) > 1:
                    raise ConfigError(f"{name} must be 1 with enable_dp_attention, got {getattr(self, name)}")
        if self.moe_backend == "mega" and not self.enable_expert_parallel:
            raise ConfigError("moe_backend 'mega' needs enable_expert_parallel, got False")
        if self.disagg_constrained and not self.enable_rapidserve:
            raise ConfigError("disagg_constrained needs enable_rapidserve, got False")

    def _check_speculation(self) -> None:
        spec = self.speculative_config
        if spec is None or not spec.method:
            return
        k = spec.num_speculative_tokens
        if spec.method == "dspark" and spec.model not in (None, self.model) and k > 16:
            raise ConfigError(f"num_speculative_tokens must be at most 16 with a dspark draft model, got {k}")
        if spec.method == "eagle3" and spec.model in (None, self.model):
            raise ConfigError("speculative method 'eagle3' needs a draft model, got none")
        if spec.method == "mtp" and spec.model not in (None, self.model):
            raise ConfigError(f"speculative method 'mtp' takes no draft model, got {spec.model!r}")
        if self.dcp_config.interleave_size > 1:
            raise ConfigError(
                f"dcp_config.interleave_size must be 1 with speculation, got {self.dcp_config.interleave_size}"
            )
        if self.dspark.confidence_schedule and spec.synthetic_acceptance_rates is not None:
            raise ConfigError(
                "dspark.confidence_schedule does not go with a forced acceptance rate; got both"
            )

    @classmethod
    def build(cls, model: str, **fields: Any) -> "Config":
        """A configuration from fields by name, JSON objects or instances, with the environment's say.

        Raises ConfigError for an unknown name (with the near match), a bad value or a bad variable.
        """
        if fields.get("kv_events_config") is None:
            fields["kv_events_config"] = KVEventsConfig.from_env()
        if fields.get("torch_profiler_dir") is None:
            fields["torch_profiler_dir"] = envs.get("ATOM_TORCH_PROFILER_DIR")
        if envs.is_set("ATOM_STATE_CHECKPOINT_DEMAND"):
            fields["state_checkpoint_demand"] = envs.get("ATOM_STATE_CHECKPOINT_DEMAND")
        if fields.get("dynamic_chunking_smooth_factor") is None and fields.get("enable_dynamic_chunking"):
            fields["dynamic_chunking_smooth_factor"] = envs.get("ATOM_DYNAMIC_CHUNKING_SMOOTH_FACTOR")
        config = cls.from_dict({"model": model, **fields})
        return config.replace(parallel_config=config.parallel_config.with_env())

    def replace(self, **changes: Any) -> Self:
        """A checked copy with other values."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, for a message to another process."""
        return to_dict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Config":
        """Restore ``to_dict``. Raises ConfigError for an unknown field, naming the near match."""
        return from_dict(cls, data)

    @property
    def world_size(self) -> int:
        """Processes of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.prefill_context_parallel_size

    def _set_cudagraph_sizes(self) -> None:
        """Compute ``capture_sizes``: the compilation configuration's; above ``max_num_seqs``, the largest batch."""
        sizes: tuple[int, ...] = ()
        if self.compilation_config.captures_graphs and not self.enforce_eager:
            sizes = self.compilation_config.capture_sizes()
        sizes = tuple(sorted({min(size, self.max_num_seqs) for size in sizes}))
        object.__setattr__(self, "_capture_sizes", sizes)

    @property
    def capture_sizes(self) -> tuple[int, ...]:
        """Batch sizes recorded as graphs, within ``max_num_seqs``; empty when nothing is recorded."""
        return self._capture_sizes

    @property
    def compilation_level(self) -> CompilationLevel:
        """The level in force: none under ``enforce_eager``."""
        return CompilationLevel(0 if self.enforce_eager else self.compilation_config.level)

    def resolve_max_model_len(self, max_position_embeddings: int | None) -> int:
        """The context in force: the smaller of what was asked for and what the model was trained with."""
        own = max_position_embeddings or FALLBACK_MAX_MODEL_LEN
        if self.max_model_len is not None and max_position_embeddings and self.max_model_len > own:
            logger.warning("max_model_len %d exceeds the model's %d: using %d", self.max_model_len, own, own)
        if self.max_model_len is not None and not max_position_embeddings:
            return self.max_model_len
        return min(self.max_model_len or own, own)

    def compute_hash(self) -> str:
        """Ten hex digits over every field that a compiled graph depends on; keys the compile cache."""
        names = (
            "model",
            "dtype",
            "hf_overrides",
            "quant_config",
            "online_quant_config",
            "lm_head_dtype",
            "attention_backend",
            "gguf_dtype",
            "cpu_weights",
            "deterministic",
            "device",
            "kv_cache_block_size",
            "kv_cache_dtype",
            "index_cache_dtype",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "prefill_context_parallel_size",
            "decode_context_parallel_size",
            "enable_dp_attention",
            "enable_expert_parallel",
            "moe_backend",
            "enforce_eager",
            "compilation_config",
            "speculative_config",
            "hf_config",
        )
        everything = self.to_dict()
        chosen = {name: everything[name] for name in names}
        chosen["compilation_config"] = self.compilation_config.compute_hash()
        text = json.dumps(chosen, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:10]


_current: tuple[Config, int] | None = None


@contextmanager
def set_current_atom_config(config: Config, rank: int = 0) -> Iterator[None]:
    """Make ``config`` the one that models built inside belong to; ``rank`` is this worker's.

    Contexts nest: a drafter may be built with another configuration inside.
    """
    global _current
    previous, _current = _current, (config, rank)
    try:
        yield
    finally:
        _current = previous


def get_current_atom_config() -> Config | None:
    """The configuration of the model being built; None outside of ``set_current_atom_config``."""
    return None if _current is None else _current[0]


def get_current_rank() -> int:
    """The rank that goes with it; 0 outside."""
    return 0 if _current is None else _current[1]


# Fields of features that do not exist in this version: only the default is accepted. A name goes when its
# feature comes.
LATER_FIELDS = (
    "asyncio_mode",
    "attn_prefill_chunk_size",
    "cache_hit_rate_window",
    "dcp_config",
    "decode_context_parallel_size",
    "disagg_constrained",
    "disagg_prefill_max_num_seqs",
    "dp_load_balance",
    "dspark",
    "dynamic_chunking_base_size",
    "dynamic_chunking_calibration",
    "dynamic_chunking_calibration_logging",
    "dynamic_chunking_min_chunk_size",
    "dynamic_chunking_smooth_factor",
    "enable_dp_attention",
    "enable_dynamic_chunking",
    "enable_expert_parallel",
    "enable_low_latency",
    "enable_rapidserve",
    "enable_tbo",
    "enable_tbo_decode",
    "eplb_config",
    "eplb_enable",
    "fake_eplb",
    "index_cache_dtype",
    "kv_cache_dtype",
    "kv_transfer_config",
    "master_addr",
    "moe_backend",
    "pipeline_parallel_size",
    "port",
    "prefill_context_parallel_size",
    "quant_config",
    "speculative_config",
    "state_checkpoint_interval_tokens",
    "tensor_parallel_size",
    "throughput_log_interval",
)
# Fields that the engine fills and no person sets.
ENGINE_FIELDS = (
    "bos_token_id",
    "dp_logical_size",
    "eos_token_id",
    "generation_config",
    "hf_config",
    "moe_ep_flatten_tp_across_dp",
    "pool_entries",
    "pool_entries_per_req",
    "stop_token_ids",
    "torch_dtype",
)
_WITHOUT_FLAG = ("asyncio_mode", "master_addr", "quant_config")
_FLAGS = {  # where a flag is not its field's name in kebab spelling
    "dspark": "--dspark-config",
    "enable_low_latency": "--all2all-backend",
    "enable_tbo_decode": "--enable-tbo",
    "kv_cache_block_size": "--block-size",
    "speculative_config": "--method",
}


def flag_of(field: str) -> str:
    """The flag that sets a ``Config`` field; the field itself where there is none."""
    return field if field in _WITHOUT_FLAG else _FLAGS.get(field, "--" + field.replace("_", "-"))


def check_supported(config: Config) -> None:
    """Refuse what this version cannot do. Raises ConfigError for the first such setting, naming its flag."""
    plain = Config(model=config.model)
    changed = [
        f.name for f in dataclasses.fields(config) if getattr(config, f.name) != getattr(plain, f.name)
    ]
    for name in ENGINE_FIELDS:
        if name in changed:
            raise ConfigError(f"{name} is set by the engine and not by hand, got {getattr(config, name)!r}")
    settings = [(flag_of(name), getattr(config, name)) for name in LATER_FIELDS if name in changed]
    if config.parallel_config.data_parallel_size > 1:
        settings.append(("--data-parallel-size", config.parallel_config.data_parallel_size))
    for flag, value in settings:
        hint = "; the HTTP port is --server-port" if flag == "--port" else ""
        raise ConfigError(f"{flag} is not available in this version of ATOM, got {value}{hint}")
