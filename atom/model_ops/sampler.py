"""The sampling stage: logits of a step to one id a sequence, batched, after the forward pass.

The order of the stages: penalties, logit bias, bans; then arg-max for greedy rows; for the others
temperature, top-k, top-p, min-p and a choice by one uniform number that depends on (seed, position) alone,
so that neither the row, the step, the chunking nor the company of other requests changes an answer.
Log-probabilities are the model's own, before any of it.

``plan`` works on the host and costs about a microsecond while the batch keeps its rows and all are greedy;
``sample`` only touches the device.
"""

from collections.abc import Sequence as Values
from dataclasses import dataclass, field, replace
from types import ModuleType

import numpy as np
import torch

from atom.core import BatchOutput, ScheduledBatch, TokenMasks
from atom.distributed.parallel_state import get_tp_group
from atom.kernels.reference.sampling import Advance, Draw
from atom.model_ops import sampler_cpu
from atom.model_ops.host_copy import start_copy, to_device
from atom.model_ops.logprobs import LogprobTensors, token_logprobs
from atom.model_ops.outbox import Letter
from atom.model_ops.sampler_tables import (
    BANS,
    BIAS,
    CHANGES_LOGITS,
    FILTERS,
    LATE_BANS,
    LOGPROBS,
    MIN_TOKENS,
    PENALTIES,
    RANDOM,
    SamplerTables,
)
from atom.model_ops.token_masks import apply_masks
from atom.utils.debug_helper import make_topk_log

NOT_FINITE = "the model's logits are not finite (NaN, or no token is left to choose)"


@dataclass(slots=True)
class _Group:
    """The logits rows that need one stage: as a list, as a tensor, and the parameters of its stage."""

    rows: list[int]
    index: torch.Tensor
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class _Composition:
    """What follows from which sequences sample, in which order; kept while neither changes."""

    rows: list[int]
    version: int
    needs: int = 0  # bits of any row
    draw: Draw | None = None  # of all rows; None: none is random
    penalties: _Group | None = None
    slots: torch.Tensor | None = None  # penalty slots [m]
    host_slots: list[int] = field(default_factory=list)
    bias: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # (row, id, value), each [k]
    bans: tuple[torch.Tensor, torch.Tensor] | None = None  # (row, id)
    min_tokens: list[int] = field(default_factory=list)
    logprobs: _Group | None = None
    num_top: list[int] = field(default_factory=list)


@dataclass(slots=True)
class SamplingPlan:
    """How one step is sampled. ``indices[i]`` is the batch index of logits row i; None: all, in order."""

    indices: list[int] | None
    composition: _Composition
    index: torch.Tensor | None = None  # ``indices`` on the device: indexing by a list would wait for it
    draw: Draw | None = None  # of the step's positions
    min_token_bans: list[tuple[int, int]] = field(default_factory=list)  # (logits row, id)
    logged_batch: ScheduledBatch | None = None  # whose logits go to the log of the best

    @property
    def is_greedy(self) -> bool:
        return not self.composition.needs & RANDOM

    @property
    def is_argmax(self) -> bool:
        """Whether the best ids are all that is wanted of the logits."""
        return not self.composition.needs and self.logged_batch is None

    @property
    def reads_ids(self) -> bool:
        """Whether ids are read on the device once they are sampled."""
        return bool(self.composition.needs & (PENALTIES | LOGPROBS))

    @property
    def needs_late_mask(self) -> bool:
        """Whether ``late_bans`` must be asked once the step before this one is committed."""
        return bool(self.composition.needs & LATE_BANS)


@dataclass(slots=True)
class SampleResult:
    """Device tensors of one step; row i belongs to logits row i."""

    token_ids: torch.Tensor  # [n] int64
    is_finite: torch.Tensor  # [n] bool; where False the row alone has failed
    logprobs: LogprobTensors | None = None  # of the rows that asked
    arrival: torch.cuda.Event | None = None  # when what is in host memory has arrived
    letter: Letter | None = None  # whose tensors these are

    def to_host(self) -> "SampleResult":
        """The same in host memory, to be read after :meth:`wait`; starts the copies and returns at once.

        Waiting for these copies alone lets the next step, launched behind them, go on computing.
        """
        if self.token_ids.device.type == "cpu":
            return self
        logprobs = None if self.logprobs is None else self.logprobs.to_host()
        result = SampleResult(start_copy(self.token_ids), start_copy(self.is_finite), logprobs)
        result.arrival = torch.cuda.Event()
        result.arrival.record()
        return result

    def wait(self) -> None:
        """Return once everything is there."""
        if self.arrival is not None:
            self.arrival.synchronize()
        if self.letter is not None:
            self.letter.check()


