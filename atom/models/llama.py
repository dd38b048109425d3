"""Llama, and the decoder that the other dense families vary.

A layer is ``x += attention(norm(x))``, ``x += mlp(norm(x))``; the last product of either adds its results to ``x``
where it makes them, which saves passes over both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from atom.kernels.linear import Activations
from atom.model_ops.attention import Attention
from atom.model_ops.dense_decoder import DenseLayer
from atom.model_ops.layernorm import QKNorm, RMSNorm
from atom.model_ops.linear import QKVParallelLinear, RowParallelLinear
from atom.model_ops.rotary_embedding import RotaryEmbedding, Rotation
from atom.models.base import CausalLM, GatedMLP, build_ropes, new_embedding, window_of_layer
from atom.utils.decorators import support_torch_compile
from atom.utils.region_graph import token_graph

if TYPE_CHECKING:
    from atom.model_loader.hf_config import HFConfig


class LlamaAttention(nn.Module):
    """Grouped-query attention with rotary embedding. Variants override the small methods below."""

    qk_norm_class: ClassVar[type[QKNorm] | None] = None

    def __init__(self, config: HFConfig, index: int, rope: RotaryEmbedding):
        super().__init__()
        head_dim = config.head_dim
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=self.has_qkv_bias(config),
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * head_dim, config.hidden_size, bias=self.has_output_bias(config)
        )
        self.num_heads = self.qkv_proj.num_heads
        self.num_kv_heads = self.qkv_proj.num_kv_heads
        self.head_dim = head_dim
        self.qk_norm = None
        if self.qk_norm_class is not None:
            self.qk_norm = self.qk_norm_class(
                self.num_heads, self.num_kv_heads, head_dim, config.rms_norm_eps
            )
        self.rope = rope  # shared by all layers of its kind
        self.attn = Attention(
            self.num_heads,
            head_dim,
            self.scale(config),
            self.num_kv_heads,
            f"model.layers.{index}.self_attn",
            sliding_window=window_of_layer(config, index),
        )

    def has_qkv_bias(self, config: HFConfig) -> bool:
        return config.get("attention_bias", False)

    def has_output_bias(self, config: HFConfig) -> bool:
        return config.get("attention_bias", False)

    def scale(self, config: HFConfig) -> float:
        return config.head_dim**-0.5

    def forward(self, x: Activations, rotation: Rotation, total: torch.Tensor | None = None) -> torch.Tensor:
        """The attention of ``x [num_tokens, hidden_size]``; with ``total``, alike, that plus the attention."""
        norm = self.qk_norm
        is_fused = self.attn.fuses_rotation and self.rope.rotary_dim == self.head_dim
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        if is_fused and self.attn.can_project(self.qkv_proj):
            heads = self.attn.forward_hidden(x, self.qkv_proj.packed, *rotation, weight, eps)
            return self.o_proj(heads, total)
        qkv = self.qkv_proj(x)
        qkv = qkv.view(len(qkv), -1, self.head_dim)
        if is_fused:
            return self.o_proj(self.attn.forward_projected(qkv, *rotation, weight, eps), total)
        num_qk = self.num_heads + self.num_kv_heads
        qk = qkv[:, :num_qk]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)  # query heads first
        qk = self.rope(qk, rotation)
        heads = self.attn(qk[:, : self.num_heads], qk[:, self.num_heads :], qkv[:, num_qk:])
        return self.o_proj(heads, total)

    def describe(self, *, mlp: GatedMLP, **norms: RMSNorm | None) -> DenseLayer:
        """The layer that this attention and ``mlp`` form with the norms around them."""
        return DenseLayer(
            qkv=self.qkv_proj,
            qk_norm=self.qk_norm,
            rope=self.rope,
            attention=self.attn,
            output=self.o_proj,
            gate_up=mlp.gate_up_proj,
            activation=mlp.activation,
            down=mlp.down_proj,
            **norms,
        )


class LlamaDecoderLayer(nn.Module):
    attention_class: ClassVar[type[LlamaAttention]] = LlamaAttention

    def __init__(self, config: HFConfig, index: int, rope: RotaryEmbedding):
        super().__init__()
        self.self_attn = self.attention_class(config, index, rope)
        self.mlp = GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            bias=config.get("mlp_bias", False),
        )
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def fuse_quantisation(self) -> None:
        """Let each norm round its results where the product behind it would."""
        self.input_layernorm.quantise_for(self.self_attn.qkv_proj)
        self.post_attention_layernorm.quantise_for(self.mlp.gate_up_proj)

    def forward(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """``x [num_tokens, hidden_size]``, whose memory the result may take."""
        x = self.self_attn(self.input_layernorm(x), rotation, x)
        return self.mlp(self.post_attention_layernorm(x), x)

    def describe(self) -> DenseLayer:
        return self.self_attn.describe(
            input_norm=self.input_layernorm,
            post_attention_norm=None,
            mlp_norm=self.post_attention_layernorm,
            mlp=self.mlp,
            post_mlp_norm=None,
        )


@token_graph(per_phase=True)  # attention runs other kernels in a prefill than in a decode
@support_torch_compile
class LlamaModel(nn.Module):
    layer_class: ClassVar[type[nn.Module]] = LlamaDecoderLayer
    norm_class: ClassVar[type[RMSNorm]] = RMSNorm

    def __init__(self, config: HFConfig):
        super().__init__()
        self.embed_tokens = new_embedding(config)
        self.ropes, self.rope_of_layer = build_ropes(config)
        self.layers = nn.ModuleList(
            self.layer_class(config, i, self.ropes[key]) for i, key in enumerate(self.rope_of_layer)
        )
        self.norm = self.norm_class(config.hidden_size, config.rms_norm_eps)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(input_ids)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        rotations = {key: rope.rotation(positions, x.dtype) for key, rope in self.ropes.items()}
        for layer, key in zip(self.layers, self.rope_of_layer, strict=True):
            x = layer(x, rotations[key])
        return self.norm(x)


class LlamaForCausalLM(CausalLM):
    body_class = LlamaModel

    def convert_gguf(self, hf_name: str, tensor: torch.Tensor) -> torch.Tensor:
        order = self.gguf_row_order(hf_name)
        return tensor if order is None else tensor[order]

    def gguf_row_order(self, hf_name: str) -> torch.Tensor | None:
        """Undo llama.cpp's reordering of query and key rows for interleaved rotary pairs.

        There, row ``2 i + j`` of a head is row ``i + j * head_dim / 2`` of the half-split form.
        """
        module = hf_name.rpartition(".")[0].rpartition(".")[2]
        if module not in ("q_proj", "k_proj"):
            return None
        config = self.config
        num_heads = config.num_attention_heads if module == "q_proj" else config.num_key_value_heads
        rows = torch.arange(num_heads * config.head_dim)
        return rows.view(num_heads, config.head_dim // 2, 2).transpose(1, 2).reshape(-1)
