"""Sampling parameters by row of the device tables, and the penalty counts of the rows that use them.

A row's parameters are written once, when a sequence gets the row; nothing is rebuilt when the batch changes.
"""

import secrets

import numpy as np
import torch

from atom.core import Sequence
from atom.model_ops.host_copy import to_device

# What a row needs beyond arg-max, as bits of ``SamplerTables.needs[row]``.
RANDOM = 1
PENALTIES = 2
BIAS = 4
BANS = 8  # single-token bad words
MIN_TOKENS = 16
LATE_BANS = 32  # bad words of several tokens: depend on the ids just sampled
LOGPROBS = 64
GUIDED = 128  # a grammar's mask comes with the step
FILTERS = 256  # top-k, top-p or min-p of a random row
CHANGES_LOGITS = PENALTIES | BIAS | BANS | MIN_TOKENS | LATE_BANS

MIN_TEMPERATURE = 1e-5  # below it the best id has all the weight
_FLOATS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
_ALIGNMENT = 4  # rows: columns of float32 begin at 16 bytes, which kernels are compiled for


class PenaltyStore:
    """How often the answers hold each id, and which ids prompt and answer hold: one slot a sequence.

    A step touches the ids that a sequence holds, not the vocabulary. Slots are allocated as they are needed.
    """

    def __init__(self, vocab_size: int, device: torch.device | str):
        self.vocab_size = vocab_size
        self.device = device
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        # Ids held, left-aligned, repeats allowed; the rest of a line repeats its first id.
        self._held = torch.zeros((0, 64), dtype=torch.int64, device=device)
        self._lengths: list[int] = []
        self._free: list[int] = []

    @property
    def num_slots(self) -> int:
        return len(self._lengths)

    def acquire(self, seq: Sequence) -> int:
        """A slot with the counts of the sequence's committed ids."""
        if not self._free:
            self._grow_slots()
        slot = self._free.pop()
        ids = np.asarray(seq.token_ids, dtype=np.int64)
        output = ids[seq.num_prompt_tokens :]
        ids = np.unique(ids[ids < self.vocab_size])
        output, counts = np.unique(output[output < self.vocab_size], return_counts=True)
        self._counts[slot] = 0
        counts = to_device(counts.astype(np.int32), self.device)
        self._counts[slot, to_device(output, self.device)] = counts
        self._lengths[slot] = len(ids)
        self._grow_width(len(ids))
        if len(ids):
            self._held[slot] = int(ids[0])
            self._held[slot, : len(ids)] = to_device(ids, self.device)
        return slot

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def _grow_slots(self) -> None:
        num_old = len(self._lengths)
        num_new = max(4, num_old)
        self._counts = torch.cat((self._counts, self._counts.new_zeros((num_new, self.vocab_size))))
        self._held = torch.cat((self._held, self._held.new_zeros((num_new, self._held.shape[1]))))
        self._lengths += [0] * num_new
        self._free += range(num_old + num_new - 1, num_old - 1, -1)

    def _grow_width(self, width: int) -> None:
        num_old = self._held.shape[1]
        if width > num_old:
            num_more = max(num_old, width - num_old)
            self._held = torch.cat((self._held, self._held[:, :1].expand(-1, num_more)), dim=1)

    def apply(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        slots: torch.Tensor,
        host_slots: list[int],
        presence: torch.Tensor,
        frequency: torch.Tensor,
        repetition: torch.Tensor,
    ) -> None:
        """Penalise, in place, ``logits[rows]`` by what ``slots`` hold; see ``reference.apply_penalties``.

        ``rows`` and ``slots`` [m] int64; the penalties [m] float32; ``host_slots`` is ``slots`` as a list.
        """
        members = [i for i, slot in enumerate(host_slots) if self._lengths[slot]]
        if not members:
            return
        if len(members) < len(host_slots):  # a prompt without one valid id, before its answer
            select = to_device(np.array(members, np.int64), self.device)
            rows, slots = rows[select], slots[select]
            presence, frequency, repetition = presence[select], frequency[select], repetition[select]
        width = max(self._lengths[slot] for slot in host_slots)
        ids = self._held[slots, :width]  # [m, width]; a repeated id is computed, and written, alike each time
        counts = self._counts[slots.unsqueeze(-1), ids]
        row = rows.unsqueeze(-1)
        held = logits[row, ids]
        factor = repetition.unsqueeze(-1)
        held = torch.where(held > 0, held / factor, held * factor)
        held -= frequency.unsqueeze(-1) * counts
        held -= presence.unsqueeze(-1) * (counts > 0)
        logits[row, ids] = held

    def record(self, slots: torch.Tensor, host_slots: list[int], ids: torch.Tensor) -> None:
        """The answers of ``slots`` grow by ``ids`` [m] int64."""
        self._grow_width(1 + max(self._lengths[slot] for slot in host_slots))
        columns = [self._lengths[slot] for slot in host_slots]
        for i, slot in enumerate(host_slots):
            if columns[i] == 0:  # nothing to repeat yet
                self._held[slot] = ids[i]
            self._lengths[slot] += 1
        self._held[slots, to_device(np.array(columns, np.int64), self.device)] = ids
        self._counts[slots, ids] += 1


