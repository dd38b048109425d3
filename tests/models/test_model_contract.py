"""What models offer to the loader and the engine, beyond their numbers."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from atom.config import Config
from atom.core import GroupKind
from atom.errors import ConfigError
from atom.kernels.registry import override_kernel
from atom.model_engine.model_runner import ModelRunner
from atom.model_loader.hf_config import HFConfig
from atom.model_ops.attentions.backend import override_backend
from atom.model_ops.linear import LinearBase
from atom.models.registry import get_model_class, support_model_arch_dict
from atom.platforms import PLATFORMS, meta_stands_for
from tests.models.harness import PagedRunner

REPO = Path(__file__).parents[2]
SHAPE = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3_text",
}


def config_of(architecture: str, **changes) -> dict:
    fields = {"architectures": [architecture], "model_type": MODEL_TYPES[architecture]}
    if "Gemma" in architecture:
        fields["head_dim"] = 8
    return fields | SHAPE | changes


def build(architecture: str, **changes):
    return get_model_class([architecture])(HFConfig.from_dict(config_of(architecture, **changes)))


def fill(model):
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3)
    model.after_load()
    return model


def test_the_registry_names_classes_that_exist_and_imports_none_of_them():
    assert set(support_model_arch_dict) == set(MODEL_TYPES)
    for name in support_model_arch_dict:
        assert get_model_class([name]).__name__ == name
    code = "import sys, atom.models.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO).returncode == 0


def test_an_unsupported_architecture_lists_the_supported_ones():
    with pytest.raises(ConfigError, match=r"\['Bert'\] is not supported; supported: LlamaForCausalLM, "):
        get_model_class(["Bert"])
    with pytest.raises(ConfigError, match="architectures: None is not supported"):
        get_model_class(None)
    assert get_model_class(["Other", "Qwen2ForCausalLM"]).__name__ == "Qwen2ForCausalLM"


def test_the_guide_lists_every_architecture():
    guide = (REPO / "docs" / "model_support_guide.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)` \|", guide, re.MULTILINE))
    assert rows == set(support_model_arch_dict)


@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_every_parameter_can_be_loaded(architecture):
    model = build(architecture, tie_word_embeddings=False)
    for name, parameter in model.named_parameters():
        assert callable(parameter.weight_loader), name
        assert isinstance(parameter.expected_shards, tuple) and parameter.expected_shards, name
    assert model.map_checkpoint_name("lm_head.weight") == ("lm_head.table.weight", None)
    assert "lm_head.table.weight" in dict(model.named_parameters())


def test_checkpoint_names():
    model = build("LlamaForCausalLM", tie_word_embeddings=True)
    at = "model.layers.2."
    assert model.map_checkpoint_name(at + "self_attn.k_proj.bias") == (at + "self_attn.qkv_proj.bias", "k")
    assert model.map_checkpoint_name(at + "mlp.up_proj.weight") == (at + "mlp.gate_up_proj.weight", 1)
    assert model.map_checkpoint_name(at + "mlp.down_proj.weight") == (at + "mlp.down_proj.weight", None)
    assert model.map_checkpoint_name("lm_head.weight") is None  # tied
    assert model.map_checkpoint_name(at + "self_attn.rotary_emb.inv_freq") is None
    assert model.map_checkpoint_name("nonsense") == ("nonsense", None)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_multimodal_gemma_keeps_its_language_model(prefix):
    model = build("Gemma3ForConditionalGeneration")
    assert model.map_checkpoint_name(prefix + "embed_tokens.weight") == ("model.embed_tokens.weight", None)
    assert model.map_checkpoint_name(prefix + "layers.0.self_attn.q_norm.weight") == (
        "model.layers.0.self_attn.qk_norm.weight",
        "q",
    )
    assert model.map_checkpoint_name("vision_tower.vision_model.embeddings.patch_embedding.weight") is None
    assert model.map_checkpoint_name("model.multi_modal_projector.mm_input_projection_weight") is None


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"])
def test_gguf_names_lead_to_parameters(architecture):
    model = build(architecture, tie_word_embeddings=False)
    names = ["token_embd.weight", "output_norm.weight", "output.weight"]
    names += [f"blk.1.{stem}.weight" for stem in model.gguf_block_names]
    parameters = dict(model.named_parameters())
    reached = set()
    for name in names:
        place = model.map_checkpoint_name(model.gguf_tensor_name(name))
        if "_norm" in name and place[0] not in parameters:
            continue  # one table serves families with and without query/key norms
        assert place[1] in parameters[place[0]].expected_shards, name
        reached.add(place)
    of_layer_1 = {(n, s) for n, p in parameters.items() if ".1." in n for s in p.expected_shards}
    assert of_layer_1 <= reached
    assert model.gguf_tensor_name("rope_freqs.weight") is None
    assert model.gguf_tensor_name("blk.0.attn_new.weight") == "blk.0.attn_new.weight"


def test_llama_rows_come_back_from_llama_cpps_order():
    model = build("LlamaForCausalLM")
    for name, heads in (("q_proj", 4), ("k_proj", 2)):
        weight = torch.arange(heads * 8.0 * 3).view(heads * 8, 3)
        # As convert_hf_to_gguf does it: halves of a head become interleaved pairs.
        stored = weight.reshape(heads, 2, 4, 3).swapaxes(1, 2).reshape(weight.shape)
        assert not torch.equal(stored, weight)
        assert torch.equal(model.convert_gguf(f"model.layers.0.self_attn.{name}.weight", stored), weight)
    other = torch.randn(16, 3)
    assert model.convert_gguf("model.layers.0.self_attn.v_proj.weight", other) is other


def test_gemma_norms_are_shifted_once():
    model = build("Gemma3ForCausalLM")
    factor = torch.rand(32) + 0.5  # what llama.cpp stores
    name = model.gguf_tensor_name("blk.0.ffn_norm.weight")
    parameter = dict(model.named_parameters())[model.map_checkpoint_name(name)[0]]
    parameter.weight_loader(parameter, model.convert_gguf(name, factor), None)
    torch.testing.assert_close(parameter.data, factor)


def test_cache_groups():
    full = build("LlamaForCausalLM").cache_groups(16, torch.bfloat16)
    assert [(g.kind, g.window, len(g.layer_names)) for g in full] == [(GroupKind.FULL, None, 3)]
    assert full[0].bytes_per_block == 3 * 2 * 2 * 16 * 8 * 2
    mixed = build(
        "Gemma3ForCausalLM",
        num_hidden_layers=6,
        sliding_window=10,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
    )
    groups = mixed.cache_groups(16, torch.float32)
    assert [(g.kind, g.window, len(g.layer_names)) for g in groups] == [
        (GroupKind.FULL, None, 1),
        (GroupKind.SLIDING, 10, 5),
    ]
    assert groups[1].bytes_per_block == 5 * 2 * 2 * 16 * 8 * 4
    assert {n for g in groups for n in g.layer_names} == set(mixed.attention_layers())


def test_fast_and_reference_paths_give_the_same_logits():
    ops = ("rms_norm", "rotary", "gelu_tanh_and_mul")
    fast = fill(build("Gemma3ForCausalLM", sliding_window=6))
    overrides = [override_kernel(op, "reference") for op in ops] + [override_backend("reference")]
    for override in overrides:
        override.__enter__()
    try:
        plain = fill(build("Gemma3ForCausalLM", sliding_window=6))
    finally:
        for override in reversed(overrides):
            override.__exit__(None, None, None)
    ids = torch.randint(0, 60, (30,)).tolist()
    results = []
    for model in (fast, plain):
        runner = PagedRunner(model)
        first = runner.step(prefill={"a": ids[:20], "b": ids[:3]})["a"]
        results.append(torch.cat((first, runner.step(decode={"a": ids[20:21], "b": ids[3:4]})["a"])))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_int8_head_serves_a_model():
    config = HFConfig.from_dict({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"} | SHAPE)
    exact, rounded = (
        fill(get_model_class(config.architectures)(config, lm_head_dtype=dtype)) for dtype in ("auto", "int8")
    )
    wanted, found = (PagedRunner(model).step(prefill={"a": [3, 4, 5]})["a"] for model in (exact, rounded))
    assert 0 < (found - wanted).norm() / wanted.norm() < 0.03


@pytest.mark.parametrize("head_dtype", ["auto", "int8"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_weight_bytes_are_known_before_loading(head_dtype, is_tied):
    config = HFConfig.from_dict(
        {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": is_tied} | SHAPE
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = get_model_class(config.architectures)(config, lm_head_dtype=head_dtype)
    finally:
        torch.set_default_dtype(torch.float32)
    parameters = sum(p.nbytes for p in model.parameters())
    table = 60 * 32 * 2
    kernel = model.lm_head.kernel
    head = kernel.num_bytes(60, 32, torch.bfloat16) if kernel.makes_copy else table
    assert head < table if head_dtype == "int8" else head >= table
    layers = [layer for layer in model.modules() if isinstance(layer, LinearBase) and layer.kernel.makes_copy]
    packed = [
        layer.kernel.num_bytes(layer.out_features, layer.in_features, torch.bfloat16) for layer in layers
    ]
    blocks = parameters - table * (1 if is_tied else 2)
    blocks += sum(packed) - sum(layer.weight.nbytes for layer in layers)
    is_one_copy = is_tied and (kernel.can_gather or not kernel.makes_copy)
    assert model.num_weight_bytes() == blocks + head + (0 if is_one_copy else table)


def test_bidirectional_gemma_is_refused():
    with pytest.raises(ConfigError, match="use_bidirectional_attention"):
        build("Gemma3ForCausalLM", use_bidirectional_attention=True)


class DevicelessPlatform(PLATFORMS["cuda"]):
    """What a model asks of an H200's platform while it is built."""

    def supports(self, feature):
        return feature != "fp8_e4m3fnuz"

    def architecture(self):
        return "sm_90"


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("architecture", support_model_arch_dict)
def test_an_accelerators_memory_is_planned_by_a_model_without_values(architecture, level, tmp_path):
    """It is built on the meta device and has what the model that is served will have."""
    (tmp_path / "config.json").write_text(json.dumps(config_of(architecture, sliding_window=16)))
    (tmp_path / "model.safetensors").touch()
    config = Config.build(str(tmp_path), device="cpu", dtype="bfloat16", compilation_config={"level": level})
    runner = ModelRunner(config)
    served = runner._build_model(torch.device("cpu"))
    with meta_stands_for(DevicelessPlatform("a test")):
        planned = runner._build_model(torch.device("meta"))
    facts = [
        {name: (p.shape, p.dtype) for name, p in model.named_parameters()} for model in (planned, served)
    ]
    assert facts[0] == facts[1] and all(p.is_meta for p in planned.parameters())
    assert planned.num_weight_bytes() == sum(p.nbytes for p in planned.parameters())
    specs = [model.cache_groups(16, torch.bfloat16) for model in (planned, served)]
    assert specs[0] == specs[1] and specs[0]
    if "Gemma" in architecture:
        assert planned.model.embed_scale == served.model.embed_scale == 5.65625  # the root of 32, in bf16
