"""What happens to a step's ids: append, stop, publish, and say what is new in one message."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from atom.core import BatchOutput, ScheduledBatch, Sequence, TokenLogprobs
from atom.model_engine.messages import Logprobs, RequestEvent, StepOutput
from atom.model_engine.scheduling.block_manager import BlockManager
from atom.model_engine.scheduling.lifecycle import Lifecycle


@dataclass(slots=True)
class StepResult:
    """Every delta of one step in parallel lists: no object a sequence in the common case.

    ``token_ids`` are concatenated; ``counts`` says how many each sequence got (None: one each). ``events``
    tell what ids cannot: first output, end, log-probabilities; ``event.index`` points into ``seqs``.
    """

    seqs: list[Sequence]
    token_ids: list[int]
    counts: list[int] | None = None
    events: list[RequestEvent] = field(default_factory=list)
    id_bytes: bytes | None = None  # int64 ids of ``seqs`` where already packed

    def to_message(self) -> StepOutput:
        ids = self.id_bytes
        return StepOutput(
            ids=pack_ids(self.seqs) if ids is None else ids,
            token_ids=array("i", self.token_ids).tobytes(),
            counts=b"" if self.counts is None else array("i", self.counts).tobytes(),
            events=self.events,
        )

    @classmethod
    def of_ended(cls, seqs: list[Sequence]) -> "StepResult":
        """The end of sequences that left outside of a step (``Scheduler.take_rejected``)."""
        events = [RequestEvent(index, seq.leave_reason) for index, seq in enumerate(seqs)]
        return cls(seqs, [], [0] * len(seqs), events)


def pack_ids(seqs: list[Sequence]) -> bytes:
    return array("q", [seq.id for seq in seqs]).tobytes()


def _pack(entries: list[TokenLogprobs] | None) -> list[Logprobs] | None:
    if entries is None:
        return None
    return [Logprobs(e.token_id, e.logprob, e.rank, e.top_ids, e.top_logprobs) for e in entries]


class Committer:
    """Applies step outputs in the order in which the steps were scheduled."""

    def __init__(self, manager: BlockManager, lifecycle: Lifecycle, eos_ids: frozenset[int]):
        self._manager = manager
        self._lifecycle = lifecycle
        self._eos_ids = eos_ids
        self._packed: tuple[list[Sequence], bytes] = ([], b"")  # ids of the last decode set
        self.num_drafts_verified = 0
        self.num_drafts_accepted = 0

    def commit(
        self, batch: ScheduledBatch, output: BatchOutput, tell: Callable[[StepResult], object]
    ) -> StepResult:
        """``tell`` gets the result once it is known: behind a prompt the books over hundreds of blocks come later."""
        if batch.num_prefill_seqs or output.errors or output.logprobs or output.prompt_logprobs:
            return self._commit_any(batch, output, tell)
        if output.accepted is not None:
            result = self._commit_verify(batch, output.accepted)
        elif batch.num_tokens != len(batch.seqs):
            return self._commit_any(batch, output, tell)
        else:
            result = self._commit_decode(batch, output.token_ids)
        tell(result)
        return result

    def _commit_decode(self, batch: ScheduledBatch, token_ids: list[int]) -> StepResult:
        """Every live row got exactly one id. The loop is the hot one of the host: integers only."""
        seqs = batch.seqs
        due = []  # a stop id, a full block, or the longest length
        num_lost = 0
        for seq, epoch, token in zip(seqs, batch.epochs, token_ids, strict=True):
            if seq.epoch != epoch:
                num_lost += 1
                continue
            seq.token_ids.append(token)
            seq.num_computed = computed = seq.num_computed + 1
            if computed >= seq.commit_check or token in seq.stop_ids:
                due.append(seq)
        if num_lost:
            seqs, token_ids, late = self._without_zombies(batch, token_ids)
            result = StepResult(seqs, token_ids)
            for seq in late:
                self._end_if_due(seq, result)
        else:
            result = StepResult(seqs, token_ids, id_bytes=self._pack_ids(seqs))
        commit = self._manager.commit
        for seq in due:
            if not self._end_if_due(seq, result):
                commit(seq)
        return result

    def _end_if_due(self, seq: Sequence, result: StepResult) -> bool:
        """End ``seq``, one of ``result.seqs``, if its last id or its length says so."""
        tokens = seq.token_ids
        if len(tokens) < seq.max_len and tokens[-1] not in seq.stop_ids:
            return False
        reason = self._stop_reason(seq, tokens[-1], len(tokens))
        self._lifecycle.finish(seq, reason)
        result.events.append(RequestEvent(result.seqs.index(seq), reason))
        return True

    def _pack_ids(self, seqs: list[Sequence]) -> bytes:
        """The ids of a decode set, packed once while the set stays."""
        if self._packed[0] is not seqs:
            self._packed = (seqs, pack_ids(seqs))
        return self._packed[1]

    def _without_zombies(
        self, batch: ScheduledBatch, token_ids: list[int]
    ) -> tuple[list[Sequence], list[int], list[Sequence]]:
        """Drop rows whose sequence ended; take the last id of those that were preempted meanwhile."""
        seqs, ids, late = [], [], []
        for seq, epoch, token in zip(batch.seqs, batch.epochs, token_ids, strict=True):
            if seq.epoch != epoch:
                if not self._takes_late(seq):
                    continue
                seq.token_ids.append(token)
                late.append(seq)
            seqs.append(seq)
            ids.append(token)
        return seqs, ids, late

    @staticmethod
    def _takes_late(seq: Sequence) -> bool:
        """Whether ids of a row that ``seq`` has lost are still its own: it was preempted, not ended."""
        if seq.is_finished or not seq.num_inflight_samples:
            return False
        seq.num_inflight_samples -= 1
        return True

    def _commit_verify(self, batch: ScheduledBatch, accepted: list[list[int]]) -> StepResult:
        """A decode step with drafts: row i keeps ``accepted[i]``, at least one id."""
        seqs: list[Sequence] = []
        token_ids: list[int] = []
        counts: list[int] = []
        due: list[Sequence] = []
        ends: list[tuple[int, str]] = []
        num_kept = 0
        rows = zip(batch.seqs, batch.epochs, accepted, batch.num_scheduled, strict=True)
        for seq, epoch, new_ids, num_scheduled in rows:
            count = len(new_ids)
            if seq.epoch == epoch:
                seq.num_computed = computed = seq.num_computed + count
                seq.num_scheduled -= num_scheduled - count
                num_kept += count
                if computed >= seq.commit_check:
                    due.append(seq)
            elif not self._takes_late(seq):
                continue
            tokens = seq.token_ids
            if len(tokens) + count >= seq.max_len or not seq.stop_ids.isdisjoint(new_ids):
                new_ids, reason = self._append(seq, new_ids)
                if reason:
                    ends.append((len(seqs), reason))
            else:
                tokens.extend(new_ids)
            seqs.append(seq)
            token_ids += new_ids
            counts.append(len(new_ids))
        self.num_drafts_verified += batch.num_tokens - len(batch.seqs)
        self.num_drafts_accepted += max(0, num_kept - len(seqs))
        for index, reason in ends:
            self._lifecycle.finish(seqs[index], reason)
        for seq in due:
            if not seq.is_finished:
                self._manager.commit(seq)
        if len(seqs) == len(batch.seqs):
            seqs = batch.seqs
        events = [RequestEvent(index, reason) for index, reason in ends]
        return StepResult(seqs, token_ids, counts, events, self._pack_ids(seqs))

    def _commit_any(
        self, batch: ScheduledBatch, output: BatchOutput, tell: Callable[[StepResult], object]
    ) -> StepResult:
        result = StepResult([], [], counts := [])
        errors = output.errors or {}
        ends: list[tuple[Sequence, str, bool]] = []  # with the reason, and whether the last step succeeded
        due: list[Sequence] = []
        for index, seq in enumerate(batch.seqs):
            is_live = seq.epoch == batch.epochs[index]
            if not is_live and not (batch.samples[index] and self._takes_late(seq)):
                continue
            new_ids = self._new_ids(batch, output, index)
            if is_live:
                self._advance(batch, index, len(new_ids))
            is_first = not seq.num_output_tokens
            if is_first and output.prompt_logprobs and index in output.prompt_logprobs:
                seq.prompt_logprobs += output.prompt_logprobs[index]
            reason = f"error: {errors[index]}" if index in errors else ""
            if reason:
                new_ids = []
            else:
                new_ids, reason = self._append(seq, new_ids)
            if reason:
                ends.append((seq, reason, index not in errors))
            elif is_live and (index < batch.num_prefill_seqs or seq.num_computed >= seq.commit_check):
                due.append(seq)
            if not new_ids and not reason:
                continue
            self._add_event(result, output, index, seq, len(new_ids), is_first, reason)
            result.seqs.append(seq)
            result.token_ids += new_ids
            counts.append(len(new_ids))
        if counts.count(1) == len(counts):
            result.counts = None
        tell(result)
        for seq, reason, is_valid in ends:
            self._lifecycle.finish(seq, reason, is_valid=is_valid)
        for seq in due:
            self._manager.commit(seq)
        return result

    def _new_ids(self, batch: ScheduledBatch, output: BatchOutput, index: int) -> list[int]:
        if not batch.samples[index]:
            return []
        return [output.token_ids[index]] if output.accepted is None else output.accepted[index]

    def _advance(self, batch: ScheduledBatch, index: int, num_new: int) -> None:
        """Count the positions whose KV is right, and take back what was scheduled for rejected drafts."""
        seq, num_scheduled = batch.seqs[index], batch.num_scheduled[index]
        if index < batch.num_prefill_seqs:
            seq.num_computed += num_scheduled
            return
        seq.num_computed += num_new
        seq.num_scheduled -= num_scheduled - num_new
        self.num_drafts_verified += num_scheduled - 1
        self.num_drafts_accepted += max(0, num_new - 1)

    def _append(self, seq: Sequence, new_ids: list[int]) -> tuple[list[int], str]:
        """Append ids up to the first that ends the sequence. What is kept, and the reason of an end."""
        length = len(seq.token_ids)
        for count, token in enumerate(new_ids, 1):
            reason = self._stop_reason(seq, token, length + count)
            if reason:
                new_ids = new_ids[:count]
                break
        else:
            reason = ""
        seq.token_ids.extend(new_ids)
        return new_ids, reason

    def _stop_reason(self, seq: Sequence, token: int, length: int) -> str:
        """Why ``token``, which made the sequence ``length`` tokens long, ends it; "" when it does not."""
        if token in seq.stop_ids:
            is_eos = token in self._eos_ids and not seq.params.ignore_eos
            return "eos" if is_eos else f"stop_{token}"
        return "max_tokens" if length >= seq.max_len else ""

    def _add_event(
        self,
        result: StepResult,
        output: BatchOutput,
        index: int,
        seq: Sequence,
        num_new: int,
        is_first: bool,
        reason: str,
    ) -> None:
        logprobs = output.logprobs.get(index) if output.logprobs else None
        if not is_first and not reason and logprobs is None:
            return
        event = RequestEvent(len(result.seqs), reason)
        if logprobs is not None:
            event.logprobs = _pack(logprobs[:num_new])
        if is_first:
            event.num_cached_tokens = seq.num_cached_tokens
            event.first_scheduled_time = seq.first_scheduled_time
            is_whole = seq.prompt_logprobs or seq.num_prompt_tokens == 1  # whose only token has no row
            if seq.params.prompt_logprobs is not None and is_whole:
                event.prompt_logprobs = _pack(seq.prompt_logprobs)
                seq.prompt_logprobs = []
        result.events.append(event)
