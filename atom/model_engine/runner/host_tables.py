"""Device tables where the device is the host: the same in numpy, on the tensors' own memory.

A small torch operation costs 1-5 us, one of numpy a tenth of it, and a decode step has thirty of them.
"""

from __future__ import annotations

import numpy as np
import torch

from atom.model_engine.runner.device_tables import DeviceTables, GroupInputs, StepInputs
from atom.model_engine.runner.input_packer import PackedStep


class HostTables(DeviceTables):
    """Gives attention the block tables of the step's sequences alone."""

    def __init__(self, num_rows: int, max_blocks: int, num_groups: int, block_size: int):
        super().__init__(num_rows, max_blocks, num_groups, block_size, torch.device("cpu"))
        self._arrays = [table.numpy() for table in self.block_tables]
        self._computed, self._last_token = self.computed.numpy(), self.last_token.numpy()

    def apply(self, packed: torch.Tensor, step: PackedStep) -> None:
        buffer, offset = step.buffer, step.patch_offset
        for table, count in zip(self._arrays, step.patch_counts, strict=True):
            if count:
                patches = buffer[offset : offset + 3 * count].reshape(count, 3)
                table[patches[:, 0], patches[:, 1]] = patches[:, 2]
                offset += 3 * count
        num_prefill = step.num_prefill_seqs
        if num_prefill:
            start = 2 * step.running_bs
            self._computed[buffer[:num_prefill]] = buffer[start : start + num_prefill]

    def derive(
        self, packed: torch.Tensor, step: PackedStep, max_context_len: int, running_tokens: int | None = None
    ) -> StepInputs:
        n, num_tokens = step.running_bs, running_tokens or step.num_tokens
        rows = step.buffer[:n].astype(np.int64)
        query_lens = step.buffer[n : 2 * n]
        starts = self._computed[rows]
        context_lens = starts + query_lens
        is_live = None
        if running_tokens is not None:
            is_live = rows != self.trash_row
            context_lens *= is_live
        cu_seqlens_q = np.zeros(n + 1, np.int32)
        np.cumsum(query_lens, out=cu_seqlens_q[1:])

        if not step.num_prefill_seqs and num_tokens == n:
            positions, input_ids, token_rows = starts.astype(np.int64), self._last_token[rows], rows
        else:
            owner = np.repeat(np.arange(n), query_lens)
            num_behind = num_tokens - len(owner)
            if num_behind:
                owner = np.concatenate((owner, np.full(num_behind, n - 1)))
            if is_live is not None:
                is_live = is_live[owner]
                is_live[num_tokens - num_behind :] = False
            positions = (starts - cu_seqlens_q[:-1])[owner] + np.arange(num_tokens)
            token_rows = rows[owner]
            first = step.ids_offset
            prefill_ids = step.buffer[first : first + step.num_prefill_tokens]
            decode_ids = self._last_token[rows[step.num_prefill_seqs : step.num_seqs]]
            input_ids = np.zeros(num_tokens, np.int64)
            num_prefill = len(prefill_ids)
            input_ids[:num_prefill] = prefill_ids
            input_ids[num_prefill : num_prefill + len(decode_ids)] = decode_ids
        if is_live is not None:
            positions *= is_live

        block_index = positions // self.block_size
        in_block = positions - block_index * self.block_size
        columns = -(-max_context_len // self.block_size)
        groups = []
        for table in self._arrays:
            slots = table[token_rows, block_index].astype(np.int64) * self.block_size + in_block
            if is_live is not None:
                slots = np.where(is_live, slots, -1)
            groups.append(GroupInputs(torch.from_numpy(table[rows, :columns]), torch.from_numpy(slots)))
        arrays = (rows, input_ids, positions, cu_seqlens_q, context_lens)
        return StepInputs(*map(torch.from_numpy, arrays), groups)

    def advance(
        self,
        rows: torch.Tensor,
        context_lens: torch.Tensor,
        sampled_rows: torch.Tensor,
        token_ids: torch.Tensor,
    ) -> None:
        self._computed[rows.numpy()] = context_lens.numpy()
        self._last_token[sampled_rows.numpy()] = token_ids.numpy()
