"""A runner whose device answers at once: what is left of a step is the host's work.

Everything between the scheduler and the device runs as it does on one: packing, publishing, choosing the graph, the
calls of the fused decoder, sampling's plan, reading ids back. Device buffers are host memory, events do nothing, and
in place of a graph launch stands a call that returns the graph's outputs.
"""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from atom.config import Config, CUDAGraphMode
from atom.core import BatchOutput, CacheGroupSpec, GroupKind, ScheduledBatch
from atom.model_engine.model_runner import ModelRunner
from atom.model_engine.runner.device_tables import DeviceTables
from atom.model_engine.runner.device_timer import NoTimer
from atom.model_engine.runner.forward_mode import GraphTables
from atom.model_engine.runner.forward_pass import ForwardPass
from atom.model_engine.runner.input_packer import RING_SIZE, InputPacker, PackedStep
from atom.model_engine.runner.limits import scheduler_limits
from atom.model_engine.runner.publisher import Publisher
from atom.model_engine.runner.readback import Readback
from atom.model_engine.runner.step_sizes import StepSizes
from atom.model_engine.runner.worker import ReportProgress
from atom.model_engine.scheduler import SchedulerConfig
from atom.model_ops.fused_cuda import FusedCudaDecoder
from atom.model_ops.outbox import Letter, Outbox
from atom.model_ops.sampler import Sampler

DEVICE_MS = 3.0  # BusyRunner's step
REAL_VOCAB = 151_936  # ids that its front end takes
_SPIN_S = 0.3e-3
_HIDDEN, _VOCAB = 64, 512
_CPU = torch.device("cpu")


class _Event:
    def record(self) -> None:
        return None

    def synchronize(self) -> None:
        return None


class _Tables(DeviceTables):
    """Patches are part of a launch on a device: of a decode step nothing here, of a prefill ``apply_now``."""

    apply_now = DeviceTables.apply

    def takes(self, step: PackedStep) -> bool:
        return not step.num_prefill_seqs

    def take(self, host: torch.Tensor, packed: torch.Tensor, step: PackedStep) -> None:
        used = 2 * step.running_bs
        packed.numpy()[:used] = step.buffer[:used]

    def apply(self, packed: torch.Tensor, step: PackedStep) -> None:
        return None


class _Publisher(Publisher):
    def __init__(self, capacity: int):
        super().__init__(capacity, _CPU)
        self._device_buffer = torch.zeros(capacity, dtype=torch.int32)
        self._is_read = [_Event() for _ in range(RING_SIZE)]
        self._views = {}


class _Graphs:
    """Request graphs whose replay takes no time."""

    def __init__(self, hidden: torch.Tensor, sizes: list[int]):
        self._outputs = {
            (size, 0): (
                hidden[:size],
                torch.zeros(size, dtype=torch.int64),
                torch.zeros(size, dtype=torch.int32),
                torch.arange(size + 1, dtype=torch.int32),
            )
            for size in sizes
        }

    def replay(self, key: tuple[int, int]) -> Any:
        return self._outputs[key]


class _Outbox(Outbox):
    """Every id is 7, and there at once."""

    def __init__(self, room: int):
        super().__init__(room, _CPU)
        self.tensors.ids.fill_(7)
        self.tensors.flags.fill_(True)

    def take(self, num_seqs: int) -> Letter | None:
        letter = super().take(num_seqs)
        letter.stamp[0] = letter.number
        return letter


class _Fused(FusedCudaDecoder):
    """Its results are what they were."""

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens
        self.hidden = torch.zeros(max_tokens, _HIDDEN)
        self.logits = torch.zeros(max_tokens, _VOCAB)
        self.token_ids = torch.full((max_tokens,), 7)
        self.is_finite = torch.ones(max_tokens, dtype=torch.bool)
        self.outbox = _Outbox(max_tokens)
        self._flags = torch.zeros(2, dtype=torch.int32)
        self._wants_logits, self._num_valid_ids = False, _VOCAB
        self._is_advanced = True
        self._views, self._is_on_host = {}, False


