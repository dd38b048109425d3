"""The device side of a step's input: one row a running sequence, and the kernel that derives the rest.

Row ``R`` (the last) is the trash row: padded rows of recorded graphs point at it, so that what they sample
cannot overwrite a live row.
"""

from dataclasses import dataclass

import torch

from atom.model_engine.runner.input_packer import PackedStep


@dataclass(slots=True)
class GroupInputs:
    """A cache group's share of a step."""

    block_table: torch.Tensor  # [num_seqs, columns] int32
    slots: torch.Tensor  # [num_tokens] int64


@dataclass(slots=True)
class StepInputs:
    """Everything that the forward pass and the sampler read."""

    rows: torch.Tensor  # [num_seqs] int64
    input_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    cu_seqlens_q: torch.Tensor  # [num_seqs + 1] int32
    context_lens: torch.Tensor  # [num_seqs] int32
    groups: list[GroupInputs]


class DeviceTables:
    """Per-row state at fixed addresses.

    Attributes:
        block_tables: per cache group ``[R + 1, max_blocks]`` int32.
        computed: ``[R + 1]`` int32, positions whose KV is written.
        last_token: ``[R + 1]`` int64, the id sampled last, input of the next decode step.
    """

    def __init__(
        self, num_rows: int, max_blocks: int, num_groups: int, block_size: int, device: torch.device
    ):
        self.block_size = block_size
        self.block_tables = [
            torch.zeros((num_rows + 1, max_blocks), dtype=torch.int32, device=device)
            for _ in range(num_groups)
        ]
        self.computed = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        self.last_token = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)

    def prepare(self, packed: torch.Tensor, step: PackedStep, max_context_len: int) -> StepInputs:
        """Apply the step's patches and derive ids, positions, lengths and cache slots.

        Args:
            packed: the step's buffer on the device, ``[used]`` int32.
            step: its section sizes.
            max_context_len: upper bound of the context lengths; the gathered tables end there.
        """
        n, num_prefill = step.num_seqs, step.num_prefill_seqs
        rows = packed[:n].long()
        self._apply_patches(packed, step)
        if num_prefill:
            self.computed[rows[:num_prefill]] = packed[2 * n : 2 * n + num_prefill]
        query_lens = packed[n : 2 * n]
        starts = self.computed[rows]
        context_lens = starts + query_lens
        cu_seqlens_q = torch.zeros(n + 1, dtype=torch.int32, device=packed.device)
        torch.cumsum(query_lens, 0, dtype=torch.int32, out=cu_seqlens_q[1:])

        decode_ids = self.last_token[rows[num_prefill:]]
        if num_prefill:
            owner = torch.repeat_interleave(query_lens.long(), output_size=step.num_tokens)
            offsets = torch.arange(step.num_tokens, device=packed.device) - cu_seqlens_q[owner]
            positions = starts[owner] + offsets
            prefill_ids = packed[step.ids_offset : step.ids_offset + step.num_prefill_tokens].long()
            input_ids = torch.cat((prefill_ids, decode_ids))
            token_rows = rows[owner]
        else:
            positions, input_ids, token_rows = starts.long(), decode_ids, rows

        columns = -(-max_context_len // self.block_size)
        block_index = positions // self.block_size
        in_block = positions - block_index * self.block_size
        groups = []
        for table in self.block_tables:
            blocks = table[token_rows, block_index].long()
            groups.append(
                GroupInputs(table[:, :columns].index_select(0, rows), blocks * self.block_size + in_block)
            )
        return StepInputs(rows, input_ids, positions, cu_seqlens_q, context_lens, groups)

    def _apply_patches(self, packed: torch.Tensor, step: PackedStep) -> None:
        offset = step.patch_offset
        for table, count in zip(self.block_tables, step.patch_counts, strict=True):
            if count:
                patches = packed[offset : offset + 3 * count].view(count, 3)
                index = patches[:, :2].long()
                table[index[:, 0], index[:, 1]] = patches[:, 2]
                offset += 3 * count

    def advance(self, inputs: StepInputs, sampled_rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """After sampling: ``token_ids`` feed the next decode step of ``sampled_rows``; every row has moved on."""
        self.computed[inputs.rows] = inputs.context_lens
        self.last_token[sampled_rows] = token_ids.long()
