"""Recording the device graphs that the configuration asks for, one bucket at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from atom.config_parts import CUDAGraphMode
from atom.model_engine.runner.forward_mode import GraphTables
from atom.model_engine.runner.forward_pass import ForwardPass
from atom.model_engine.runner.kv_budget import format_bytes
from atom.model_engine.runner.step_profiler import StepProfiler
from atom.platforms import Platform
from atom.utils.logging import init_logger
from atom.utils.region_graph import token_graphs

logger = init_logger(__name__)


@dataclass(slots=True)
class RecordedBucket:
    """What one recording took."""

    kind: str  # decode | prefill
    size: int  # sequences of a decode, tokens of a prefill
    seconds: float
    memory: int  # bytes that the shared pool grew by


@dataclass
class GraphRecorder:
    """Records decode buckets as request or token graphs, by mode, and prefill buckets as token graphs.

    Args:
        forward: whose graph tables are replaced after every bucket, so that serving may begin before the last.
        decode_sizes: sequences of each decode bucket.
        prefill_sizes: tokens of each prefill bucket; only where every attention layer supports it.
    """

    forward: ForwardPass
    platform: Platform
    profiler: StepProfiler
    mode: CUDAGraphMode
    decode_sizes: list[int]
    prefill_sizes: list[int]
    recorded: list[RecordedBucket] = field(default_factory=list)

    @property
    def num_buckets(self) -> int:
        return len(self.decode_sizes) + len(self.prefill_sizes)

    def run(self, largest_first: bool = True) -> Iterator[RecordedBucket]:
        """Record bucket after bucket. The largest first shares memory best: each fits into what the one before
        left; the smallest first lets early steps find a bucket that fits.
        """
        buckets = [("prefill", size) for size in self.prefill_sizes]
        buckets += [("decode", size) for size in self.decode_sizes]
        # By the rows of the forward pass, of either kind.
        for kind, size in sorted(buckets, key=lambda bucket: bucket[1], reverse=largest_first):
            yield self._record(kind, size)
        self._log()

    def run_while_serving(self) -> Iterator[RecordedBucket]:
        """The same, the smallest first. A recording that fails is the last: steps go on with those there are."""
        try:
            yield from self.run(largest_first=False)
        except RuntimeError as error:  # out of memory, for one
            logger.warning("no more graphs are recorded: %s", error)

    def record_on_demand(self) -> None:
        """Let steps choose among all buckets, and record each when a step first needs it.

        What fails to be recorded is not offered again.
        """
        recorded: set[tuple[str, int]] = set()
        offered = {"decode": list(self.decode_sizes), "prefill": list(self.prefill_sizes)}

        def offer() -> None:
            self.forward.graphs = self._tables(offered["decode"], offered["prefill"])

        def record(kind: str, size: int) -> bool:
            if (kind, size) in recorded:
                return True
            try:
                self._record(kind, size)
                recorded.add((kind, size))
            except RuntimeError as error:
                logger.warning("steps of %s %d run eagerly: %s", kind, size, error)
                offered[kind].remove(size)
            offer()
            return (kind, size) in recorded

        offer()
        self.forward.before_replay = record

    def _record(self, kind: str, size: int) -> RecordedBucket:
        began = time.monotonic()
        forward = self.forward
        is_prefill = kind == "prefill"
        forward.rehearse(forward.prefill_bs(size) if is_prefill else size, size, is_prefill)
        with self.profiler.capture(1 if is_prefill else size, size if is_prefill else 1):
            forward.run_rehearsed()
            self.platform.synchronize()
            if is_prefill or self.mode.uses_tr_hybrid():
                forward.record_bucket()
            else:
                forward.record_request()
            self.platform.synchronize()
        bucket = RecordedBucket(kind, size, time.monotonic() - began, self._held() - self.memory)
        self.recorded.append(bucket)
        logger.debug(
            "recorded %s %d in %.0f ms, %s", kind, size, bucket.seconds * 1e3, format_bytes(bucket.memory)
        )
        done = {k: sorted(b.size for b in self.recorded if b.kind == k) for k in ("decode", "prefill")}
        forward.graphs = self._tables(done["decode"], done["prefill"])
        return bucket

    @property
    def memory(self) -> int:
        """Bytes that all recordings added to the shared pool."""
        return sum(bucket.memory for bucket in self.recorded)

    def _held(self) -> int:
        graphs = [self.forward.req_graph, *token_graphs(self.forward.model)]
        return sum(sum(graph.memory.values()) for graph in graphs)

    def _tables(self, decode_sizes: list[int], prefill_sizes: list[int]) -> GraphTables:
        """What may be replayed when these buckets are recorded."""
        decode_sizes = sorted(decode_sizes)
        in_tokens = self.mode.uses_tr_hybrid()
        return GraphTables(
            mode=self.mode,
            request_sizes={} if in_tokens else {1: decode_sizes},
            prefill_tokens=sorted(prefill_sizes),
            decode_tokens=decode_sizes if in_tokens else (),
        )

    def _log(self) -> None:
        seconds = sum(bucket.seconds for bucket in self.recorded)
        parts = []
        for kind in ("decode", "prefill"):
            sizes = sorted(bucket.size for bucket in self.recorded if bucket.kind == kind)
            if sizes:
                parts.append(f"{len(sizes)} {kind} buckets up to {sizes[-1]}")
        logger.info(
            "graphs (%s): %s in %.2f s, %s",
            self.mode.name,
            ", ".join(parts) or "none",
            seconds,
            format_bytes(self.memory),
        )
