"""Admission to the cache over all groups: prefix hits, room, reservation, publication.

The scheduler decides who runs; this module knows what that costs in blocks. It mutates a sequence's
``tables``, ``num_published``, ``decode_limit`` and ``commit_check`` only.
"""

from collections.abc import Callable, Iterable
from itertools import repeat

from atom.core import Sequence
from atom.model_engine.scheduling.block_pool import NO_BLOCK, ChangeLog
from atom.model_engine.scheduling.cache_group import UNBOUNDED, CacheGroup, Patch
from atom.model_engine.scheduling.prefix_cache import PrefixHit, PrefixQuery, WalkMemo
from atom.model_engine.scheduling.prefix_hash import HashChain
from atom.utils import envs

PUBLISH_STRIDE = 64  # tokens
OnPublish = Callable[[Sequence, CacheGroup, int, int], None]  # blocks [first, last) of the sequence


class BlockManager:
    """Blocks of all cache groups. Single-threaded, like everything in the engine's step."""

    def __init__(self, groups: list[CacheGroup], block_size: int, *, is_caching: bool = True, seed: int = 0):
        self.groups = groups
        self.block_size = block_size
        self.is_caching = is_caching
        self.seed = seed
        # Decode publishes in strides: hashing four blocks at once costs half as much as one by one.
        self._releasing = [g for g in groups if type(g).release is not CacheGroup.release]
        self._stride = block_size if self._releasing else max(block_size, PUBLISH_STRIDE)
        self.changes = ChangeLog()
        for group in groups:
            group.attach(self.changes)
        self.memo = WalkMemo(self.changes)
        self.compare_all = not envs.ATOM_PREFIX_FAST_WALK
        self.use_memo = bool(envs.ATOM_PREFIX_WALK_MEMO)
        self.on_publish: list[OnPublish] = []
        self.num_walks = 0

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequence that every group can hold alone."""
        return min(group.capacity for group in self.groups)

    # -- prefix lookup --------------------------------------------------------------------------------
    def prepare(self, seq: Sequence) -> None:
        """Give a new sequence its hash chain, unless the front end shipped one that fits."""
        seed = seq.hash_seed or self.seed
        chain = seq.chain
        if not self.is_caching:
            seq.chain = None
        elif chain is None or chain.block_size != self.block_size or chain.seed != seed:
            seq.chain = HashChain(self.block_size, seed)

    def probe(self, seq: Sequence, *, memoized: bool = False) -> PrefixHit:
        """The prefix of ``seq`` that every group can resume from.

        ``memoized``: an earlier walk is reused while no hash that it read has changed. Without it only one
        since which no hash at all has changed.
        """
        if self.use_memo and self.is_caching:
            hit = self.memo.get(seq)
            if hit is not None and (memoized or hit.position == self.changes.position):
                return hit
            hit = self._walk(seq)
            self.memo.put(seq, hit)
            return hit
        return self._walk(seq)

    def _walk(self, seq: Sequence) -> PrefixHit:
        # The last block is always computed: the step needs at least one token to sample from.
        limit = (len(seq.token_ids) - 1) // self.block_size * self.block_size
        wants_prompt = seq.params.prompt_logprobs is not None and not seq.num_output_tokens
        if not self.is_caching or wants_prompt or limit <= 0:
            return PrefixHit(0, [[] for _ in self.groups], 0, self.changes.position)
        self.num_walks += 1
        query = PrefixQuery(seq.chain, seq.token_ids, self.compare_all or seq.cache_salted)
        hit = limit
        while True:
            agreed = hit
            for group in self.groups:
                hit = min(hit, group.resumable_hit(query, hit))
            if hit == agreed or hit == 0:
                break
        tables = [group.hit_table(query, hit) for group in self.groups]
        return PrefixHit(hit, tables, query.num_read, self.changes.position)

    # -- admission ------------------------------------------------------------------------------------
    def fits(self, seq: Sequence, hit: PrefixHit, room: list[int] | None = None) -> bool:
        """Whether every group can admit ``seq`` now and still has ``room[g]`` blocks after it."""
        num_tokens = len(seq.token_ids)
        for index, group in enumerate(self.groups):
            needed = group.num_needed(hit.tables[index], num_tokens)
            if needed + (room[index] if room else 0) > group.num_free:
                return False
        return True

    def can_allocate(self, seq: Sequence, *, memoized: bool = False) -> int:
        """Blocks of ``seq`` that the cache holds, or -1 when it does not fit now. The fit is asked anew each time,
        ``memoized`` the walk is not (see ``probe``).
        """
        hit = self.probe(seq, memoized=memoized)
        return hit.num_tokens // self.block_size if self.fits(seq, hit) else -1

    def allocate(self, seq: Sequence, hit: PrefixHit) -> None:
        """Claim the hit and take the blocks that ``seq`` owns from the start. ``fits`` must hold."""
        if hit.position != self.changes.position:
            hit = self._walk(seq)
        self.memo.forget(seq.id)
        num_tokens = len(seq.token_ids)
        for group, table in zip(self.groups, hit.tables, strict=True):
            group.admit(seq, table, num_tokens)
        seq.num_published = hit.num_tokens // self.block_size

    def reserve_external(self, seq: Sequence, start: int) -> bool:
        """Blocks for positions below ``start``, which an external store fills. False: no room, nothing done."""
        if not self.can_append(seq, start):
            return False
        for group in self.groups:
            group.release(seq)  # what only the local hit would have needed
        return self.may_append(seq, start, None) > 0

    # -- growth ---------------------------------------------------------------------------------------
    def can_append(self, seq: Sequence, upto: int) -> bool:
        return all(group.can_reserve(seq, upto) for group in self.groups)

    def may_append(self, seq: Sequence, upto: int, patches: list[list[Patch]] | None) -> int:
        """Cover ``[0, upto)`` in every group; ``patches[g]`` gets the new columns.

        Returns the positions that every table covers then; 0 when there is no room and nothing was done.
        """
        if len(self.groups) == 1:
            return self.groups[0].reserve(seq, upto, patches and patches[0])
        if not self.can_append(seq, upto):
            return 0
        limit = UNBOUNDED
        for group in self.groups:
            covered = group.reserve(seq, upto, patches and patches[group.index])
            if covered < limit:
                limit = covered
        return limit

    def cut_chunk(self, seq: Sequence, start: int, end: int) -> int:
        for group in self.groups:
            end = group.cut_chunk(seq, start, end)
        return end

    def table_patches(self, seq: Sequence, patches: list[list[Patch]]) -> None:
        """Every column of ``seq``, for the row that it just got."""
        row = seq.row
        for table, new in zip(seq.tables, patches, strict=True):
            patch = zip(repeat(row), range(len(table)), table, strict=False)
            new.extend(patch if NO_BLOCK not in table else [p for p in patch if p[2] >= 0])

    def growth(self, seq: Sequence, num_tokens: int, chunk: int = 1) -> list[int]:
        """Per group, the blocks that ``seq`` may still take until it has ``num_tokens``.

        ``chunk``: the longest step that it may take on the way. A sequence without tables is counted as if
        it had just been admitted.
        """
        counts = []
        for group in self.groups:
            held = group.num_held(seq) if seq.tables else group.peak(len(seq.token_ids))
            counts.append(max(0, group.peak(num_tokens, chunk) - held))
        return counts

    # -- after a step ---------------------------------------------------------------------------------
    def commit(self, seq: Sequence) -> None:
        """``seq.num_computed`` grew: publish filled blocks, release what left the window, set the next look."""
        size = self.block_size
        filled = seq.num_computed // size
        if self.is_caching and filled > seq.num_published:
            self.publish(seq, filled)
        for group in self._releasing:
            group.release(seq)
        check = seq.num_computed + self._stride
        check -= check % size
        seq.commit_check = check if check < seq.max_len else seq.max_len - 1

    def publish(self, seq: Sequence, num_blocks: int) -> None:
        """Let later prompts hit the first ``num_blocks`` blocks, whose KV is complete."""
        first = seq.num_published
        seq.chain.extend(seq.token_ids, num_blocks)
        for group in self.groups:
            group.publish(seq, first, num_blocks)
        seq.num_published = num_blocks
        if self.on_publish:
            for tell in self.on_publish:
                for group in self.groups:
                    tell(seq, group, first, num_blocks)

    def unpublish(self, seq: Sequence, keep_tokens: int) -> None:
        """Take blocks that hold tokens past the first ``keep_tokens`` out of the prefix cache."""
        if self.is_caching:
            for group in self.groups:
                group.unpublish(seq, keep_tokens // self.block_size)

    def free(self, seq: Sequence) -> None:
        for group in self.groups:
            group.free(seq)
        seq.tables = []
        seq.num_published = 0

    # -- reports --------------------------------------------------------------------------------------
    def clear_cache(self) -> None:
        for group in self.groups:
            group.clear_cache()
        self.changes.record_clear()

    def stats(self) -> dict[str, int]:
        """Blocks used, free, free but cached, total and indexed: ``kv_blocks_used`` over all groups, ``..._g0`` of
        group 0."""
        out = {f"kv_blocks_{name}": 0 for name in ("used", "free", "cached", "total", "indexed")}
        for group in self.groups:
            free, total = group.num_free, group.num_total
            counts = {"used": total - free, "free": free, "cached": group.num_cached}
            counts |= {"total": total, "indexed": group.num_indexed}
            for name, count in counts.items():
                out[f"kv_blocks_{name}"] += count
                out[f"kv_blocks_{name}_g{group.index}"] = count
        return out

    def check_integrity(self, holders: Iterable[Sequence], repair: bool = False) -> list[str]:
        """Faults of every group's books, given all sequences that own tables."""
        holders = list(holders)
        return [fault for group in self.groups for fault in group.check_integrity(holders, repair)]
