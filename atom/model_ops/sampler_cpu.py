"""Sampling on the CPU: the functions of ``kernels.reference.sampling`` without their passes over the vocabulary.

A full sort of 16 x 262,144 logits takes 230 ms. Here the largest logit of each block of 64 comes first (one
fast pass); the k-th largest of these bounds the k-th largest logit from below, so the few blocks above it hold
every candidate. Candidates are all ids at or above a bound, hence ties are never split, and stay in order of
ids. Whether they were enough is checked; rows where they were not are done again, in the end row by row on
the whole vocabulary (2 ms each: NumPy sorts values 20 times as fast as torch sorts pairs).

Control flow depends on the data, and NumPy works on the tensors' own memory: CPU tensors only.

Where there are native kernels, arg-max and choice are theirs: the same method, 2 to 100 times as fast. All of this
remains for machines without a compiler.
"""

from dataclasses import dataclass

import numpy as np
import torch

from atom.kernels.cpu.native.library import NativeLibrary, native_library
from atom.kernels.cpu.native.sampling import MAX_VOCAB, native_argmax, native_choose
from atom.kernels.reference import sampling as reference
from atom.kernels.reference.sampling import ADVANCES, TOP_P_SLACK, Advance, Draw, mask_bits

__all__ = ["ADVANCES", "argmax", "choose", "mask_bits", "philox_uniform", "rank_of", "sample", "top"]

WIDE_BLOCK = 512
SMALL_VOCAB = 1024  # ids; up to here the reference is as fast
CHUNK_BYTES = 4 * 2**20
FIRST_SHARE = 1 / 16  # of the blocks: this many candidates first
MAX_SHARE = 1 / 4  # of the blocks: a row that needs more is faster on the whole vocabulary
LOG_ZERO = -104.0  # exp(-104) is 0 in float32


def philox_uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """As the reference: [n] int64, [n] int64 -> [n] float32. 25 us instead of 210."""
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    seed, position = seeds.numpy().view(np.uint64), positions.numpy().view(np.uint64)
    key = np.stack((seed & low, seed >> shift))
    even = np.stack((np.zeros_like(position), position & low))
    odd = np.stack((position >> shift, np.zeros_like(position)))
    for _ in range(10):
        product = even * _ROUND
        even = ((product >> shift) ^ odd ^ key)[::-1]
        odd = product & low
        key = (key + _KEY_STEP) & low
    word = even[1].astype(np.uint32).view(np.int32)
    magnitude = np.where(word < 0, ~word, word).astype(np.float32)
    return torch.from_numpy(magnitude * np.float32(reference.UNIFORM_SCALE))


_ROUND = np.array(reference.ROUND, np.uint64)[:, None]
_KEY_STEP = np.array(reference.KEY_STEP, np.uint64)[:, None]


def _native(logits: torch.Tensor) -> NativeLibrary | None:
    """The native kernels, where they can read these logits."""
    is_readable = (
        logits.dtype is torch.float32
        and logits.stride(-1) == 1
        and SMALL_VOCAB < logits.shape[-1] <= MAX_VOCAB
    )
    return native_library() if is_readable else None


def _block_size(vocab_size: int) -> int:
    """Ids in a block: few enough blocks to select from, small enough that few ids beside the wanted come along."""
    return 64 if vocab_size >= 2**16 else 16


