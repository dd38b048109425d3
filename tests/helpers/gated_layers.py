"""Gated layers of the CPU as layers of an sm_90 device have them: their product of few tokens runs anywhere. And the
platforms that decide who has them.
"""

from atom.kernels import registry
from atom.kernels.reference import activation
from atom.kernels.registry import register_kernel
from atom.kernels.triton import gated_linear
from atom.platforms import PLATFORMS


class Hopper(PLATFORMS["cuda"]):
    """What a layer asks of an H200's platform."""

    def supports(self, feature):
        return feature != "fp8_e4m3fnuz"

    def architecture(self):
        return "sm_90"


class Ampere(Hopper):
    def architecture(self):
        return "sm_80"


def give_cpu_gated_layers(monkeypatch):
    """Until the test ends. Returns the numbers of tokens of the products, as they run."""
    registry.implementations("linear")
    monkeypatch.setattr(registry, "_kernels", {op: dict(own) for op, own in registry._kernels.items()})
    register_kernel(
        "linear", "gated_here", priority={"cpu": 99}, supports=lambda platform, gated_by=None, **_: gated_by == "silu"
    )(gated_linear.GatedLinear("silu"))  # fmt: skip
    monkeypatch.setitem(gated_linear.ACTIVATIONS, "silu", activation.silu_and_mul)
    seen = []

    monkeypatch.setattr(gated_linear, "gated_shape", lambda num_tokens, *_: seen.append(num_tokens))
    return seen
