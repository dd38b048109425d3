"""The device side of a step's input: one row a running sequence, and what derives the rest from them.

Row ``R`` (the last) is the trash row: padded rows of recorded graphs point at it, so that what they sample
cannot overwrite a live row.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from atom.model_engine.runner.input_packer import PackedStep


@dataclass(slots=True)
class GroupInputs:
    """A cache group's share of a step."""

    block_tables: torch.Tensor  # [num_seqs, columns] int32, or all rows where the step comes with rows
    slot_mapping: torch.Tensor  # [num_tokens] int64; -1: padding


@dataclass(slots=True)
class StepInputs:
    """Everything that the forward pass and the sampler read; counts include padding."""

    rows: torch.Tensor  # [num_seqs] int64
    input_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    cu_seqlens_q: torch.Tensor  # [num_seqs + 1] int32
    context_lens: torch.Tensor  # [num_seqs] int32
    groups: list[GroupInputs]
    has_table_rows: bool = False  # whether block tables are of all rows, to be read at ``rows``
    slots: torch.Tensor | None = None  # [groups, num_tokens] where the groups' slots are rows of one tensor

    def tensors(self) -> list[torch.Tensor]:
        """What changes from step to step."""
        own = [self.rows, self.input_ids, self.positions, self.cu_seqlens_q, self.context_lens]
        return own + [group.slot_mapping for group in self.groups]

    def copy_(self, other: "StepInputs") -> None:
        """Take over what ``other``, of the same sizes, holds; all row tables must be shared."""
        torch._foreach_copy_(self.tensors(), other.tensors())


