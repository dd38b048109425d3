"""Sampling in plain PyTorch: the oracle of every faster way, and the way of devices without one.

No function here looks at a value on the host, so all of them may run behind the device without a sync.
Rows are independent: row i of a result depends on row i of the inputs alone. Ties go to the lowest id.

Weights are unnormalised probabilities ``exp((logit - best) / temperature)``: the best id has weight 1.
"""

import sys
from dataclasses import dataclass
from functools import cache

import torch

from atom.kernels.registry import register_kernel

# Top-p leaves out the last token when the tokens before it miss the bound only by rounding.
TOP_P_SLACK = 1e-6

_MASK = 0xFFFFFFFF
ROUND = (0xCD9E8D57, 0xD2511F53)  # multipliers of counter words 2 and 0
KEY_STEP = (0x9E3779B9, 0xBB67AE85)
UNIFORM_SCALE = 4.6566127342e-10  # just below 2**-31, so that the largest integer maps below 1

ADVANCES = False  # whether ``sample`` heeds ``advance``
# Rows [n] int64 of the device tables and their new lengths [n] int32; ``computed`` and ``last_token`` of the tables.
Advance = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class Draw:
    """How each row of a step is sampled; tensors [n], float32 where nothing else is said."""

    temperature: torch.Tensor  # 0: the best id
    top_k: torch.Tensor  # int32; below 1 is off
    top_p: torch.Tensor  # 1 is off
    min_p: torch.Tensor  # 0 is off
    seeds: torch.Tensor  # int64
    positions: torch.Tensor  # int64
    is_filtered: bool  # whether a row has top-k, top-p or min-p