def _block_max(values: torch.Tensor, block: int) -> torch.Tensor:
    """The largest value of each block of ids, [n, ceil(vocab / block)]; the last block may be short."""
    num_full = values.shape[-1] // block
    largest = values[:, : num_full * block].unflatten(-1, (num_full, block)).amax(dim=-1)
    if num_full * block == values.shape[-1]:
        return largest
    return torch.cat((largest, values[:, num_full * block :].amax(dim=-1, keepdim=True)), dim=-1)


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference, ten times as fast: the best block of 512, then the best id in it."""
    num_rows, vocab_size = logits.shape
    if vocab_size < 2 * WIDE_BLOCK:
        return reference.argmax(logits)
    library = _native(logits)
    if library is not None:
        return native_argmax(library, logits)
    block = _block_max(logits, WIDE_BLOCK).argmax(dim=-1, keepdim=True)  # the first of equals
    start = (block * WIDE_BLOCK).clamp_(max=vocab_size - WIDE_BLOCK)  # a short last block: look back
    columns = start + torch.arange(WIDE_BLOCK)
    inside = logits.gather(-1, columns)
    best, offset = inside.max(dim=-1, keepdim=True)
    # Looking back cannot find an earlier equal: then its block would have been the first of equals.
    return (start + offset).squeeze(-1), best.squeeze(-1)


def sample(
    logits: torch.Tensor, draw: Draw | None = None, advance: Advance | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference; rows that are not random take part in nothing but the arg-max."""
    ids, best = argmax(logits)
    is_finite = best.isfinite()
    if draw is None:
        return ids, is_finite
    parts = (logits, best, draw.temperature, draw.top_k, draw.top_p, draw.min_p, draw.seeds, draw.positions)
    rows = np.flatnonzero(draw.temperature.numpy() > 0)
    index = torch.from_numpy(rows)
    if len(rows) < len(ids):
        parts = tuple(part[index] for part in parts)
    *parameters, seeds, positions = parts
    chosen = choose(*parameters, philox_uniform(seeds, positions))
    ids[index] = chosen.clamp_(0, logits.shape[-1] - 1)  # a row that is not finite may run over
    return ids, is_finite


