"""The parts of ``atom.config.Config``: one frozen dataclass a topic, and the enums of compilation. No torch."""

import ast
import dataclasses
import enum
import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from atom.config_fields import check_fields, opt, to_dict
from atom.errors import ConfigError
from atom.utils import envs
from atom.utils.suggest import suggest

DEFAULT_SPLITTING_OPS = ("aiter.unified_attention_with_output", "aiter.mla_attention")


class CompilationLevel(enum.IntEnum):
    NO_COMPILATION = 0
    DYNAMO_AS_IS = 1
    DYNAMO_ONCE = 2
    PIECEWISE = 3


class CUDAGraphMode(enum.Enum):
    """What is recorded as device graphs. A pair is ``(decode steps, steps with a prefill)``."""

    NONE = 0
    TR_HYBRID = 1  # token graphs, broken where a launch depends on host data
    FULL = 2  # the whole forward pass
    FULL_DECODE_ONLY = (FULL, NONE)
    FULL_AND_TR_HYBRID = (FULL, TR_HYBRID)

    def separate_routine(self) -> bool:
        return isinstance(self.value, tuple)

    def decode_mode(self) -> "CUDAGraphMode":
        return CUDAGraphMode(self.value[0]) if self.separate_routine() else self

    def mixed_mode(self) -> "CUDAGraphMode":
        return CUDAGraphMode(self.value[1]) if self.separate_routine() else self

    def max_cudagraph_mode(self) -> "CUDAGraphMode":
        return CUDAGraphMode(max(self.value)) if self.separate_routine() else self

    def has_full_cudagraphs(self) -> bool:
        return self.max_cudagraph_mode() is CUDAGraphMode.FULL

    def uses_tr_hybrid(self) -> bool:
        return CUDAGraphMode.TR_HYBRID in (self.decode_mode(), self.mixed_mode())

    @classmethod
    def read(cls, name: str, value: Any) -> "CUDAGraphMode | None":
        """A mode from itself or its name in any case. Raises ConfigError naming the field."""
        if value is None or isinstance(value, cls):
            return value
        key = str(value).upper().replace("-", "_")
        if key not in cls.__members__:
            raise ConfigError(
                f"{name} must be one of {', '.join(cls.__members__)}, got {value!r}"
                f"{suggest(str(value), cls.__members__)}"
            )
        return cls[key]


