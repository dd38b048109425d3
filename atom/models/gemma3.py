"""Gemma 3, text only: sandwich norms stored as ``w - 1``, local and global rotary bases, scaled embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from atom.errors import ConfigError
from atom.kernels.linear import add_up
from atom.model_ops.dense_decoder import DenseLayer
from atom.model_ops.layernorm import GemmaQKNorm, GemmaRMSNorm
from atom.model_ops.rotary_embedding import Rotation
from atom.models.base import CausalLM, GatedMLP
from atom.models.llama import LlamaAttention, LlamaModel

if TYPE_CHECKING:
    from atom.model_loader.hf_config import HFConfig
    from atom.model_ops.rotary_embedding import RotaryEmbedding


class Gemma3Attention(LlamaAttention):
    qk_norm_class = GemmaQKNorm

    def scale(self, config: HFConfig) -> float:
        return config.query_pre_attn_scalar**-0.5


class Gemma3DecoderLayer(nn.Module):
    """Attention and MLP each between two norms; the second one comes before the residual is added."""

    def __init__(self, config: HFConfig, index: int, rope: RotaryEmbedding):
        super().__init__()
        self.self_attn = Gemma3Attention(config, index, rope)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_activation)
        for name in (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ):
            setattr(self, name, GemmaRMSNorm(config.hidden_size, config.rms_norm_eps))

    def fuse_quantisation(self) -> None:
        """Let each norm before a product round its results where the product would."""
        self.input_layernorm.quantise_for(self.self_attn.qkv_proj)
        self.pre_feedforward_layernorm.quantise_for(self.mlp.gate_up_proj)

    def forward(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        attention = self.self_attn(self.input_layernorm(x), rotation)
        x = add_up(x, self.post_attention_layernorm(attention))
        return add_up(x, self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x))))

    def describe(self) -> DenseLayer:
        return self.self_attn.describe(
            input_norm=self.input_layernorm,
            post_attention_norm=self.post_attention_layernorm,
            mlp_norm=self.pre_feedforward_layernorm,
            mlp=self.mlp,
            post_mlp_norm=self.post_feedforward_layernorm,
        )


class Gemma3Model(LlamaModel):
    layer_class = Gemma3DecoderLayer
    norm_class = GemmaRMSNorm

    def __init__(self, config: HFConfig):
        if config.get("use_bidirectional_attention"):
            raise ConfigError(
                "use_bidirectional_attention: True is for embedding models, which are not served"
            )
        super().__init__(config)
        # Rounded to the weights' dtype before the product, as the model was trained. On the CPU: a plan is made on the
        # meta device, whose tensors have no values.
        dtype = self.embed_tokens.weight.dtype
        self.embed_scale = torch.tensor(config.hidden_size**0.5, dtype=dtype, device="cpu").item()

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(input_ids) * self.embed_scale


class Gemma3ForCausalLM(CausalLM):
    body_class = Gemma3Model
    packed_modules = CausalLM.packed_modules | {"q_norm": ("qk_norm", "q"), "k_norm": ("qk_norm", "k")}
    gguf_block_names = CausalLM.gguf_block_names | {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }

    def __init__(self, config: HFConfig, *, lm_head_dtype: str = "auto"):
        super().__init__(config, lm_head_dtype=lm_head_dtype)
        self.logits_soft_cap = config.get("final_logit_softcapping")

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = super().compute_logits(hidden_states)
        if self.logits_soft_cap is not None:
            logits = torch.tanh(logits / self.logits_soft_cap) * self.logits_soft_cap
        return logits

    def convert_gguf(self, hf_name: str, tensor: torch.Tensor) -> torch.Tensor:
        """llama.cpp stores the norms' effective factors, the Hugging Face layout their distance from one."""
        return tensor.float() - 1.0 if hf_name.endswith("norm.weight") else tensor


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The language model of the multimodal checkpoints; their vision parts are left out."""

    def map_checkpoint_name(self, name: str) -> tuple[str, Any] | None:
        if "vision_tower." in name or "multi_modal_projector." in name:
            return None
        # Two generations of names: ``language_model.model.*`` and ``model.language_model.*``.
        if name.startswith("model.language_model."):
            name = name.replace("model.language_model.", "model.", 1)
        return super().map_checkpoint_name(name.removeprefix("language_model."))
