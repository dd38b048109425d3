"""Every family with Triton's attention, which norms and rotates itself, says what the separate parts say."""

import pytest
import torch

from atom.kernels.registry import override_kernel
from atom.kernels.triton import head_projection
from atom.model_ops.attention import Attention
from atom.model_ops.attentions.triton import TritonAttention
from tests.models.harness import PagedRunner
from tests.models.test_model_contract import build, fill

STEPS = (
    {"prefill": {"a": [5, 9, 2, 7, 1, 30], "b": [3, 3]}},
    {"prefill": {"b": [8, 1, 4]}, "decode": {"a": [11]}},
    {"decode": {"a": [12], "b": [6]}},
)
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the harness computes on the CPU, which takes the interpreter"
)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"])
@pytest.mark.parametrize("is_fused", [True, False])
def test_triton_equals_the_reference(architecture, is_fused, monkeypatch):
    monkeypatch.setattr(TritonAttention, "fuses_rotation", is_fused)
    models = [fill(build(architecture, head_dim=16, num_hidden_layers=2)) for _ in range(2)]
    for module in models[1].modules():
        if isinstance(module, Attention):
            module.backend = TritonAttention(module.backend.spec)
    runners = [PagedRunner(model) for model in models]
    for step in STEPS:
        wanted, found = (runner.step(**step) for runner in runners)
        for name in wanted:
            torch.testing.assert_close(found[name], wanted[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen2ForCausalLM"])
def test_attention_from_hidden_states_equals_the_reference(architecture, monkeypatch):
    """What the kernel for sm_90 does not take goes the same way by separate launches; a bias is left to the layer."""
    calls = []
    monkeypatch.setattr(head_projection, "takes", lambda *args: calls.append(args) and False)
    with override_kernel("linear", "reference"):
        models = [fill(build(architecture, head_dim=16, num_hidden_layers=2)) for _ in range(2)]
    for module in models[1].modules():
        if isinstance(module, Attention):
            module.backend = TritonAttention(module.backend.spec)
            assert not module.backend.fuses_projection  # the CPU is no sm_90
            module.backend.fuses_projection = True
    runners = [PagedRunner(model) for model in models]
    for step in STEPS:
        wanted, found = (runner.step(**step) for runner in runners)
        for name in wanted:
            torch.testing.assert_close(found[name], wanted[name], rtol=1e-4, atol=1e-4)
    assert len(calls) == (0 if architecture == "Qwen2ForCausalLM" else 2 * len(STEPS))


def test_rotated_channels_that_do_not_fill_a_head_take_the_separate_kernels(monkeypatch):
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    models = [fill(build("LlamaForCausalLM", head_dim=16, rope_parameters=rope)) for _ in range(2)]
    monkeypatch.setattr(TritonAttention, "forward_projected", None)
    for module in models[1].modules():
        if isinstance(module, Attention):
            module.backend = TritonAttention(module.backend.spec)
    wanted, found = (PagedRunner(model).step(**STEPS[0]) for model in models)
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-4, atol=1e-4)
