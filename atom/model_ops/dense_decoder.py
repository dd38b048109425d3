"""What a dense decoder consists of, so that a fused runner can execute it without knowing its family.

A model whose layers are ``x += attention(norm(x)); x += mlp(norm(x))`` describes itself with these dataclasses;
a ``FusedDecoder`` runs the description with as few launches as its platform allows. The plain modules stay what
every fused runner is tested against.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from atom.model_ops.attention import Attention
    from atom.model_ops.embedding import ParallelLMHead, VocabParallelEmbedding
    from atom.model_ops.layernorm import QKNorm, RMSNorm
    from atom.model_ops.linear import LinearBase
    from atom.model_ops.rotary_embedding import RotaryEmbedding
    from atom.utils.forward_context import ForwardContext, HeadWork


@dataclass(frozen=True, slots=True, eq=False)
class DenseLayer:
    """One layer. With ``a = attention(rope(qk_norm(qkv(input_norm(x)))))``:

    ``x += post_attention_norm(output(a))``, then ``x += post_mlp_norm(down(act(gate) * up))`` where
    ``[gate | up] = gate_up(mlp_norm(x))``. A norm that is None is left out.
    """

    input_norm: RMSNorm
    qkv: LinearBase
    qk_norm: QKNorm | None
    rope: RotaryEmbedding
    attention: Attention
    output: LinearBase
    post_attention_norm: RMSNorm | None
    mlp_norm: RMSNorm
    gate_up: LinearBase
    activation: str  # "silu" or "gelu_tanh"
    down: LinearBase
    post_mlp_norm: RMSNorm | None


@dataclass(frozen=True, slots=True, eq=False)
class DenseDecoder:
    """A whole model: embedding times ``embed_scale``, layers, final norm, head."""

    embedding: VocabParallelEmbedding
    embed_scale: float
    layers: tuple[DenseLayer, ...]
    final_norm: RMSNorm
    head: ParallelLMHead
    logits_soft_cap: float | None


class FusedDecoder(ABC):
    """Runs a ``DenseDecoder`` in place of its modules, for the steps that it takes.

    ``takes_prefill``: whether steps with prompts may be among them; ``begin`` and ``finish`` are for those that may.
    """

    takes_prefill = False

    @abstractmethod
    def takes(self, context: ForwardContext, num_tokens: int) -> bool:
        """Whether this runs the step that ``context`` describes; the modules run it otherwise."""

    @abstractmethod
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """As ``CausalLM.forward``, inside a forward context: hidden states behind the final norm."""

    def begin(self, head: HeadWork) -> None:
        """Before a step, be it run or replayed: what its head is asked for. The forward context has it too."""
        return None

    def finish(self, head: HeadWork, hidden: torch.Tensor) -> None:
        """Put into ``head`` what the step that made ``hidden`` left beside it, if it did not do so itself."""
        return None
