"""Models rounded to fp8 while they load: against transformers with every product rounded by hand, and by switches."""

import pytest
import torch
import transformers
from torch import nn

from atom.config import Config
from atom.config_parts import OnlineQuantConfig
from atom.errors import ConfigError
from atom.kernels.linear import QuantisedRows
from atom.model_loader.loader import load_weights
from atom.model_loader.model_files import ModelFiles
from atom.model_ops.layernorm import RMSNorm
from atom.model_ops.linear import LinearBase
from atom.model_ops.online_quant import apply_online_quant
from atom.models.registry import get_model_class
from atom.sampling_params import SamplingParams
from tests.helpers.core_driver import run_to_the_end
from tests.helpers.tiny_model import make_tiny_model
from tests.models.harness import PagedRunner
from tests.models.test_parity import BASE, ids_of

PTPC = {"global_quant_config": "ptpc_fp8"}
NORM_SWITCH = "ATOM_LLAMA_ENABLE_AITER_TRITON_FUSED_RMSNORM_QUANT"
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
GATE_SWITCH = "ATOM_LLAMA_ENABLE_AITER_TRITON_FUSED_SILU_MUL_QUANT"


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


class RoundedLinear(nn.Module):
    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = rounded_rows(linear.weight.detach()), linear.bias

    def forward(self, x):
        return nn.functional.linear(rounded_rows(x), self.weight, self.bias)


@pytest.fixture(scope="module", params=["Llama", "Qwen2", "Qwen3", "Gemma3"])
def case(request, tmp_path_factory):
    """A checkpoint, and its model in transformers with rounded products but for the head."""
    family = request.param
    name = "Gemma3Text" if family == "Gemma3" else family
    changes = {"head_dim": 16} if family in ("Qwen3", "Gemma3") else {}
    config = getattr(transformers, f"{name}Config")(**(BASE | changes), attn_implementation="eager")
    torch.manual_seed(3)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    folder = tmp_path_factory.mktemp(family)
    model.save_pretrained(folder)
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and path != "lm_head":
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, RoundedLinear(module))
    return folder, model


def load(folder, **fields):
    files = ModelFiles.resolve(str(folder))
    with torch.device("cpu"):
        model = get_model_class(files.hf_config.architectures)(files.hf_config)
        chosen = apply_online_quant(model, OnlineQuantConfig(**fields) if fields else None)
    load_weights(model, files)
    return model.eval(), chosen


def logits_of(model, ids):
    runner = PagedRunner(model)
    parts = [runner.step(prefill={"s": ids[:20]})["s"]]
    parts += [runner.step(decode={"s": [i]})["s"] for i in ids[20:]]
    return torch.cat(parts)


def test_logits_are_those_of_rounded_products(case):
    folder, reference = case
    model, chosen = load(folder, **PTPC)
    assert len(chosen) == 4 * BASE["num_hidden_layers"] and set(chosen.values()) == {"fp8"}
    ids = ids_of(5, 24)
    with torch.inference_mode():
        wanted = reference(torch.tensor([ids])).logits[0]
    found = logits_of(model, ids)
    # A value beside the middle of two may be rounded the other way; without rounding the distance is ten times this.
    error = (found - wanted).norm() / wanted.norm()
    plain = logits_of(load(folder)[0], ids)
    assert error < 0.1 * (plain - wanted).norm() / wanted.norm(), error


@pytest.mark.parametrize("switch", [NORM_SWITCH, GATE_SWITCH])
def test_switches_move_the_rounding_and_change_nothing_in_fp32(case, switch, monkeypatch):
    folder, _ = case
    ids = ids_of(5, 24)
    fused, _ = load(folder, **PTPC)
    wanted = logits_of(fused, ids)
    monkeypatch.setenv(switch, "0")
    plain, _ = load(folder, **PTPC)
    torch.testing.assert_close(logits_of(plain, ids), wanted, rtol=1e-5, atol=1e-5)
    for model, is_fused in ((fused, True), (plain, False)):
        layer = model.model.layers[0]
        norm = layer.input_layernorm(torch.randn(2, BASE["hidden_size"]))
        gated = layer.mlp.act(torch.randn(2, 2 * BASE["intermediate_size"]))
        assert isinstance(norm, QuantisedRows) is (is_fused or switch == GATE_SWITCH)
        assert isinstance(gated, QuantisedRows) is (is_fused or switch == NORM_SWITCH)


