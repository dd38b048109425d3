"""Qwen2: Llama with a bias on the query, key and value projections alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atom.models.base import CausalLM
from atom.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaModel

if TYPE_CHECKING:
    from atom.model_loader.hf_config import HFConfig


class Qwen2Attention(LlamaAttention):
    def has_qkv_bias(self, config: HFConfig) -> bool:
        return True

    def has_output_bias(self, config: HFConfig) -> bool:
        return False


class Qwen2DecoderLayer(LlamaDecoderLayer):
    attention_class = Qwen2Attention


class Qwen2Model(LlamaModel):
    layer_class = Qwen2DecoderLayer


class Qwen2ForCausalLM(CausalLM):
    body_class = Qwen2Model
