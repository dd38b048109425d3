"""A toy model with a split op that writes in place, as attention does; run as a program it compiles itself once."""

import json
import sys
from dataclasses import asdict

import torch
from torch import nn

from atom.config import Config, set_current_atom_config
from atom.utils.compile_cache import compilation_counter
from atom.utils.decorators import mark_spliting_op, support_torch_compile

WIDTH = 4
STEP = {"factor": 1.0}  # what a step knows and traced code must not: read inside the op


@mark_spliting_op(is_custom=True, mutates_args=["out"])
def toy_attention(x: torch.Tensor, out: torch.Tensor, layer_name: str) -> None:
    out.copy_(x.cumsum(0) * STEP["factor"])


class ToyLayer(nn.Module):
    def __init__(self, index: int):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH) + index)
        self.layer_name = f"layers.{index}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x * self.scale + 1)
        out = torch.empty_like(y)
        torch.ops.aiter.toy_attention(y, out, self.layer_name)
        return x + out.sigmoid()


@support_torch_compile
class ToyModel(nn.Module):
    def __init__(self, num_layers: int):
        super().__init__()
        self.embedding = nn.Parameter(torch.linspace(-1, 1, 10 * WIDTH).view(10, WIDTH))
        self.layers = nn.ModuleList(ToyLayer(i) for i in range(num_layers))

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embedding[input_ids] + positions[:, None] * 0.01
        for layer in self.layers:
            x = layer(x)
        return x


def toy_config(level: int, cache_dir: str = "", *, device: str = "cpu", **compilation) -> Config:
    return Config(
        "toy",
        device=device,
        compilation_config={"level": level, "cache_dir": cache_dir, "use_cudagraph": False, **compilation},
    )


def build(config: Config | None, num_layers: int = 2) -> ToyModel:
    if config is None:
        return ToyModel(num_layers)
    with set_current_atom_config(config):
        return ToyModel(num_layers)


def inputs(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(num_tokens) % 10, torch.arange(num_tokens)


def main() -> None:
    """Level 3 with Inductor; prints the counter and whether outputs of several sizes equal eager ones."""
    torch.set_grad_enabled(False)
    model = build(toy_config(3, sys.argv[1]), num_layers=1)
    outputs = [(model(*inputs(n)), model.forward(*inputs(n))) for n in (5, 5, 1, 2, 33)]
    is_equal = all(a.shape == b.shape and torch.allclose(a, b, atol=1e-6) for a, b in outputs)
    print(json.dumps(asdict(compilation_counter) | {"is_equal": is_equal}))


if __name__ == "__main__":
    main()
