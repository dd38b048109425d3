"""A step's inputs on a device: one launch writes what the tensor operations of the CPU derive, recorded or not."""

import random
import time

import pytest
import torch

from atom.core import ScheduledBatch, Sequence
from atom.model_engine.runner.device_tables import DeviceTables
from atom.model_engine.runner.input_packer import InputPacker
from atom.model_engine.runner.publisher import Publisher
from atom.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

ROWS, COLUMNS, PAGE, GROUPS, MOST_TOKENS = 64, 40, 16, 2, 2048


class Side:
    """Tables of one device, filled from ``seed``; the packed steps reach them as the engine's do."""

    def __init__(self, device, seed):
        self.tables = DeviceTables(ROWS, COLUMNS, GROUPS, PAGE, torch.device(device))
        generator = torch.Generator().manual_seed(seed)
        tables = self.tables
        tables.computed[:ROWS] = torch.randint(1, 600, (ROWS,), generator=generator, dtype=torch.int32).to(
            device
        )
        tables.last_token[:ROWS] = torch.randint(1, 1000, (ROWS,), generator=generator).to(device)
        for table in tables.block_tables:
            table.copy_(torch.randint(1, 500, table.shape, generator=generator, dtype=torch.int32))
        capacity = InputPacker.capacity(ROWS, MOST_TOKENS, COLUMNS, GROUPS)
        self.publisher = Publisher(capacity, torch.device(device))
        self.packer = InputPacker(
            capacity, ROWS, self.publisher.buffers, self.publisher.wait_for, num_groups=GROUPS
        )

    def publish(self, batch, running_bs):
        step = self.packer.pack(batch, running_bs)
        return step, self.publisher.publish(step)

    def inputs(self, batch, running_bs=None, running_tokens=None):
        step = self.packer.pack(batch, running_bs)
        packed = self.publisher.deliver(step, self.tables)
        inputs = self.tables.derive(packed, step, PAGE * COLUMNS, running_tokens)
        n = batch.num_seqs
        rows, ids = inputs.rows[:n], torch.arange(n, device=inputs.rows.device)
        self.tables.advance(rows, inputs.context_lens[:n], rows, ids)
        return inputs


def prefill(rng, num_seqs):
    """Prompts, some behind a cached prefix, with patches of every row."""
    rows = rng.sample(range(ROWS), num_seqs)
    lengths = [rng.randint(1, 90) for _ in rows]
    starts = [rng.choice((0, PAGE * rng.randint(0, 20))) for _ in rows]
    seqs = []
    for row, start, length in zip(rows, starts, lengths, strict=True):
        seq = Sequence(
            row, [rng.randint(0, 900) for _ in range(start + length)], SamplingParams(), max_output_tokens=8
        )
        seq.row = row
        seqs.append(seq)
    columns = range(0, 30, 2)
    patches = [[(row, c, rng.randint(1, 900)) for row in rows for c in columns] for _ in range(GROUPS)]
    return ScheduledBatch(
        step=0,
        seqs=seqs,
        epochs=[0] * num_seqs,
        rows=rows,
        starts=starts,
        num_scheduled=lengths,
        samples=[True] * num_seqs,
        num_prefill_seqs=num_seqs,
        num_tokens=sum(lengths),
        new_seqs=[],
        patches=patches,
    )


def decode(rng, num_seqs):
    batch = prefill(rng, num_seqs)
    batch.num_scheduled, batch.num_prefill_seqs, batch.num_tokens = [1] * num_seqs, 0, num_seqs
    return batch


def check(found, wanted, ours, theirs):
    for left, right in zip(found.tensors(), wanted.tensors(), strict=True):
        assert torch.equal(left.cpu(), right)
    for left, right in zip(ours.tables.block_tables, theirs.tables.block_tables, strict=True):
        assert torch.equal(left.cpu(), right)


@pytest.mark.parametrize("backend", ["packed", "direct"])
def test_launches_write_what_tensor_operations_derive(monkeypatch, backend):
    monkeypatch.setenv("ATOM_H2D_BACKEND", backend)
    seed = time.time_ns() % 2**31
    rng = random.Random(seed)
    ours, theirs = Side("cuda", seed), Side("cpu", seed)
    for make in (prefill, decode, prefill, decode):
        batch = make(rng, rng.randint(1, 20))
        bs, tokens = (None, None) if rng.random() < 0.5 else (32, MOST_TOKENS if make is prefill else 32)
        check(ours.inputs(batch, bs, tokens), theirs.inputs(batch, bs, tokens), ours, theirs)


def test_a_recorded_launch_serves_other_steps():
    seed = time.time_ns() % 2**31
    rng = random.Random(seed)
    ours, theirs = Side("cuda", seed), Side("cpu", seed)
    step = ours.packer.padding(32, is_prefill=True)
    packed = ours.publisher.publish(step)
    room = ours.tables.new_inputs(32, MOST_TOKENS)
    ours.tables.prepare(packed, room)  # compiled outside of the recording
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        ours.tables.prepare(packed, room)
    for _ in range(4):
        batch = prefill(rng, rng.randint(1, 20))
        ours.publish(batch, 32)
        graph.replay()
        check(room, theirs.inputs(batch, 32, MOST_TOKENS), ours, theirs)
