"""config.json in, completed configuration out; transformers is the oracle for the defaults."""

import json
import subprocess
import sys

import pytest

from atom.errors import ConfigError, ModelLoadError
from atom.model_loader.hf_config import FULL, SLIDING, HFConfig

ORACLES = {
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "gemma3_text": "Gemma3TextConfig",
}
COMPARED = [
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
    "bos_token_id", "eos_token_id", "pad_token_id", "head_dim", "hidden_act", "hidden_activation",
    "attention_bias", "mlp_bias", "sliding_window", "layer_types", "rope_parameters",
    "query_pre_attn_scalar", "use_sliding_window", "max_window_layers", "final_logit_softcapping",
]  # fmt: skip

CASES = [
    ("llama", {}),
    ("llama", {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("llama", {"num_key_value_heads": 4, "head_dim": 64}),
    ("mistral", {}),
    ("mistral", {"sliding_window": None, "rope_theta": 1e6}),
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 3, "num_hidden_layers": 6}),
    ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}),
    ("qwen3", {}),
    ("qwen3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}}),
    ("gemma3_text", {}),
    ("gemma3_text", {"sliding_window_pattern": 2, "num_hidden_layers": 5, "rope_theta": 5e5,
        "rope_local_base_freq": 1e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "raw"), CASES)
def test_defaults_equal_transformers(model_type, raw):
    import transformers

    expected = getattr(transformers, ORACLES[model_type])(**json.loads(json.dumps(raw)))
    config = HFConfig.from_dict({"model_type": model_type, **raw})
    for name in COMPARED:
        if hasattr(expected, name) and not (model_type == "mistral" and name == "layer_types"):
            value = getattr(expected, name)
            if name == "rope_parameters":
                value = {k: v for k, v in value.items() if k != "type"}  # we keep the new spelling alone
            assert config.get(name, "absent") == value, name
    assert len(config.layer_types) == config.num_hidden_layers


@pytest.mark.parametrize(("model_type", "raw"), CASES)
def test_normalising_is_idempotent(model_type, raw):
    config = HFConfig.from_dict({"model_type": model_type, **raw})
    assert HFConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_saved_by_transformers_reads_back(tmp_path):
    from transformers import Gemma3TextConfig

    expected = Gemma3TextConfig(num_hidden_layers=7, hidden_size=64, sliding_window=32)
    expected.save_pretrained(tmp_path)
    config = HFConfig.from_file(tmp_path / "config.json")
    assert config.layer_types == expected.layer_types
    assert config.rope_parameters == expected.rope_parameters
    assert (config.sliding_window, config.hidden_size) == (32, 64)


def test_layer_types_of_mistral_and_llama():
    assert set(HFConfig.from_dict({"model_type": "mistral"}).layer_types) == {SLIDING}
    assert set(HFConfig.from_dict({"model_type": "mistral", "sliding_window": None}).layer_types) == {FULL}
    assert set(HFConfig.from_dict({"model_type": "llama"}).layer_types) == {FULL}


def test_multimodal_promotes_the_language_model():
    config = HFConfig.from_dict(
        {
            "model_type": "gemma3",
            "architectures": ["Gemma3ForConditionalGeneration"],
            "eos_token_id": [1, 106],
            "torch_dtype": "bfloat16",
            "text_config": {"model_type": "gemma3_text", "hidden_size": 640, "eos_token_id": 1},
            "vision_config": {"hidden_size": 1152},
        }
    )
    assert config.architectures == ["Gemma3ForConditionalGeneration"]
    assert config.eos_token_id == [1, 106]
    assert (config.hidden_size, config.dtype, config.model_type) == (640, "bfloat16", "gemma3_text")
    assert "text_config" not in config and "vision_config" not in config


def test_overrides_apply_key_by_key_and_before_what_is_derived():
    raw = {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}
    config = HFConfig.from_dict(
        raw, {"num_hidden_layers": 3, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}
    )
    assert len(config.layer_types) == 3
    assert config.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}
    assert raw["rope_parameters"] == {"rope_type": "default", "rope_theta": 5.0}  # not modified


def test_fewer_layers_by_override_cut_layer_types():
    raw = {"model_type": "qwen3", "num_hidden_layers": 4, "layer_types": [FULL] * 4}
    assert len(HFConfig.from_dict(raw, {"num_hidden_layers": 2}).layer_types) == 2
    with pytest.raises(ConfigError, match="layer_types has 4 entries, num_hidden_layers is 5"):
        HFConfig.from_dict(raw, {"num_hidden_layers": 5})


def test_quantised_checkpoint_is_refused_by_name():
    with pytest.raises(ConfigError, match="'awq'"):
        HFConfig.from_dict({"model_type": "llama", "quantization_config": {"quant_method": "awq"}})
    promoted = {"model_type": "mistral3", "text_config": {}, "quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(ConfigError, match="'fp8'"):
        HFConfig.from_dict(promoted)


def test_sliding_layers_without_window_are_refused():
    with pytest.raises(ConfigError, match="sliding_window"):
        HFConfig.from_dict({"model_type": "qwen2", "layer_types": [SLIDING] * 32})


def test_head_dim_that_cannot_be_derived_is_refused():
    with pytest.raises(ConfigError, match="hidden_size 100 is not a multiple of num_attention_heads 3"):
        HFConfig.from_dict({"model_type": "llama", "hidden_size": 100, "num_attention_heads": 3})


def test_attribute_access():
    config = HFConfig.from_dict({"model_type": "llama"})
    with pytest.raises(AttributeError, match="'llama'.*'no_such_field'"):
        _ = config.no_such_field
    assert config.get("no_such_field", 7) == 7
    assert not hasattr(config, "no_such_field")


def test_unknown_model_type_keeps_its_fields_and_gets_no_defaults():
    config = HFConfig.from_dict({"model_type": "novel", "num_hidden_layers": 2, "odd": [1]})
    assert (config.odd, config.layer_types) == ([1], [FULL, FULL])
    assert "vocab_size" not in config and "rope_parameters" not in config


@pytest.mark.parametrize(("content", "message"), [("[1]", "JSON object"), ("{", "not valid JSON")])
def test_broken_file_is_named(tmp_path, content, message):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=f"config.json.*{message}"):
        HFConfig.from_file(tmp_path / "config.json")


def test_reading_a_config_needs_no_torch():
    code = "import sys, atom.model_loader.hf_config; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
