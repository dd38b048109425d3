"""One step's forward pass: pack, publish, derive, run the model, eagerly or by a recorded graph.

``run`` is the whole way of a step. What a recorded graph holds is ``_forward``, the same function that runs
eagerly; it reads the step that is under way from ``_live``, so that a graph without a device (which runs the
function again) sees the live step, while a device graph sees the addresses that it was recorded with.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from atom.config_parts import KVCacheTensor
from atom.core import CacheGroupSpec, ScheduledBatch
from atom.model_engine.runner.device_tables import DeviceTables, StepInputs
from atom.model_engine.runner.forward_mode import ForwardMode, GraphTables, StepFacts
from atom.model_engine.runner.host_tables import HostTables
from atom.model_engine.runner.input_packer import InputPacker, PackedStep
from atom.model_engine.runner.publisher import Publisher
from atom.utils.forward_context import (
    AttentionMetaData,
    Context,
    ForwardContext,
    HeadWork,
    set_forward_context,
)
from atom.utils.region_graph import ReqGraph, request_bucket, token_graphs

# Hidden states, and of the sequences: rows, context lengths, running sums of query lengths; with padding.
_Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

TOKENS_PER_PREFILL_SEQ = 16  # a prefill bucket has room for so many times fewer sequences than tokens


@dataclass(slots=True)
class ForwardResult:
    """Hidden states of a step and what sampling needs. Of a recorded step they die at the next one."""

    hidden: torch.Tensor  # [num_tokens, hidden_size]
    rows: torch.Tensor  # [num_seqs] int64
    context_lens: torch.Tensor  # [num_seqs] int32
    cu_seqlens_q: torch.Tensor  # [num_seqs + 1] int32


@dataclass(slots=True)
class _LiveStep:
    """The step under way."""

    step: PackedStep
    packed: torch.Tensor
    mode: ForwardMode
    query_lens: list[int]  # of the host, padded decode sequences included
    context_lens: list[int]
    head: HeadWork | None
    is_rehearsal: bool = False


class ForwardPass:
    """Runs the model over scheduled steps.

    Args:
        model: called with ``input_ids``, ``positions`` inside a forward context.
        req_graph: where decode steps are recorded whole.
        layers: attention layers by name, in the order of their caches.
        chunk_tokens: the most tokens of a step; ``max_blocks`` alike of a sequence's table.
        no_compile_layers: layers that ops find by name; None: those of attention.
        annotate: names a step in traces, see ``StepProfiler.step``.
        time_model: begins to time what the device computes, and returns what ends that (``DeviceTimer.start``).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        groups: list[CacheGroupSpec],
        kv_caches: dict[str, KVCacheTensor],
        req_graph: ReqGraph,
        *,
        block_size: int,
        max_num_seqs: int,
        max_blocks: int,
        chunk_tokens: int,
        device: torch.device,
        annotate: Callable[..., AbstractContextManager[Any]],
        time_model: Callable[[], Callable[[], None]],
        no_compile_layers: dict[str, Any] | None = None,
    ):
        self.model = model
        self.layers = model.attention_layers()
        self._no_compile_layers = self.layers if no_compile_layers is None else no_compile_layers
        self.device = device
        self._annotate = annotate
        self._time_model = time_model
        self.max_num_seqs = max_num_seqs
        self.graphs = GraphTables(enforce_eager=True)  # what may be replayed; the recorder replaces it
        self.req_graph = req_graph
        # Called with kind and size of the bucket that a step is about to replay; records it where need be. False: it
        # cannot be replayed.
        self.before_replay: Callable[[str, int], bool] | None = None
        self._groups = groups
        self._kv_caches = kv_caches
        sizes = (max_num_seqs, max_blocks, len(groups), block_size)
        self.tables = HostTables(*sizes) if device.type == "cpu" else DeviceTables(*sizes, device)
        capacity = InputPacker.capacity(max_num_seqs, chunk_tokens, max_blocks, len(groups))
        self._publisher = Publisher(capacity, device)
        self._packer = InputPacker(
            capacity, self.tables.trash_row, self._publisher.buffers, self._publisher.wait_for, len(groups)
        )
        self._static: dict[tuple[int, bool], StepInputs] = {}  # of token buckets, by (tokens, is prefill)
        self._results: dict[tuple[int, int], tuple[_Outputs, ForwardResult]] = {}  # by bucket and sequences
        self._live: _LiveStep | None = None

    @property
    def supports_token_graph(self) -> bool:
        """Whether every attention layer can be held by a device graph."""
        return all(layer.backend.supports_token_graph for layer in self.layers.values())

    def prefill_kernel_sizes(self) -> set[int]:
        """Tokens of prompts from which on attention takes other kernels."""
        return {size for layer in self.layers.values() for size in layer.backend.prefill_sizes()}

    def buffers(self) -> dict[str, torch.Tensor]:
        """What recorded graphs read beside weights and cache, by name; the addresses never change."""
        tables = self.tables
        named = {
            "packed_step": self._publisher.buffer,
            "computed": tables.computed,
            "last_token": tables.last_token,
        }
        return named | {f"block_tables_{i}": table for i, table in enumerate(tables.block_tables)}

    def run(self, batch: ScheduledBatch, head: HeadWork | None = None) -> ForwardResult:
        """Launch the step's forward pass; never waits for the device. A fused decoder does ``head`` too."""
        mode = self._decide(batch)
        if mode.kind != "eager" and self.before_replay is not None:
            is_prefill = batch.num_prefill_seqs > 0
            kind, size = ("prefill", mode.running_tokens) if is_prefill else ("decode", mode.running_bs)
            if not self.before_replay(kind, size):
                mode = ForwardMode("eager", batch.num_seqs, batch.num_tokens)
        step = self._packer.pack(batch, mode.running_bs)
        self._begin(step, mode, *self._lengths(batch, mode), head)
        with self._annotate(batch, padded_bs=mode.running_bs, is_graph=mode.kind != "eager"):
            stop_timer = self._time_model()
            if mode.kind == "request":
                outputs = self.req_graph.replay(request_bucket(mode.running_bs, 1))
            elif mode.kind == "token":
                outputs = self._run_bucket()
            else:
                outputs = self._forward()
            stop_timer()
        return self._result(outputs, batch, mode)

    def _lengths(self, batch: ScheduledBatch, mode: ForwardMode) -> tuple[list[int], list[int]]:
        """Query and context lengths for the host's part of attention, padded decode sequences included.

        A decode step that a device graph holds whole has no such part.
        """
        if mode.kind == "request" and self.device.type != "cpu":
            return [], []
        query_lens = batch.num_scheduled
        context_lens = [start + n for start, n in zip(batch.starts, query_lens, strict=True)]
        if mode.running_bs > batch.num_seqs and not batch.num_prefill_seqs:
            padding = mode.running_bs - batch.num_seqs
            query_lens, context_lens = query_lens + [1] * padding, context_lens + [0] * padding
        return query_lens, context_lens

    def _result(self, outputs: _Outputs, batch: ScheduledBatch, mode: ForwardMode) -> ForwardResult:
        """The step's outputs without padding. Those of a recorded decode step lie where they lay: kept."""
        n = batch.num_seqs
        key = mode.running_bs, n
        if mode.kind == "request":
            kept = self._results.get(key)
            if kept is not None and kept[0] is outputs:
                return kept[1]
        hidden, rows, lens, cu_seqlens_q = outputs
        result = ForwardResult(hidden[: batch.num_tokens], rows[:n], lens[:n], cu_seqlens_q[: n + 1])
        if mode.kind == "request":
            self._results[key] = outputs, result
        return result

    # -- what the recorder calls

    def rehearse(self, running_bs: int, running_tokens: int, is_prefill: bool) -> None:
        """Make a step of nothing but padding the live one: it writes no cache and changes no row."""
        step = self._packer.padding(running_bs, is_prefill)
        kind = "token" if is_prefill else "request"
        lens = ([], []) if is_prefill else ([1] * running_bs, [0] * running_bs)
        self._begin(step, ForwardMode(kind, running_bs, running_tokens), *lens)
        self._live.is_rehearsal = True

    def rehearse_patches(self) -> None:
        """Launch what writes the new blocks of decode steps; only where nothing runs that is launched."""
        step = self._packer.padding(1, False)
        step.patch_counts = [1] * len(self._groups)
        self._publisher.deliver(step, self.tables)
        self.tables.apply(self._publisher.buffer, step)  # of steps too large for one launch

    def record_request(self) -> None:
        """Record the rehearsed decode step as a request graph."""
        self.req_graph.record(request_bucket(self._live.mode.running_bs, 1), self._forward)

    def run_rehearsed(self) -> None:
        self._forward()

    def run_modules(self, scope: Callable[[], AbstractContextManager[Any]]) -> None:
        """Run the rehearsed step's modules eagerly, all that it launches inside ``scope()``, which may keep kernels
        from running: its inputs are true all the same. Only with device tables.
        """
        with scope():
            self._derive()
        with self.tables.without_kernels():
            inputs = self._derive()
        with scope(), set_forward_context(self._context(inputs)):
            self.model(inputs.input_ids, inputs.positions)

    def record_bucket(self) -> None:
        """Let the model's recording units record the rehearsed step as a token bucket of its phase."""
        live = self._live
        inputs = self._derive()
        self._static[live.mode.running_tokens, bool(live.step.num_prefill_seqs)] = inputs
        context = self._context(inputs)
        context.tr_graph = "record"
        if self.tables.prepares(live.step):  # the graph fills its inputs itself, from the packed step
            packed = live.packed
            context.prepare = lambda: self.tables.prepare(packed, inputs)
        with set_forward_context(context):
            self.model(inputs.input_ids, inputs.positions)

    def prefill_bs(self, num_tokens: int) -> int:
        """Sequences that a prefill bucket of ``num_tokens`` has room for."""
        return min(self.max_num_seqs, max(1, num_tokens // TOKENS_PER_PREFILL_SEQ))

    def clear_graphs(self) -> None:
        """Drop every recording, and what refers to this object on their behalf."""
        self.req_graph.clear()
        for graphs in token_graphs(self.model):
            graphs.clear()
        self._static.clear()
        self._results.clear()
        self.before_replay = self._live = None

    # -- a step's parts

    def _decide(self, batch: ScheduledBatch) -> ForwardMode:
        num_seqs, num_tokens = batch.num_seqs, batch.num_tokens
        is_prefill = batch.num_prefill_seqs > 0
        longest = max(batch.num_scheduled) if num_tokens > num_seqs else 1
        mode = ForwardMode.decide(StepFacts(is_prefill, num_seqs, num_tokens, longest), self.graphs)
        if mode.token_graph and is_prefill:
            mode.running_bs = self.prefill_bs(mode.running_tokens)
            if num_seqs > mode.running_bs:
                return ForwardMode("eager", num_seqs, num_tokens)
        return mode

    def _begin(
        self,
        step: PackedStep,
        mode: ForwardMode,
        query_lens: list[int],
        context_lens: list[int],
        head: HeadWork | None = None,
    ) -> None:
        packed = self._publisher.deliver(step, self.tables)
        self._live = _LiveStep(step, packed, mode, query_lens, context_lens, head)

    def _derive(self) -> StepInputs:
        live = self._live
        longest = max(live.context_lens, default=1) or 1
        running_tokens = live.mode.running_tokens if live.mode.kind != "eager" else None
        return self.tables.derive(live.packed, live.step, longest, running_tokens)

    def _forward(self) -> _Outputs:
        """Derive the live step's inputs and run the model on them."""
        inputs = self._derive()
        with set_forward_context(self._context(inputs)):
            hidden = self.model(inputs.input_ids, inputs.positions)
        return hidden, inputs.rows, inputs.context_lens, inputs.cu_seqlens_q

    def _run_bucket(self) -> _Outputs:
        """Replay the live step's token bucket, on the inputs that it was recorded with."""
        live = self._live
        inputs = static = self._static[live.mode.running_tokens, bool(live.step.num_prefill_seqs)]
        if not self.tables.prepares(live.step):
            inputs = self._derive()
            static.copy_(inputs)
        context = self._context(inputs)
        context.tr_graph = "replay"
        with set_forward_context(context):
            hidden = self.model(static.input_ids, static.positions)
        return hidden, inputs.rows, inputs.context_lens, inputs.cu_seqlens_q

    def _context(self, inputs: StepInputs) -> ForwardContext:
        live = self._live
        by_layer = {}
        for group, spec in zip(inputs.groups, self._groups, strict=True):
            metadata = AttentionMetaData(
                num_prefill_seqs=live.step.num_prefill_seqs,
                num_prefill_tokens=live.step.num_prefill_tokens,
                query_lens_host=live.query_lens,
                context_lens_host=live.context_lens,
                cu_seqlens_q=inputs.cu_seqlens_q,
                context_lens=inputs.context_lens,
                block_tables=group.block_tables,
                slot_mapping=group.slot_mapping,
                table_rows=inputs.rows if inputs.has_table_rows else None,
            )
            by_layer |= dict.fromkeys(spec.layer_names, metadata)
        context = Context(
            positions=inputs.positions,
            is_prefill=live.step.num_prefill_seqs > 0,
            batch_size=live.step.num_seqs,
            running_bs=live.mode.running_bs,
            running_tokens=live.mode.running_tokens,
        )
        return ForwardContext(
            self._no_compile_layers,
            by_layer,
            self._kv_caches,
            context,
            head=live.head,
            is_rehearsal=live.is_rehearsal,
        )
