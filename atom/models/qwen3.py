"""Qwen3: Llama with query and key heads normalised before the rotation."""

from atom.model_ops.layernorm import QKNorm
from atom.models.base import CausalLM
from atom.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaModel


class Qwen3Attention(LlamaAttention):
    qk_norm_class = QKNorm


class Qwen3DecoderLayer(LlamaDecoderLayer):
    attention_class = Qwen3Attention


class Qwen3Model(LlamaModel):
    layer_class = Qwen3DecoderLayer


class Qwen3ForCausalLM(CausalLM):
    body_class = Qwen3Model
    packed_modules = CausalLM.packed_modules | {"q_norm": ("qk_norm", "q"), "k_norm": ("qk_norm", "k")}
