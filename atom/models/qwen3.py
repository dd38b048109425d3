"""Qwen3: Llama with query and key heads normalised before the rotation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from atom.model_ops.layernorm import QKNorm
from atom.models.base import CausalLM
from atom.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaModel

if TYPE_CHECKING:
    from atom.model_loader.hf_config import HFConfig
    from atom.model_ops.rotary_embedding import RotaryEmbedding


class Qwen3Attention(LlamaAttention):
    def __init__(self, config: HFConfig, index: int, rope: RotaryEmbedding):
        super().__init__(config, index, rope)
        self.qk_norm = QKNorm(self.num_heads, self.num_kv_heads, self.head_dim, config.rms_norm_eps)

    def norm_qk(self, qk: torch.Tensor) -> torch.Tensor:
        return self.qk_norm(qk)


class Qwen3DecoderLayer(LlamaDecoderLayer):
    attention_class = Qwen3Attention


class Qwen3Model(LlamaModel):
    layer_class = Qwen3DecoderLayer


class Qwen3ForCausalLM(CausalLM):
    body_class = Qwen3Model
    packed_modules = CausalLM.packed_modules | {"q_norm": ("qk_norm", "q"), "k_norm": ("qk_norm", "k")}
