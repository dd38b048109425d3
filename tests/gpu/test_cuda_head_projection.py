"""Query, key and value heads of many tokens on sm_90 against fp32, on fresh random data in bf16."""

import time

import pytest
import torch

from atom.kernels.reference import norm, rotary
from atom.kernels.triton import head_projection
from atom.model_ops.attentions.backend import AttentionSpec
from atom.model_ops.attentions.triton import TritonAttention
from atom.platforms import get_platform
from atom.utils.forward_context import AttentionMetaData

PAGE = 16
MAX_ERROR = 6e-3  # ||found - wanted|| / ||wanted||
LAYERS = {  # query heads, kv heads, head_dim, hidden size, whether heads are normed
    "0.6B": (16, 8, 128, 1024, True),
    "1B": (32, 8, 64, 2048, False),
    "8B": (32, 8, 128, 4096, False),
    "few": (4, 4, 64, 200, True),  # K ends within a step
}

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_sm_90():
    platform = get_platform()
    if platform.name != "cuda" or platform.architecture() != "sm_90":
        pytest.skip("compiled for sm_90 alone")
    torch.manual_seed(time.time_ns() % 2**31)


def randn(*shape):
    return torch.randn(*shape, device="cuda").bfloat16()


def error_of(found, wanted):
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


class Layer:
    """A step's hidden states and all that makes heads of them; its pages are shuffled and hold NaN."""

    def __init__(self, name, num_tokens):
        self.num_heads, self.kv, dim, hidden, has_norm = LAYERS[name]
        self.x = randn(num_tokens, hidden)
        self.weight = (
            torch.randn((self.num_heads + 2 * self.kv) * dim, hidden, device="cuda") / hidden**0.5
        ).bfloat16()
        angles = 6 * torch.rand(num_tokens, 1, dim // 2, device="cuda")
        self.cos = torch.cat((angles.cos(), angles.cos()), -1).bfloat16()
        self.sin = torch.cat((-angles.sin(), angles.sin()), -1).bfloat16()
        self.norm = torch.rand(self.num_heads + self.kv, dim, device="cuda") + 0.5 if has_norm else None
        pages = num_tokens // PAGE + 3
        self.cache = [
            torch.full((pages, self.kv, PAGE, dim), float("nan"), device="cuda").bfloat16() for _ in "kv"
        ]
        self.slots = torch.randperm(pages * PAGE, device="cuda")[:num_tokens]

    @property
    def arguments(self):
        return self.cos, self.sin, self.norm, 1e-6, *self.cache

    def run(self):
        dim = self.cos.shape[2]
        output = torch.full(
            (len(self.x), self.num_heads + 2 * self.kv, dim), float("nan"), device="cuda"
        ).bfloat16()
        head_projection.launch(self.x, self.weight, output, self.num_heads, *self.arguments, self.slots)
        return output

    def wanted(self):
        heads = (self.x.float() @ self.weight.float().t()).view(len(self.x), -1, self.cos.shape[2])
        turned, rest = heads.split((self.num_heads + self.kv, self.kv), 1)
        if self.norm is not None:
            turned = norm.rms_norm(turned, self.norm, 1e-6)
        return torch.cat((rotary.rotary(turned, self.cos.float(), self.sin.float()), rest), 1)


@pytest.mark.parametrize("num_tokens", [1, 130, 1025, 4096])
@pytest.mark.parametrize("name", LAYERS)
def test_heads_are_right_kept_finite_and_repeat_bit_for_bit(name, num_tokens):
    layer = Layer(name, num_tokens)
    layer.slots[num_tokens // 2] = -1
    bad = torch.zeros(num_tokens, dtype=torch.bool, device="cuda")
    if num_tokens > 7:
        layer.x[7, 3], bad[7] = float("inf"), True
    found = layer.run()
    assert error_of(found[~bad], layer.wanted()[~bad]) < MAX_ERROR
    assert found[:, layer.num_heads :].isfinite().all()
    assert torch.equal(layer.run()[~bad], found[~bad])
    is_kept = layer.slots >= 0
    stored = [part.transpose(1, 2).flatten(0, 1) for part in layer.cache]
    own = found[is_kept, layer.num_heads :].split(layer.kv, 1)
    assert all(
        torch.equal(part[layer.slots[is_kept]], heads) for part, heads in zip(stored, own, strict=True)
    )
    others = torch.ones(len(stored[0]), dtype=torch.bool, device="cuda")
    others[layer.slots[is_kept]] = False
    assert all(part[others].isnan().all() for part in stored)


@pytest.mark.parametrize("name", ["0.6B", "1B"])
def test_attention_from_hidden_states_says_what_separate_launches_say(name, monkeypatch):
    layer = Layer(name, 4096)
    dim = layer.cos.shape[2]
    with torch.device("cuda"):
        backend = TritonAttention(AttentionSpec(layer.num_heads, layer.kv, dim, dim**-0.5, torch.bfloat16))
    assert backend.fuses_projection and head_projection.takes(layer.x, layer.weight, layer.cache[0])
    lens = torch.tensor([3000, 1096], dtype=torch.int32, device="cuda")
    outputs = []
    for takes in (head_projection.takes, lambda *_: False):
        monkeypatch.setattr(head_projection, "takes", takes)
        metadata = AttentionMetaData(
            num_prefill_seqs=2,
            num_prefill_tokens=4096,
            query_lens_host=[3000, 1096],
            context_lens_host=[3000, 1096],
            cu_seqlens_q=torch.tensor([0, 3000, 4096], dtype=torch.int32, device="cuda"),
            context_lens=lens,
            block_tables=torch.zeros(2, 256, dtype=torch.int32, device="cuda"),  # nothing is read from pages
            slot_mapping=layer.slots,
        )
        outputs.append(torch.full((4096, layer.num_heads, dim), float("nan"), device="cuda").bfloat16())
        backend.forward_hidden(layer.x, layer.weight, *layer.arguments, metadata, outputs[-1])
    assert error_of(*outputs) < 1e-2


def test_few_tokens_and_other_caches_are_left_to_separate_launches():
    layer = Layer("8B", 2048)
    keys = layer.cache[0]
    assert head_projection.takes(layer.x, layer.weight, keys)
    assert not head_projection.takes(layer.x[:300], layer.weight, keys)
    assert not head_projection.takes(layer.x, layer.weight, keys.to(torch.float8_e4m3fn))
    assert not head_projection.takes(layer.x[:, :-4], layer.weight[:, :-4], keys)