def test_a_layer_that_is_left_out_is_fed_as_before(case):
    folder, _ = case
    model, chosen = load(folder, exclude_layer=("*.qkv_proj", "*.down_proj"), **PTPC)
    assert all(name.endswith(("o_proj", "gate_up_proj")) for name in chosen) and chosen
    layer = model.model.layers[0]
    assert isinstance(layer.input_layernorm(torch.randn(2, BASE["hidden_size"])), torch.Tensor)
    assert isinstance(layer.mlp.act(torch.randn(2, 2 * BASE["intermediate_size"])), torch.Tensor)
    assert logits_of(model, ids_of(5, 24)).isfinite().all()


def test_planned_bytes_are_those_of_packed_weights(case):
    folder, _ = case
    files = ModelFiles.resolve(str(folder))
    model = get_model_class(files.hf_config.architectures)(files.hf_config)
    whole = model.num_weight_bytes()
    apply_online_quant(model, OnlineQuantConfig(**PTPC))
    planned, layers = model.num_weight_bytes(), [m for m in model.modules() if isinstance(m, LinearBase)]
    loaded = sum(layer.weight.nbytes for layer in layers)
    load_weights(model, files)
    packed = sum(layer.packed.values.nbytes + layer.packed.scales.nbytes for layer in layers)
    assert whole - planned == loaded - packed > 0.6 * loaded


def test_only_norms_before_products_round(case):
    folder, _ = case
    model, _ = load(folder, **PTPC)
    x = torch.randn(2, BASE["hidden_size"])
    rounding = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, RMSNorm)
        and module.weight.shape == x.shape[1:]
        and isinstance(module(x), QuantisedRows)
    }
    is_gemma = "Gemma" in type(model).__name__
    assert rounding == {
        "input_layernorm",
        "pre_feedforward_layernorm" if is_gemma else "post_attention_layernorm",
    }


def test_an_engine_serves_what_it_rounded(tmp_path, caplog):
    folder = make_tiny_model(tmp_path / "m", "llama", num_hidden_layers=1)
    prompts = {1: [5, 9, 2, 7], 2: [3] * 40}
    online = PTPC | {"exclude_layer": ["*.o_poj"]}
    plain = run_to_the_end(folder, prompts, GREEDY, device="cpu")
    found = run_to_the_end(folder, prompts, GREEDY, device="cpu", online_quant_config=online)
    assert {seq: len(ids) for seq, ids in found.tokens.items()} == {1: 8, 2: 8}
    runner, reference = found.core.worker, plain.core.worker
    assert runner.model.fused is None and runner._weight_bytes < reference._weight_bytes
    assert "'*.o_poj' is the name of no layer" in caplog.text
    assert "no fast fp8 products" in caplog.text
    again = run_to_the_end(
        folder,
        prompts,
        GREEDY,
        device="cpu",
        online_quant_config=PTPC,
        compilation_config={"level": 3, "cache_dir": str(tmp_path / "c")},
    )
    assert again.tokens == found.tokens


def test_formats_that_are_not_there_yet_stop_the_start(tmp_path):
    folder = make_tiny_model(tmp_path / "m", "llama")
    with pytest.raises(ConfigError, match="format 'mxfp8' is not available"):
        run_to_the_end(folder, {}, GREEDY, online_quant_config={"global_quant_config": "mxfp8"})
    assert Config.build(str(folder), online_quant_config=PTPC).online_quant_config == OnlineQuantConfig(
        **PTPC
    )
