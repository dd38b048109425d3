"""Linear layers, embedding, head, norms and rotary embedding on one rank; sharding is in tests/distributed."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from atom.errors import ConfigError, ModelLoadError
from atom.kernels.reference.linear import ReferenceLinear
from atom.kernels.registry import override_kernel
from atom.model_ops.activation import get_act_and_mul
from atom.model_ops.embedding import ParallelLMHead, VocabParallelEmbedding
from atom.model_ops.layernorm import GemmaRMSNorm, QKNorm, RMSNorm
from atom.model_ops.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from atom.model_ops.rotary_embedding import get_rope


def load(param, *tensors):
    for shard, tensor in zip(param.expected_shards, tensors, strict=True):
        param.weight_loader(param, tensor, shard)


@pytest.mark.parametrize("kind", [ReplicatedLinear, ColumnParallelLinear, RowParallelLinear])
def test_plain_layers(kind):
    layer = kind(8, 12, bias=True)
    weight, bias, x = torch.randn(12, 8), torch.randn(12), torch.randn(3, 8)
    load(layer.weight, weight)
    load(layer.bias, bias)
    layer.after_load()
    torch.testing.assert_close(layer(x), x @ weight.t() + bias)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kernel", ["reference", "native"])
def test_a_row_parallel_layer_adds_to_a_total(kernel, bias):
    with override_kernel("linear", kernel):
        layer = RowParallelLinear(32, 64, bias=bias)
    weight, shift, x = torch.randn(64, 32), torch.randn(64), torch.randn(3, 32)
    load(layer.weight, weight)
    if bias:
        load(layer.bias, shift)
    layer.after_load()
    total = torch.randn(3, 64)
    wanted = total + x @ weight.t() + (shift if bias else 0)
    found = layer(x, total)
    torch.testing.assert_close(found, wanted)
    if kernel == "reference" and not bias:
        assert found is total  # no other memory is written


def test_a_sum_is_rounded_once():
    layer = RowParallelLinear(1, 1)
    layer.kernel = ReferenceLinear()
    layer.packed = torch.ones(1, 1).bfloat16()
    # 256 + 1 + 2^-7: the product alone is 1 in bf16 and 257 lies between 256 and 258, the sum of fp32 above the middle.
    x = torch.full((1, 1), 1 + 2**-7).bfloat16()
    assert layer(x, torch.full((1, 1), 256.0).bfloat16()).item() == 258.0


def test_merged_and_qkv_layers_stack_their_shards():
    q, k, v, x = torch.randn(12, 8), torch.randn(6, 8), torch.randn(6, 8), torch.randn(3, 8)
    layer = QKVParallelLinear(8, 3, 4, 2)
    assert layer.weight.expected_shards == ("q", "k", "v")
    load(layer.weight, q, k, v)
    layer.after_load()
    torch.testing.assert_close(layer(x), x @ torch.cat((q, k, v)).t())
    merged = MergedColumnParallelLinear(8, (12, 6))
    load(merged.weight, q, k)
    merged.after_load()
    torch.testing.assert_close(merged(x), x @ torch.cat((q, k)).t())


@pytest.mark.parametrize(
    ("layer", "shard", "tensor", "found"),
    [
        (lambda: ReplicatedLinear(8, 12, bias=False), None, torch.zeros(12, 9), r"expected shape \[12, 8\]"),
        (lambda: ColumnParallelLinear(8, 12), None, torch.zeros(13, 8), "expected 12 entries in dimension 0"),
        (lambda: RowParallelLinear(8, 12), None, torch.zeros(12), "expected 8 entries in dimension 1"),
        (lambda: QKVParallelLinear(8, 3, 4, 2), "k", torch.zeros(12, 8), "expected 6 entries in dimension 0"),
    ],
)
def test_a_wrong_shape_says_expected_and_found(layer, shard, tensor, found):
    weight = layer().weight
    with pytest.raises(ModelLoadError, match=rf"{found}.*found"):
        weight.weight_loader(weight, tensor, shard)


def test_packing_frees_the_original_weight():
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = ReplicatedLinear(32, 16, bias=False)
    finally:
        torch.set_default_dtype(torch.float32)
    weight = torch.randn(16, 32).bfloat16()
    load(layer.weight, weight)
    kept = layer.weight
    layer.after_load()
    packed = layer.packed
    layer.after_load()  # a second call changes nothing
    assert layer.packed is packed
    if layer.kernel.makes_copy:
        assert kept.numel() == 0 and layer.weight is None
    x = torch.randn(2, 32).bfloat16()
    torch.testing.assert_close(layer(x).float(), x.float() @ weight.float().t(), rtol=2e-2, atol=2e-2)


def test_embedding_and_heads():
    weight, x = torch.randn(50, 8), torch.randn(3, 8)
    table = VocabParallelEmbedding(50, 8)
    load(table.weight, weight)
    assert torch.equal(table(torch.tensor([4, 49])), weight[[4, 49]])
    tied = ParallelLMHead(50, 8, tied_to=table)
    assert list(tied.parameters()) == []
    tied.after_load()
    torch.testing.assert_close(tied(x), x @ weight.t())
    own = ParallelLMHead(50, 8, bias=True)
    load(own.table.weight, weight)
    load(own.bias, torch.arange(50.0))
    own.after_load()
    torch.testing.assert_close(own(x), x @ weight.t() + torch.arange(50.0))
    with pytest.raises(ModelLoadError, match=r"expected shape \[50, 8\], found \[51, 8\]"):
        table.weight.weight_loader(table.weight, torch.zeros(51, 8))


def test_int8_head_rounds_the_embedding_with_it_or_leaves_it():
    weight, x = torch.randn(500, 64), torch.randn(4, 64)
    table = VocabParallelEmbedding(500, 64)
    load(table.weight, weight)
    tied = ParallelLMHead(500, 64, tied_to=table, dtype="int8")
    tied.after_load()
    if tied.kernel.can_gather:  # one copy of the weight
        assert table.weight is None
        steps = (weight.abs().amax(-1, keepdim=True) / 127).expand(-1, 64)[[3, 499]]
        assert bool(((table(torch.tensor([3, 499])) - weight[[3, 499]]).abs() <= 0.51 * steps).all())
    else:
        assert torch.equal(table.weight.data, weight)
    error = (tied(x) - x @ weight.t()).norm() / (x @ weight.t()).norm()
    assert error < 0.02
    own = ParallelLMHead(500, 64, dtype="int8")
    load(own.table.weight, weight)
    own.after_load()
    assert own.table.weight is None
    assert torch.equal(own(x), tied(x))
    with pytest.raises(ConfigError, match="lm_head_dtype: 'int4' is not one of auto, int8"):
        ParallelLMHead(500, 64, dtype="int4")


def test_norms():
    x, weight = torch.randn(3, 16), torch.randn(16)
    for kind, factor in ((RMSNorm, weight), (GemmaRMSNorm, weight + 1)):
        norm = kind(16, 1e-5)
        load(norm.weight, weight.bfloat16().float())
        factor = weight.bfloat16().float() + (factor - weight)
        wanted = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * factor
        torch.testing.assert_close(norm(x), wanted)


def test_qk_norm_uses_the_right_weight_for_each_head():
    q, k = torch.randn(8), torch.randn(8)
    both = QKNorm(3, 2, 8)
    load(both.weight, q, k)
    x = torch.randn(4, 5, 8)
    for heads, weight in ((slice(0, 3), q), (slice(3, 5), k)):
        one = RMSNorm(8)
        load(one.weight, weight)
        torch.testing.assert_close(both(x)[:, heads], one(x[:, heads].contiguous()))
    with pytest.raises(ModelLoadError, match=r"expected shape \[8\], found \[7\]"):
        both.weight.weight_loader(both.weight, torch.zeros(7), "q")


ROPES = [
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 512},
    {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 8.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 20,
        "beta_slow": 2,
        "truncate": False,
        "attention_factor": 1.3,
        "partial_rotary_factor": 0.5,
    },
    {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 8.0,
        "original_max_position_embeddings": 256,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
]


@pytest.mark.parametrize("parameters", ROPES)
def test_frequencies_equal_transformers(parameters):
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=2048, rope_parameters=dict(parameters)
    )
    wanted, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    rope = get_rope(64, parameters, 2048)
    torch.testing.assert_close(rope.inv_freq[: len(wanted)], wanted, rtol=1e-6, atol=0)
    cos, sin = rope.rotation(torch.tensor([0, 5, 1999]), torch.float32)
    assert cos.shape == sin.shape == (3, 1, 2 * len(wanted))
    angle = torch.tensor([0.0, 5.0, 1999.0])[:, None] * wanted
    close = {"rtol": 0.0, "atol": 1e-4}  # an ulp of the frequency, 1999 positions on
    torch.testing.assert_close(cos[:, 0, : len(wanted)], angle.cos() * factor, **close)
    torch.testing.assert_close(sin[:, 0], torch.cat((-angle.sin(), angle.sin()), -1) * factor, **close)


def test_rope_errors_name_what_is_wrong():
    with pytest.raises(
        ConfigError, match="rope_type: 'longrope' is not supported; supported: default, linear"
    ):
        get_rope(64, {"rope_type": "longrope", "rope_theta": 1e4}, 128)
    with pytest.raises(ConfigError, match="rope_type 'linear' needs 'factor'"):
        get_rope(64, {"rope_type": "linear", "rope_theta": 1e4}, 128)


def test_an_unknown_activation_lists_the_known_ones():
    with pytest.raises(
        ConfigError, match="hidden_act: 'relu2' is not supported; supported: silu, gelu_pytorch"
    ):
        get_act_and_mul("relu2")