class SamplerTables:
    """Parameters by row; row ``num_rows`` is the trash row of padded batches and stays greedy.

    ``needs[row]`` has a bit for each stage that the row needs (0: arg-max alone); ``version`` grows whenever
    a row's parameters change.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device | str = "cpu"):
        self.num_rows = num_rows
        self.device = device
        self._host_floats = np.zeros((num_rows + 1, len(_FLOATS)), np.float32)
        self._host_seeds = np.zeros(num_rows + 1, np.int64)
        self._host_top_k = np.zeros(num_rows + 1, np.int32)
        self.needs = [0] * (num_rows + 1)
        self.seqs: list[Sequence | None] = [None] * (num_rows + 1)
        self.slots = [-1] * (num_rows + 1)  # of the penalty store
        self.penalties = PenaltyStore(vocab_size, device)
        self.version = 0
        self._seed_base = secrets.randbits(63)

    @torch.inference_mode()
    def admit(self, row: int, seq: Sequence) -> None:
        """Write the parameters of a sequence that got ``row``, with the counts of what it holds so far."""
        needs = needs_of(seq)
        self.release(row)
        self.version += 1
        self.needs[row] = needs
        p = seq.params
        self._host_floats[row] = (
            p.temperature if needs & RANDOM else 0.0,
            p.top_p, p.min_p, p.presence_penalty, p.frequency_penalty, p.repetition_penalty,
        )  # fmt: skip
        if not needs:
            return
        self.seqs[row] = seq
        self._host_top_k[row] = max(0, p.top_k)
        self._host_seeds[row] = self._seed_of(seq)
        if needs & PENALTIES:
            self.slots[row] = self.penalties.acquire(seq)

    def release(self, row: int) -> None:
        """Forget the sequence of ``row``. Admitting another one to the row does it as well."""
        if self.slots[row] >= 0:
            self.penalties.give_back(self.slots[row])
            self.slots[row] = -1
        if self.needs[row]:
            self.version += 1
        self.needs[row] = 0
        self.seqs[row] = None

    def _seed_of(self, seq: Sequence) -> int:
        """The request's seed; without one (the front end draws it) a number that no other request has."""
        if seq.params.seed is not None:
            return seq.params.seed
        return (self._seed_base + seq.id * 0x9E3779B97F4A7C15) % 2**63

    def parameters(self, rows: list[int]) -> dict[str, torch.Tensor]:
        """Parameters of ``rows``, each [n], in one copy: float32, ``top_k`` int32 (0 = off), ``seed`` int64.

        The temperature of a row that is not random is 0.
        """
        n = len(rows)
        room = -(-n // _ALIGNMENT) * _ALIGNMENT
        num_floats = len(_FLOATS)
        ends = [8 * room, (8 + 4 * num_floats) * room, (12 + 4 * num_floats) * room]
        packed = np.zeros(ends[-1], np.uint8)
        packed[: ends[0]].view(np.int64)[:n] = self._host_seeds[rows]
        packed[ends[0] : ends[1]].view(np.float32).reshape(num_floats, room)[:, :n] = self._host_floats[
            rows
        ].T
        packed[ends[1] :].view(np.int32)[:n] = self._host_top_k[rows]
        whole = to_device(packed, self.device)
        columns = whole[ends[0] : ends[1]].view(torch.float32).view(num_floats, room)[:, :n].unbind()
        named: dict[str, torch.Tensor] = dict(zip(_FLOATS, columns, strict=True))
        named["top_k"] = whole[ends[1] :].view(torch.int32)[:n]
        named["seed"] = whole[: ends[0]].view(torch.int64)[:n]
        return named


def needs_of(seq: Sequence) -> int:
    """The stages that a sequence needs beyond arg-max."""
    p = seq.params
    needs = 0
    if not p.is_greedy and p.temperature >= MIN_TEMPERATURE:
        needs |= RANDOM
        if p.top_k > 0 or p.top_p < 1 or p.min_p > 0:
            needs |= FILTERS
    if p.has_penalties:
        needs |= PENALTIES
    if p.logit_bias:
        needs |= BIAS
    if p.min_tokens and seq.stop_ids:
        needs |= MIN_TOKENS
    if p.num_logprobs >= 0:
        needs |= LOGPROBS
    if seq.guide is not None:
        needs |= GUIDED
    for word in seq.bad_word_ids:
        needs |= BANS if len(word) == 1 else LATE_BANS
    return needs
