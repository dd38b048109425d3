"""What every language model offers to the engine and to the loader, and the parts that dense ones share.

A model is built under ``torch.device(...)`` and the default dtype of its weights, filled by the loader (see
``model_loader.loader``), finished by ``after_load()``, and then called inside ``set_forward_context``:
``forward(input_ids, positions)`` gives hidden states of every token, ``compute_logits`` the logits of the rows
that are sampled.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from atom.config import get_current_atom_config
from atom.core import CacheGroupSpec, GroupKind
from atom.kernels.linear import Activations
from atom.kernels.registry import traceable_kernels
from atom.model_ops.activation import get_act_and_mul
from atom.model_ops.attention import Attention
from atom.model_ops.dense_decoder import DenseDecoder, FusedDecoder
from atom.model_ops.embedding import ParallelLMHead, VocabParallelEmbedding
from atom.model_ops.linear import GateUpParallelLinear, LinearBase, RowParallelLinear
from atom.model_ops.rotary_embedding import get_rope
from atom.model_ops.weights import num_loaded_bytes, run_after_load
from atom.utils import envs
from atom.utils.forward_context import get_forward_context

if TYPE_CHECKING:
    from atom.model_loader.hf_config import HFConfig

_GGUF_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class CausalLM(nn.Module):
    """Base of the language models; a family sets ``body_class`` and what is different about its names."""

    body_class: ClassVar[type[nn.Module]]

    # Checkpoint module -> (parameter's module, shard): what is packed into one product.
    packed_modules: ClassVar[dict[str, tuple[str, Any]]] = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }
    # llama.cpp's tensor names -> those of the Hugging Face layout.
    gguf_top_names: ClassVar[dict[str, str]] = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
    }
    gguf_block_names: ClassVar[dict[str, str]] = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }

    def __init__(self, config: HFConfig, *, lm_head_dtype: str = "auto"):
        super().__init__()
        self.config = config
        engine_config = get_current_atom_config()
        is_compiled = engine_config is not None and engine_config.compilation_level > 0
        with traceable_kernels(is_compiled):
            self.model = self.body_class(config)
        self.is_tied = bool(config.get("tie_word_embeddings", False))
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            tied_to=self.model.embed_tokens if self.is_tied else None,
            dtype=lm_head_dtype,
        )
        self.fused: FusedDecoder | None = None  # runs the steps that it takes in place of the modules

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """``input_ids``, ``positions`` ``[num_tokens]`` -> hidden states ``[num_tokens, hidden_size]``."""
        fused = self.fused
        if fused is not None and fused.takes(get_forward_context(), len(input_ids)):
            return fused.forward(input_ids, positions)
        return self.model(input_ids, positions)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``hidden_states [num_rows, hidden_size]`` -> ``[num_rows, vocab_size]``."""
        return self.lm_head(hidden_states)

    def dense_decoder(self) -> DenseDecoder | None:
        """What a fused runner may execute instead of the modules; None where the layers are not dense."""
        if not all(hasattr(layer, "describe") for layer in self.model.layers):
            return None
        return DenseDecoder(
            embedding=self.model.embed_tokens,
            embed_scale=getattr(self.model, "embed_scale", 1.0),
            layers=tuple(layer.describe() for layer in self.model.layers),
            final_norm=self.model.norm,
            head=self.lm_head,
            logits_soft_cap=getattr(self, "logits_soft_cap", None),
        )

    def attention_layers(self) -> dict[str, Attention]:
        """The layers that keep keys and values, by the name that forward contexts use, in layer order."""
        return {m.layer_name: m for m in self.modules() if isinstance(m, Attention)}

    def cache_groups(self, block_size: int, kv_dtype: torch.dtype) -> list[CacheGroupSpec]:
        """One group of all full-attention layers, and one for each window length; full comes first."""
        by_window: dict[int | None, list[Attention]] = {}
        for layer in self.attention_layers().values():
            by_window.setdefault(layer.sliding_window, []).append(layer)
        return [
            CacheGroupSpec(
                kind=GroupKind.FULL if window is None else GroupKind.SLIDING,
                layer_names=tuple(layer.layer_name for layer in layers),
                bytes_per_block=sum(layer.bytes_per_block(block_size, kv_dtype) for layer in layers),
                window=window,
            )
            for window, layers in sorted(by_window.items(), key=lambda item: item[0] or 0)
        ]

    def map_checkpoint_name(self, name: str) -> tuple[str, Any] | None:
        """Where a tensor of the Hugging Face layout goes: ``(parameter name, shard id)``.

        None for tensors that are known and not needed. An unknown name comes back unchanged and names no
        parameter.
        """
        if name.endswith("rotary_emb.inv_freq"):
            return None
        if name == "lm_head.weight":
            return None if self.is_tied else ("lm_head.table.weight", None)
        path, _, leaf = name.rpartition(".")
        parent, _, module = path.rpartition(".")
        if module in self.packed_modules:
            packed, shard = self.packed_modules[module]
            return f"{parent}.{packed}.{leaf}", shard
        return name, None

    def gguf_tensor_name(self, name: str) -> str | None:
        """The Hugging Face name of a llama.cpp tensor; None where it is derived data that we compute.

        An unknown name comes back unchanged and names no parameter.
        """
        if name == "rope_freqs.weight":
            return None
        match = _GGUF_BLOCK.fullmatch(name)
        if match and match[2] in self.gguf_block_names:
            return f"model.layers.{match[1]}.{self.gguf_block_names[match[2]]}.{match[3]}"
        stem, _, leaf = name.rpartition(".")
        return f"{self.gguf_top_names[stem]}.{leaf}" if stem in self.gguf_top_names else name

    def convert_gguf(self, hf_name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A llama.cpp tensor as the Hugging Face layout would have it."""
        return tensor

    def gguf_row_order(self, hf_name: str) -> torch.Tensor | None:
        """Which rows of a llama.cpp matrix make the Hugging Face layout's, in order; None: they are the same.

        Matrices differ in nothing else, so that blocks can be kept as they are.
        """
        return None

    def num_weight_bytes(self) -> int:
        """Bytes that this rank's weights will take once loaded and packed.

        Call it before loading: a packed weight is no parameter any more.
        """
        saved = sum(layer.num_saved_bytes() for layer in self.modules() if isinstance(layer, LinearBase))
        return sum(map(num_loaded_bytes, self.parameters())) - saved + self.lm_head.num_extra_bytes()

    def after_load(self) -> None:
        """Pack and quantise weights once all of them are there; the model is usable from here on."""
        run_after_load(self)


class GatedMLP(nn.Module):
    """``down(act(gate(x)) * up(x))``, added to ``total`` where there is one."""

    def __init__(self, hidden_size: int, intermediate_size: int, activation: str, *, bias: bool = False):
        super().__init__()
        self.act = get_act_and_mul(activation)
        self.activation = "silu" if activation == "silu" else "gelu_tanh"
        self.gate_up_proj = GateUpParallelLinear(hidden_size, intermediate_size, self.activation, bias=bias)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias=bias, has_outliers=True)

    def fuse_quantisation(self) -> None:
        """Round behind the activation, in its pass, where ``down_proj`` rounds its input."""
        if self.down_proj.kernel.takes_quantised and envs.ATOM_LLAMA_ENABLE_AITER_TRITON_FUSED_SILU_MUL_QUANT:
            self.act = get_act_and_mul(self.activation, quantised_size=self.down_proj.in_features)

    def forward(self, x: Activations, total: torch.Tensor | None = None) -> torch.Tensor:
        gate_up = self.gate_up_proj
        x = gate_up(x)
        return self.down_proj(x if gate_up.is_activated else self.act(x), total)


def window_of_layer(config: HFConfig, index: int) -> int | None:
    """The sliding window of layer ``index``; None where it sees the full context."""
    return config.sliding_window if config.layer_types[index] == "sliding_attention" else None


def build_ropes(config: HFConfig) -> tuple[nn.ModuleDict, list[str]]:
    """The model's rotary embeddings, and for each layer the key of its own.

    A configuration has either one set of parameters or one for each layer type.
    """
    parameters = config.rope_parameters
    if not all(isinstance(parameters.get(kind), dict) for kind in config.layer_types):
        parameters = {"all": parameters}
    keys = config.layer_types if "all" not in parameters else ["all"] * len(config.layer_types)
    ropes = {
        key: get_rope(config.head_dim, parameters[key], config.max_position_embeddings)
        for key in sorted(set(keys))
    }
    return nn.ModuleDict(ropes), keys


def new_embedding(config: HFConfig) -> VocabParallelEmbedding:
    return VocabParallelEmbedding(config.vocab_size, config.hidden_size)
