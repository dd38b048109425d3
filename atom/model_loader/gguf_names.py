"""From llama.cpp's tensor names and layouts to those of a Hugging Face checkpoint."""

import re

import torch

from atom.model_loader.hf_config import HFConfig

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_GEMMA3_LAYER = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Constants that the configuration already speaks of.
_IGNORED = {"rope_freqs.weight"}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.([a-z0-9_]+)\.(weight|bias)")


def hf_name(name: str, model_type: str) -> str | None:
    """The Hugging Face name of a GGUF tensor of a llama, qwen2, qwen3 or gemma3_text model.

    None: the tensor carries nothing to load. A name that is not known is returned as it is, so that the
    loader reports it.
    """
    if name in _IGNORED:
        return None
    match = _LAYER_NAME.fullmatch(name)
    if match:
        layer, part, kind = match.groups()
        parts = _GEMMA3_LAYER if model_type == "gemma3_text" else _LAYER
        return f"model.layers.{layer}.{parts[part]}.{kind}" if part in parts else name
    part, _, kind = name.rpartition(".")
    return f"{_TOP[part]}.{kind}" if part in _TOP else name


def to_hf_layout(name: str, tensor: torch.Tensor, config: HFConfig) -> torch.Tensor:
    """Undo what llama.cpp's conversion did to the tensor of Hugging Face name ``name``.

    Gemma's norms are stored as 1 + weight. Llama's query and key projections have the rows of each head
    interleaved (pairs for RoPE side by side) where Hugging Face keeps the two halves apart.
    """
    if config.model_type == "gemma3_text" and name.endswith("norm.weight"):
        return tensor - 1.0
    if config.model_type == "llama":
        if ".q_proj." in name:
            return _halves(tensor, config.num_attention_heads)
        if ".k_proj." in name:
            return _halves(tensor, config.num_key_value_heads)
    return tensor


def _halves(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows [head, pair, 2] to [head, 2, pair]."""
    pairs = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
