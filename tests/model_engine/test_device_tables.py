"""From a scheduled batch to the tensors of a forward pass: packing on the host, deriving on the device."""

import numpy as np
import pytest
import torch

from atom.core import ScheduledBatch, Sequence
from atom.kernels.triton.step_inputs import patch_tables
from atom.model_engine.runner.device_tables import DeviceTables
from atom.model_engine.runner.host_tables import HostTables
from atom.model_engine.runner.input_packer import RING_SIZE, InputPacker
from atom.sampling_params import SamplingParams

BLOCK = 4


def sequence(row, ids):
    seq = Sequence(row, ids, SamplingParams(), max_output_tokens=8)
    seq.row = row
    return seq


def batch(seqs, starts, lengths, num_prefill, patches):
    return ScheduledBatch(
        step=0,
        seqs=seqs,
        epochs=[0] * len(seqs),
        rows=[seq.row for seq in seqs],
        starts=starts,
        num_scheduled=lengths,
        samples=[True] * len(seqs),
        num_prefill_seqs=num_prefill,
        num_tokens=sum(lengths),
        new_seqs=[],
        patches=patches,
    )


def prepared(tables, packer, step, running_bs=None, running_tokens=None):
    packed = packer.pack(step, running_bs)
    bound = max(start + n for start, n in zip(step.starts, step.num_scheduled, strict=True))
    buffer = torch.from_numpy(packed.buffer)
    tables.apply(buffer, packed)
    return tables.derive(buffer, packed, bound, running_tokens)


@pytest.fixture(params=["device", "host"])
def fresh(request):
    """Tables as devices have them, and as the CPU does."""

    def make(num_groups=1):
        sizes = (8, 16, num_groups, BLOCK)
        is_host = request.param == "host"
        tables = HostTables(*sizes) if is_host else DeviceTables(*sizes, torch.device("cpu"))
        capacity = InputPacker.capacity(8, 64, 16, num_groups)
        return tables, InputPacker(capacity, tables.trash_row)

    return make


def block_tables(inputs, group=0):
    """Of the step's sequences."""
    table = inputs.groups[group].block_tables
    return table[inputs.rows] if inputs.has_table_rows else table


def test_prefill_chunks_of_two_prompts(fresh):
    tables, packer = fresh()
    first, second = sequence(3, list(range(10, 20))), sequence(0, list(range(50, 56)))
    patches = [[(3, 0, 7), (3, 1, 2), (0, 0, 5), (0, 1, 6)]]
    inputs = prepared(tables, packer, batch([first, second], [2, 0], [5, 6], 2, patches))
    assert inputs.input_ids.tolist() == [12, 13, 14, 15, 16, 50, 51, 52, 53, 54, 55]
    assert inputs.positions.tolist() == [2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5]
    assert inputs.cu_seqlens_q.tolist() == [0, 5, 11]
    assert inputs.context_lens.tolist() == [7, 6]
    assert inputs.groups[0].slot_mapping.tolist() == [30, 31, 8, 9, 10, 20, 21, 22, 23, 24, 25]
    assert block_tables(inputs)[:, :2].tolist() == [[7, 2], [5, 6]]


def test_packed_prompts_give_the_ids_that_lists_give():
    ids, packer = list(range(100, 112)), InputPacker(200)
    plain = sequence(2, ids)
    packed = Sequence(
        2, list(ids), SamplingParams(), max_output_tokens=8, packed_prompt=np.array(ids, np.int32).tobytes()
    )
    packed.row = 2
    for seq in (plain, packed):
        seq.token_ids += [7, 8]  # computed again after a preemption, an answer belongs to the prefill
    for start, length in ((0, 12), (3, 5), (8, 6), (12, 2)):
        both = [
            packer.pack(batch([seq], [start], [length], 1, [[]])).buffer.tolist() for seq in (plain, packed)
        ]
        assert both[0] == both[1] and both[0][-length:] == plain.token_ids[start : start + length]


