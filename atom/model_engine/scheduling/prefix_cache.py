"""Looking a prompt up in the prefix indexes: the walk, its token comparison, and its memo.

A walk is a chain of hash lookups. By default (``ATOM_PREFIX_FAST_WALK``) it runs in rounds of 1, 16, 64, ...
blocks at C speed and compares tokens on the last hit block alone; a request with a cache salt, or the switch
set to 0, compares every block.
"""

from array import array
from collections.abc import Sequence as Ids
from dataclasses import dataclass

from atom.core import Sequence
from atom.model_engine.scheduling.block_pool import BlockPool, ChangeLog
from atom.model_engine.scheduling.prefix_hash import HashChain

SECOND_ROUND = 16
ROUND_GROWTH = 4


class PrefixQuery:
    """One lookup of one sequence's known ids in the groups' indexes.

    ``found`` is the groups' scratch space: what each has found so far, by group index. ``num_read`` is how
    many leading hashes any answer depends on.
    """

    __slots__ = ("chain", "token_ids", "compare_all", "found", "num_read")

    def __init__(self, chain: HashChain, token_ids: Ids[int], compare_all: bool):
        self.chain = chain
        self.token_ids = token_ids
        self.compare_all = compare_all
        self.found: dict[int, list[int]] = {}
        self.num_read = 0

    def read(self, num_blocks: int) -> None:
        """The answer depends on the first ``num_blocks`` hashes."""
        self.num_read = max(self.num_read, num_blocks)

    def hashes(self, num_blocks: int) -> "array[int]":
        """At least the first ``num_blocks`` hashes, computed where they are not yet known."""
        self.read(num_blocks)
        return self.chain.extend(self.token_ids, num_blocks)

    def walk(self, pool: BlockPool, limit: int) -> list[int]:
        """Blocks of the longest prefix in ``pool``, at most ``limit``."""
        found = self._walk_each(pool, limit) if self.compare_all else self._walk_fast(pool, limit)
        self.read(min(len(found) + 1, limit))  # up to the first miss
        return found

    def _walk_fast(self, pool: BlockPool, limit: int) -> list[int]:
        extend, token_ids = self.chain.extend, self.token_ids
        found: list[int] = []
        start, size = 0, 1
        while start < limit:
            stop = min(start + size, limit)
            blocks = list(map(pool.find, extend(token_ids, stop)[start:stop]))
            if None in blocks:
                found += blocks[: blocks.index(None)]
                break
            found += blocks
            start, size = stop, SECOND_ROUND if size == 1 else size * ROUND_GROWTH
        return found

    def _walk_each(self, pool: BlockPool, limit: int) -> list[int]:
        found: list[int] = []
        for column in range(limit):
            block = pool.find(self.chain.extend(self.token_ids, column + 1)[column])
            if block is None or not self._is_equal(pool, block, column):
                break
            found.append(block)
        return found

    def num_verified(self, pool: BlockPool, found: list[int], first: int, count: int) -> int:
        """How many of ``found[:count]``, which stand for blocks ``first``..., hold this sequence's tokens.

        Looks at the last one; at all of them if that differs or every block is to be compared.
        """
        if not count:
            return 0
        if not self.compare_all and self._is_equal(pool, found[count - 1], first + count - 1):
            return count
        for offset in range(count):
            if not self._is_equal(pool, found[offset], first + offset):
                return offset
        return count

    def _is_equal(self, pool: BlockPool, block: int, column: int) -> bool:
        size = self.chain.block_size
        return pool.tokens(block) == tuple(self.token_ids[column * size : (column + 1) * size])


@dataclass(slots=True)
class PrefixHit:
    """What the cache holds of one sequence: the same length in every group, and the tables to start with."""

    num_tokens: int
    tables: list[list[int]]
    num_read: int  # leading hashes that the answer depends on
    position: int  # of the change log when it was found


class WalkMemo:
    """Walks of waiting sequences, kept from tick to tick while nothing that they read has changed."""

    def __init__(self, changes: ChangeLog):
        self.changes = changes
        self.num_reused = 0
        self._entries: dict[int, tuple[int, int, PrefixHit]] = {}
        self._reads: dict[int, frozenset[int]] = {}

    def get(self, seq: Sequence) -> PrefixHit | None:
        entry = self._entries.get(seq.id)
        if entry is None:
            return None
        num_tokens, seed, hit = entry
        if num_tokens != len(seq.token_ids) or seed != seq.chain.seed or not self._is_current(seq, hit):
            self.forget(seq.id)
            return None
        self.num_reused += 1
        return hit

    def put(self, seq: Sequence, hit: PrefixHit) -> None:
        self._entries[seq.id] = (len(seq.token_ids), seq.chain.seed, hit)
        self._reads.pop(seq.id, None)

    def forget(self, seq_id: int) -> None:
        self._entries.pop(seq_id, None)
        self._reads.pop(seq_id, None)

    def _is_current(self, seq: Sequence, hit: PrefixHit) -> bool:
        if hit.position == self.changes.position:
            return True
        changed = self.changes.since(hit.position)
        if changed is None:
            return False
        reads = self._reads.get(seq.id)
        if reads is None:
            hashes = seq.chain.extend(seq.token_ids, hit.num_read)
            reads = self._reads[seq.id] = frozenset(hashes[: hit.num_read])
        if not reads.isdisjoint(changed):
            return False
        hit.position = self.changes.position
        return True