def philox_uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One uniform number for each (seed, position): Philox4x32-10 as ``triton.language.rand`` computes it.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC'11).

    Args:
        seeds: [n] int64, the key.
        positions: [n] int64, the counter.
    Returns:
        [n] float32 in [0, 1).
    """
    multipliers, key_step = _pairs(seeds.device)
    key = torch.stack((seeds & _MASK, (seeds >> 32) & _MASK))
    even = torch.stack((torch.zeros_like(positions), positions & _MASK))  # counter words 2 and 0
    odd = torch.stack(((positions >> 32) & _MASK, torch.zeros_like(positions)))  # words 1 and 3
    for _ in range(10):
        product = even * multipliers  # [2, n]; int64 wraps, the low 64 bits are what is wanted
        high = (product >> 32) & _MASK
        # New words 0 and 2 come in this order; the next round wants 2 and 0.
        even = (high ^ odd ^ key).flip(0)
        odd = product & _MASK
        key = (key + key_step) & _MASK
    word = even[1]  # word 0
    signed = torch.where(word >= 2**31, _MASK - word, word)  # ~x of a negative int32
    return signed.to(torch.float32) * UNIFORM_SCALE


@cache
def _pairs(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """``ROUND`` and ``KEY_STEP``, each [2, 1] int64. Filled where they are: ``torch.tensor`` waits for a device."""
    with torch.inference_mode(False):
        pairs = torch.empty((2, 2, 1), dtype=torch.int64, device=device)
        for pair, values in zip(pairs, (ROUND, KEY_STEP), strict=True):
            for number, value in zip(pair, values, strict=True):
                number.fill_(value)
    return pairs[0], pairs[1]


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The best id (lowest on ties) and its logit: [n, vocab] -> [n] int64, [n]. NaN counts as the best."""
    ids = logits.argmax(dim=-1)
    return ids, logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def apply_penalties(
    logits: torch.Tensor,
    output_counts: torch.Tensor,
    is_in_prompt: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> torch.Tensor:
    """Logits after the penalties.

    Repetition (CTRL, Keskar et al. 2019) scales what the prompt or the answer holds; then frequency and
    presence (OpenAI's API reference) are taken off for what the answer holds.

    Args:
        logits: [n, vocab] float32.
        output_counts: [n, vocab] int32, how often the answer holds each id.
        is_in_prompt: [n, vocab] bool.
        presence, frequency, repetition: [n] float32; 0, 0 and 1 are off.
    """
    is_seen = is_in_prompt | (output_counts > 0)
    factor = repetition.unsqueeze(-1)
    scaled = torch.where(logits > 0, logits / factor, logits * factor)
    logits = torch.where(is_seen, scaled, logits)
    logits = logits - frequency.unsqueeze(-1) * output_counts
    return logits - presence.unsqueeze(-1) * (output_counts > 0)


def weights_of(logits: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Unnormalised probabilities [n, vocab] float32 of ``logits``; ``best`` [n] is each row's largest."""
    return ((logits - best.unsqueeze(-1)) / temperature.unsqueeze(-1)).exp()


def keep_mask(
    logits: torch.Tensor,
    weights: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Which ids may be sampled, [n, vocab] bool; at least the best one.

    Top-k first; top-p keeps the fewest of those whose share of *their* mass reaches ``top_p``; min-p keeps
    what is at least ``min_p`` times as likely as the best id.

    Args:
        top_k: [n] int; below 1 is off.
        top_p, min_p: [n] float32; 1 and 0 are off.
    """
    _, order = logits.sort(dim=-1, descending=True, stable=True)
    ranked = weights.gather(-1, order)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    limit = torch.where(top_k < 1, logits.shape[-1], top_k).unsqueeze(-1)
    is_kept = rank < limit
    mass = (ranked * is_kept).double().cumsum(dim=-1)
    bound = (top_p.double() - TOP_P_SLACK).unsqueeze(-1) * mass[:, -1:]
    is_kept &= (mass - ranked < bound) | (top_p >= 1).unsqueeze(-1)
    is_kept &= ranked >= min_p.unsqueeze(-1)
    is_kept[:, 0] = True
    return torch.zeros_like(is_kept).scatter_(-1, order, is_kept)


def pick(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The id at which the sum of weights, in order of ids, passes ``uniform`` of the total: [n] int64."""
    cumulative = weights.double().cumsum(dim=-1)
    target = cumulative[:, -1:] * uniforms.double().unsqueeze(-1)
    ids = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    return ids.clamp_(max=weights.shape[-1] - 1)


def choose(
    logits: torch.Tensor,
    best: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """Sampled ids [n] int64 of ``logits`` [n, vocab] float32 (finite or -inf); parameters are [n].

    ``temperature`` is above 0; ``best`` [n] is each row's largest logit.
    """
    weights = weights_of(logits, best, temperature)
    weights = weights * keep_mask(logits, weights, top_k, top_p, min_p)
    return pick(weights, uniforms)


def sample(
    logits: torch.Tensor, draw: Draw | None = None, advance: Advance | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One id a row of ``logits`` [n, vocab]: [n] int64, and whether the row's best logit is finite: [n] bool.

    A row that is not finite gets some id of the vocabulary. ``advance`` is left to the caller, see ``ADVANCES``.
    """
    ids, best = argmax(logits)
    is_finite = best.isfinite()
    if draw is not None:
        is_random = draw.temperature > 0
        temperature = torch.where(is_random, draw.temperature, 1.0)
        uniforms = philox_uniform(draw.seeds, draw.positions)
        chosen = choose(
            logits.float(), best.float(), temperature, draw.top_k, draw.top_p, draw.min_p, uniforms
        )  # fmt: skip
        ids = torch.where(is_random, chosen.clamp_(0, logits.shape[-1] - 1), ids)
    return ids, is_finite


def mask_bits(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    """Minus infinity, in place, for the ids that ``bits`` do not allow; ids past their end are not allowed.

    Args:
        logits: [n, vocab].
        rows: [m] int64, the rows of ``logits`` that are masked.
        bits: [m, words] int32, an id a bit, the lowest first.
    """
    num_ids = logits.shape[-1]
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    is_allowed = (bits.unsqueeze(-1) >> shifts).bitwise_and_(1).bool().view(len(rows), -1)[:, :num_ids]
    if is_allowed.shape[-1] < num_ids:
        is_allowed = torch.nn.functional.pad(is_allowed, (0, num_ids - is_allowed.shape[-1]))
    logits[rows] = logits[rows].masked_fill_(~is_allowed, -torch.inf)


def top(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``k`` largest of each row, best first and lowest id first on ties: values and ids, [n, k]."""
    ordered, ids = values.sort(dim=-1, descending=True, stable=True)
    return ordered[:, :k], ids[:, :k]


def rank_of(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The place of ``ids`` [n] in the order of :func:`top`, 1 = first: [n] int64."""
    chosen = values.gather(-1, ids.unsqueeze(-1))
    is_before = torch.arange(values.shape[-1], device=values.device) < ids.unsqueeze(-1)
    is_ahead = (values > chosen) | ((values == chosen) & is_before)
    return is_ahead.count_nonzero(dim=-1) + 1


register_kernel("sampling", "reference")(sys.modules[__name__])