def test_decode_takes_ids_and_positions_from_the_device(fresh):
    tables, packer = fresh()
    first, second = sequence(1, [1, 2, 3]), sequence(4, [9] * 5)
    step = batch([first, second], [0, 0], [3, 5], 2, [[(1, 0, 1), (4, 0, 2), (4, 1, 3)]])
    inputs = prepared(tables, packer, step)
    tables.advance(inputs.rows, inputs.context_lens, inputs.rows, torch.tensor([77, 88]))
    decode = batch([second, first], [5, 3], [1, 1], 0, [[]])
    inputs = prepared(tables, packer, decode)
    assert inputs.input_ids.tolist() == [88, 77]
    assert inputs.positions.tolist() == [5, 3]
    assert inputs.context_lens.tolist() == [6, 4]
    assert inputs.groups[0].slot_mapping.tolist() == [3 * BLOCK + 1, BLOCK + 3]


def test_a_mixed_step_puts_decode_rows_behind_prefill_rows(fresh):
    tables, packer = fresh()
    old, new = sequence(2, [5, 6]), sequence(6, [7, 8, 9])
    inputs = prepared(tables, packer, batch([old], [0], [2], 1, [[(2, 0, 4)]]))
    tables.advance(inputs.rows, inputs.context_lens, inputs.rows, torch.tensor([42]))
    inputs = prepared(tables, packer, batch([new, old], [0, 2], [3, 1], 1, [[(6, 0, 9)]]))
    assert inputs.input_ids.tolist() == [7, 8, 9, 42]
    assert inputs.positions.tolist() == [0, 1, 2, 2]
    assert inputs.groups[0].slot_mapping.tolist() == [36, 37, 38, 18]


def test_every_cache_group_has_its_own_table(fresh):
    tables, packer = fresh(num_groups=2)
    seq = sequence(0, [1, 2, 3, 4, 5])
    inputs = prepared(
        tables, packer, batch([seq], [0], [5], 1, [[(0, 0, 1), (0, 1, 2)], [(0, 0, 8), (0, 1, 9)]])
    )
    assert inputs.groups[0].slot_mapping.tolist() == [4, 5, 6, 7, 8]
    assert inputs.groups[1].slot_mapping.tolist() == [32, 33, 34, 35, 36]


def test_a_buffer_is_not_written_again_before_the_ring_has_gone_round(fresh):
    _, packer = fresh()
    seqs = [sequence(i, [i + 1, i + 2]) for i in range(RING_SIZE)]
    packed = [packer.pack(batch([seq], [0], [2], 1, [[]])) for seq in seqs]
    for i, step in enumerate(packed):
        assert step.buffer[step.ids_offset :].tolist() == [i + 1, i + 2]
    again = packer.pack(batch([seqs[0]], [0], [1], 1, [[]]))
    assert np.shares_memory(again.buffer, packed[0].buffer)


def test_padded_decode_rows_are_the_trash_row_and_write_nowhere(fresh):
    tables, packer = fresh()
    first, second = sequence(1, [1, 2, 3]), sequence(4, [9] * 5)
    step = batch([first, second], [0, 0], [3, 5], 2, [[(1, 0, 1), (4, 0, 2), (4, 1, 3)]])
    inputs = prepared(tables, packer, step)
    tables.advance(inputs.rows, inputs.context_lens, inputs.rows, torch.tensor([77, 88]))
    decode = batch([second, first], [5, 3], [1, 1], 0, [[]])
    inputs = prepared(tables, packer, decode, running_bs=4, running_tokens=4)
    assert inputs.rows.tolist() == [4, 1, 8, 8]
    assert inputs.input_ids[:2].tolist() == [88, 77]
    assert inputs.positions.tolist() == [5, 3, 0, 0]
    assert inputs.context_lens.tolist() == [6, 4, 0, 0]
    assert inputs.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4]
    assert inputs.groups[0].slot_mapping.tolist() == [3 * BLOCK + 1, BLOCK + 3, -1, -1]
    tables.advance(inputs.rows, inputs.context_lens, inputs.rows, torch.tensor([1, 2, 3, 4]))
    assert tables.computed[[1, 4]].tolist() == [4, 6]


