"""Numbers of a model are baked into its code, whatever other models of the process had in their place."""

import torch
from torch import nn

from atom.config import set_current_atom_config
from atom.utils.compile_cache import compilation_counter
from atom.utils.decorators import support_torch_compile
from tests.helpers.toy_compiled import toy_config


@support_torch_compile
class Scaled(nn.Module):
    def __init__(self, factor: float, count: int):
        super().__init__()
        self.factor, self.count = factor, count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor + self.count


def test_models_that_differ_in_a_number_compile_one_graph_each(tmp_path):
    torch.set_grad_enabled(False)
    config = toy_config(3, str(tmp_path))
    for number, (factor, count) in enumerate([(0.5, 3), (1.5, 4), (2.5, 5)], 1):
        seen = compilation_counter.num_graphs_seen
        with set_current_atom_config(config):
            model = Scaled(factor, count)
        x = torch.ones(4, 2)
        assert torch.equal(model(x), x * factor + count), number
        assert compilation_counter.num_graphs_seen == seen + 1
