"""Log-probabilities of sampled and of prompt tokens, from the model's own logits."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from atom.core import TokenLogprobs
from atom.model_ops.host_copy import start_copy

ComputeLogits = Callable[[torch.Tensor], torch.Tensor]

CHUNK_BYTES = 64 * 2**20  # float32 log-probabilities held at a time


@dataclass(slots=True)
class LogprobTensors:
    """Of n tokens: log-probability [n] float32, rank [n] int64 (1 = likeliest), and the best alternatives
    [n, num_top], likeliest first.
    """

    ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    def to_host(self) -> "LogprobTensors":
        """The same in host memory, to be read once an event recorded after this call has passed."""
        if self.ids.device.type == "cpu":
            return self
        return LogprobTensors(*(start_copy(getattr(self, field)) for field in self.__slots__))

    @classmethod
    def join(cls, parts: list["LogprobTensors"]) -> "LogprobTensors":
        """The tokens of all ``parts``, one after the other."""
        if len(parts) == 1:
            return parts[0]
        return cls(*(torch.cat([getattr(part, field) for part in parts]) for field in cls.__slots__))

    def to_list(self, num_top: list[int] | None = None) -> list[TokenLogprobs]:
        """One entry a token; ``num_top[i]`` (default: all) alternatives of token i. Waits for the device."""
        columns = (self.ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs)
        entries = [TokenLogprobs(*entry) for entry in zip(*(c.tolist() for c in columns), strict=True)]
        for entry, count in zip(entries, num_top or (), strict=False):
            del entry.top_ids[count:], entry.top_logprobs[count:]
        return entries


def token_logprobs(logits: torch.Tensor, ids: torch.Tensor, num_top: int, ops: ModuleType) -> LogprobTensors:
    """Log-probabilities of ``ids`` [n] int64 under ``logits`` [n, vocab], in chunks of rows.

    ``ops`` is the sampling module in use: ``kernels.reference.sampling`` or one that equals it.
    """
    num_rows, vocab_size = logits.shape
    chunk = max(1, CHUNK_BYTES // (4 * vocab_size))
    parts = []
    for start in range(0, max(1, num_rows), chunk):
        own = ids[start : start + chunk]
        values = logits[start : start + chunk].float().log_softmax(dim=-1)
        top_logprobs, top_ids = ops.top(values, min(num_top, vocab_size))
        chosen = values.gather(-1, own.unsqueeze(-1)).squeeze(-1)
        parts.append(LogprobTensors(own, chosen, ops.rank_of(values, own), top_ids, top_logprobs))
    return LogprobTensors.join(parts)


def prompt_logprobs(
    hidden_states: torch.Tensor,
    compute_logits: ComputeLogits,
    next_ids: torch.Tensor,
    num_top: int,
    num_valid_ids: int,
    ops: ModuleType,
) -> LogprobTensors:
    """Log-probabilities of the prompt token after each position of a chunk.

    Logits are computed for a bounded number of positions at a time: 2,048 positions of a 262,144-word
    vocabulary would take 2 GiB at once.

    Args:
        hidden_states: [n, hidden_size], n at least 1.
        compute_logits: the model's head, [m, hidden_size] -> [m, at least num_valid_ids].
        next_ids: [n] int64, the token that follows each position.
    """
    chunk = max(1, CHUNK_BYTES // (4 * num_valid_ids))
    parts = []
    for start in range(0, len(next_ids), chunk):
        logits = compute_logits(hidden_states[start : start + chunk])[:, :num_valid_ids]
        parts.append(token_logprobs(logits, next_ids[start : start + chunk], num_top, ops))
    return LogprobTensors.join(parts)
