"""Log-probabilities of prompt tokens: computed behind a step's forward pass, read when the step is."""

from dataclasses import dataclass

import numpy as np
import torch

from atom.core import ScheduledBatch, TokenLogprobs
from atom.model_ops.host_copy import to_device
from atom.model_ops.logprobs import ComputeLogits, LogprobTensors, prompt_logprobs
from atom.model_ops.sampler import Sampler


@dataclass(slots=True)
class PromptScores:
    """Of one step, on their way to the host, by batch index."""

    by_index: dict[int, LogprobTensors]
    arrival: torch.cuda.Event | None  # None: they are there

    def read(self) -> dict[int, list[TokenLogprobs]]:
        """One entry a position whose next prompt token was scored. Waits until they are there."""
        if self.arrival is not None:
            self.arrival.synchronize()
        return {index: scores.to_list() for index, scores in self.by_index.items()}


def score_prompts(
    batch: ScheduledBatch, hidden: torch.Tensor, compute_logits: ComputeLogits, sampler: Sampler
) -> PromptScores | None:
    """Score the prompt tokens that follow this step's positions, where asked for; waits for nothing.

    Args:
        hidden: ``[num_tokens, hidden_size]``, what the step has computed.
    """
    by_index, at = {}, 0
    for index in range(batch.num_prefill_seqs):
        seq, start, count = batch.seqs[index], batch.starts[index], batch.num_scheduled[index]
        end = min(start + count, seq.num_prompt_tokens - 1)
        num_top = seq.params.prompt_logprobs
        if num_top is not None and end > start:
            next_ids = to_device(np.array(seq.token_ids[start + 1 : end + 1], np.int64), hidden.device)
            scores = prompt_logprobs(
                hidden[at : at + end - start],
                compute_logits,
                next_ids,
                num_top,
                sampler.num_valid_ids,
                sampler.ops,
            )
            by_index[index] = scores.to_host()
        at += count
    if not by_index:
        return None
    arrival = None
    if hidden.device.type != "cpu":
        arrival = torch.cuda.Event()
        arrival.record()
    return PromptScores(by_index, arrival)
