"""Every change of a sequence's state in one place, so that row, blocks, queues and connector agree."""

from atom.core import ScheduledBatch, Sequence, SequenceStatus
from atom.kv_transfer.connector import KVConnector
from atom.model_engine.scheduling.block_manager import BlockManager
from atom.model_engine.scheduling.prefix_cache import PrefixHit
from atom.model_engine.scheduling.roster import Roster


class Lifecycle:
    """Admission, parking, preemption and end of sequences. Decides nothing."""

    def __init__(self, manager: BlockManager, roster: Roster, connector: KVConnector, num_drafts: int):
        self.manager = manager
        self.roster = roster
        self.connector = connector
        self.num_drafts = num_drafts
        self.inflight: list[ScheduledBatch] = []  # scheduled, not committed yet; oldest first
        self.live: dict[int, Sequence] = {}  # every sequence that has not ended
        self.rowless: set[int] = set()  # admitted, but no step has carried their row's parameters yet
        self.ended: list[Sequence] = []  # ended outside of a commit; the engine core collects them
        self.no_external: set[int] = set()  # an external load failed: compute instead
        self.num_preemptions = 0
        self.num_prefix_requests = 0  # first admissions
        self.num_prefix_queries = 0  # tokens that first admissions looked up ...
        self.num_prefix_hits = 0  # ... and found

    def admit(self, seq: Sequence, hit: PrefixHit, num_external: int, is_async: bool) -> None:
        """Give ``seq`` its row and blocks; it runs, or parks while ``num_external`` tokens are loaded."""
        roster = self.roster
        roster.waiting.remove(seq)
        roster.take_row(seq)
        self.rowless.add(seq.id)
        seq.prefill_end = len(seq.token_ids)
        self.manager.allocate(seq, hit)
        start = hit.num_tokens + num_external
        seq.num_computed = seq.num_scheduled = start
        if num_external and not self.manager.reserve_external(seq, start):
            num_external, is_async = 0, False
            seq.num_computed = seq.num_scheduled = hit.num_tokens
        if not seq.num_preemptions and not seq.num_output_tokens:
            seq.num_cached_tokens = hit.num_tokens + num_external
            self.num_prefix_requests += 1
            self.num_prefix_queries += len(seq.token_ids)
            self.num_prefix_hits += hit.num_tokens
        if is_async:
            seq.status = SequenceStatus.WAITING_FOR_REMOTE_KVS
            roster.parked[seq.id] = seq
        else:
            roster.run(seq)
        if num_external:
            self.connector.update_state_after_alloc(seq, num_external)

    def poll_connector(self) -> None:
        """Resume parked sequences whose load ended, free blocks that nothing reads any more."""
        for seq_id, succeeded in self.connector.poll_loaded():
            seq = self.roster.parked.get(seq_id)
            if seq is None:
                continue  # it ended while it was parked
            if succeeded:
                del self.roster.parked[seq_id]
                self.roster.run(seq)
            else:
                self.no_external.add(seq_id)
                self._requeue(seq)
        for seq_id in self.connector.poll_released():
            seq = self.roster.deferred.pop(seq_id, None)
            if seq is not None:
                self.manager.free(seq)

    def preempt(self, seq: Sequence) -> None:
        """Take row and blocks away; ``seq`` is computed again when it comes to the front of ``waiting``."""
        seq.num_inflight_samples = sum(
            samples
            for batch in self.inflight
            for other, epoch, samples in zip(batch.seqs, batch.epochs, batch.samples, strict=True)
            if other is seq and epoch == seq.epoch
        )
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self._publish_computed(seq)
        self._requeue(seq)

    def _requeue(self, seq: Sequence) -> None:
        self.roster.drop(seq)
        self._strip(seq)
        self.manager.free(seq)
        if not seq.num_output_tokens:
            seq.prompt_logprobs.clear()  # its prompt is computed again, from the start
        seq.status = SequenceStatus.WAITING
        self.roster.waiting.append_front(seq)

    def finish(self, seq: Sequence, reason: str, *, keep_tokens: int = -1, is_valid: bool = True) -> None:
        """End ``seq`` now. Its blocks are free at once: whatever is still in flight runs before the next step.

        Args:
            keep_tokens: KV of tokens past this many leaves the prefix cache; -1 keeps all.
            is_valid: False: the last step failed, so nothing more of it is published.
        """
        had_tables = bool(seq.tables)
        if had_tables:
            seq.num_computed = min(seq.num_computed, len(seq.token_ids) - 1)
            if is_valid and seq.id not in self.roster.parked:
                self._publish_computed(seq)
        if keep_tokens >= 0:
            self.manager.unpublish(seq, keep_tokens)
        self.roster.drop(seq)
        self._strip(seq)
        seq.status = SequenceStatus.ABORTED if reason == "aborted" else SequenceStatus.FINISHED
        seq.leave_reason = reason
        self.manager.memo.forget(seq.id)
        self.no_external.discard(seq.id)
        self.live.pop(seq.id, None)
        if self.connector.request_finished(seq) and had_tables:
            self.roster.deferred[seq.id] = seq
        elif had_tables:
            self.manager.free(seq)

    def reject(self, seq: Sequence, reason: str) -> None:
        """End a sequence that never got into a queue."""
        seq.status = SequenceStatus.FINISHED
        seq.leave_reason = reason
        self.ended.append(seq)

    def _strip(self, seq: Sequence) -> None:
        """The row is gone: so is everything that counts positions on it."""
        self.roster.leave_row(seq)
        self.rowless.discard(seq.id)
        seq.num_computed = seq.num_scheduled = 0
        seq.decode_limit = 0
        seq.num_drafts = self.num_drafts

    def _publish_computed(self, seq: Sequence) -> None:
        num_blocks = seq.num_computed // self.manager.block_size
        if self.manager.is_caching and num_blocks > seq.num_published:
            self.manager.publish(seq, num_blocks)
