"""Random models of a few hundred kB that serve like real ones: weights, configuration and byte tokenizer."""

import json
from pathlib import Path

NUM_BYTES = 256
BOS_ID, EOS_ID, PAD_ID, TURN_ID = 256, 257, 258, 259
BOS, EOS, PAD, TURN = "<bos>", "<eos>", "<pad>", "<turn>"
SPECIAL_TOKENS = {BOS: BOS_ID, EOS: EOS_ID, PAD: PAD_ID, TURN: TURN_ID}
TOKENIZER_SIZE = NUM_BYTES + len(SPECIAL_TOKENS)
VOCAB_SIZE = 320  # rows beyond the tokenizer's 260 ids, as padded heads of real models have

# A template as chat models have it: every turn opens with a special token, the answer comes after the last.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<turn>{{ message['role'] }}\n{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,  # logits far enough apart that rounding does not change the best one
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}
# family -> (configuration class, model class, what it has of its own)
_FAMILIES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 24}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "num_hidden_layers": 3,
            "sliding_window": 24,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
FAMILIES = tuple(_FAMILIES)


def make_tiny_model(
    folder: str | Path,
    family: str = "llama",
    dtype: str = "float32",
    chat_template: str | None = None,
    *,
    seed: int = 0,
    max_shard_size: str = "5GB",
    **config,
) -> Path:
    """Save a random model of ``family`` with its tokenizer into ``folder`` and return the folder.

    Args:
        chat_template: Jinja text for ``tokenizer_config.json``; ``CHAT_TEMPLATE`` is a usable one.
        max_shard_size: as in ``save_pretrained``: small values give several files and an index.
        config: fields of the configuration to replace.
    """
    import torch
    import transformers

    config_name, model_name, own = _FAMILIES[family]
    model_config = getattr(transformers, config_name)(**(_SIZES | own | config))
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = getattr(transformers, model_name)(model_config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases, which initialise to constants
                parameter.add_(torch.randn_like(parameter) * 0.1)
    torch.set_rng_state(state)
    folder = Path(folder)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    write_byte_tokenizer(folder, chat_template)
    ids = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    (folder / "generation_config.json").write_text(json.dumps(ids))
    return folder


def write_byte_tokenizer(folder: str | Path, chat_template: str | None = None) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``: a token a byte (id = byte), then the special ones.

    ``<bos>`` is put before every encoded text.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    vocab = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each byte, by byte: itself where printable, else from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters, num_moved = [], 0
    for byte in range(NUM_BYTES):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(0x100 + num_moved))
            num_moved += 1
    return characters