def capture_sizes_from(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Batch sizes to record: one value N means 1 to 8, then every 16 up to N; several mean themselves."""
    if len(sizes) != 1:
        return tuple(sorted(set(sizes)))
    largest = sizes[0]
    return tuple(n for n in (*range(1, 9), *range(16, largest + 1, 16)) if n <= largest)


@dataclass
class CompileState:
    """What compiling one engine's model gathers as it goes: never hashed, never sent to another process."""

    local_cache_dir: str = ""  # folder of this configuration's artifacts, once it is known
    traced_files: set[str] = dataclasses.field(default_factory=set)  # sources of what was compiled
    compilation_time: float = 0.0  # seconds, loading from the cache included
    compile_sizes: tuple[int, ...] = ()  # of ``CompilationConfig``, resolved to numbers
    static_forward_context: dict[str, Any] = dataclasses.field(default_factory=dict)  # layers by name
    modules_by_tag: dict[str, int] = dataclasses.field(
        default_factory=dict
    )  # compiled so far, see VllmBackend

    def add_layer(self, name: str, layer: Any) -> None:
        """Let ops find ``layer`` by ``name``. Raises ValueError for a name that is taken."""
        if name in self.static_forward_context:
            raise ValueError(f"layer name {name!r} is taken; every layer that an op looks up needs its own")
        self.static_forward_context[name] = layer


@dataclass(frozen=True)
class CompilationConfig:
    level: int = opt(0, "0 none, 1 Dynamo alone, 2 Inductor once, 3 Inductor piece by piece.", lo=0, hi=3)
    use_cudagraph: bool = opt(True, "Record device graphs where the mode asks for them.")
    cudagraph_capture_sizes: tuple[int, ...] | None = opt(None, "Batch sizes to record, as given.")
    cuda_graph_sizes: tuple[int, ...] = opt((512,), "One size N: record 1 to 8, then every 16 up to N.")
    cudagraph_mode: CUDAGraphMode | None = opt(
        None, "What is recorded; TR_HYBRID when unset at level 3.", coerce=CUDAGraphMode.read
    )
    splitting_ops: tuple[str, ...] | None = opt(None, "Ops at which level 3 cuts; unset: attention.")
    cudagraph_copy_inputs: bool = opt(False, "Copy inputs into fixed buffers before a replay.")
    use_inductor: bool = opt(True, "Compile pieces with Inductor.")
    compile_sizes: tuple[int | Literal["cudagraph_capture_sizes"], ...] | None = opt(
        None, "Batch sizes compiled for their exact shape; 'cudagraph_capture_sizes' stands for those."
    )
    inductor_compile_config: dict[str, Any] = opt(dict, "Options handed to Inductor.")
    debug_dump_path: str = opt("", "Folder for decompiled graphs.")
    cache_dir: str = opt("", "Folder of compiled artifacts; empty: below ~/.cache/atom.")
    is_level_open: bool = opt(False, "The platform chooses the level.")
    is_mode_open: bool = opt(False, "The platform chooses what is recorded.")
    graph_warmup: Literal["startup", "background", "lazy"] = opt(
        "startup",
        "When graphs are recorded: before the engine is ready, bucket by bucket while it serves, or at first use.",
    )
    state: CompileState = dataclasses.field(
        default_factory=CompileState, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        check_fields(self, "compilation_config.")
        for name in ("cudagraph_capture_sizes", "cuda_graph_sizes"):
            sizes = getattr(self, name)
            if sizes is not None and (not sizes or min(sizes) < 1):
                raise ConfigError(f"compilation_config.{name} must be sizes of at least 1, got {list(sizes)}")
        numbers = [size for size in self.compile_sizes or () if not isinstance(size, str)]
        if numbers and min(numbers) < 1:
            raise ConfigError(
                f"compilation_config.compile_sizes must be sizes of at least 1, got {list(self.compile_sizes)}"
            )
        if self.level == CompilationLevel.PIECEWISE:
            self.set_splitting_ops_for_v1()
            if self.cudagraph_mode is None:
                object.__setattr__(self, "cudagraph_mode", CUDAGraphMode.TR_HYBRID)
        self.init_with_cudagraph_sizes(self.capture_sizes())

    def set_splitting_ops_for_v1(self) -> None:
        """Cut at the attention ops unless ``splitting_ops`` says otherwise."""
        if self.splitting_ops is None:
            object.__setattr__(self, "splitting_ops", DEFAULT_SPLITTING_OPS)

    def init_with_cudagraph_sizes(self, capture_sizes: tuple[int, ...]) -> None:
        """Settle ``state.compile_sizes``: numbers as given, 'cudagraph_capture_sizes' as ``capture_sizes``."""
        self.state.compile_sizes = self.resolved_compile_sizes(capture_sizes)

    def settled(self, level: int, mode: CUDAGraphMode) -> "CompilationConfig":
        """A copy in which what was left open has these values."""
        return dataclasses.replace(
            self,
            level=level if self.is_level_open else self.level,
            cudagraph_mode=mode if self.is_mode_open else self.cudagraph_mode,
            is_level_open=False,
            is_mode_open=False,
        )

    @property
    def captures_graphs(self) -> bool:
        return self.use_cudagraph and self.cudagraph_mode not in (None, CUDAGraphMode.NONE)

    def capture_sizes(self) -> tuple[int, ...]:
        if self.cudagraph_capture_sizes is not None:
            return tuple(sorted(set(self.cudagraph_capture_sizes)))
        return capture_sizes_from(self.cuda_graph_sizes)

    def resolved_compile_sizes(self, capture_sizes: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """``compile_sizes`` in numbers, ascending. ``capture_sizes`` None: those of this configuration."""
        recorded = self.capture_sizes() if capture_sizes is None else capture_sizes
        sizes: set[int] = set()
        for size in self.compile_sizes or ():
            sizes.update(recorded if isinstance(size, str) else (size,))
        return tuple(sorted(sizes))

    @property
    def copies_inputs(self) -> bool:
        """Whether ``cudagraph_copy_inputs`` has an effect: at level 3, while graphs are recorded."""
        return (
            self.cudagraph_copy_inputs and self.level == CompilationLevel.PIECEWISE and self.captures_graphs
        )

    @property
    def local_cache_dir(self) -> str:
        return self.state.local_cache_dir

    @property
    def traced_files(self) -> set[str]:
        return self.state.traced_files

    @property
    def compilation_time(self) -> float:
        return self.state.compilation_time

    @property
    def static_forward_context(self) -> dict[str, Any]:
        return self.state.static_forward_context

    def compute_hash(self) -> str:
        """SHA-256 over what compiled code depends on. Where results go does not change them, nor does what is
        recorded of them, but for the copies of inputs that a recording may ask for.
        """
        fields = to_dict(self)
        for name in _NOT_COMPILED:
            fields.pop(name)
        fields |= {"compile_sizes": self.state.compile_sizes, "copies_inputs": self.copies_inputs}
        return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()


_NOT_COMPILED = (
    "cache_dir",
    "cuda_graph_sizes",
    "cudagraph_capture_sizes",
    "cudagraph_copy_inputs",
    "cudagraph_mode",
    "debug_dump_path",
    "graph_warmup",
    "is_level_open",
    "is_mode_open",
)


@dataclass(frozen=True)
class ParallelConfig:
    data_parallel_size: int = opt(1, "Engines that serve side by side.", lo=1)
    data_parallel_size_local: int | None = opt(1, "Of these, on this host; None: all.", lo=1)
    data_parallel_rank: int = opt(0, "This engine's number.", lo=0)
    data_parallel_rank_local: int | None = opt(None, "Its number on this host.", lo=0)
    decode_context_parallel_size: int = opt(1, "Follows the engine's field of this name.", lo=1)
    pipeline_parallel_rank: int = opt(0, "This engine's pipeline stage.", lo=0)
    pp_meta_addrs: tuple[str, ...] = opt((), "Channels on which the first stage announces batches.")
    pp_token_addr: str | None = opt(None, "Channel on which the last stage returns tokens.")
    pp_kv_status_addr: str | None = opt(None, "Channel on which stages report KV transfers.")
    control_address: str | None = opt(None, "Channel of control messages.")
    data_parallel_master_ip: str = opt("127.0.0.1", "Where the ranks meet.")
    data_parallel_master_port: int = opt(29500, "Port at which they meet.", lo=1, hi=65535)
    data_parallel_base_port: int = opt(0, "First port of their own channels; 0: free ones.", lo=0, hi=65535)

    def __post_init__(self) -> None:
        check_fields(self, "parallel_config.")
        if self.data_parallel_size_local is None:
            object.__setattr__(self, "data_parallel_size_local", self.data_parallel_size)
        if self.data_parallel_rank >= self.data_parallel_size:
            raise ConfigError(
                f"parallel_config.data_parallel_rank must be below data_parallel_size "
                f"({self.data_parallel_size}), got {self.data_parallel_rank}"
            )

    def with_env(self) -> "ParallelConfig":
        """A copy in which every ``ATOM_DP_*`` variable that is set has its say."""
        names = {
            "data_parallel_size": "ATOM_DP_SIZE",
            "data_parallel_rank": "ATOM_DP_RANK",
            "data_parallel_rank_local": "ATOM_DP_RANK_LOCAL",
            "data_parallel_master_ip": "ATOM_DP_MASTER_IP",
            "data_parallel_master_port": "ATOM_DP_MASTER_PORT",
            "data_parallel_base_port": "ATOM_DP_BASE_PORT",
        }
        return dataclasses.replace(self, **{f: envs.get(v) for f, v in names.items() if envs.is_set(v)})


@dataclass(frozen=True)
class SpeculativeConfig:
    method: Literal["", "mtp", "eagle3", "dspark"] = opt("", "How tokens are drafted; empty: not at all.")
    model: str | None = opt(None, "Folder of the draft model; the target's own for built-in drafters.")
    num_speculative_tokens: int = opt(1, "Tokens drafted a step.", lo=1, hi=128)
    draft_model_hf_config: dict[str, Any] | None = opt(None, "The draft model's configuration, once read.")
    use_aux_hidden_state: bool = opt(False, "The drafter reads hidden states of inner layers.")
    eagle3_aux_layer_ids: tuple[int, ...] | None = opt(None, "Those layers; unset: the drafter's default.")
    synthetic_acceptance_length: float | None = opt(
        None, "Benchmarks: accept so many tokens a step on average, whatever was drafted.", lo=1
    )
    synthetic_acceptance_rate: float | None = opt(None, "Benchmarks: the same as a share.", lo=0, hi=1)

    def __post_init__(self) -> None:
        check_fields(self, "speculative_config.")
        if self.method in ("mtp", "eagle3") and self.num_speculative_tokens > 4:
            raise ConfigError(
                f"speculative_config.num_speculative_tokens must be at most 4 with {self.method}, "
                f"got {self.num_speculative_tokens}"
            )
        length, rate = self.synthetic_acceptance_length, self.synthetic_acceptance_rate
        if length is not None and rate is not None:
            raise ConfigError(
                "speculative_config takes synthetic_acceptance_length or synthetic_acceptance_rate, "
                f"not both; got {length} and {rate}"
            )
        if length is not None and length > self.num_speculative_tokens + 1:
            raise ConfigError(
                f"speculative_config.synthetic_acceptance_length must be at most num_speculative_tokens + 1 "
                f"({self.num_speculative_tokens + 1}), got {length}"
            )

    @property
    def synthetic_acceptance_rates(self) -> tuple[float, ...] | None:
        """Forced acceptance rate of each draft position, the budget spent on the earliest; None: not forced."""
        if self.synthetic_acceptance_length is not None:
            budget = self.synthetic_acceptance_length - 1
        elif self.synthetic_acceptance_rate is not None:
            budget = self.synthetic_acceptance_rate * self.num_speculative_tokens
        else:
            return None
        return tuple(min(1.0, max(0.0, budget - i)) for i in range(self.num_speculative_tokens))


@dataclass(frozen=True)
class DSparkConfig:
    confidence_schedule: bool = opt(False, "Size each verification by the drafter's confidence.")
    ragged: bool = opt(False, "Let requests verify different numbers of tokens; needs the schedule.")
    ragged_graph_sizes: str = opt("", "Query sizes recorded for that, such as '1,3,6,8'.")
    q_buckets: str = opt("", "Query sizes that all requests of a batch share.")
    disable_sps_calib: bool = opt(False, "Do not time verification at start.")

    def __post_init__(self) -> None:
        check_fields(self, "dspark.")
        if self.ragged and not self.confidence_schedule:
            raise ConfigError("dspark.ragged needs dspark.confidence_schedule, got ragged alone")


@dataclass(frozen=True)
class EPLBConfig:
    load_window_size: int = opt(1000, "Steps over which expert load is counted.", lo=1)
    rebalance_interval: int = opt(3000, "Steps between rebalances; at least the window.", lo=1)
    rebalance_layers_per_chunk: int = opt(64, "Layers moved in one step.", lo=1)
    num_redundant_experts: int = opt(0, "Copies of busy experts beyond one each.", lo=0)
    rebalance_min_balancedness: float = opt(2.0, "Rebalance only below this balance.", lo=0)
    rebalance_balancedness_agg: Literal["min", "mean"] = opt("min", "Balance of the layers taken together.")
    p2p_batch_chunk_size: int = opt(32, "Transfers sent at once.", lo=1)
    placement_policy: Literal["naive", "biased"] = opt("naive", "How experts are placed.")

    def __post_init__(self) -> None:
        check_fields(self, "eplb_config.")
        if self.rebalance_interval < self.load_window_size:
            raise ConfigError(
                f"eplb_config.rebalance_interval must be at least load_window_size "
                f"({self.load_window_size}), got {self.rebalance_interval}"
            )


@dataclass(frozen=True)
class DCPConfig:
    interleave_size: int = opt(1, "Neighbouring tokens kept on one rank; divides the block size.", lo=1)

    def __post_init__(self) -> None:
        check_fields(self, "dcp_config.")


@dataclass(frozen=True)
class OnlineQuantConfig:
    global_quant_config: str | None = opt(None, "Format of every layer that nothing else names: ptpc_fp8.")
    layer_quant_config: dict[str, str] = opt(dict, "Format by layer-name pattern.")
    exclude_layer: str | tuple[str, ...] = opt((), "Layer-name patterns left as they are.")

    def __post_init__(self) -> None:
        check_fields(self, "online_quant_config.")
        formats = ("ptpc_fp8", "per_block_fp8", "per_block128_fp8", "mxfp4", "mxfp8")
        named = [self.global_quant_config] if self.global_quant_config is not None else []
        for value in [*named, *self.layer_quant_config.values()]:
            if value not in formats:
                raise ConfigError(
                    f"online_quant_config format must be one of {', '.join(formats)}, got {value!r}"
                    f"{suggest(value, formats)}"
                )
        if not named and not self.layer_quant_config:
            raise ConfigError(
                "online_quant_config rounds nothing: it needs global_quant_config or layer_quant_config"
            )
        exclude = (self.exclude_layer,) if isinstance(self.exclude_layer, str) else self.exclude_layer
        for rule in (rule for rule in exclude if rule.startswith("re:")):
            try:
                re.compile(rule[3:])
            except re.error as error:
                raise ConfigError(
                    f"online_quant_config.exclude_layer: {rule!r} is no regular expression: {error}"
                ) from error


@dataclass(frozen=True)
class KVEventsConfig:
    enable: bool = opt(False, "Publish changes of the prefix cache.")
    publisher: Literal["zmq", "null"] = opt("zmq", "Where they go.")
    endpoint: str = opt("tcp://127.0.0.1:5557", "Address of the event socket.")
    topic: str = opt("", "Topic in front of every batch.")
    hwm: int = opt(0, "High-water mark of the socket.", lo=0)
    buffer_steps: int = opt(10000, "Batches queued before the oldest is dropped.", lo=1)
    replay_endpoint: str = opt("", "Address at which missed batches can be asked for; empty: none.")
    replay_buffer_steps: int = opt(10000, "Batches kept for replay.", lo=1)

    def __post_init__(self) -> None:
        check_fields(self, "kv_events_config.")

    @classmethod
    def from_env(cls) -> "KVEventsConfig":
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: envs.get(f"ATOM_KV_EVENTS_{name.upper()}") for name in names})


@dataclass
class KVCacheTensor:
    """KV storage of one layer; the tensors are the device's and never travel."""

    layer_num: int
    k_cache: Any = None
    v_cache: Any = None
    k_scale: Any = None
    v_scale: Any = None
    index_cache: Any = None  # keys of a sparse indexer


@dataclass
class KVCacheConfig:
    kv_cache_tensors: list[KVCacheTensor] = dataclasses.field(default_factory=list)


def read_object(name: str, value: Any) -> dict[str, Any]:
    """A dict from itself, a JSON object or a Python literal; empty for None."""
    if value is None:
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            try:
                value = ast.literal_eval(value)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                raise ConfigError(f"{name} must be a JSON object, got {value!r}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be a JSON object, got {value!r}")
    return value
