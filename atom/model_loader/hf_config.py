"""A checkpoint's ``config.json`` as a plain attribute bag, completed the way transformers completes it.

``transformers`` leaves out what equals a class default and has spelt RoPE settings in three ways over the
years, so the file alone is not enough to build a model. :class:`HFConfig` fills in the defaults of the
families that we serve, writes one form of ``rope_parameters`` and always has ``layer_types``. Neither torch
nor transformers is imported, so the server process can read it too.

Normalising is idempotent: ``HFConfig.from_dict(config.to_dict())`` is the same config, which is how it
travels between processes.
"""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atom.errors import ConfigError, ModelLoadError

FULL, SLIDING = "full_attention", "sliding_attention"

_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_size": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_QWEN: dict[str, Any] = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
}
_GEMMA3: dict[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "use_bidirectional_attention": False,
}

# model_type -> what an absent key means; the values of transformers' configuration classes.
CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _COMMON | _LLAMA,
    "mistral": _COMMON
    | _LLAMA
    | {
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": _COMMON | _QWEN | {"attention_bias": True},
    "qwen3": _COMMON | _QWEN | {"attention_bias": False, "head_dim": 128},
    "gemma3_text": {k: v for k, v in (_COMMON | _GEMMA3).items() if k != "hidden_act"},
}

# What a multimodal root contributes to the language model that is promoted out of its ``text_config``.
_ROOT_KEYS = ("architectures", "quantization_config", "bos_token_id", "eos_token_id", "pad_token_id")
# RoPE kinds that are stretched from the context of the pre-training.
_STRETCHED_ROPE = ("llama3", "yarn", "longrope")


class HFConfig:
    """Fields of a model configuration as attributes.

    An unknown field raises ``AttributeError`` that names it; use ``get(name, default)`` where absence has
    a meaning. Values are JSON values (``rope_parameters`` and friends stay dicts).
    """

    def __init__(self, values: Mapping[str, Any]):
        """Take ``values`` as they are. Use :meth:`from_dict` to normalise a ``config.json``."""
        self.__dict__.update(values)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], hf_overrides: Mapping[str, Any] | None = None) -> "HFConfig":
        """Normalise the content of a ``config.json``.

        Args:
            raw: the parsed file; not modified.
            hf_overrides: fields to replace, key by key; a dict is merged into the dict it overrides.

        Raises:
            ConfigError: the checkpoint is quantised in a way that we do not read, or a field contradicts
                another one.
        """
        return cls(normalise(raw, hf_overrides))

    @classmethod
    def from_file(cls, path: str | Path, hf_overrides: Mapping[str, Any] | None = None) -> "HFConfig":
        """Read and normalise a ``config.json``; a file that is not a JSON object is a ModelLoadError."""
        return cls.from_dict(read_json_object(path), hf_overrides)

    def __getattr__(self, name: str) -> Any:
        # Only reached when the field is absent.
        raise AttributeError(
            f"the model configuration (model_type {self.get('model_type')!r}) has no {name!r}"
        )

    def get(self, name: str, default: Any = None) -> Any:
        return self.__dict__.get(name, default)

    def to_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.__dict__)

    def __contains__(self, name: str) -> bool:
        return name in self.__dict__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HFConfig) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"HFConfig({self.get('architectures')}, model_type={self.get('model_type')!r})"


def read_json_object(path: str | Path) -> dict[str, Any]:
    """The JSON object in a file of a model folder; anything else is a ModelLoadError naming the file."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, ValueError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, found {type(content).__name__}")
    return content


def normalise(raw: Mapping[str, Any], hf_overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The completed fields of a configuration; see :meth:`HFConfig.from_dict`."""
    config = _promote_text_config(copy.deepcopy(dict(raw)))
    merge_overrides(config, hf_overrides or {})
    _reject_quantised(config)
    if config.get("model_type") == "gemma3":
        config["model_type"] = "gemma3_text"
    for name, default in CLASS_DEFAULTS.get(config.get("model_type", ""), {}).items():
        config.setdefault(name, default)
    _normalise_dtype(config)
    _normalise_heads(config)
    if "num_hidden_layers" in config:
        _normalise_layer_types(config)
    _normalise_rope(config)
    return config


