"""The configuration of a GGUF model in Hugging Face terms. No torch.

Key names: GGUF specification. Where llama.cpp fixes a value in its code instead of the file (Gemma 3's
window pattern, local RoPE base and query scale) the same value is written here.
"""

from collections.abc import Mapping
from math import pi
from typing import Any

import numpy as np

from atom.errors import ConfigError, ModelLoadError
from atom.model_loader.checkpoint import TensorInfo
from atom.model_loader.hf_config import FULL, SLIDING, HFConfig

# general.architecture -> (architectures[0], model_type). llama.cpp files Mistral models under llama.
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
_REQUIRED = object()
# Llama 3 stretches RoPE by per-frequency divisors; a GGUF file holds them and not the rule behind them.
_LLAMA3_LOW, _LLAMA3_HIGH = 1.0, 4.0
_LLAMA3_CONTEXTS = [1 << exponent for exponent in range(10, 20)]


def gguf_config(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    hf_overrides: Mapping[str, Any] | None = None,
) -> HFConfig:
    """Translate metadata and tensor shapes, then normalise as a ``config.json``.

    Raises:
        ConfigError: an architecture or a variation of one that we do not serve.
        ModelLoadError: a key or tensor that the architecture needs is absent.
    """
    name = str(metadata.get("general.architecture", ""))
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"general.architecture {name!r} of the GGUF file is not supported; known: {', '.join(ARCHITECTURES)}"
        )
    if "token_embd.weight" not in tensors:
        raise ModelLoadError(
            "the GGUF file has no tensor token_embd.weight: it is not a whole language model"
        )
    keys = _Keys(metadata, name)
    if keys.get("expert_count", 0):
        raise ConfigError(f"{name}.expert_count is {keys.get('expert_count')}: this mixture is not supported")
    architecture, model_type = ARCHITECTURES[name]
    heads = keys.number("attention.head_count")
    hidden_size = keys.number("embedding_length")
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": _dtype(tensors),
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": keys.number("feed_forward_length"),
        "num_hidden_layers": keys.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.number("attention.head_count_kv", heads),
        "head_dim": _head_dim(keys, hidden_size, heads),
        "max_position_embeddings": keys.number("context_length"),
        "rms_norm_eps": keys.get("attention.layer_norm_rms_epsilon", _REQUIRED),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    config |= _rope(keys, config, tensors, hf_overrides or {})
    if name == "gemma3":
        config |= _gemma3(keys, config)
    return HFConfig.from_dict(config, hf_overrides)


class _Keys:
    """Metadata of one architecture by the part after its prefix."""

    def __init__(self, metadata: Mapping[str, Any], prefix: str):
        self._metadata, self._prefix = metadata, prefix

    def get(self, key: str, default: Any = None) -> Any:
        value = self._metadata.get(f"{self._prefix}.{key}")
        if value is None and default is _REQUIRED:
            raise ModelLoadError(f"the GGUF file lacks the key {self._prefix}.{key}")
        return default if value is None else value

    def number(self, key: str, default: Any = _REQUIRED) -> int:
        """A count; one value a layer is accepted if all are the same."""
        value = self.get(key, default)
        if isinstance(value, np.ndarray):
            values = sorted({int(item) for item in value})
            if len(values) != 1:
                raise ConfigError(
                    f"{self._prefix}.{key} differs between layers ({values}), which is not supported"
                )
            return values[0]
        return int(value)


def _dtype(tensors: Mapping[str, TensorInfo]) -> str:
    """What to compute in: the type of the first projection, bfloat16 where that is a block format."""
    first = tensors.get("blk.0.attn_q.weight", tensors["token_embd.weight"])
    return first.dtype if first.dtype in ("float32", "float16") else "bfloat16"


def _head_dim(keys: _Keys, hidden_size: int, heads: int) -> int:
    head_dim = keys.number("attention.key_length", hidden_size // heads)
    value_dim = keys.number("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise ConfigError(f"attention.value_length {value_dim} differs from attention.key_length {head_dim}")
    return head_dim


def _rope(
    keys: _Keys,
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    hf_overrides: Mapping[str, Any],
) -> dict[str, Any]:
    theta = keys.get("rope.freq_base")
    rope: dict[str, Any] = {} if theta is None else {"rope_theta": theta}
    rotated = keys.number("rope.dimension_count", config["head_dim"])
    if rotated != config["head_dim"]:
        rope["partial_rotary_factor"] = rotated / config["head_dim"]
    kind = keys.get("rope.scaling.type", "none")
    if kind in ("linear", "yarn"):
        scaling = {"rope_type": kind, "factor": keys.get("rope.scaling.factor", _REQUIRED)}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = keys.number("rope.scaling.original_context_length")
            for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
                if keys.get(f"rope.scaling.{theirs}") is not None:
                    scaling[ours] = keys.get(f"rope.scaling.{theirs}")
        rope["rope_scaling"] = scaling
    elif kind != "none":
        raise ConfigError(
            f"rope.scaling.type {kind!r} of the GGUF file is not supported; known: linear, yarn"
        )
    elif "rope_freqs.weight" in tensors and not {"rope_scaling", "rope_parameters"} & set(hf_overrides):
        divisors = _read_floats(tensors["rope_freqs.weight"])
        rope["rope_scaling"] = llama3_scaling(divisors, theta or 10_000.0, rotated)
    return rope


def _read_floats(info: TensorInfo) -> np.ndarray:
    if info.dtype != "float32":
        raise ModelLoadError(f"tensor {info.name} in {info.file.name} must be float32, found {info.dtype}")
    return np.fromfile(info.file, np.float32, info.numel, offset=info.offset)


def llama3_divisors(theta: float, rotated: int, factor: float, context: int) -> np.ndarray:
    """What Llama 3's rule divides each inverse frequency by: 1 for short waves, ``factor`` for long ones."""
    wave_lengths = 2 * pi * theta ** (np.arange(0, rotated, 2) / rotated)
    smooth = np.clip(
        (context / wave_lengths - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0, 1.0
    )  # 0 beyond the long bound, 1 below the short one
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def llama3_scaling(divisors: np.ndarray, theta: float, rotated: int) -> dict[str, Any]:
    """Find the ``llama3`` rule that gives ``divisors`` [rotated / 2].

    Raises:
        ConfigError: no rule of that kind does.
    """
    factor = round(float(divisors.max()), 3)
    for context in _LLAMA3_CONTEXTS:
        expected = llama3_divisors(theta, rotated, factor, context)
        if divisors.shape == expected.shape and np.allclose(divisors, expected, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LLAMA3_LOW,
                "high_freq_factor": _LLAMA3_HIGH,
                "original_max_position_embeddings": context,
            }
    raise ConfigError(
        "rope_freqs.weight of the GGUF file does not follow the Llama 3 rule; give rope_parameters in --hf-overrides"
    )


def _gemma3(keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    num_layers, hidden_size = config["num_hidden_layers"], config["hidden_size"]
    is_27b = num_layers == 62
    scalar = hidden_size // config["num_attention_heads"] if is_27b else config["head_dim"]
    fields: dict[str, Any] = {
        "sliding_window": keys.number("attention.sliding_window"),
        "query_pre_attn_scalar": scalar,
        "rope_local_base_freq": keys.get("rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
        "attn_logit_softcapping": keys.get("attn_logit_softcapping"),
    }
    pattern = keys.get("attention.sliding_window_pattern", 6)
    if isinstance(pattern, np.ndarray):
        fields["layer_types"] = [SLIDING if is_sliding else FULL for is_sliding in pattern[:num_layers]]
    else:
        fields["sliding_window_pattern"] = int(pattern)
    return fields