def test_a_padded_prefill_has_empty_sequences_and_tokens_of_nobody(fresh):
    tables, packer = fresh()
    first, second = sequence(3, list(range(10, 15))), sequence(0, [50, 51])
    step = batch([first, second], [0, 0], [5, 2], 2, [[(3, 0, 7), (3, 1, 2), (0, 0, 5)]])
    inputs = prepared(tables, packer, step, running_bs=4, running_tokens=10)
    assert inputs.rows.tolist() == [3, 0, 8, 8]
    assert inputs.input_ids.tolist() == [10, 11, 12, 13, 14, 50, 51, 0, 0, 0]
    assert inputs.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 0, 0, 0]
    assert inputs.cu_seqlens_q.tolist() == [0, 5, 7, 7, 7]
    assert inputs.context_lens.tolist() == [5, 2, 0, 0]
    assert inputs.groups[0].slot_mapping.tolist() == [28, 29, 30, 31, 8, 20, 21, -1, -1, -1]


def test_tables_of_all_rows_stay_where_they_are():
    tables = DeviceTables(8, 16, 1, BLOCK, torch.device("cpu"))
    packer = InputPacker(InputPacker.capacity(8, 64, 16, 1), tables.trash_row)
    seq = sequence(2, [1, 2, 3])
    inputs = prepared(tables, packer, batch([seq], [0], [3], 1, [[(2, 0, 6)]]))
    assert inputs.has_table_rows
    assert inputs.groups[0].block_tables.data_ptr() == tables.block_tables[0].data_ptr()
    assert inputs.groups[0].block_tables[inputs.rows, 0].tolist() == [6]


def test_static_inputs_take_over_a_step(fresh):
    tables, packer = fresh()
    seq = sequence(2, [1, 2, 3])
    step = batch([seq], [0], [3], 1, [[(2, 0, 6)]])
    static = prepared(tables, packer, step, running_bs=2, running_tokens=4)
    addresses = [tensor.data_ptr() for tensor in static.tensors()]
    fresh_inputs = prepared(tables, packer, batch([seq], [1], [2], 1, [[]]), 2, 4)
    static.copy_(fresh_inputs)
    assert static.input_ids.tolist() == [2, 3, 0, 0]
    assert static.context_lens.tolist() == [3, 0]
    assert [tensor.data_ptr() for tensor in static.tensors()] == addresses


def test_a_slot_is_waited_for_before_it_is_written():
    waited = []
    packer = InputPacker(InputPacker.capacity(8, 64, 16, 1), wait_for=waited.append)
    for _ in range(RING_SIZE + 1):
        packer.pack(batch([sequence(0, [1, 2])], [0], [2], 1, [[]]))
    assert waited == [0, 1, 2, 0]


def test_sections_cover_the_buffer_without_what_nobody_reads():
    packer = InputPacker(InputPacker.capacity(8, 64, 16, 1))
    step = packer.pack(batch([sequence(0, [1, 2])], [0], [2], 1, [[(0, 0, 3)]]))
    assert step.sections() == [(0, 1), (1, 2), (2, 3), (3, 9), (9, 11)]
    step = packer.pack(batch([sequence(0, [1, 2])], [2], [1], 0, [[]]))
    assert step.sections() == [(0, 1), (1, 2), (3, 6)]


