"""What is compared, as data: engines in their settings, what they read and multiply, and the targets."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from atom.benchmarks.cpu_peer import WORKLOADS

ATOM = "atom"
HTTP = "http"
ALL_WORKLOADS = (*WORKLOADS, HTTP)

# Bits of a weight in the blocks, and in the output head: scales count, norms do not.
WEIGHT_BITS: dict[str, tuple[float, float]] = {
    "bf16": (16, 16),
    "bf16, int8 head": (16, 8),
    "int8": (8, 8),
    "q8_0": (8.5, 8.5),
    "int4, int8 head": (4.5, 8),
    "int4": (4.5, 4.5),
    "q4_0": (4.5, 4.5),
}
FILE_WEIGHTS = "gguf"  # whatever the demo model's file holds


@dataclass(frozen=True)
class Variant:
    """An engine in one of its settings.

    ``peer``: ``atom`` or a name of ``installers.PEERS``. ``weights``: key of ``WEIGHT_BITS``, or
    ``FILE_WEIGHTS``. ``products``: the machine's rate that bounds its prefill, bf16 or int8. ``settings``: for
    ATOM fields of its configuration, for the others what ``rounds`` knows of them.
    """

    name: str
    peer: str
    weights: str
    products: str = "bf16"
    settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    workloads: tuple[str, ...] = WORKLOADS

    @property
    def is_atom(self) -> bool:
        return self.peer == ATOM


def _atom(name: str, weights: str, products: str = "bf16", **settings: Any) -> Variant:
    return Variant(f"ATOM {name}", ATOM, weights, products, settings, ALL_WORKLOADS)


def _llama(file: str, weights: str, products: str = "int8") -> Variant:
    return Variant(f"llama.cpp {file}", "llama.cpp", weights, products, {"file": file}, ALL_WORKLOADS)


def _openvino(name: str, weights: str, products: str, **settings: Any) -> Variant:
    return Variant(f"OpenVINO {name}", "openvino", weights, products, settings)


# In the order of a round; classes of weights are mixed, so that a slow minute hits no class alone.
VARIANTS: tuple[Variant, ...] = (
    _atom("bf16", "bf16", cpu_weights="bf16"),
    _llama("Q4_K_M", FILE_WEIGHTS),
    _openvino("int8", "int8", "int8", format="int8"),
    _atom("int8", "int8", "int8", cpu_weights="int8"),
    Variant("vLLM bf16", "vllm", "bf16"),
    _llama("Q8_0", "q8_0"),
    _atom("bf16, int8 head", "bf16, int8 head", cpu_weights="bf16", lm_head_dtype="int8"),
    Variant("transformers bf16", "transformers", "bf16"),
    _llama("BF16", "bf16", "bf16"),
    _atom("int4", "int4", "int8", cpu_weights="int4"),
    _openvino("int4", "int4, int8 head", "int8", format="int4"),
    _atom("GGUF kept", FILE_WEIGHTS, "int8", gguf_dtype="keep"),
    _openvino("fp16", "bf16", "bf16", format="fp16"),
    _atom("int8-a8", "int8", "int8", cpu_weights="int8_a8"),
    _llama("Q4_0", "q4_0"),
    _atom("int4, int8 head", "int4, int8 head", "int8", cpu_weights="int4", lm_head_dtype="int8"),
    _openvino("int8, SDPA", "int8", "int8", format="int8", backend="SDPA"),
)
BY_NAME = {variant.name: variant for variant in VARIANTS}


@dataclass(frozen=True)
class PeerTarget:
    """A bound on the best of ``contenders``: over the best of ``references`` in the same round, or on itself."""

    field: str
    contenders: tuple[str, ...]
    bound: float
    references: tuple[str, ...] = ()


_INT8 = ("OpenVINO int8", "OpenVINO int8, SDPA")
_BF16 = ("llama.cpp BF16", "vLLM bf16", "OpenVINO fp16", "transformers bf16")
TARGETS = (
    PeerTarget("decode_tok_s", ("ATOM bf16",), 1.25, ("llama.cpp BF16", "vLLM bf16")),
    PeerTarget("decode_tok_s", ("ATOM bf16, int8 head",), 1.5, ("llama.cpp BF16",)),
    PeerTarget("decode_tok_s", ("ATOM int8",), 1.25, _INT8),
    PeerTarget("decode_tok_s", ("ATOM GGUF kept",), 2.0, ("llama.cpp Q4_K_M",)),
    PeerTarget("decode_tok_s", ("ATOM int4",), 1.1, ("llama.cpp Q4_0",)),
    PeerTarget("prefill_512_tok_s", ("ATOM bf16",), 1.0, _BF16),
    PeerTarget("prefill_2048_tok_s", ("ATOM bf16",), 1.0, _BF16),
    PeerTarget("prefill_512_tok_s", ("ATOM int8-a8",), 1.3, _INT8),
    PeerTarget("prefill_2048_tok_s", ("ATOM int8-a8",), 1.3, _INT8),
    PeerTarget("concurrent_tok_s", ("ATOM int8-a8",), 1.6, ("OpenVINO int8, SDPA",)),
    PeerTarget("http_tok_s", ("ATOM int8-a8",), 2.0, ("llama.cpp Q4_0",)),
    PeerTarget("start_to_first_token_s", ("ATOM bf16",), 2.0),
    PeerTarget("serving_rss_bytes", ("ATOM bf16",), 1.1e9),
)