class DeviceTables:
    """Per-row state at fixed addresses. Attention gets the block tables of all rows and reads them by row.

    Attributes:
        block_tables: per cache group ``[R + 1, max_blocks]`` int32.
        computed: ``[R + 1]`` int32, positions whose KV is written.
        last_token: ``[R + 1]`` int64, the id sampled last, input of the next decode step.
        prepare_decode: stands in for ``decode_step.prepare_decode`` where whoever runs the steps does more in that
            launch.
    """

    def __init__(
        self,
        num_rows: int,
        max_blocks: int,
        num_groups: int,
        block_size: int,
        device: torch.device,
    ):
        self.block_size = block_size
        self.trash_row = num_rows
        self.device = device
        self._prepares = device.type == "cuda"  # whether our own kernels take the place of tensor operations
        self.prepare_decode: Callable[..., tuple[torch.Tensor, ...]] | None = None
        self._tables = torch.zeros((num_groups, num_rows + 1, max_blocks), dtype=torch.int32, device=device)
        self.block_tables = list(self._tables.unbind())
        self.computed = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        self.last_token = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)

    def apply(self, packed: torch.Tensor, step: PackedStep) -> None:
        """Write what the step changes: patches of the tables, and where its prefills start.

        Args:
            packed: the step's buffer on the device, at least ``[used]`` int32.
        """
        if self._prepares:
            if not step.num_prefill_seqs and any(step.patch_counts):
                from atom.kernels.triton.step_inputs import patch_tables

                patch_tables(packed, self._tables, step.running_bs)
            return  # of a step with prompts, :meth:`prepare` does it
        offset = step.patch_offset
        for table, count in zip(self.block_tables, step.patch_counts, strict=True):
            if count:
                patches = packed[offset : offset + 3 * count].view(count, 3)
                index = patches[:, :2].long()
                table[index[:, 0], index[:, 1]] = patches[:, 2]
                offset += 3 * count
        num_prefill = step.num_prefill_seqs
        if num_prefill:
            start = 2 * step.running_bs
            self.computed[packed[:num_prefill].long()] = packed[start : start + num_prefill]

    def takes(self, step: PackedStep) -> bool:
        """Whether :meth:`take` can bring such a step to the device: a decode of a few KB."""
        if not self._prepares or step.num_prefill_seqs:
            return False
        from atom.kernels.triton.step_inputs import MOST_TAKEN

        return step.ids_offset <= MOST_TAKEN

    def take(self, host: torch.Tensor, packed: torch.Tensor, step: PackedStep) -> None:
        """One launch for a decode step that reads ``host``, its buffer in pinned memory: it writes the patches into
        the tables, and rows and query lengths to ``packed`` on the device.
        """
        from atom.kernels.triton.step_inputs import take_decode

        take_decode(host, packed, self._tables, step.running_bs, sum(step.patch_counts))

    def derive(
        self, packed: torch.Tensor, step: PackedStep, max_context_len: int, running_tokens: int | None = None
    ) -> StepInputs:
        """Ids, positions, lengths and cache slots, after :meth:`apply`. Reads nothing back from the device.

        Args:
            packed: the step's buffer on the device, at least ``[used]`` int32.
            step: its section sizes.
            max_context_len: upper bound of the context lengths; tables of the step's sequences alone end there.
            running_tokens: rows of the forward pass with padding; None: no padding.
        """
        n, num_tokens = step.running_bs, running_tokens or step.num_tokens
        if self._prepares and step.num_prefill_seqs:
            return self.prepare(packed, self.new_inputs(n, num_tokens))
        if self._prepares and num_tokens == n:
            return self._prepare(packed, n, running_tokens is not None)
        rows = packed[:n].long()
        query_lens = packed[n : 2 * n]
        starts = self.computed[rows]
        context_lens = starts + query_lens
        is_padded = running_tokens is not None
        if is_padded:
            is_live = rows != self.trash_row
            context_lens = context_lens * is_live
        cu_seqlens_q = torch.zeros(n + 1, dtype=torch.int32, device=packed.device)
        torch.cumsum(query_lens, 0, dtype=torch.int32, out=cu_seqlens_q[1:])

        if not step.num_prefill_seqs and num_tokens == n:
            positions, input_ids, token_rows = starts.long(), self.last_token[rows], rows
        else:
            token = torch.arange(num_tokens, device=packed.device)
            owner = torch.searchsorted(cu_seqlens_q[1:], token, right=True)
            if is_padded:
                is_inside = owner < n
                owner = owner.clamp_(max=n - 1)
                is_live = is_live[owner] & is_inside
            positions = starts[owner] + (token - cu_seqlens_q[owner])
            input_ids, token_rows = self._input_ids(packed, step, rows, num_tokens), rows[owner]
        if is_padded:
            positions = positions * is_live

        block_index = positions // self.block_size
        in_block = positions - block_index * self.block_size
        groups = []
        for table in self.block_tables:
            slots = table[token_rows, block_index].long() * self.block_size + in_block
            if is_padded:
                slots = torch.where(is_live, slots, -1)
            groups.append(GroupInputs(table, slots))
        return StepInputs(rows, input_ids, positions, cu_seqlens_q, context_lens, groups, has_table_rows=True)

    def prepares(self, step: PackedStep) -> bool:
        """Whether :meth:`prepare` makes the inputs of such a step, which a recorded graph may then do itself."""
        return self._prepares and step.num_prefill_seqs > 0

    def new_inputs(self, n: int, num_tokens: int) -> StepInputs:
        """Room for the inputs of ``n`` sequences and ``num_tokens`` tokens, of undefined content."""
        whole, device = torch.int64, self.device
        even = num_tokens + num_tokens % 2  # every row begins at 16 bytes: kernels are compiled for that
        slots = torch.empty((len(self._tables), even), dtype=whole, device=device)[:, :num_tokens]
        return StepInputs(
            torch.empty(n, dtype=whole, device=device),
            torch.empty(num_tokens, dtype=whole, device=device),
            torch.empty(num_tokens, dtype=whole, device=device),
            torch.empty(n + 1, dtype=torch.int32, device=device),
            torch.empty(n, dtype=torch.int32, device=device),
            [GroupInputs(table, row) for table, row in zip(self.block_tables, slots.unbind(), strict=True)],
            has_table_rows=True,
            slots=slots,
        )

    def prepare(self, packed: torch.Tensor, inputs: StepInputs) -> StepInputs:
        """Apply a step's patches and fill ``inputs`` (of :meth:`new_inputs`), in one launch. All that depends on the
        step is read from ``packed``, so that a recorded launch serves every step of those sizes. Returns ``inputs``.
        """
        from atom.kernels.triton.step_inputs import prepare_tokens

        i = inputs
        outputs = (i.rows, i.input_ids, i.positions, i.cu_seqlens_q, i.context_lens, i.slots)
        prepare_tokens(
            packed,
            self.computed,
            self.last_token,
            self._tables,
            outputs,
            self.trash_row,
            self.block_size,
        )
        return inputs

    @contextmanager
    def without_kernels(self) -> Iterator[None]:
        """Inside, steps are derived by tensor operations alone."""
        before, self._prepares = self._prepares, False
        try:
            yield
        finally:
            self._prepares = before

    def _prepare(self, packed: torch.Tensor, n: int, is_padded: bool) -> StepInputs:
        """What :meth:`derive` gives for a step of one token a sequence, in one launch."""
        from atom.kernels.triton.decode_step import prepare_decode

        prepare = self.prepare_decode or prepare_decode
        rows, input_ids, positions, cu_seqlens, context_lens, slots = prepare(
            packed,
            self.computed,
            self.last_token,
            self._tables,
            n,
            self.trash_row,
            self.block_size,
            is_padded,
        )
        groups = [GroupInputs(t, s) for t, s in zip(self.block_tables, slots, strict=True)]
        return StepInputs(rows, input_ids, positions, cu_seqlens, context_lens, groups, True)

    def _input_ids(
        self, packed: torch.Tensor, step: PackedStep, rows: torch.Tensor, num_tokens: int
    ) -> torch.Tensor:
        """Ids of prefill sequences as they were sent, of decode sequences as they were sampled, then zeros."""
        prefill_ids = packed[step.ids_offset : step.ids_offset + step.num_prefill_tokens].long()
        decode_ids = self.last_token[rows[step.num_prefill_seqs : step.num_seqs]]
        num_padding = num_tokens - len(prefill_ids) - len(decode_ids)
        return torch.cat((prefill_ids, decode_ids, prefill_ids.new_zeros(num_padding)))

    def advance(
        self,
        rows: torch.Tensor,
        context_lens: torch.Tensor,
        sampled_rows: torch.Tensor,
        token_ids: torch.Tensor,
    ) -> None:
        """After sampling: ``token_ids`` feed the next decode step of ``sampled_rows``; every row has moved on."""
        self.computed[rows] = context_lens
        self.last_token[sampled_rows] = token_ids.long()
