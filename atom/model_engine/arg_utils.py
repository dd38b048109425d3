"""From command-line flags to a ``Config``: ``EngineArgs`` holds one field a flag. No torch.

A field that carries over to ``Config`` unchanged takes its default, type and help from there.
"""

import argparse
import dataclasses
import typing
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from typing import TYPE_CHECKING, Any, Literal

from atom.config import Config, CUDAGraphMode, check_supported
from atom.config_fields import type_hints
from atom.errors import ConfigError
from atom.utils.cli_parser import float_list, int_list, json_object
from atom.utils.logging import init_logger

if TYPE_CHECKING:
    from atom.model_engine.llm_engine import LLMEngine

logger = init_logger(__name__)

DEFAULT_MODEL = "Qwen/Qwen3-0.6B"

_CONFIG_FIELDS = {field.name: field for field in dataclasses.fields(Config)}


def same(name: str, *aliases: str) -> Any:
    """An argument that is the ``Config`` field ``name``; ``aliases`` are further spellings of its flag."""
    field = _CONFIG_FIELDS[name]
    factory = field.default_factory
    default = None if factory is not MISSING else field.default
    metadata = {"config": name, "aliases": aliases, "help": field.metadata["doc"]}
    return dataclasses.field(default=default, metadata=metadata)


def arg(default: Any, text: str, *aliases: str, **options: Any) -> Any:
    """An argument of its own; ``options`` go to ``add_argument``."""
    metadata = {"aliases": aliases, "help": text, "options": options}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass
