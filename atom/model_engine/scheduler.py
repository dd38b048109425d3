"""The scheduler: who computes what in the next step, and what a finished step means for everyone.

Prefill first, never mixed: a step is all prefill (resumed chunks, then new admissions) or all decode. When
blocks run out, the youngest running sequence is preempted and computed again later. No torch in here.

One engine thread calls ``add``, ``abort``, ``schedule`` and ``commit``. In the overlapped loop step N + 1 is
scheduled before step N is committed: every row in flight is taken to continue, and what turns out otherwise
is dropped at commit by its epoch.
"""

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from operator import add

from atom.core import NO_ROW, BatchOutput, CacheGroupSpec, ScheduledBatch, Sequence
from atom.kv_transfer.connector import KVConnector, NullConnector
from atom.model_engine.scheduling.block_manager import BlockManager
from atom.model_engine.scheduling.cache_group import CacheGroup, Patch, build_groups
from atom.model_engine.scheduling.chunking import MIN_CHUNK_ALIGNMENT, chunk_size
from atom.model_engine.scheduling.commit import Committer, StepResult
from atom.model_engine.scheduling.config import SchedulerConfig
from atom.model_engine.scheduling.lifecycle import Lifecycle
from atom.model_engine.scheduling.roster import Roster

__all__ = ["Scheduler", "SchedulerConfig", "StepResult"]

ROOM_GROWTH = 4  # each preemption of a sequence multiplies the room that it waits for


@dataclass(slots=True)
class _Step:
    """A prefill step in the making; parallel lists as in ScheduledBatch."""

    budget: int
    seqs: list[Sequence] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    new_seqs: list[Sequence] = field(default_factory=list)


@dataclass(slots=True)
class _DecodeLists:
    """What a decode batch says about its rows; reused while no row changes hands."""

    seqs: list[Sequence]
    version: int
    rows: list[int]
    epochs: list[int]
    ones: list[int]
    samples: list[bool]