def test_one_launch_prepares_what_the_tensor_operations_derive():
    tables = DeviceTables(8, 16, 2, BLOCK, torch.device("cpu"))
    packer = InputPacker(InputPacker.capacity(8, 64, 16, 2), tables.trash_row)
    tables.computed[:8] = torch.tensor([3, 0, 9, 14, 0, 7, 0, 1])
    tables.last_token[:8] = torch.arange(100, 108)
    for table in tables.block_tables:
        table.copy_(torch.randint(1, 50, table.shape))
    seqs = [sequence(row, list(range(20))) for row in (3, 0, 5)]
    step = batch(seqs, [14, 3, 7], [1, 1, 1], 0, [[], []])
    for running_bs in (3, 4):
        packed = packer.pack(step, running_bs)
        buffer = torch.from_numpy(packed.buffer)
        running_tokens = running_bs if running_bs > 3 else None
        derived = tables.derive(buffer, packed, 15, running_tokens)
        launched = tables._prepare(buffer, running_bs, running_tokens is not None)
        for ours, theirs in zip(launched.tensors(), derived.tensors(), strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
        assert launched.has_table_rows and derived.has_table_rows


def filled_tables(num_groups, seed):
    """Tables of 8 rows of which each is somewhere in the middle of its answer."""
    tables = DeviceTables(8, 16, num_groups, BLOCK, torch.device("cpu"))
    random = torch.Generator().manual_seed(seed)
    tables.computed[:8] = torch.randint(1, 60, (8,), generator=random, dtype=torch.int32)
    tables.last_token[:8] = torch.randint(1, 1000, (8,), generator=random)
    for table in tables.block_tables:
        table.copy_(torch.randint(1, 50, table.shape, generator=random))
    return tables


def patches_of(seqs, num_groups, first=60):
    return [
        [(seq.row, column, first + column) for seq in seqs for column in (0, 3)] for _ in range(num_groups)
    ]


@pytest.mark.parametrize(
    "starts, lengths, num_prefill, running_bs, running_tokens, num_groups",
    [
        ([0], [5], 1, None, None, 1),
        ([0, 8, 4], [9, 1, 30], 3, None, None, 2),
        ([0, 8, 4], [9, 1, 30], 3, 5, 48, 2),
        ([0, 0], [16, 16], 2, 2, 32, 1),
        ([3, 7, 0, 0], [20, 1, 1, 1], 1, 6, 40, 1),  # decodes behind a prompt: their starts are on the device
    ],
    ids=["one", "groups", "padded", "full bucket", "mixed"],
)
def test_one_launch_prepares_a_step_with_prompts(
    starts, lengths, num_prefill, running_bs, running_tokens, num_groups
):
    seqs = [sequence(row, list(range(10 * row, 10 * row + 40))) for row in (3, 0, 5, 7)][: len(starts)]
    patches = patches_of(seqs, num_groups)
    patches[-1].pop()
    step = batch(seqs, starts, lengths, num_prefill, patches)
    ours, theirs = filled_tables(num_groups, 0), filled_tables(num_groups, 0)
    packer = InputPacker(InputPacker.capacity(8, 64, 16, num_groups), ours.trash_row, num_groups=num_groups)
    derived = prepared(theirs, packer, step, running_bs, running_tokens)
    packed = packer.pack(step, running_bs)
    room = ours.new_inputs(packed.running_bs, running_tokens or packed.num_tokens)
    launched = ours.prepare(torch.from_numpy(packed.buffer), room)
    for found, wanted in zip(launched.tensors(), derived.tensors(), strict=True):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)
    for found, wanted in zip(ours.block_tables, theirs.block_tables, strict=True):
        assert torch.equal(found, wanted)
    assert launched.has_table_rows and derived.has_table_rows


def test_a_launch_that_was_recorded_serves_the_next_step():
    """Another number of prompts, patches and tokens behind the same addresses and sizes."""
    ours, theirs = filled_tables(2, 1), filled_tables(2, 1)
    packer = InputPacker(InputPacker.capacity(8, 64, 16, 2), ours.trash_row, num_groups=2)
    buffer = torch.zeros(InputPacker.capacity(8, 64, 16, 2), dtype=torch.int32)
    room = ours.new_inputs(4, 50)
    rehearsed = packer.padding(4, is_prefill=True)
    buffer[: len(rehearsed.buffer)] = torch.from_numpy(rehearsed.buffer)
    ours.prepare(buffer, room)
    assert room.rows.tolist() == [ours.trash_row] * 4 and room.context_lens.tolist() == [0] * 4
    assert all(group.slot_mapping.eq(-1).all() for group in room.groups)
    for seed, rows in enumerate([(1, 2, 6), (4,)]):
        seqs = [sequence(row, list(range(row, row + 20))) for row in rows]
        step = batch(
            seqs, [4 * seed] * len(seqs), [13] * len(seqs), len(seqs), patches_of(seqs, 2, 70 + seed)
        )
        derived = prepared(theirs, packer, step, 4, 50)
        packed = packer.pack(step, 4)
        buffer[: len(packed.buffer)] = torch.from_numpy(packed.buffer)
        ours.prepare(buffer, room)
        for found, wanted in zip(room.tensors(), derived.tensors(), strict=True):
            assert torch.equal(found, wanted)