class EngineArgs:
    model: str = arg(DEFAULT_MODEL, "Model folder, GGUF file or name.")
    trust_remote_code: bool = same("trust_remote_code")
    dtype: str = same("dtype")
    load_dummy: str | None = arg(
        None,
        "Invent the weights; bare: empty.",
        nargs="?",
        const="empty",
        choices=("empty", "zero", "xavier"),
    )
    hf_overrides: dict[str, Any] | None = same("hf_overrides")
    online_quant_config: dict[str, Any] | None = same("online_quant_config")
    lm_head_dtype: str = same("lm_head_dtype")
    attention_backend: str = same("attention_backend")
    gguf_dtype: str = same("gguf_dtype")
    cpu_weights: str | None = same("cpu_weights")
    deterministic: bool = same("deterministic")

    device: str = same("device")
    num_threads: int | None = same("num_threads")
    gpu_memory_utilization: float = same("gpu_memory_utilization")
    kv_cache_memory: int | str | None = arg(
        None, "KV cache size in bytes or as '2GiB'; default: what the device leaves."
    )
    block_size: int = arg(16, "Tokens in a cache block: a multiple of 16, or 1.", type=int)
    kv_cache_dtype: str = same("kv_cache_dtype")
    index_cache_dtype: str | None = same("index_cache_dtype")

    max_model_len: int | None = same("max_model_len")
    max_num_seqs: int = same("max_num_seqs")
    max_queued_requests: int = same("max_queued_requests")
    max_queued_tokens: int = same("max_queued_tokens")
    max_num_batched_tokens: int | None = same("max_num_batched_tokens")
    enable_chunked_prefill: bool = same("enable_chunked_prefill")
    long_prefill_token_threshold: int = same("long_prefill_token_threshold")
    attn_prefill_chunk_size: int = same("attn_prefill_chunk_size")
    scheduler_delay_factor: float = same("scheduler_delay_factor")
    max_consecutive_prefill_steps: int | None = same("max_consecutive_prefill_steps")
    enable_dynamic_chunking: bool = same("enable_dynamic_chunking")
    dynamic_chunking_smooth_factor: float | None = same("dynamic_chunking_smooth_factor")
    dynamic_chunking_min_chunk_size: int = same("dynamic_chunking_min_chunk_size")
    dynamic_chunking_base_size: int = same("dynamic_chunking_base_size")
    dynamic_chunking_calibration: list[float] | None = arg(
        None, "Cost a,b,c,gamma of a chunk; default: measured at start.", type=float_list
    )
    dynamic_chunking_calibration_logging: bool = same("dynamic_chunking_calibration_logging")
    loop: str = same("loop")

    enable_prefix_caching: bool = same("enable_prefix_caching")
    prefix_hash_seed: int | None = same("prefix_hash_seed")
    state_checkpoint_interval_tokens: int = same("state_checkpoint_interval_tokens")
    state_checkpoint_demand: bool = same("state_checkpoint_demand")
    kv_transfer_config: dict[str, Any] | None = same("kv_transfer_config")

    tensor_parallel_size: int = same("tensor_parallel_size", "-tp")
    pipeline_parallel_size: int = same("pipeline_parallel_size", "-pp")
    prefill_context_parallel_size: int = same("prefill_context_parallel_size", "-pcp")
    decode_context_parallel_size: int = same("decode_context_parallel_size", "-dcp")
    data_parallel_size: int = arg(1, "Engines that serve side by side.", "-dp", type=int)
    dcp_config: dict[str, Any] | None = same("dcp_config")
    enable_dp_attention: bool = same("enable_dp_attention")
    dp_load_balance: str = same("dp_load_balance")
    enable_expert_parallel: bool = same("enable_expert_parallel")
    moe_backend: str = same("moe_backend")
    all2all_backend: str | None = arg(
        None, "Expert exchange for throughput or latency.", choices=("high-throughput", "low-latency")
    )
    fake_eplb: bool = same("fake_eplb")
    eplb_enable: bool = same("eplb_enable", "--enable-eplb")
    eplb_config: dict[str, Any] | None = same("eplb_config")
    enable_tbo: str | None = arg(
        None,
        "Overlap two halves of a batch; bare: prefill.",
        nargs="?",
        const="prefill",
        choices=("prefill", "all"),
    )

    enforce_eager: bool = same("enforce_eager")
    level: int | None = arg(
        None,
        "Compilation level; default: 3 on a GPU, 0 on the CPU.",
        type=int,
        choices=range(4),
    )
    cudagraph_mode: str | None = arg(
        None,
        "What is recorded as device graphs; default: FULL on a GPU, NONE on the CPU.",
        type=str.upper,
        choices=tuple(CUDAGraphMode.__members__),
    )
    cudagraph_capture_sizes: list[int] | None = arg(
        None,
        "Batch sizes to record, such as [1,2,4,8]; default: 1 to 8, then every 16 to 512.",
        type=int_list,
    )
    graph_warmup: str = arg(
        "startup",
        "When graphs are recorded: before serving, while serving, or at first use.",
        choices=("startup", "background", "lazy"),
    )
    method: str | None = arg(None, "Speculative decoding.", choices=("mtp", "eagle3", "dspark"))
    num_speculative_tokens: int = arg(1, "Tokens drafted a step.", type=int)
    draft_model: str | None = arg(None, "Folder of the draft model (eagle3, dspark).")
    spec_decode_acceptance_length: float | None = arg(
        None, "Benchmarks: accept so many tokens a step.", type=float
    )
    spec_decode_acceptance_rate: float | None = arg(None, "Benchmarks: the same as a share.", type=float)
    dspark_config: dict[str, Any] | None = arg(None, "Settings of the dspark drafter.", type=json_object)

    enable_rapidserve: bool = same("enable_rapidserve")
    disagg_constrained: bool = same("disagg_constrained")
    disagg_prefill_max_num_seqs: int | None = same("disagg_prefill_max_num_seqs")

    enable_log_stats: bool = same("enable_log_stats")
    throughput_log_interval: float = same("throughput_log_interval")
    torch_profiler_dir: str | None = same("torch_profiler_dir")
    mark_trace: bool = same("mark_trace")
    port: int = same("port")

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Register one flag a field, in the group "engine"."""
        group = parser.add_argument_group("engine")
        for field in dataclasses.fields(EngineArgs):
            flag = "--" + field.name.replace("_", "-")
            options = _add_argument_options(field)
            group.add_argument(flag, *field.metadata["aliases"], help=field.metadata["help"], **options)
        return parser

    @classmethod
    def from_cli_args(cls, namespace: argparse.Namespace) -> "EngineArgs":
        """Take the engine's flags out of a parsed command line; other attributes are left."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: getattr(namespace, name) for name in names if hasattr(namespace, name)})

    def create_config(self) -> Config:
        """The configuration that these flags and the environment describe. Raises ConfigError."""
        fields: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            name = field.metadata.get("config")
            value = getattr(self, field.name)
            # None stands for a default that is an object, such as an empty --eplb-config.
            if name is not None and not (value is None and _CONFIG_FIELDS[name].default is not None):
                fields[name] = value
        if self.dspark_config is not None:
            fields["dspark"] = self.dspark_config
        fields.update(
            load_dummy=self.load_dummy,
            kv_cache_memory=self.kv_cache_memory,
            kv_cache_block_size=self.block_size,
            dynamic_chunking_calibration=self.dynamic_chunking_calibration,
            parallel_config={"data_parallel_size": self.data_parallel_size, "data_parallel_size_local": None},
            enable_low_latency=self.all2all_backend == "low-latency",
            enable_tbo=self.enable_tbo is not None,
            enable_tbo_decode=self.enable_tbo == "all",
            compilation_config=self._compilation_fields(),
            speculative_config=self._speculative_fields(),
        )
        return Config.build(self.model, **fields)

    def _compilation_fields(self) -> dict[str, Any]:
        """What was asked for; the rest is left to the platform."""
        return {
            "level": self.level or 0,
            "is_level_open": self.level is None,
            "cudagraph_mode": self.cudagraph_mode,
            "is_mode_open": self.cudagraph_mode is None,
            "cudagraph_capture_sizes": self.cudagraph_capture_sizes,
            "graph_warmup": self.graph_warmup,
        }

    def _speculative_fields(self) -> dict[str, Any] | None:
        if self.method is None:
            given = {
                "--draft-model": self.draft_model,
                "--spec-decode-acceptance-length": self.spec_decode_acceptance_length,
                "--spec-decode-acceptance-rate": self.spec_decode_acceptance_rate,
                "--dspark-config": self.dspark_config,
            }
            for flag, value in given.items():
                if value is not None:
                    raise ConfigError(f"{flag} needs --method, got {flag} {value} alone")
            return None
        return {
            "method": self.method,
            "model": self.draft_model or self.model,
            "num_speculative_tokens": self.num_speculative_tokens,
            "synthetic_acceptance_length": self.spec_decode_acceptance_length,
            "synthetic_acceptance_rate": self.spec_decode_acceptance_rate,
        }

    def create_engine(self, tokenizer: Any = None, *, in_process: bool = False) -> "LLMEngine":
        """Start an engine of this configuration. Raises ConfigError before anything heavy is imported."""
        config = self.create_config()
        check_supported(config)
        from atom.model_engine.llm_engine import LLMEngine

        return LLMEngine(config=config, tokenizer=tokenizer, in_process=in_process)


