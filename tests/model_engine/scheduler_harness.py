"""A fake device that knows what every cache slot holds, and loops that drive a scheduler with it.

The device believes only what reaches it: row parameters of ``new_seqs``, table patches, rows, counts. Each
written slot remembers its token and the prefix that led to it, so a wrong block, a missing patch, an early
reuse or a stale read raises at once. The next id is a pure function of all ids before it.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from atom.core import BatchOutput, CacheGroupSpec, GroupKind, ScheduledBatch, Sequence
from atom.model_engine.scheduler import Scheduler, SchedulerConfig
from atom.sampling_params import SamplingParams

VOCAB = 50
EOS = 7


def next_id(history: list[int]) -> int:
    return random.Random(hash(tuple(history[-40:])) ^ len(history)).randrange(VOCAB)


def expected_answer(prompt: list[int], max_new: int, stop_ids: frozenset[int], max_len: int) -> list[int]:
    ids = list(prompt)
    while True:
        ids.append(next_id(ids))
        if ids[-1] in stop_ids or len(ids) - len(prompt) >= max_new or len(ids) >= max_len:
            return ids[len(prompt) :]


def full(num_blocks: int) -> CacheGroupSpec:
    return CacheGroupSpec(GroupKind.FULL, ("a",), 1, num_blocks=num_blocks)


def sliding(num_blocks: int, window: int) -> CacheGroupSpec:
    return CacheGroupSpec(GroupKind.SLIDING, ("b",), 1, window=window, num_blocks=num_blocks)


def make_seq(seq_id: int, prompt: list[int], max_new: int = 8, *, stop: bool = True, **kwargs) -> Sequence:
    params = kwargs.pop("params", None) or SamplingParams(max_tokens=max_new)
    stop_ids = frozenset({EOS}) if stop else frozenset()
    return Sequence(seq_id, list(prompt), params, stop_ids=stop_ids, max_output_tokens=max_new, **kwargs)


def make_scheduler(groups=None, connector=None, **kwargs) -> Scheduler:
    defaults = dict(
        max_num_seqs=8, max_num_batched_tokens=64, max_model_len=512, block_size=4, eos_ids=frozenset({EOS})
    )
    return Scheduler(SchedulerConfig(**{**defaults, **kwargs}), groups or [full(64)], connector)


class FakeDevice:
    """Runs batches in launch order on shadow caches, one per group that has a window or is full."""

    def __init__(self, scheduler: Scheduler, *, accept_rate: float = 0.6, seed: int = 0):
        self.scheduler = scheduler
        self.windows = [getattr(group, "window", None) for group in scheduler.groups]
        self.paged = [group.kind != GroupKind.STATE for group in scheduler.groups]
        self.block_size = scheduler.config.block_size
        self.tables: dict[int, list[dict[int, int]]] = {}
        self.histories: dict[int, list[int]] = {}  # row -> ids whose KV it has, in order
        self.last: dict[int, int] = {}
        self.shadow: list[dict[tuple[int, int], tuple[int, int]]] = [{} for _ in scheduler.groups]
        self.random = random.Random(seed)
        self.accept_rate = accept_rate
        self.external: dict[int, int] = {}  # seq id -> tokens that a connector wrote before it resumed
        self.launched: list[ScheduledBatch] = []

    def launch(self, batch: ScheduledBatch) -> BatchOutput:
        self.launched.append(batch)
        self._check_shape(batch)
        for seq in batch.new_seqs:
            at = batch.seqs.index(seq)
            self.tables[seq.row] = [{} for _ in self.windows]
            self.histories[seq.row] = list(seq.token_ids[: batch.starts[at]])
        for group, patches in enumerate(batch.patches):
            for row, column, block in patches:
                assert column not in self.tables[row][group], "a table column was written twice"
                self.tables[row][group][column] = block
        for seq in batch.new_seqs:
            if seq.id in self.external:
                self._load(seq)
        ids, accepted = [], []
        for index, seq in enumerate(batch.seqs):
            if index < batch.num_prefill_seqs:
                kept = self._prefill(batch, index, seq)
            else:
                kept = self._decode(batch, index)
            accepted.append(kept)
            ids.append(kept[-1] if kept else -1)
        speculative = self.scheduler.config.num_draft_tokens > 0
        return BatchOutput(ids, accepted if speculative else None)

    def _check_shape(self, batch: ScheduledBatch) -> None:
        n = len(batch.seqs)
        for name in ("epochs", "rows", "starts", "num_scheduled", "samples"):
            assert len(getattr(batch, name)) == n, name
        assert batch.num_tokens == sum(batch.num_scheduled) <= self.scheduler.config.max_num_batched_tokens
        assert batch.num_prefill_seqs in (0, n), "prefill and decode are never mixed"
        assert len(set(batch.rows)) == n and all(
            0 <= r < self.scheduler.config.max_num_seqs for r in batch.rows
        )
        assert all(count > 0 for count in batch.num_scheduled)

    def _prefill(self, batch: ScheduledBatch, index: int, seq: Sequence) -> list[int]:
        row, start, count = batch.rows[index], batch.starts[index], batch.num_scheduled[index]
        assert start == len(self.histories[row]), "a chunk does not start where the last one ended"
        self._write(row, seq.token_ids[start : start + count])
        if not batch.samples[index]:
            return []
        self.last[row] = next_id(self.histories[row])
        return [self.last[row]]

    def _decode(self, batch: ScheduledBatch, index: int) -> list[int]:
        row, count = batch.rows[index], batch.num_scheduled[index]
        history = self.histories[row]
        assert len(history) <= batch.starts[index], "the host's position is not an upper bound"
        drafts, probe = [], [*history, self.last[row]]
        for _ in range(count - 1):
            is_good = self.random.random() < self.accept_rate
            drafts.append(next_id(probe) if is_good else self.random.randrange(VOCAB))
            probe.append(drafts[-1])
        before = len(history)
        inputs = [self.last[row], *drafts]
        self._write(row, inputs)
        kept = []
        for position in range(count):
            kept.append(next_id(history[: before + position + 1]))
            if position < len(drafts) and drafts[position] != kept[-1]:
                break
        del history[before + len(kept) :]
        self.last[row] = kept[-1]
        return kept

    def _load(self, seq: Sequence) -> None:
        """What a connector wrote: the KV of the first tokens, wherever the tables have a block for it."""
        for group, table in enumerate(self.tables[seq.row]):
            for position in range(self.external[seq.id]):
                block = table.get(position // self.block_size)
                if block is not None:
                    slot = (block, position % self.block_size)
                    self.shadow[group][slot] = (position, hash(tuple(seq.token_ids[: position + 1])))

    def _write(self, row: int, tokens: list[int]) -> None:
        """Store each token's KV, and read back everything that its query sees, in every group."""
        history = self.histories[row]
        for token in tokens:
            history.append(token)
            position = len(history) - 1
            for group in range(len(self.windows)):
                if not self.paged[group]:
                    continue
                slot = self._slot(row, group, position)
                self.shadow[group][slot] = (position, hash(tuple(history)))
        first = len(history) - len(tokens)
        for group, window in enumerate(self.windows):
            if not self.paged[group]:
                continue
            low = 0 if window is None else max(0, first - window + 1)
            for position in range(low, len(history)):
                held = self.shadow[group].get(self._slot(row, group, position))
                wanted = (position, hash(tuple(history[: position + 1])))
                assert held == wanted, f"row {row} reads foreign KV at {position} in group {group}"

    def _slot(self, row: int, group: int, position: int) -> tuple[int, int]:
        return self.tables[row][group][position // self.block_size], position % self.block_size


@dataclass
class Driver:
    """Steps a scheduler with the fake device and gathers what it reports.

    ``overlapped`` counts the steps that are launched before the oldest is committed; False is 0.
    """

    scheduler: Scheduler
    overlapped: int = 0
    accept_rate: float = 0.6
    device: FakeDevice = field(init=False)
    answers: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    seqs: dict[int, Sequence] = field(default_factory=dict)
    pending: deque = field(default_factory=deque)
    before_step: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self.device = FakeDevice(self.scheduler, accept_rate=self.accept_rate)

    def add(self, *seqs: Sequence) -> None:
        for seq in seqs:
            self.seqs[seq.id] = seq
            self.answers[seq.id] = []
        self.scheduler.add_all(seqs)
        self._take_rejected()

    def abort(self, seq_id: int, keep_tokens: int = -1, reason: str = "aborted") -> bool:
        done = self.scheduler.abort(seq_id, keep_tokens, reason)
        self._take_rejected()
        return done

    def step(self) -> bool:
        """One turn of the loop; False when there was nothing to launch or commit."""
        if self.before_step:
            self.before_step()
        batch = self.scheduler.schedule()
        if batch is not None:
            self.pending.append((batch, self.device.launch(batch)))
        keep = self.overlapped if batch is not None else 0
        progressed = batch is not None or bool(self.pending)
        while len(self.pending) > keep:
            self._commit(*self.pending.popleft())
        self._take_rejected()
        return progressed

    def run(self, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            assert self.step(), f"stuck: {self.scheduler.stats()}"
        raise AssertionError(f"no end after {max_steps} steps: {self.scheduler.stats()}")

    def _commit(self, batch: ScheduledBatch, output: BatchOutput) -> None:
        result = self.scheduler.commit(batch, output)
        counts = result.counts or [1] * len(result.seqs)
        message = result.to_message()
        assert memoryview(message.ids).cast("q").tolist() == [seq.id for seq in result.seqs]
        assert memoryview(message.token_ids).cast("i").tolist() == result.token_ids
        assert sum(counts) == len(result.token_ids) and len(counts) == len(result.seqs)
        at = 0
        for seq, count in zip(result.seqs, counts, strict=True):
            assert seq.id not in self.reasons, "output after the end"
            self.answers[seq.id] += result.token_ids[at : at + count]
            at += count
        for event in result.events:
            seq_id = result.seqs[event.index].id
            if event.leave_reason:
                assert seq_id not in self.reasons
                self.reasons[seq_id] = event.leave_reason
            if event.num_cached_tokens >= 0:
                assert seq_id not in self.cached, "two first outputs"
                self.cached[seq_id] = event.num_cached_tokens

    def _take_rejected(self) -> None:
        for seq in self.scheduler.take_rejected():
            assert seq.id not in self.reasons
            self.reasons[seq.id] = seq.leave_reason

    def check_answers(self, aborted: frozenset[int] = frozenset()) -> None:
        """Every answer equals the one that a roomy engine gives; an aborted one is a prefix of it."""
        for seq_id, seq in self.seqs.items():
            prompt = seq.token_ids[: seq.num_prompt_tokens]
            if self.reasons[seq_id].startswith("unschedulable"):
                assert not self.answers[seq_id]
                continue
            wanted = expected_answer(prompt, seq.max_output_tokens, seq.stop_ids, seq.max_len)
            if seq_id in aborted:
                wanted = wanted[: len(self.answers[seq_id])]
            assert self.answers[seq_id] == wanted == seq.token_ids[seq.num_prompt_tokens :]

    def check_idle(self) -> None:
        """Nobody is left and no block or row is lost."""
        assert not self.scheduler.has_work and not self.pending
        assert self.scheduler.check_integrity() == []
        stats = self.scheduler.stats()
        assert stats["kv_blocks_used"] == 0 and stats["kv_blocks_free"] == stats["kv_blocks_total"]
        assert stats["running"] == stats["waiting"] == stats["partial"] == 0
