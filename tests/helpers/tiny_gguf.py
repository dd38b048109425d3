"""Write a tiny Hugging Face folder as the GGUF file that llama.cpp's conversion would make of it."""

import json
from pathlib import Path

import numpy as np

from tests.helpers.tiny_model import BOS_ID, EOS_ID, PAD_ID, SPECIAL_TOKENS, byte_characters

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
}
_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
}
_GEMMA_PARTS = _PARTS | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(
    folder: str | Path,
    path: str | Path,
    quantisation: str = "F32",
    types: dict[str, str] | None = None,
    **extra_keys,
) -> Path:
    """Convert the model in ``folder`` (of ``make_tiny_model``) to ``path``.

    Args:
        quantisation: type of the matrices whose rows are long enough; the rest stays F32.
        types: another type by part of the tensor's name, such as ``attn_q``.
        extra_keys: more metadata of the architecture, dots as double underscores.
    """
    import gguf
    from gguf import quants
    from safetensors.numpy import load_file

    folder, path = Path(folder), Path(path)
    config = json.loads((folder / "config.json").read_text())
    arch = _ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(str(path), arch)
    _write_config(writer, arch, config)
    for key, value in extra_keys.items():
        full = f"{arch}.{key.replace('__', '.')}"
        if isinstance(value, str):
            writer.add_string(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        elif isinstance(value, list):
            writer.add_array(full, value)
        else:
            writer.add_uint32(full, value)
    _write_byte_tokenizer(writer, config["vocab_size"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensor = _to_gguf_layout(name, tensor.astype(np.float32), arch, config)
        own = [kind for part, kind in (types or {}).items() if f".{part}." in gguf_name(name, arch)]
        kind = gguf.GGMLQuantizationType[own[0] if own else quantisation]
        if tensor.ndim == 2 and tensor.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0:
            writer.add_tensor(gguf_name(name, arch), quants.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name, arch), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str, arch: str) -> str:
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    part, kind = name.rsplit(".", 1)
    if part in top:
        return f"{top[part]}.{kind}"
    _, _, layer, part = part.split(".", 3)
    return f"blk.{layer}.{(_GEMMA_PARTS if arch == 'gemma3' else _PARTS)[part]}.{kind}"


def _write_config(writer, arch: str, config: dict) -> None:
    rope = config["rope_parameters"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if arch == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_array(
            "gemma3.attention.sliding_window_pattern",
            [t == "sliding_attention" for t in config["layer_types"]],
        )


def _write_byte_tokenizer(writer, vocab_size: int) -> None:
    tokens = byte_characters() + list(SPECIAL_TOKENS)
    types = [1] * 256 + [3] * len(SPECIAL_TOKENS)
    for index in range(len(tokens), vocab_size):
        tokens.append(f"[PAD{index}]")
        types.append(5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_pad_token_id(PAD_ID)
    writer.add_add_bos_token(True)


def _to_gguf_layout(name: str, tensor: np.ndarray, arch: str, config: dict) -> np.ndarray:
    if arch == "gemma3" and name.endswith("norm.weight"):
        return tensor + 1
    if arch == "llama":
        for part, heads in ((".q_proj.", "num_attention_heads"), (".k_proj.", "num_key_value_heads")):
            if part in name:
                halves = tensor.reshape(config[heads], 2, -1, *tensor.shape[1:])
                return halves.swapaxes(1, 2).reshape(tensor.shape)
    return tensor