def _add_argument_options(field: dataclasses.Field) -> dict[str, Any]:
    """``add_argument`` options of a field: its own, or those that its ``Config`` field's type implies."""
    options: dict[str, Any] = {"default": field.default, **field.metadata.get("options", {})}
    if "config" not in field.metadata:
        return options
    hint = type_hints(Config)[field.metadata["config"]]
    if hint is bool:
        action = argparse.BooleanOptionalAction if field.default else "store_true"
        return {**options, "action": action}
    members = (hint,) if typing.get_origin(hint) is Literal else typing.get_args(hint) or (hint,)
    kind = next(member for member in members if member is not type(None))
    if typing.get_origin(kind) is Literal:
        return {**options, "choices": typing.get_args(kind)}
    if kind in (int, float, str):
        return {**options, "type": kind}
    return {**options, "type": json_object}


def add_server_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Register the flags of the HTTP server, in the group "server"."""
    group = parser.add_argument_group("server")
    add: Callable[..., Any] = group.add_argument
    add("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 is every interface.")
    add("--server-port", type=int, default=8000, help="HTTP port.")
    add("--timeout-keep-alive", type=int, default=5, help="Seconds that an idle connection is kept.")
    add("--disable-uvicorn-access-log", action="store_true", help="Do not log every HTTP request.")
    add("--chat-template", help="Chat template: a file or the template itself.")
    add("--default-chat-template-kwargs", type=json_object, help="Template variables; a request's own win.")
    add(
        "--tool-call-parser",
        default="auto",
        help="How the model writes tool calls: a dialect, auto (by template and model type) or none.",
    )
    add(
        "--reasoning-parser",
        default="auto",
        help="How the model marks its thinking: a dialect, auto (by template and model type) or none.",
    )
    add("--stop-in-reasoning", action="store_true", help="Match stop strings in the thinking as well.")
    add("--strict-fields", action="store_true", help="Refuse request fields that are not known (400).")
    add("--served-model-name", help="Name of the model in the API; default: --model as given.")
    return parser