class InstantRunner(ModelRunner):
    """Every sequence goes on with id 7 (its first id is 0). ``config`` names no model."""

    def __init__(self, config: Config):
        self.config, self.device, self.max_model_len = config, _CPU, config.max_model_len
        self._timer = NoTimer()

    def load(self, report: ReportProgress) -> None:
        return None

    def cache_groups(self) -> list[CacheGroupSpec]:
        return [CacheGroupSpec(GroupKind.FULL, ("layer",), 1, num_blocks=self.config.num_kvcache_blocks)]

    def allocate(self, groups: list[CacheGroupSpec]) -> None:
        most, block_size = self.config.max_num_seqs, self.config.kv_cache_block_size
        fused = _Fused(most)
        self.model = SimpleNamespace(
            attention_layers=dict,
            fused=fused,
            compute_logits=lambda hidden: torch.zeros(len(hidden), _VOCAB),
        )
        sizes = [2**i for i in range(most.bit_length())]
        blocks = -(-self.max_model_len // block_size) + 1
        tokens = self.config.max_num_batched_tokens
        self._forward = forward = ForwardPass(
            self.model,
            groups,
            {},
            _Graphs(fused.hidden, sizes),
            block_size=block_size,
            max_num_seqs=most,
            max_blocks=blocks,
            chunk_tokens=tokens,
            device=_CPU,
            annotate=_no_annotation,
            time_model=partial(self._timer.start, "gpu_forward_seconds"),
        )
        forward.device = torch.device("cuda")
        forward.tables = _Tables(most, blocks, len(groups), block_size, _CPU)
        capacity = InputPacker.capacity(most, tokens, blocks, len(groups))
        forward._publisher = publisher = _Publisher(capacity)
        forward._packer = InputPacker(
            capacity, most, publisher.buffers, publisher.wait_for, num_groups=len(groups)
        )
        forward._forward = self._run_eagerly
        forward.graphs = GraphTables(CUDAGraphMode.FULL, request_sizes={1: sizes})
        self._sampler = Sampler(most, _VOCAB, _CPU)
        self._readback = readback = Readback(most, _CPU)
        readback._ring = [(torch.zeros(9 * most, dtype=torch.uint8), _Event()) for _ in range(RING_SIZE)]

    def _run_eagerly(self) -> Any:
        """A prefill: what the model makes of it is of no interest."""
        live = self._forward._live
        self._forward.tables.apply_now(live.packed, live.step)
        inputs = self._forward.tables.derive(live.packed, live.step, self.max_model_len)
        hidden = torch.zeros(len(inputs.input_ids), _HIDDEN)
        return hidden, inputs.rows, inputs.context_lens, inputs.cu_seqlens_q

    def set_vocab_size(self, size: int) -> None:
        return None

    def warm_up(self, report: ReportProgress) -> None:
        return None

    def record_graphs(self, report: ReportProgress) -> None:
        return None

    def record_next_graph(self) -> bool:
        return False

    def scheduler_config(self) -> SchedulerConfig:
        sizes = StepSizes(self.config.max_num_batched_tokens, self.config.max_num_seqs)
        return scheduler_limits(
            self.config, sizes, max_model_len=self.max_model_len, max_consecutive_prefill_steps=0
        )

    def uses_overlapped_loop(self) -> bool:
        return self.config.loop == "overlapped"

    def info(self) -> dict[str, Any]:
        return {"device": "instant"}

    def close(self) -> None:
        self.model = self._forward = self._sampler = self._readback = None


class BusyRunner(InstantRunner):
    """Its device needs ``DEVICE_MS`` for a step, and what happened when is found in its metrics (seconds)."""

    def __init__(self, config: Config):
        super().__init__(config)
        self._moments = dict.fromkeys(("arrival", "scheduled", "given", "launched", "done"), 0.0)

    def launch(self, batch: ScheduledBatch) -> Any:
        seq = batch.seqs[-1]
        now = time.monotonic()
        self._moments |= {"arrival": seq.arrival_time, "scheduled": seq.first_scheduled_time, "given": now}
        return super().launch(batch)

    def _run_eagerly(self) -> Any:
        self._moments["launched"] = time.monotonic()
        return super()._run_eagerly()

    def wait(self, handle: Any) -> BatchOutput:
        due = self._moments["launched"] + DEVICE_MS / 1e3
        time.sleep(max(0.0, due - _SPIN_S - time.monotonic()))
        while time.monotonic() < due:  # as a device's event is waited for: busy, without the GIL
            os.sched_yield()
        self._moments["done"] = time.monotonic()
        return super().wait(handle)

    def info(self) -> dict[str, Any]:
        return {**super().info(), "max_model_len": self.max_model_len, "vocab_size": REAL_VOCAB}

    def metrics(self) -> dict[str, float]:
        return dict(self._moments)


def _no_annotation(*args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
    return nullcontext()
