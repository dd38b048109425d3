"""The demo model in transformers, read with the ``gguf`` package alone: an oracle that shares no code with ATOM."""

import gguf
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from atom.model_loader.demo import assemble_demo_model

_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load_hf_demo(dtype: torch.dtype) -> Gemma3ForCausalLM:
    """The dequantised model, ready to run."""
    reader = gguf.GGUFReader(str(assemble_demo_model()))
    facts = {name: field.contents() for name, field in reader.fields.items() if name.startswith("gemma3.")}
    state = {}
    for tensor in reader.tensors:
        value = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        if "norm" in tensor.name:
            value = value - 1.0  # llama.cpp stores the effective factor
        state[_name(tensor.name)] = value.to(dtype)
    config = Gemma3TextConfig(
        vocab_size=state["model.embed_tokens.weight"].shape[0],
        hidden_size=facts["gemma3.embedding_length"],
        intermediate_size=facts["gemma3.feed_forward_length"],
        num_hidden_layers=facts["gemma3.block_count"],
        num_attention_heads=facts["gemma3.attention.head_count"],
        num_key_value_heads=facts["gemma3.attention.head_count_kv"],
        head_dim=facts["gemma3.attention.key_length"],
        query_pre_attn_scalar=facts["gemma3.attention.key_length"],
        max_position_embeddings=facts["gemma3.context_length"],
        sliding_window=facts["gemma3.attention.sliding_window"],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": facts["gemma3.rope.freq_base"]},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        tie_word_embeddings=True,
        attn_implementation="eager",
        dtype=dtype,
    )
    with torch.device("meta"):
        model = Gemma3ForCausalLM(config)
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    fresh = Gemma3ForCausalLM(config).model.rotary_emb  # its buffers are computed, not loaded
    model.model.rotary_emb = fresh
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise ValueError(f"the GGUF file lacks {missing}")
    model.model.embed_tokens.embed_scale = torch.tensor(config.hidden_size**0.5)
    return model.eval()


def _name(name: str) -> str:
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, rest = name.split(".", 2)
    return f"model.layers.{layer}.{_NAMES[rest.removesuffix('.weight')]}.weight"