class Scheduler:
    """Continuous batching over paged, prefix-cached KV.

    Args:
        groups: the model's cache groups with ``num_blocks`` set; a ready CacheGroup for kinds that
            have no implementation in ``scheduling.cache_group``.
        clock: monotonic seconds, the clock of ``Sequence.arrival_time``.

    Raises:
        ConfigError: a limit or group is out of range.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        groups: Many[CacheGroupSpec | CacheGroup],
        connector: KVConnector | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.config = config
        lookahead = 2 * (1 + config.num_draft_tokens)
        self.groups = build_groups(groups, config.block_size, lookahead)
        self.manager = BlockManager(
            self.groups, config.block_size, is_caching=config.enable_prefix_caching, seed=config.hash_seed
        )
        self._has_step_meta = any(type(g).step_meta is not CacheGroup.step_meta for g in self.groups)
        self._connector = connector if connector is not None else NullConnector()
        self._has_connector = not isinstance(self._connector, NullConnector)
        self._roster = Roster(config.max_running)
        self._life = Lifecycle(self.manager, self._roster, self._connector, config.num_draft_tokens)
        self._committer = Committer(self.manager, self._life, config.eos_ids)
        self._clock = clock
        self._step = 0
        self._no_patches: list[list[Patch]] = [[] for _ in self.groups]  # shared by batches, stays empty
        self._patches: list[list[Patch]] = [[] for _ in self.groups]
        self._lists = _DecodeLists([], -1, [], [], [], [])
        self._num_prefill_streak = 0
        self._prompt_started = 0.0  # when the last prefill step was scheduled; 0: the last step was none
        self._prompt_latency = 0.0
        self._num_integrity_faults = 0

    # -- requests -------------------------------------------------------------------------------------
    def add(self, seq: Sequence) -> None:
        """Queue a sequence. One that could never run ends at once; ``take_rejected`` names it."""
        if seq.id in self._life.live:
            raise ValueError(f"sequence {seq.id} is already scheduled")
        reason = self._unschedulable(seq)
        if reason:
            self._life.reject(seq, f"unschedulable: {reason}")
            return
        # The last token of an answer is sampled, its KV is never stored: hence one more than fits.
        longest = min(self.config.max_model_len, self.manager.capacity + 1)
        seq.max_len = min(seq.num_prompt_tokens + seq.max_output_tokens, longest)
        seq.num_drafts = self.config.num_draft_tokens
        self.manager.prepare(seq)
        self._life.live[seq.id] = seq
        self._roster.waiting.append(seq)

    def add_all(self, seqs: Iterable[Sequence]) -> None:
        for seq in seqs:
            self.add(seq)

    def abort(self, seq_id: int, keep_tokens: int = -1, reason: str = "aborted") -> bool:
        """End a sequence now, whatever it is doing. False: it has already ended.

        ``keep_tokens`` counts the prompt and answer tokens that the client got (-1: all); KV of later ones
        is taken out of the prefix cache. The sequence is named by ``take_rejected``.
        """
        seq = self._life.live.get(seq_id)
        if seq is None:
            return False
        self._life.finish(seq, reason, keep_tokens=keep_tokens)
        self._life.ended.append(seq)
        return True

    def take_rejected(self) -> list[Sequence]:
        """Sequences that ended outside of a commit since the last call: unschedulable or aborted."""
        ended, self._life.ended = self._life.ended, []
        return ended

    def _unschedulable(self, seq: Sequence) -> str:
        config, num_tokens = self.config, len(seq.token_ids)
        if not num_tokens:
            return "the prompt has no tokens"
        if num_tokens > config.max_model_len:
            return f"{num_tokens} tokens exceed max_model_len ({config.max_model_len})"
        if not config.enable_chunked_prefill and num_tokens > config.max_num_batched_tokens:
            limit = config.max_num_batched_tokens
            return f"{num_tokens} tokens exceed max_num_batched_tokens ({limit}) and chunked prefill is off"
        for group in self.groups:
            chunk = 1 if config.enable_chunked_prefill else num_tokens
            needed = group.peak(num_tokens, chunk)
            if needed > group.num_total:
                return f"{num_tokens} tokens need {needed} cache blocks, there are {group.num_total}"
        return ""

    # -- one step -------------------------------------------------------------------------------------
    def schedule(self) -> ScheduledBatch | None:
        """Decide the next step; None: nothing can run now.

        A batch without sequences only carries ``connector_meta`` to the workers.
        """
        roster, life = self._roster, self._life
        if self._has_connector:
            life.poll_connector()
        num_preemptions = life.num_preemptions
        batch = None
        limit = self.config.max_consecutive_prefill_steps
        if limit and self._num_prefill_streak >= limit:
            batch = self._schedule_decode()
        if batch is None and (roster.partial or roster.waiting):
            batch = self._schedule_prefill()
        if batch is None:
            batch = self._schedule_decode()
        while batch is None and not life.inflight:
            if life.num_preemptions == num_preemptions:
                # Prompts that grow chunk by chunk hold all blocks between them: the youngest gives its own back.
                victim = self._victim(roster.running[0]) if len(roster.running) > 1 else None
                if victim is None or victim is roster.running[0]:
                    break
                life.preempt(victim)
            num_preemptions = life.num_preemptions
            batch = self._schedule_prefill() or self._schedule_decode()
        if self._has_connector:
            meta = self._connector.build_connector_meta()
            if meta is not None and batch is None:
                batch = self._batch(_Step(0))
            if batch is not None:
                batch.connector_meta = meta
        if batch is not None:
            life.inflight.append(batch)
        return batch

    def commit(
        self,
        batch: ScheduledBatch,
        output: BatchOutput,
        tell: Callable[[StepResult], object] = lambda result: None,
    ) -> StepResult:
        """Apply a step's output. Batches are committed in the order in which they were scheduled.

        ``tell`` is called once, with what is returned; of a step with prompts before the books over its blocks, which
        nobody waits for. Should they raise, the answers are out already.
        """
        inflight = self._life.inflight
        if not inflight or inflight[0] is not batch:
            raise ValueError(f"step {batch.step} is not the oldest one in flight")
        del inflight[0]
        return self._committer.commit(batch, output, tell)

    # -- prefill --------------------------------------------------------------------------------------
    def _schedule_prefill(self) -> ScheduledBatch | None:
        roster = self._roster
        now = self._clock()
        if self._prompt_started:
            self._prompt_latency, self._prompt_started = now - self._prompt_started, 0.0
        step = _Step(self._prefill_budget())
        has_blocks = True
        for seq in roster.partial.copy():
            if step.budget <= 0 or not has_blocks:
                break
            has_blocks = self._add_chunk(step, seq)
        if has_blocks and roster.waiting and self._may_admit(now):
            self._admit_waiting(step, now)
        if not step.seqs:
            return None
        self._num_prefill_streak += 1
        self._prompt_started = now
        return self._batch(step)

    def _prefill_budget(self) -> int:
        """Tokens of the next prefill step: fewer where a stream waits for it to end."""
        config, roster = self.config, self._roster
        is_busy = len(roster.running) > len(roster.partial)
        limit = (is_busy and config.max_busy_prefill_tokens) or config.max_prefill_tokens
        return min(config.max_num_batched_tokens, limit or config.max_num_batched_tokens)

    def _may_admit(self, now: float) -> bool:
        """The delay factor: let prompts gather for a while so that they share a step."""
        factor = self.config.scheduler_delay_factor
        if not factor or not self._roster.running:
            return True
        oldest = min(seq.arrival_time for seq in self._roster.waiting)
        return now - oldest > factor * self._prompt_latency

    def _admit_waiting(self, step: _Step, now: float) -> None:
        """Admit from the front; the first that does not fit stops everyone behind it."""
        roster, life, manager = self._roster, self._life, self.manager
        while roster.waiting and roster.has_free_row and step.budget > 0:
            seq = roster.waiting.first()
            hit = manager.probe(seq, memoized=True)
            if seq.num_inflight_samples or not manager.fits(seq, hit):
                return
            if seq.num_preemptions and not manager.fits(seq, hit, self._room(seq)):
                return
            num_external, is_async = 0, False
            if self._has_connector and seq.id not in life.no_external and hit.num_tokens < seq.num_tokens - 1:
                num_external, is_async = self._connector.get_num_new_matched_tokens(seq, hit.num_tokens)
                num_external = max(0, min(num_external, seq.num_tokens - 1 - hit.num_tokens))
                is_async = is_async and num_external > 0
            if not is_async and not self._chunk(step, seq, hit.num_tokens + num_external, seq.num_tokens):
                return
            life.admit(seq, hit, num_external, is_async)
            if not seq.first_scheduled_time:
                seq.first_scheduled_time = now
            if not is_async and not self._add_chunk(step, seq):
                return

    def _room(self, seq: Sequence) -> list[int]:
        """Blocks that must stay free when a preempted sequence comes back, per group.

        Enough for it and everyone older to grow by a number of tokens that is four times larger after each
        of its preemptions: soon that is all they can ever need, so no sequence is preempted without end.
        """
        tokens = self.config.block_size * ROOM_GROWTH ** (seq.num_preemptions - 1)
        room = self.manager.growth(seq, min(seq.num_tokens + tokens, seq.max_len - 1))
        for other in (*self._roster.running, *self._roster.parked.values()):
            known = max(other.num_scheduled, other.prefill_end)
            chunk = self.config.max_num_batched_tokens if other.is_prefilling else 1
            grown = self.manager.growth(other, min(known + tokens, other.max_len - 1), chunk)
            room = list(map(add, room, grown))
        return room

    def _chunk(self, step: _Step, seq: Sequence, start: int, end: int) -> int:
        """Tokens of ``[start, end)`` that the budget lets this step compute."""
        budget, depth = step.budget, self.config.half_chunk_depth
        if depth and start:
            budget = max(budget * depth // (depth + start), min(budget, MIN_CHUNK_ALIGNMENT))
        return chunk_size(
            end - start,
            budget,
            self.config.block_size,
            threshold=self.config.long_prefill_token_threshold,
            # Computed again after a preemption, an answer may be longer than any prompt was allowed to be.
            is_chunked=self.config.enable_chunked_prefill or seq.num_preemptions > 0,
            is_first_in_batch=not step.seqs,
        )

    def _cost(self, num_tokens: int, start: int) -> int:
        """What a chunk takes of a step's budget: attention makes later tokens dearer."""
        depth = self.config.half_chunk_depth
        return num_tokens + (num_tokens * start // depth if depth else 0)

    def _add_chunk(self, step: _Step, seq: Sequence) -> bool:
        """Put the next chunk of ``seq`` into ``step`` if the budget has room; False: blocks are missing."""
        start, end = seq.num_scheduled, seq.prefill_end
        size = self._chunk(step, seq, start, end)
        if not size:
            return True
        stop = self.manager.cut_chunk(seq, start, start + size)
        is_whole_only = not self.config.enable_chunked_prefill and not seq.num_preemptions
        if stop <= start or (is_whole_only and stop < end):
            return False
        is_new = seq.id in self._life.rowless
        patches = None if is_new else self._patches  # a new row's are made of its whole table below
        covered = self.manager.may_append(seq, stop, patches)
        if not covered:
            return False
        if is_new:
            self.manager.table_patches(seq, self._patches)
            self._life.rowless.discard(seq.id)
            step.new_seqs.append(seq)
        step.budget -= self._cost(stop - start, start)
        step.seqs.append(seq)
        step.starts.append(start)
        step.counts.append(stop - start)
        step.samples.append(stop == end)
        seq.num_scheduled = stop
        if stop == end:
            self._roster.partial.remove(seq)
            seq.decode_limit = min(covered, seq.max_len - 1)
        return True

    # -- decode ---------------------------------------------------------------------------------------
    def _schedule_decode(self) -> ScheduledBatch | None:
        """One step of every sequence that can decode; the loop is a hot one of the host: integers only."""
        if self.config.num_draft_tokens:
            return self._schedule_verify()
        seqs = running = self._roster.running
        starts: list[int] = []
        append = starts.append
        for seq in running:
            start = seq.num_scheduled
            if start >= seq.decode_limit and not self._extend(seq, start + 1):
                if seqs is running:
                    seqs = running[: len(starts)]
                continue
            if seqs is not running:
                seqs.append(seq)
            seq.num_scheduled = start + 1
            append(start)
        return self._decode_batch(seqs, starts, None) if starts else None

    def _schedule_verify(self) -> ScheduledBatch | None:
        """The same with drafts: each row takes ``1 + num_drafts`` tokens, fewer at the end of its answer."""
        seqs: list[Sequence] = []
        starts: list[int] = []
        counts: list[int] = []
        for seq in self._roster.running:
            start = seq.num_scheduled
            count = 1 + seq.num_drafts
            if start + count > seq.decode_limit:
                count = min(count, seq.max_len - 1 - start)
                stop = start + count
                if count < 1 or (stop > seq.decode_limit and not self._extend(seq, stop)):
                    continue
            seq.num_scheduled = start + count
            seqs.append(seq)
            starts.append(start)
            counts.append(count)
        return self._decode_batch(seqs, starts, counts) if starts else None

    def _extend(self, seq: Sequence, upto: int) -> bool:
        """Cover positions below ``upto`` if ``seq`` may decode at all, preempting the youngest if need be."""
        if seq.row == NO_ROW or seq.num_scheduled < seq.prefill_end or upto >= seq.max_len:
            return False
        while not (covered := self.manager.may_append(seq, upto, self._patches)):
            victim = self._victim(seq)
            # What it has in flight may leave a sliding window when it is committed: look again then.
            is_early = seq.num_inflight_tokens > (0 if victim is seq else 1 + self.config.num_draft_tokens)
            if victim is None or is_early:
                return False
            self._life.preempt(victim)
            if victim is seq:
                return False
        seq.decode_limit = min(covered, seq.max_len - 1)
        return True

    def _victim(self, seq: Sequence) -> Sequence | None:
        """The youngest running sequence, not older than ``seq``, whose blocks no transfer reads."""
        for other in reversed(self._roster.running):
            if not self._connector.is_pinned(other):
                return other
            if other is seq:
                return None
        return None

    # -- batches --------------------------------------------------------------------------------------
    def _batch(self, step: _Step) -> ScheduledBatch:
        seqs = step.seqs
        return self._finish_batch(
            ScheduledBatch(
                step=0,
                seqs=seqs,
                epochs=[seq.epoch for seq in seqs],
                rows=[seq.row for seq in seqs],
                starts=step.starts,
                num_scheduled=step.counts,
                samples=step.samples,
                num_prefill_seqs=len(seqs),
                num_tokens=sum(step.counts),
                new_seqs=step.new_seqs,
                patches=self._no_patches,
            )
        )

    def _decode_batch(
        self, seqs: list[Sequence], starts: list[int], counts: list[int] | None
    ) -> ScheduledBatch:
        lists = self._lists
        if lists.version != self._roster.version or (seqs is not lists.seqs and seqs != lists.seqs):
            lists = self._lists = _DecodeLists(
                seqs,
                self._roster.version,
                [seq.row for seq in seqs],
                [seq.epoch for seq in seqs],
                [1] * len(seqs),
                [True] * len(seqs),
            )
        self._num_prefill_streak = 0
        if self._prompt_started:
            self._prompt_latency = self._clock() - self._prompt_started
            self._prompt_started = 0.0
        return self._finish_batch(
            ScheduledBatch(
                step=0,
                seqs=lists.seqs,
                epochs=lists.epochs,
                rows=lists.rows,
                starts=starts,
                num_scheduled=lists.ones if counts is None else counts,
                samples=lists.samples,
                num_prefill_seqs=0,
                num_tokens=len(starts) if counts is None else sum(counts),
                new_seqs=[],
                patches=self._no_patches,
            )
        )

    def _finish_batch(self, batch: ScheduledBatch) -> ScheduledBatch:
        """Number the step and hand it what was written into tables and groups since the last one."""
        self._step += 1
        batch.step = self._step
        if any(self._patches):
            batch.patches = self._patches
            self._patches = [[] for _ in self.groups]
        if self._has_step_meta:
            batch.group_meta = [group.step_meta() for group in self.groups]
        return batch

    # -- reports --------------------------------------------------------------------------------------
    @property
    def has_work(self) -> bool:
        """Whether there is anything left to do or to wait for."""
        roster = self._roster
        return bool(
            roster.running or roster.waiting or roster.parked or roster.deferred or self._life.inflight
        )

    @property
    def num_waiting(self) -> int:
        return len(self._roster.waiting)

    @property
    def num_running(self) -> int:
        return len(self._roster.running)

    def stats(self) -> dict[str, float]:
        """Counters for metrics; ``prefix_*`` and ``preemptions`` only grow."""
        life, roster, committer = self._life, self._roster, self._committer
        return {
            "running": len(roster.running),
            "waiting": len(roster.waiting),
            "partial": len(roster.partial),
            "parked": len(roster.parked),
            "deferred": len(roster.deferred),
            "oldest_waiting_s": self._oldest_age(roster.waiting),
            "oldest_running_s": self._oldest_age(roster.running),
            "preemptions": life.num_preemptions,
            "steps": self._step,
            "prefix_requests": life.num_prefix_requests,
            "prefix_query_tokens": life.num_prefix_queries,
            "prefix_hit_tokens": life.num_prefix_hits,
            "prefix_walks": self.manager.num_walks,
            "prefix_walks_reused": self.manager.memo.num_reused,
            "draft_tokens": committer.num_drafts_verified,
            "accepted_draft_tokens": committer.num_drafts_accepted,
            "integrity_faults": self._num_integrity_faults,
            **self.manager.stats(),
        }

    def _oldest_age(self, seqs: Iterable[Sequence]) -> float:
        """Seconds since the first of them arrived; 0 when there are none."""
        arrival = min((seq.arrival_time for seq in seqs), default=None)
        return 0.0 if arrival is None else max(0.0, self._clock() - arrival)

    def clear_prefix_cache(self) -> None:
        """Forget every cached prefix; running sequences are not disturbed."""
        self.manager.clear_cache()

    def check_integrity(self, repair: bool = False) -> list[str]:
        """Faults of the books over rows and blocks, in words; ``repair`` rebuilds what is wrong.

        Cheap enough for idle moments, not for every step. Faults are counted in ``stats()``.
        """
        faults = self._roster.check_integrity(repair)
        faults += self.manager.check_integrity(self._roster.holders(), repair)
        self._num_integrity_faults += len(faults)
        return faults