class Sampler:
    """Samples for the rows of the device tables.

    Args:
        num_rows: rows without the trash row.
        num_valid_ids: the tokenizer's size; ids from it on (padded vocabulary) are never sampled.
        device: where the logits are.
        ops: how the heavy parts are computed: an implementation of the registry's ``sampling``, or ``sampler_cpu``.
            On a device none waits for it.
    """

    def __init__(
        self,
        num_rows: int,
        num_valid_ids: int,
        device: torch.device | str = "cpu",
        ops: ModuleType = sampler_cpu,
    ):
        self.num_valid_ids = num_valid_ids
        self.device = device
        self.ops = ops
        self.tables = SamplerTables(num_rows, num_valid_ids, device)
        self._composition = _Composition([], -1)
        # Assigning a number through an index would copy it to the device, and wait for that.
        self._never = torch.full((), -torch.inf, device=device)
        self._topk_log = make_topk_log(get_tp_group().rank)

    def plan(self, batch: ScheduledBatch) -> SamplingPlan:
        """What ``sample`` has to do for this step. Writes the parameters of ``batch.new_seqs`` first."""
        tables = self.tables
        for seq in batch.new_seqs:
            if seq.row >= 0:
                tables.admit(seq.row, seq)
        indices = None
        rows = batch.rows
        if batch.num_prefill_seqs and not all(batch.samples):
            indices = [i for i, samples in enumerate(batch.samples) if samples]
            rows = [rows[i] for i in indices]
        composition = self._composition
        if composition.version != tables.version or composition.rows != rows:
            composition = self._composition = self._compose(list(rows))
        plan = SamplingPlan(indices, composition, None if indices is None else self._tensor(indices))
        if composition.needs & (RANDOM | MIN_TOKENS):
            self._add_positions(plan, batch)
        if self._topk_log is not None:
            plan.logged_batch = batch
        return plan

    def _add_positions(self, plan: SamplingPlan, batch: ScheduledBatch) -> None:
        """What depends on how far each sequence is: the random counters and the ban on ending early."""
        composition, indices = plan.composition, plan.indices
        # Of the token that is sampled: the number of tokens before it.
        positions = [start + count for start, count in zip(batch.starts, batch.num_scheduled, strict=True)]
        if indices is not None:
            positions = [positions[i] for i in indices]
        if composition.draw is not None:
            plan.draw = replace(composition.draw, positions=self._tensor(positions))
        for row in composition.min_tokens:
            seq = self.tables.seqs[composition.rows[row]]
            if positions[row] - seq.num_prompt_tokens < seq.params.min_tokens:
                plan.min_token_bans += [(row, i) for i in seq.stop_ids if i < self.num_valid_ids]

    def _compose(self, rows: list[int]) -> _Composition:
        tables = self.tables
        needs = [tables.needs[row] for row in rows]
        composition = _Composition(rows, tables.version)
        for need in needs:
            composition.needs |= need
        if not composition.needs:
            return composition

        def group(bit: int) -> _Group | None:
            members = [i for i, need in enumerate(needs) if need & bit]
            return _Group(members, self._tensor(members)) if members else None

        if composition.needs & RANDOM:
            p = tables.parameters(rows)
            names = ("temperature", "top_k", "top_p", "min_p", "seed")
            is_filtered = bool(composition.needs & FILTERS)
            composition.draw = Draw(*(p[name] for name in names), p["seed"], is_filtered)
        composition.penalties = group(PENALTIES)
        if composition.penalties is not None:
            members = [rows[i] for i in composition.penalties.rows]
            composition.penalties.parameters = tables.parameters(members)
            composition.host_slots = [tables.slots[row] for row in members]
            composition.slots = self._tensor(composition.host_slots)
        composition.logprobs = group(LOGPROBS)
        if composition.logprobs is not None:
            composition.num_top = [
                tables.seqs[rows[i]].params.num_logprobs for i in composition.logprobs.rows
            ]
        composition.min_tokens = [i for i, need in enumerate(needs) if need & MIN_TOKENS]
        self._compose_lists(composition, needs)
        return composition

    def _compose_lists(self, composition: _Composition, needs: list[int]) -> None:
        """The sparse lists of logit bias and of single-token bad words; ids out of range have no logit."""
        limit = self.num_valid_ids
        bias, bans = [], []
        for i, row in enumerate(composition.rows):
            seq = self.tables.seqs[row]
            if needs[i] & BIAS:
                bias += [(i, token, value) for token, value in seq.params.logit_bias.items() if token < limit]
            if needs[i] & BANS:
                bans += [(i, word[0]) for word in seq.bad_word_ids if len(word) == 1 and word[0] < limit]
        if bias:
            row, ids, values = zip(*bias, strict=True)
            values = to_device(np.array(values, np.float32), self.device)
            composition.bias = (self._tensor(row), self._tensor(ids), values)
        composition.bans = self._pairs(bans)

    def _tensor(self, values: Values[int]) -> torch.Tensor:
        # Half the time of torch.tensor, which waits for the device besides.
        return to_device(np.array(values, np.int64), self.device)

    def _pairs(self, pairs: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not pairs:
            return None
        rows, ids = zip(*pairs, strict=True)
        return self._tensor(rows), self._tensor(ids)

    @torch.inference_mode()
    def sample(
        self,
        logits: torch.Tensor,
        plan: SamplingPlan,
        late_bans: list[tuple[int, int]] | None = None,
        masks: TokenMasks | None = None,
        advance: Advance | None = None,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> SampleResult:
        """One id for each row of ``logits`` [n, vocab], which may be overwritten.

        ``late_bans`` are (logits row, id) pairs of :func:`late_bans`; ``masks`` are of grammars. ``advance`` is for
        ``ops`` that heed it (``ADVANCES``): the tables then have taken over the ids. Those write ids and flags to
        ``out``, which nobody reads here if the plan does not (``reads_ids``).
        """
        composition = plan.composition
        logits = logits[:, : self.num_valid_ids]
        if self._topk_log is not None:
            self._topk_log.maybe_log_topk(logits, plan.logged_batch, plan.indices)
        raw = None
        if composition.needs or masks is not None:
            # Bans and masks leave the other logits as they are; what is added to them is added in fp32.
            if composition.needs & (PENALTIES | BIAS) or logits.device.type == "cpu":
                logits = logits.float()
            if composition.logprobs is not None:
                raw = logits
                if len(composition.logprobs.rows) < len(logits):
                    raw = logits[composition.logprobs.index]
                elif composition.needs & CHANGES_LOGITS or masks is not None:
                    raw = logits.clone()
            self._change_logits(logits, plan, late_bans, masks)
        further = () if out is None else (out,)
        ids, is_finite = self.ops.sample(logits, plan.draw, advance, *further)
        if composition.penalties is not None:
            own = ids[composition.penalties.index]
            self.tables.penalties.record(composition.slots, composition.host_slots, own)
        result = SampleResult(ids, is_finite)
        if raw is not None:
            own = ids[composition.logprobs.index]
            result.logprobs = token_logprobs(raw, own, max(composition.num_top), self.ops)
        return result

    @torch.inference_mode()
    def rehearse(self, vocab_size: int, dtype: torch.dtype) -> None:
        """Sample one row in every way that steps may ask for, so that its kernels are known."""
        p = self.tables.parameters([0])
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "seed")
        draw = Draw(*(p[name] for name in names), is_filtered=True)
        rows = torch.zeros(1, dtype=torch.int64, device=self.device)
        for kind in (dtype, torch.float32):
            logits = torch.zeros((1, vocab_size), dtype=kind, device=self.device)[:, : self.num_valid_ids]
            for advance in (None, (rows, rows.int(), rows.int(), rows)):
                for how in (None, draw):
                    self.ops.sample(logits, how, advance)

    def _change_logits(
        self,
        logits: torch.Tensor,
        plan: SamplingPlan,
        late: list[tuple[int, int]] | None,
        masks: TokenMasks | None,
    ) -> None:
        composition = plan.composition
        if composition.penalties is not None:
            p = composition.penalties.parameters
            self.tables.penalties.apply(
                logits, composition.penalties.index, composition.slots, composition.host_slots,
                p["presence"], p["frequency"], p["repetition"],
            )  # fmt: skip
        if composition.bias is not None:
            row, ids, values = composition.bias
            logits[row, ids] += values  # an id occurs once a row
        late = [(row, i) for row, i in late or () if i < self.num_valid_ids]
        early = plan.min_token_bans
        if masks is not None:
            apply_masks(logits, masks, self.ops.mask_bits)
            if masks.ended:  # a grammar that has no more to say outweighs a least length
                early = [(row, i) for row, i in early if row not in masks.ended]
        for bans in (composition.bans, self._pairs(early + late)):
            if bans is not None:
                logits[bans] = self._never.to(logits.dtype)


def late_bans(batch: ScheduledBatch) -> list[tuple[int, int]]:
    """Ids that would complete a bad word of several tokens: (logits row, id) pairs for ``Sampler.sample``.

    Ask it when the step before ``batch`` is committed; a word is matched within the answer.
    """
    bans = []
    row = 0
    for seq, samples in zip(batch.seqs, batch.samples, strict=True):
        if not samples:
            continue
        for word in seq.bad_word_ids:
            num_before = len(word) - 1
            is_possible = 0 < num_before <= seq.num_output_tokens
            if is_possible and tuple(seq.token_ids[-num_before:]) == tuple(word[:-1]):
                bans.append((row, word[-1]))
        row += 1
    return bans


def to_batch_output(batch: ScheduledBatch, plan: SamplingPlan, result: SampleResult) -> BatchOutput:
    """A step's result as the scheduler wants it. The only function here that waits for the device."""
    result.wait()
    ids, is_finite = result.token_ids.numpy().tolist(), result.is_finite.numpy().tolist()
    indices = plan.indices
    output = BatchOutput(ids)
    if indices is not None:
        output.token_ids = [0] * batch.num_seqs
        for i, token_id in zip(indices, ids, strict=True):
            output.token_ids[i] = token_id
    if not all(is_finite):
        failed = [row for row, ok in enumerate(is_finite) if not ok]
        output.errors = {row if indices is None else indices[row]: NOT_FINITE for row in failed}
    if result.logprobs is not None:
        composition = plan.composition
        entries = result.logprobs.to_list(composition.num_top)
        rows = composition.logprobs.rows
        output.logprobs = {
            row if indices is None else indices[row]: [entry]
            for row, entry in zip(rows, entries, strict=True)
        }
    return output
