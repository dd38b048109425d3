"""Which layers --online-quant-config rounds, by their names."""

import pytest

from atom.config import Config
from atom.config_parts import OnlineQuantConfig
from atom.errors import ConfigError
from atom.model_engine.runner.weight_format import check_online_quant
from atom.models.base import CausalLM
from atom.quantization.online import OnlineFormats
from atom.quantization.spec import ONLINE_FORMATS

FP8 = ONLINE_FORMATS["ptpc_fp8"]
QKV, OUTPUT = "model.layers.1.self_attn.qkv_proj", "model.layers.1.self_attn.o_proj"
GATE_UP, DOWN = "model.layers.12.mlp.gate_up_proj", "model.layers.12.mlp.down_proj"
NAMES = (QKV, OUTPUT, GATE_UP, DOWN)


def rounded(**fields) -> list[str]:
    formats = OnlineFormats(OnlineQuantConfig(**fields), CausalLM.packed_modules)
    assert {formats.format_of(name) for name in NAMES} <= {None, FP8}
    return [name for name in NAMES if formats.format_of(name) is FP8]


def test_everything():
    assert rounded(global_quant_config="ptpc_fp8") == list(NAMES)


@pytest.mark.parametrize(
    "rule, left",
    [
        (QKV, [QKV]),
        ("model.layers.1", [QKV, OUTPUT]),  # a prefix up to a dot: not layer 12
        ("*.o_proj", [OUTPUT]),
        ("*.mlp", [GATE_UP, DOWN]),  # a glob names what lies below it, too
        (r"re:layers\.1\d\.", [GATE_UP, DOWN]),
        ("*.q_proj", [QKV]),  # part of a product that is one layer here
        ("*.up_proj", [GATE_UP]),
        ("lm_head", []),
        (("*.q_proj", DOWN), [QKV, DOWN]),
    ],
)
def test_exclusions(rule, left):
    kept = [name for name in NAMES if name not in left]
    assert rounded(global_quant_config="ptpc_fp8", exclude_layer=rule) == kept


@pytest.mark.parametrize(
    "pattern, chosen",
    [("mlp", [GATE_UP, DOWN]), ("*.gate_proj", [GATE_UP]), ("*layers.1.*", [QKV, OUTPUT]), ("q_proj", [QKV])],
)
def test_patterns(pattern, chosen):
    assert rounded(layer_quant_config={pattern: "ptpc_fp8"}) == chosen


def test_an_exclusion_comes_before_a_pattern():
    assert rounded(layer_quant_config={"mlp": "ptpc_fp8"}, exclude_layer="*.down_proj") == [GATE_UP]


def test_rules_that_fit_nothing_are_found():
    config = OnlineQuantConfig(layer_quant_config={"mpl": "ptpc_fp8"}, exclude_layer=("*.o_proj", "*.oproj"))
    formats = OnlineFormats(config, CausalLM.packed_modules)
    assert formats.rules_without(NAMES) == ["*.oproj", "mpl"]


def test_formats_of_later_versions_are_refused_by_name():
    online = {"global_quant_config": "ptpc_fp8", "layer_quant_config": {"mlp": "mxfp4"}}
    with pytest.raises(ConfigError, match="--online-quant-config: format 'mxfp4'.*available: ptpc_fp8"):
        check_online_quant(Config.build("m", online_quant_config=online))
    check_online_quant(Config.build("m", online_quant_config={"global_quant_config": "ptpc_fp8"}))
    check_online_quant(Config.build("m"))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({}, "rounds nothing: it needs global_quant_config or layer_quant_config"),
        ({"exclude_layer": "mlp"}, "rounds nothing"),
        (
            {"global_quant_config": "ptpc_fp8", "exclude_layer": ["*.mlp", "re:layers.("]},
            r"exclude_layer: 're:layers.\(' is no regular expression",
        ),
    ],
)
def test_rules_that_mean_nothing_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        Config.build("m", online_quant_config=fields)


def test_weights_are_rounded_once():
    with pytest.raises(ConfigError, match="online_quant_config.*cpu_weights must be None, got 'int8'"):
        Config.build("m", online_quant_config={"global_quant_config": "ptpc_fp8"}, cpu_weights="int8")
