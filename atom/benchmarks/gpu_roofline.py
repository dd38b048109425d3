"""Fewest bytes and operations of a GPU workload, and the time that they take at a machine's measured ceilings.

Counted for a decode step of B sequences at context length c:

- weights: every dense weight once, the embedding table only as the output head; of a mixture-of-experts layer the
  experts that B tokens touch under uniform routing, ``E * (1 - (1 - k/E)**B)``;
- KV cache: ``B * c`` positions read, B written;
- operations: 2 a weight and token, and ``4 * heads * head_dim * c`` a layer for attention.

Activations, embedding rows and norms are left out: they are small.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

BF16_BYTES = 2


class Ceilings(NamedTuple):
    """What the device can do at best."""

    read_gb_s: float
    matmul_tflop_s: float


# Of one H200, measured beside the peers' figures (torch 2.11, triton 3.6).
H200 = Ceilings(read_gb_s=4438.0, matmul_tflop_s=753.0)
# The same with fp8 products (8,192 x 28,672 x 4,096, a scale for each row and column).
H200_FP8 = H200._replace(matmul_tflop_s=1536.0)


class ModelShape:
    """Byte and operation counts of a decoder, from its ``config.json``.

    Args:
        layer_bytes: of a weight of the layers; the head's are bf16.
    """

    def __init__(self, config: Mapping[str, Any], layer_bytes: int = BF16_BYTES):
        self.layer_bytes = layer_bytes
        self.hidden = config["hidden_size"]
        self.num_heads = config["num_attention_heads"]
        self.num_kv_heads = config["num_key_value_heads"]
        self.head_dim = config.get("head_dim") or self.hidden // self.num_heads
        self.num_layers = config["num_hidden_layers"]
        self.num_experts = config.get("num_experts", 0)
        self.experts_per_token = config.get("num_experts_per_tok", 0)
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.dense_layer = self.hidden * (q_size + 2 * kv_size) + q_size * self.hidden
        if self.num_experts:
            self.expert = 3 * self.hidden * config["moe_intermediate_size"]
            self.dense_layer += self.hidden * self.num_experts
        else:
            self.expert = 0
            self.dense_layer += 3 * self.hidden * config["intermediate_size"]
        self.head = self.hidden * config["vocab_size"]
        self.kv_bytes_per_token = 2 * self.num_layers * kv_size * BF16_BYTES

    def weight_bytes(self, num_tokens: int) -> float:
        """Bytes of weights that a pass over ``num_tokens`` tokens must read."""
        touched = 0.0
        if self.num_experts:
            touched = self.num_experts * (1 - (1 - self.experts_per_token / self.num_experts) ** num_tokens)
        layer = self.dense_layer + touched * self.expert
        return self.layer_bytes * layer * self.num_layers + BF16_BYTES * self.head

    @property
    def weights_per_token(self) -> int:
        """Weights that one token is multiplied with, the head left out."""
        return (self.dense_layer + self.experts_per_token * self.expert) * self.num_layers

    def decode_step_s(self, batch: int, context: int, ceilings: Ceilings) -> float:
        num_bytes = self.weight_bytes(batch) + batch * (context + 1) * self.kv_bytes_per_token
        attention = 4 * self.num_heads * self.head_dim * context * self.num_layers
        flops = batch * (2 * (self.weights_per_token + self.head) + attention)
        return _longest(num_bytes, flops, ceilings)

    def prefill_flops(self, batch: int, length: int) -> int:
        """Operations of ``batch`` prompts of ``length`` tokens, and the first token of each."""
        attention = 2 * self.num_heads * self.head_dim * self.num_layers * length * (length + 1)
        return batch * (2 * length * self.weights_per_token + 2 * self.head + attention)

    def prefill_s(self, batch: int, length: int, ceilings: Ceilings) -> float:
        """``batch`` prompts of ``length`` tokens, and the first token of each."""
        return _longest(self.weight_bytes(batch * length), self.prefill_flops(batch, length), ceilings)

    def bound_s(
        self, kind: str, batch: int, prompt_len: int, output_len: int, ceilings: Ceilings = H200
    ) -> float:
        """Least seconds of what a workload times: a decode step, or the whole of a prefill or throughput run."""
        steps = [self.decode_step_s(batch, prompt_len + i, ceilings) for i in range(1, output_len)]
        if kind == "decode":
            return sum(steps) / len(steps)
        return self.prefill_s(batch, prompt_len, ceilings) + (sum(steps) if kind == "throughput" else 0.0)


def _longest(num_bytes: float, flops: float, ceilings: Ceilings) -> float:
    return max(num_bytes / (ceilings.read_gb_s * 1e9), flops / (ceilings.matmul_tflop_s * 1e12))
