"""GGUF files of tiny models load to the same configuration and weights as their safetensors originals."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from atom.errors import ConfigError, ModelLoadError
from atom.model_loader.gguf_config import llama3_divisors, llama3_scaling
from atom.model_loader.loader import load_weights
from atom.model_loader.model_files import ModelFiles
from atom.models.registry import get_model_class
from tests.helpers.tiny_gguf import write_gguf
from tests.helpers.tiny_model import FAMILIES, make_tiny_model

COMPARED = [
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
    "layer_types", "rope_parameters", "sliding_window", "bos_token_id", "eos_token_id", "pad_token_id",
    "attention_bias", "query_pre_attn_scalar", "hidden_activation", "hidden_act", "dtype",
]  # fmt: skip


def load(files, dtype=torch.float32):
    """The parameters of the model in ``files`` as they are before the layers pack them."""
    torch.set_default_dtype(dtype)
    try:
        model = get_model_class(files.hf_config.architectures)(files.hf_config)
    finally:
        torch.set_default_dtype(torch.float32)
    model.after_load = lambda: None
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    load_weights(model, files)
    return dict(model.named_parameters())


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    return {
        family: make_tiny_model(root / family, family, max_position_embeddings=256) for family in FAMILIES
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_same_configuration_and_weights(folders, tmp_path, family):
    original = ModelFiles.resolve(str(folders[family]))
    converted = ModelFiles.resolve(str(write_gguf(folders[family], tmp_path / "m.gguf")))
    assert converted.kind == "gguf"
    for name in COMPARED:
        if family == "mistral" and name in ("layer_types", "sliding_window"):
            continue  # llama.cpp files Mistral under llama, without its window
        assert converted.hf_config.get(name) == original.hf_config.get(name), name
    expected, loaded = load(original), load(converted)
    assert list(expected) == list(loaded)
    for name, parameter in loaded.items():
        # Gemma's norms went through 1 + w and back.
        tolerance = 1e-7 if family == "gemma3" else 0
        assert torch.allclose(parameter, expected[name], rtol=0, atol=tolerance), name
    assert converted.weight_bytes("bfloat16") == original.weight_bytes("bfloat16")


@pytest.mark.parametrize("quantisation", ["Q8_0", "Q4_0", "F16", "BF16"])
def test_quantised_matrices_come_close(folders, tmp_path, quantisation):
    original = ModelFiles.resolve(str(folders["llama"]))
    converted = ModelFiles.resolve(str(write_gguf(folders["llama"], tmp_path / "m.gguf", quantisation)))
    expected, loaded = load(original), load(converted, torch.bfloat16)
    limit = {"Q8_0": 0.01, "Q4_0": 0.12, "F16": 0.003, "BF16": 0.006}[quantisation]
    for name, wanted in expected.items():
        error = (loaded[name].float() - wanted).norm() / wanted.norm()
        assert error < limit
    expected_dtype = {"F16": "float16"}.get(quantisation, "bfloat16")
    assert converted.hf_config.dtype == expected_dtype


def test_missing_and_unknown_tensors_are_named(folders, tmp_path):
    files = ModelFiles.resolve(str(write_gguf(folders["qwen3"], tmp_path / "m.gguf")))
    info = files.tensors.pop("blk.1.attn_q_norm.weight")
    files.tensors["blk.1.mystery.weight"] = replace(info, name="blk.1.mystery.weight")
    with pytest.raises(ModelLoadError) as caught:
        load(files)
    assert "lacks tensors of this model (1): model.layers.1.self_attn.qk_norm" in str(caught.value)
    assert "does not know (1): blk.1.mystery.weight (m.gguf, shape [16])" in str(caught.value)


def test_tokenizer_and_generation_settings(folders, tmp_path):
    original = ModelFiles.resolve(str(folders["llama"])).load_tokenizer()
    files = ModelFiles.resolve(str(write_gguf(folders["llama"], tmp_path / "m.gguf")))
    converted = files.load_tokenizer()
    for text in ("plain", " é🙂 <eos> <turn>x\n", ""):
        assert converted.encode(text) == original.encode(text)
        assert converted.decode(original.encode(text)) == original.decode(original.encode(text))
    for name in ("vocab_size", "bos_id", "eos_ids", "bos_token", "eos_token", "special_ids"):
        assert getattr(converted, name) == getattr(original, name), name
    assert files.generation_config == {"eos_token_id": [257]}
    assert files.chat_template is None


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        (
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 64,
                "rope__scaling__yarn_beta_fast": 16.0,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0},
        ),
        ({"rope__dimension_count": 8}, {"rope_type": "default", "partial_rotary_factor": 0.5}),
        ({"rope__dimension_count": 16, "rope__scaling__type": "none"}, {"rope_type": "default"}),
    ],
)
def test_rope_scaling(folders, tmp_path, keys, expected):
    config = ModelFiles.resolve(str(write_gguf(folders["qwen3"], tmp_path / "m.gguf", **keys))).hf_config
    assert config.rope_parameters == expected | {"rope_theta": 10_000.0}


def test_rope_scaling_of_gemma_is_for_global_layers(folders, tmp_path):
    keys = {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0}
    config = ModelFiles.resolve(str(write_gguf(folders["gemma3"], tmp_path / "m.gguf", **keys))).hf_config
    assert config.rope_parameters == {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"expert_count": 8}, "llama.expert_count is 8"),
        ({"rope__scaling__type": "longrope"}, "'longrope'"),
        ({"attention__value_length": 32}, "value_length 32 differs from attention.key_length 16"),
        ({"attention__head_count_kv": [2, 1]}, r"head_count_kv differs between layers \(\[1, 2\]\)"),
    ],
)
def test_variations_that_are_refused(folders, tmp_path, keys, message):
    with pytest.raises(ConfigError, match=message):
        _ = ModelFiles.resolve(str(write_gguf(folders["llama"], tmp_path / "m.gguf", **keys))).hf_config


def test_layer_values_that_are_all_the_same_are_one_value(folders, tmp_path):
    path = write_gguf(folders["llama"], tmp_path / "m.gguf", attention__head_count_kv=[2, 2])
    assert ModelFiles.resolve(str(path)).hf_config.num_key_value_heads == 2


def test_unknown_architecture_is_named(folders, tmp_path):
    path = write_gguf(folders["llama"], tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(b"llama", b"mamba"))
    with pytest.raises(ConfigError, match="'mamba'.*known: llama, qwen2"):
        _ = ModelFiles.resolve(str(path)).hf_config


@pytest.mark.parametrize(("factor", "context"), [(8.0, 8192), (32.0, 8192), (4.0, 131072)])
def test_llama3_rope_is_recovered_from_its_divisors(factor, context):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": context, "rope_theta": 500000.0,
    }  # fmt: skip
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters=dict(rope))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** (-np.arange(0, 128, 2) / 128)
    divisors = (plain / scaled.numpy()).astype(np.float32)
    assert np.allclose(divisors, llama3_divisors(500000.0, 128, factor, context), rtol=1e-4)
    found = llama3_scaling(divisors, 500000.0, 128)
    assert found == {k: v for k, v in rope.items() if k != "rope_theta"}


def test_divisors_of_no_known_rule_are_refused():
    with pytest.raises(ConfigError, match="rope_freqs.weight"):
        llama3_scaling(np.linspace(1, 9, 64, dtype=np.float32), 10_000.0, 128)