def _candidates(
    logits: np.ndarray, largest: np.ndarray, bound: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every id whose logit is at or above its row's bound, in order of ids.

    Args:
        logits: [n, vocab] float32.
        largest: [n, blocks], the largest logit of each block.
        bound: [n] float32.
    Returns:
        logits [n, c] float32 padded with -inf, ids [n, c] int64 padded with 0, counts [n].
    """
    num_rows, vocab_size = logits.shape
    block = _block_size(vocab_size)
    rows, blocks = np.nonzero(largest >= bound[:, None])
    columns = blocks[:, None] * block + np.arange(block)
    np.minimum(columns, vocab_size - 1, out=columns)
    found = logits[rows[:, None], columns]
    is_candidate = found >= bound[rows][:, None]
    if vocab_size % block:  # the short block repeated the last id
        is_candidate[blocks == vocab_size // block, vocab_size % block :] = False
    block_index, offset = np.nonzero(is_candidate)
    row = rows[block_index]
    counts = np.bincount(row, minlength=num_rows)
    place = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
    values = np.full((num_rows, max(1, counts.max())), -np.inf, np.float32)
    ids = np.zeros(values.shape, np.int64)
    values[row, place] = found[block_index, offset]
    ids[row, place] = columns[block_index, offset]
    return values, ids, counts


def _kth_largest(largest: np.ndarray, k: int) -> np.ndarray:
    """The k-th largest block maximum of each row: at least ``k`` logits reach it. -inf: too few blocks."""
    num_rows, num_blocks = largest.shape
    if k > num_blocks:
        return np.full(num_rows, -np.inf, np.float32)
    return np.partition(largest, num_blocks - k, axis=-1)[:, num_blocks - k]


def top(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference: the ``k`` largest of each row with their ids."""
    if k == 0:
        return values[:, :0], torch.zeros((values.shape[0], 0), dtype=torch.int64)
    largest = _block_max(values, _block_size(values.shape[-1])).numpy()
    bound = _kth_largest(largest, k)
    if not np.isfinite(bound).all():
        return reference.top(values, k)
    found, ids, _ = _candidates(values.numpy(), largest, bound)
    order = np.argsort(-found, axis=-1, kind="stable")[:, :k]
    found, ids = np.take_along_axis(found, order, -1), np.take_along_axis(ids, order, -1)
    return torch.from_numpy(found), torch.from_numpy(ids)


def rank_of(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """As the reference. NumPy counts true values ten times as fast as torch."""
    ranks = []
    for row, token_id in zip(values.numpy(), ids.tolist(), strict=True):
        chosen = row[token_id]
        num_equal_before = np.count_nonzero(row[:token_id] == chosen)
        ranks.append(1 + np.count_nonzero(row > chosen) + num_equal_before)
    return torch.tensor(ranks, dtype=torch.int64)


def choose(
    logits: torch.Tensor,
    best: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """As the reference; rows whose every id may be sampled are told from those that are filtered."""
    if logits.shape[-1] <= SMALL_VOCAB:
        return reference.choose(logits, best, temperature, top_k, top_p, min_p, uniforms)
    library = _native(logits)
    if library is not None:
        return native_choose(library, logits, best, temperature, top_k, top_p, min_p, uniforms)
    is_filtered = (top_k > 0) | (top_p < 1) | (min_p > 0)
    parameters = (best, temperature, top_k, top_p, min_p, uniforms)
    if not is_filtered.any():
        return _choose_from_all(logits, best, temperature, uniforms)
    if is_filtered.all():
        return _choose_filtered(logits, *parameters)
    ids = torch.empty(len(best), dtype=torch.int64)
    rows = is_filtered.logical_not().nonzero().squeeze(-1)
    ids[rows] = _choose_from_all(logits[rows], best[rows], temperature[rows], uniforms[rows])
    rows = is_filtered.nonzero().squeeze(-1)
    ids[rows] = _choose_filtered(logits[rows], *(p[rows] for p in parameters))
    return ids


def _block_weights(logits: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Weights in blocks of ids, [n, ceil(vocab / 512), 512] float32, zero past the vocabulary."""
    num_rows, vocab_size = logits.shape
    num_blocks = -(-vocab_size // WIDE_BLOCK)
    weights = torch.empty((num_rows, num_blocks * WIDE_BLOCK))
    weights[:, vocab_size:] = 0
    inside = weights[:, :vocab_size]
    torch.sub(logits, best.unsqueeze(-1), out=inside)
    inside.div_(temperature.unsqueeze(-1)).exp_()
    return weights.view(num_rows, num_blocks, WIDE_BLOCK)


def _rows_at_a_time(logits: torch.Tensor) -> int:
    """So many that their weights stay in the cache; larger arrays cost page faults each time as well."""
    return max(1, CHUNK_BYTES // (4 * logits.shape[-1]))


def _total_weights(logits: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor) -> np.ndarray:
    """The weight of the whole vocabulary, [n] float64."""
    chunk = _rows_at_a_time(logits)
    parts = zip(*(t.split(chunk) for t in (logits, best, temperature)), strict=True)
    sums = [_block_weights(*part).sum(dim=-1).numpy().sum(axis=-1, dtype=np.float64) for part in parts]
    return np.concatenate(sums)


def _choose_from_all(
    logits: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor, uniforms: torch.Tensor
) -> torch.Tensor:
    """No filter: every id may be sampled."""
    chunk = _rows_at_a_time(logits)
    if len(logits) > chunk:
        parts = zip(*(t.split(chunk) for t in (logits, best, temperature, uniforms)), strict=True)
        return torch.cat([_choose_from_all(*part) for part in parts])
    return torch.from_numpy(_pick(_block_weights(logits, best, temperature), uniforms.numpy()))


def _pick(weights: torch.Tensor, uniforms: np.ndarray) -> np.ndarray:
    """As the reference, [n] int64, of weights [n, blocks, 512]: find the block, then the id in it."""
    cumulative = np.cumsum(weights.sum(dim=-1).numpy(), axis=-1, dtype=np.float64)
    target = cumulative[:, -1] * uniforms.astype(np.float64)
    block = (cumulative <= target[:, None]).sum(axis=-1)
    block = np.minimum(block, cumulative.shape[-1] - 1)  # a row that is not finite finds none
    row = np.arange(len(block))
    target -= np.where(block > 0, cumulative[row, block - 1], 0.0)
    inside = weights.numpy()[row, block]  # [n, WIDE_BLOCK]
    offset = (np.cumsum(inside, axis=-1, dtype=np.float64) <= target[:, None]).sum(axis=-1)
    # The two sums round differently: never step past the last id that has any weight.
    last = WIDE_BLOCK - 1 - np.argmax(inside[:, ::-1] > 0, axis=-1)
    return block * WIDE_BLOCK + np.minimum(offset, last)


@dataclass(slots=True)
class _Rows:
    """Rows to be sampled, as NumPy arrays with one entry (or line) a row."""

    logits: np.ndarray  # [n, vocab] float32
    largest: np.ndarray  # [n, blocks]
    best: np.ndarray
    temperature: np.ndarray
    limit: np.ndarray  # top-k; the vocabulary's size where it is off
    top_p: np.ndarray
    min_p: np.ndarray
    uniforms: np.ndarray
    total: np.ndarray  # float64 weight of the whole vocabulary, where only top-p is on; else 0
    floor: np.ndarray  # no logit below it can be sampled

    def _fields(self) -> list[np.ndarray]:
        return [getattr(self, name) for name in self.__slots__]

    def take(self, rows: np.ndarray) -> "_Rows":
        return self if len(rows) == len(self.best) else _Rows(*(a[rows] for a in self._fields()))


def _prepare(
    logits: torch.Tensor,
    best: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniforms: torch.Tensor,
) -> _Rows:
    vocab_size = logits.shape[-1]
    limit = np.where(top_k.numpy() < 1, vocab_size, top_k.numpy())
    is_limited, is_nucleus = limit < vocab_size, top_p.numpy() < 1
    total = np.zeros(len(limit))
    rows = np.flatnonzero(is_nucleus & ~is_limited)
    if len(rows):
        parts = (logits, best, temperature)
        if len(rows) < len(limit):
            parts = tuple(part[torch.from_numpy(rows)] for part in parts)
        total[rows] = _total_weights(*parts)
    with np.errstate(divide="ignore"):
        lowest = np.maximum(LOG_ZERO, np.log(min_p.numpy()) - 1e-3)  # the margin is for rounding
    # The share of top-p is one of all that top-k keeps: min-p must not narrow the candidates before.
    lowest = np.where(is_limited & is_nucleus, LOG_ZERO, lowest)
    floor = (best.numpy() + temperature.numpy() * lowest).astype(np.float32)
    return _Rows(
        logits.numpy(), _block_max(logits, _block_size(vocab_size)).numpy(), best.numpy(), temperature.numpy(),
        limit, top_p.numpy(), min_p.numpy(), uniforms.numpy(), total, floor,
    )  # fmt: skip


def _choose_filtered(logits: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
    """Top-k, top-p or min-p is on in every row: a few candidates, then more, then the whole vocabulary."""
    every = _prepare(logits, *parameters)
    num_blocks = every.largest.shape[-1]
    is_limited, is_nucleus = every.limit < logits.shape[-1], every.top_p < 1
    num_wanted = every.limit[is_limited].max(initial=0)
    if (is_nucleus & ~is_limited).any():
        num_wanted = max(num_wanted, int(FIRST_SHARE * num_blocks))
    bound = every.floor
    if num_wanted:  # else min-p alone, whose floor says it all
        first = np.maximum(every.floor, _kth_largest(every.largest, num_wanted))
        bound = np.where(is_limited | is_nucleus, first, every.floor)
    ids, is_short = _choose_above(every, bound)
    if is_short.any():
        rows = np.flatnonzero(is_short)
        some = every.take(rows)
        bound = np.maximum(some.floor, _kth_largest(some.largest, int(MAX_SHARE * num_blocks)))
        ids[rows], is_short = _choose_above(some, bound)
        for row in rows[is_short]:
            ids[row] = _choose_in_row(every, row)
    return torch.from_numpy(ids)


def _choose_above(rows: _Rows, bound: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sample among the logits at or above ``bound`` [n].

    Returns ids [n], and where they may be wrong because ids below the bound could be sampled as well.
    """
    is_wide = np.count_nonzero(rows.largest >= bound[:, None], axis=-1) > MAX_SHARE * rows.largest.shape[-1]
    if not is_wide.any():
        return _choose_candidates(rows, bound)
    ids = np.empty(len(bound), np.int64)
    is_short = np.zeros(len(bound), bool)
    for row in np.flatnonzero(is_wide):
        ids[row] = _choose_in_row(rows, row)
    narrow = np.flatnonzero(~is_wide)
    if len(narrow):
        ids[narrow], is_short[narrow] = _choose_candidates(rows.take(narrow), bound[narrow])
    return ids, is_short


def _weights(values: np.ndarray, best: np.ndarray, temperature: np.ndarray) -> np.ndarray:
    """The reference's weights of an array, bit for bit."""
    tensors = (torch.from_numpy(a) for a in (values, best, temperature))
    return reference.weights_of(*tensors).numpy()


def _choose_candidates(rows: _Rows, bound: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    values, ids, counts = _candidates(rows.logits, rows.largest, bound)
    ordered = np.sort(values, axis=-1)[:, ::-1].copy()
    ranked = _weights(ordered, rows.best, rows.temperature)
    is_kept = np.arange(values.shape[-1]) < np.minimum(rows.limit, counts)[:, None]
    mass = np.cumsum(ranked * is_kept, axis=-1, dtype=np.float64)
    total = np.where(rows.total > 0, rows.total, mass[:, -1])
    share = (rows.top_p.astype(np.float64) - TOP_P_SLACK) * total
    is_kept &= (mass - ranked < share[:, None]) | (rows.top_p >= 1)[:, None]
    is_kept &= ranked >= rows.min_p[:, None]
    is_kept[:, 0] = True
    num_kept = is_kept.sum(axis=-1)

    smallest = np.take_along_axis(ordered, num_kept[:, None] - 1, -1)
    is_kept = values > smallest
    is_tie = values == smallest
    num_ties = num_kept - is_kept.sum(axis=-1)
    is_kept |= is_tie & (np.cumsum(is_tie, axis=-1) <= num_ties[:, None])
    cumulative = np.cumsum(_weights(values, rows.best, rows.temperature) * is_kept, axis=-1, dtype=np.float64)
    target = cumulative[:, -1] * rows.uniforms.astype(np.float64)
    column = (cumulative <= target[:, None]).sum(axis=-1)
    column = np.minimum(column, values.shape[-1] - 1)  # a row that is not finite finds no column
    is_short = (bound > rows.floor) & (num_kept >= counts) & (num_kept < rows.limit)
    return np.take_along_axis(ids, column[:, None], -1)[:, 0], is_short


def _choose_in_row(rows: _Rows, row: int) -> int:
    """One row on the whole vocabulary."""
    values, best, temperature = rows.logits[row], rows.best[row : row + 1], rows.temperature[row : row + 1]
    ordered = -values
    ordered.sort()
    np.negative(ordered, out=ordered)  # largest first
    ranked = _weights(ordered[None, : rows.limit[row]], best, temperature)[0]
    num_kept = len(ranked)
    if rows.top_p[row] < 1:
        mass = torch.from_numpy(ranked).double().cumsum(dim=0).numpy()
        share = (np.float64(rows.top_p[row]) - TOP_P_SLACK) * mass[-1]
        num_kept = min(num_kept, 1 + int(np.searchsorted(mass, share)))
    num_kept = min(num_kept, len(ranked) - int(np.searchsorted(ranked[::-1], rows.min_p[row])))
    smallest = ordered[max(1, num_kept) - 1]

    is_kept = values >= smallest
    num_surplus = np.count_nonzero(is_kept) - num_kept
    if num_surplus > 0:
        is_kept[np.flatnonzero(values == smallest)[-num_surplus:]] = False
    tensors = (torch.from_numpy(array) for array in (values[None], best, temperature))
    weights = _block_weights(*tensors)
    weights.view(-1)[: len(values)].mul_(torch.from_numpy(is_kept))
    return min(int(_pick(weights, rows.uniforms[row : row + 1])[0]), len(values) - 1)