def test_more_sequences_and_patches_than_a_launch_looks_at_in_one_go():
    num_rows, columns = 70, 10
    tables = [DeviceTables(num_rows, columns, 1, BLOCK, torch.device("cpu")) for _ in range(2)]
    capacity = InputPacker.capacity(num_rows, 1024, columns, 1)
    packer = InputPacker(capacity, num_rows)
    seqs = [sequence(row, list(range(row, row + 9))) for row in range(num_rows)]
    lengths = [1 + row % 9 for row in range(num_rows)]
    patches = [
        [(row, column, row * columns + column) for row in range(num_rows) for column in range(columns)]
    ]
    step = batch(seqs, [0] * num_rows, lengths, num_rows, patches)
    derived = prepared(tables[0], packer, step)
    packed = packer.pack(step)
    room = tables[1].new_inputs(num_rows, sum(lengths))
    tables[1].prepare(torch.from_numpy(packed.buffer), room)
    for found, wanted in zip(room.tensors(), derived.tensors(), strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(tables[0].block_tables[0], tables[1].block_tables[0])


def test_patches_of_a_decode_step_in_one_launch():
    ours, theirs = filled_tables(2, 2), filled_tables(2, 2)
    packer = InputPacker(InputPacker.capacity(8, 64, 16, 2), ours.trash_row, num_groups=2)
    seqs = [sequence(row, [1]) for row in (2, 6)]
    packed = packer.pack(batch(seqs, [8, 9], [1, 1], 0, [[(2, 2, 51)], [(2, 2, 52), (6, 2, 53)]]), 4)
    buffer = torch.from_numpy(packed.buffer)
    theirs.apply(buffer, packed)
    patch_tables(buffer, ours._tables, packed.running_bs)
    assert torch.equal(ours._tables, theirs._tables)
    assert ours.block_tables[1][6, 2] == 53


def test_a_decode_of_the_same_rows_is_the_step_before_again(fresh):
    tables, packer = fresh()
    seqs = [sequence(1, [1] * 9), sequence(4, [2] * 9)]
    inputs = prepared(
        tables, packer, batch(seqs, [0, 0], [7, 7], 2, [[(1, 0, 1), (1, 1, 3), (4, 0, 2), (4, 1, 5)]])
    )
    tables.advance(inputs.rows, inputs.context_lens, inputs.rows, torch.tensor([7, 8]))
    rows, ones, places = [1, 4], [1, 1], []
    for position, patches in ((7, []), (8, [(1, 2, 9), (4, 2, 6)]), (9, []), (10, [])):
        step = batch(seqs, [position] * 2, ones, 0, [patches])
        step.rows = rows
        packed = packer.pack(step)
        places.append((packed.is_repeat, packed.slot, packed.patch_counts))
        buffer = torch.from_numpy(packed.buffer)
        tables.apply(buffer, packed)
        inputs = tables.derive(buffer, packed, position + 1)
        assert inputs.positions.tolist() == [position] * 2
        tables.advance(inputs.rows, inputs.context_lens, inputs.rows, torch.tensor([position, position]))
    assert places == [(False, 1, [0]), (False, 2, [2]), (True, 2, [0]), (True, 2, [0])]
    assert inputs.groups[0].slot_mapping.tolist() == [9 * BLOCK + 2, 6 * BLOCK + 2]
    step = batch(seqs[:1], [11], [1], 0, [[]])
    assert not packer.pack(step).is_repeat, "other rows"