def merge_overrides(config: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Apply ``overrides`` in place, key by key; a dict over a dict merges instead of replacing it."""
    for name, value in overrides.items():
        if isinstance(value, Mapping) and isinstance(config.get(name), dict):
            merge_overrides(config[name], value)
        else:
            config[name] = copy.deepcopy(value)


def _promote_text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Replace a multimodal configuration by its language model's, with the root's identity copied in."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    for name in _ROOT_KEYS:
        if config.get(name) is not None:
            text[name] = config[name]
    for name in ("dtype", "torch_dtype", "tie_word_embeddings"):
        if config.get(name) is not None:
            text.setdefault(name, config[name])
    text.setdefault("model_type", config.get("model_type"))
    return text


def _reject_quantised(config: dict[str, Any]) -> None:
    quantisation = config.get("quantization_config")
    if not quantisation:
        config.pop("quantization_config", None)
        return
    method = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation
    raise ConfigError(
        f"quantization_config: the checkpoint is quantised with method {method!r}, which is not supported; "
        "use an unquantised or a GGUF version of this model"
    )


def _normalise_dtype(config: dict[str, Any]) -> None:
    """One spelling of the checkpoint's dtype under both the old and the new key."""
    dtype = config.get("dtype") or config.get("torch_dtype")
    if dtype:
        config["dtype"] = config["torch_dtype"] = str(dtype).removeprefix("torch.")


def _normalise_heads(config: dict[str, Any]) -> None:
    heads = config.get("num_attention_heads")
    if not heads:
        return
    if config.get("num_key_value_heads") is None:
        config["num_key_value_heads"] = heads
    if config.get("head_dim") is None and config.get("hidden_size"):
        if config["hidden_size"] % heads:
            raise ConfigError(
                f"head_dim is absent and hidden_size {config['hidden_size']} is not a multiple of "
                f"num_attention_heads {heads}"
            )
        config["head_dim"] = config["hidden_size"] // heads


def _normalise_layer_types(config: dict[str, Any]) -> None:
    """Say for every layer whether it sees the full context or a window."""
    num_layers = config["num_hidden_layers"]
    if config.get("use_sliding_window") is False:
        config["sliding_window"] = None
    window = config.get("sliding_window")
    model_type = config.get("model_type")
    layer_types = config.get("layer_types")
    if layer_types is None or model_type in ("llama", "mistral"):
        if model_type == "gemma3_text":
            pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
            layer_types = [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(num_layers)]
        elif model_type in ("qwen2", "qwen3"):
            first = config["max_window_layers"] if window is not None else num_layers
            layer_types = [SLIDING if i >= first else FULL for i in range(num_layers)]
        else:
            is_windowed = model_type == "mistral" and window is not None
            layer_types = [SLIDING if is_windowed else FULL] * num_layers
    if len(layer_types) < num_layers:
        raise ConfigError(
            f"layer_types has {len(layer_types)} entries, num_hidden_layers is {num_layers}: give one a layer"
        )
    layer_types = layer_types[:num_layers]  # a smaller num_hidden_layers (an override) cuts the model short
    if SLIDING in layer_types and window is None:
        raise ConfigError(
            "layer_types has sliding_attention layers but sliding_window is null or switched off"
        )
    config["layer_types"] = layer_types


def _normalise_rope(config: dict[str, Any]) -> None:
    """Write ``rope_parameters``: one dict, or one a layer type where a family has several bases.

    Accepts the present form and the older ``rope_theta`` + ``rope_scaling`` (+ ``rope_local_base_freq``);
    the older keys are removed so that one place tells the truth. ``rope_scaling`` wins over
    ``rope_parameters`` as in transformers, which lets an override name either.
    """
    scaling = config.pop("rope_scaling", None)
    theta = config.pop("rope_theta", None)
    local_theta = config.pop("rope_local_base_freq", None)
    partial = config.pop("partial_rotary_factor", None)
    present = config.get("rope_parameters")
    if config.get("model_type") not in CLASS_DEFAULTS and not (scaling or theta or present):
        return
    present = dict(present or {})
    if config.get("model_type") == "gemma3_text":
        nested = {FULL: present.pop(FULL, None) or {}, SLIDING: present.pop(SLIDING, None) or {}}
        nested[FULL] = present | nested[FULL] | (scaling or {})  # a flat dict speaks of the global layers
        nested[FULL].setdefault("rope_theta", 1_000_000.0 if theta is None else theta)
        nested[SLIDING].setdefault("rope_theta", 10_000.0 if local_theta is None else local_theta)
        config["rope_parameters"] = {k: _standard_rope(v, config, partial) for k, v in nested.items()}
        return
    if any(isinstance(value, dict) for value in present.values()):
        config["rope_parameters"] = {k: _standard_rope(v, config, partial) for k, v in present.items() if v}
        return
    flat = dict(scaling) if scaling else present
    flat.setdefault("rope_theta", present.get("rope_theta", 10_000.0) if theta is None else theta)
    config["rope_parameters"] = _standard_rope(flat, config, partial)


def _standard_rope(rope: dict[str, Any], config: dict[str, Any], partial: float | None) -> dict[str, Any]:
    rope = dict(rope)
    legacy_type = rope.pop("type", None)
    rope["rope_type"] = rope.get("rope_type") or legacy_type or "default"
    if partial is not None:
        rope.setdefault("partial_rotary_factor", partial)
    if rope["rope_type"] in _STRETCHED_ROPE and rope.get("original_max_position_embeddings") is None:
        original = config.get("original_max_position_embeddings") or config.get("max_position_embeddings")
        rope["original_max_position_embeddings"] = original
    return rope
