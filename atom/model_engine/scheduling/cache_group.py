"""Cache groups: layers that share one block table, each with its own rule of what a sequence must keep.

A new kind (recurrent state, compressed rings) subclasses :class:`CacheGroup`; the scheduler knows no other
difference between kinds. Positions are token counts; a table column is ``position // block_size``.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from typing import Any

from atom.core import CacheGroupSpec, GroupKind, Sequence
from atom.errors import ConfigError
from atom.model_engine.scheduling.block_pool import NO_BLOCK, BlockPool, ChangeLog
from atom.model_engine.scheduling.prefix_cache import PrefixQuery

Patch = tuple[int, int, int]  # (row, column, block)
UNBOUNDED = 2**62


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class CacheGroup(ABC):
    """One group. ``seq.tables[self.index]`` is this group's and only this group changes it.

    Order of calls for an admission: ``resumable_hit`` (again and again, until all groups agree),
    ``hit_table``, ``num_needed`` (compared with ``num_free``), ``admit``. Then for each step ``cut_chunk``
    (prefill only), ``can_reserve``, ``reserve``; after the step ``publish`` and ``release``; ``free`` once.
    """

    kind: GroupKind

    def __init__(self, index: int, block_size: int):
        self.index = index
        self.block_size = block_size

    def attach(self, changes: ChangeLog) -> None:  # noqa: B027 - optional
        """Record in ``changes`` every hash whose answer in ``resumable_hit`` changes."""

    # -- admission ------------------------------------------------------------------------------------
    @abstractmethod
    def resumable_hit(self, query: PrefixQuery, limit: int) -> int:
        """The longest prefix of at most ``limit`` tokens after which this group can go on; pure.

        A multiple of the block size. Must not grow when ``limit`` shrinks.
        """

    @abstractmethod
    def hit_table(self, query: PrefixQuery, hit: int) -> list[int]:
        """The table that a sequence starts with when ``hit`` tokens are taken from the cache; pure."""

    @abstractmethod
    def num_needed(self, table: list[int], num_tokens: int) -> int:
        """Free blocks (or slots) that admitting ``num_tokens`` on top of ``table`` takes."""

    @abstractmethod
    def admit(self, seq: Sequence, table: list[int], num_tokens: int) -> None:
        """Claim ``table``, append it to ``seq.tables`` and take what must be owned from the start."""

    # -- while it runs --------------------------------------------------------------------------------
    def cut_chunk(self, seq: Sequence, start: int, end: int) -> int:
        """A prefill chunk ``[start, end)`` is planned: where it must end at the latest (``start``: not now)."""
        return end

    @abstractmethod
    def can_reserve(self, seq: Sequence, upto: int) -> bool:
        """Whether ``reserve`` would succeed."""

    @abstractmethod
    def reserve(self, seq: Sequence, upto: int, patches: list[Patch] | None) -> int:
        """Append blocks until ``[0, upto)`` is covered; every new column goes into ``patches``, if there are any.

        Returns the positions that the table covers now, at least ``upto``; 0 when there is no room and
        nothing was done.
        """

    def publish(self, seq: Sequence, first: int, last: int) -> None:  # noqa: B027 - optional
        """KV of blocks ``[first, last)`` is complete and ``seq.chain`` holds their hashes."""

    def release(self, seq: Sequence) -> None:  # noqa: B027 - optional
        """Free what no position from ``seq.num_computed`` on reads. Columns keep their places."""

    def unpublish(self, seq: Sequence, first: int) -> None:  # noqa: B027 - optional
        """Blocks from ``first`` on hold tokens that the client never got: no later prompt may hit them.

        ``seq`` may have no table any more (it was preempted).
        """

    @abstractmethod
    def free(self, seq: Sequence) -> None:
        """Give everything back, last column first, so that prefixes outlive suffixes."""

    def step_meta(self) -> Any:
        """Drain what the workers must do for this group before the next step (state copies); None: nothing."""
        return None

    # -- limits and reports ---------------------------------------------------------------------------
    @property
    @abstractmethod
    def num_free(self) -> int:
        """Blocks or slots that could be taken now."""

    @property
    @abstractmethod
    def num_total(self) -> int:
        """Blocks or slots altogether."""

    @property
    def num_indexed(self) -> int:
        """Blocks that a prefix can still hit."""
        return 0

    @property
    def num_cached(self) -> int:
        """Free blocks that a prefix can still hit: the next ones to lose their content."""
        return 0

    @abstractmethod
    def peak(self, num_tokens: int, chunk: int = 1) -> int:
        """The most blocks that a sequence of ``num_tokens``, computed ``chunk`` at a time, holds at once."""

    def num_held(self, seq: Sequence) -> int:
        """Blocks that ``seq`` holds now."""
        table = seq.tables[self.index]
        return len(table) - table.count(NO_BLOCK)

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Tokens of the longest sequence that fits alone."""

    def clear_cache(self) -> None:  # noqa: B027 - optional
        """Forget every prefix."""

    def check_integrity(self, holders: Iterable[Sequence], repair: bool = False) -> list[str]:
        """Faults of the books, given every sequence that owns a table; ``repair`` makes them right again."""
        return []


class PagedGroup(CacheGroup):
    """What groups over a block pool have in common."""

    def __init__(self, index: int, block_size: int, num_blocks: int):
        super().__init__(index, block_size)
        self.pool = BlockPool(num_blocks)

    def attach(self, changes: ChangeLog) -> None:
        self.pool.changes = changes

    def admit(self, seq: Sequence, table: list[int], num_tokens: int) -> None:
        claim = self.pool.claim
        for block in table:
            if block >= 0:
                claim(block)
        seq.tables.append(table)

    def can_reserve(self, seq: Sequence, upto: int) -> bool:
        missing = upto - len(seq.tables[self.index]) * self.block_size
        return missing <= 0 or missing <= self.pool.num_free * self.block_size

    def reserve(self, seq: Sequence, upto: int, patches: list[Patch] | None) -> int:
        table, size, pool = seq.tables[self.index], self.block_size, self.pool
        column = len(table)
        covered = column * size
        if upto - covered > size and upto - covered > pool.num_free * size:
            return 0
        if upto <= covered:
            return covered
        missing = ceil_div(upto - covered, size)
        blocks = pool.allocate_many(missing)
        table += blocks
        if patches is not None:
            row = seq.row
            patches += [(row, at, block) for at, block in enumerate(blocks, column)]
        return covered + missing * size if len(blocks) == missing else 0

    def publish(self, seq: Sequence, first: int, last: int) -> None:
        table, hashes, tokens, size = seq.tables[self.index], seq.chain.hashes, seq.token_ids, self.block_size
        publish = self.pool.publish
        for column in range(first, last):
            block = table[column]
            if block >= 0:
                publish(block, hashes[column], tuple(tokens[column * size : (column + 1) * size]))

    def unpublish(self, seq: Sequence, first: int) -> None:
        table, pool = seq.tables[self.index] if seq.tables else [], self.pool
        for column in range(first, len(seq.chain.hashes)):
            block = pool.find(seq.chain.hashes[column])
            if block is None:
                continue
            # Another owner matched these tokens with its own prompt: they are its to keep.
            is_mine = column < len(table) and table[column] == block
            if pool.ref_count(block) <= is_mine:
                pool.unpublish(block)

    def free(self, seq: Sequence) -> None:
        self.pool.free_many(reversed(seq.tables[self.index]))

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    @property
    def num_total(self) -> int:
        return self.pool.num_blocks

    @property
    def num_indexed(self) -> int:
        return self.pool.num_indexed

    @property
    def num_cached(self) -> int:
        return self.pool.num_cached

    def clear_cache(self) -> None:
        self.pool.clear_cache()

    def check_integrity(self, holders: Iterable[Sequence], repair: bool = False) -> list[str]:
        owners = Counter(block for seq in holders for block in seq.tables[self.index] if block >= 0)
        faults = [f"{self.kind} group {self.index}: {fault}" for fault in self.pool.check_integrity(owners)]
        if faults and repair:
            self.pool.rebuild(owners)
        return faults


class FullGroup(PagedGroup):
    """Every position is kept until the sequence leaves. The whole known length is owned from admission on."""

    kind = GroupKind.FULL

    def resumable_hit(self, query: PrefixQuery, limit: int) -> int:
        size = self.block_size
        found = query.found.get(self.index)
        if found is None:
            found = query.found[self.index] = query.walk(self.pool, limit // size)
        return query.num_verified(self.pool, found, 0, min(len(found), limit // size)) * size

    def hit_table(self, query: PrefixQuery, hit: int) -> list[int]:
        return query.found[self.index][: hit // self.block_size] if hit else []

    def num_needed(self, table: list[int], num_tokens: int) -> int:
        fresh = ceil_div(num_tokens, self.block_size) - len(table)
        return fresh + self.pool.num_unreferenced(table)

    def admit(self, seq: Sequence, table: list[int], num_tokens: int) -> None:
        super().admit(seq, table, num_tokens)
        self.reserve(seq, num_tokens, None)

    def peak(self, num_tokens: int, chunk: int = 1) -> int:
        return ceil_div(num_tokens, self.block_size)

    @property
    def capacity(self) -> int:
        return self.pool.num_blocks * self.block_size


class SlidingGroup(PagedGroup):
    """A query sees itself and the ``window - 1`` tokens before it; what no query will see again is released.

    Released blocks that were published stay hittable until they are handed out.
    """

    kind = GroupKind.SLIDING

    def __init__(self, index: int, block_size: int, num_blocks: int, window: int, lookahead: int = 2):
        """``lookahead``: positions past the committed ones that decode steps in flight reserve."""
        super().__init__(index, block_size, num_blocks)
        self.window = window
        self.lookahead = lookahead
        self.num_window_blocks = ceil_div(window - 1, block_size)  # before a block boundary

    def resumable_hit(self, query: PrefixQuery, limit: int) -> int:
        end = limit // self.block_size
        need = self.num_window_blocks
        if need == 0:
            return end * self.block_size
        query.read(end)
        if not self.pool.num_indexed:
            return 0
        hashes, find = query.hashes(end), self.pool.find
        while end > 0:
            first = max(0, end - need)
            found: list[int] = []  # backwards from end - 1
            for column in range(end - 1, first - 1, -1):
                block = find(hashes[column])
                if block is None:
                    break
                found.append(block)
            column = end - len(found)
            if column > first:
                end = column - 1  # nothing that needs the missing block can resume
                continue
            found.reverse()
            good = query.num_verified(self.pool, found, first, len(found))
            if good == len(found):
                query.found[self.index] = found
                break
            end = first + good
        return end * self.block_size

    def hit_table(self, query: PrefixQuery, hit: int) -> list[int]:
        if not hit:
            return []
        found = query.found[self.index] if self.num_window_blocks else []
        return [NO_BLOCK] * (hit // self.block_size - len(found)) + found

    def num_needed(self, table: list[int], num_tokens: int) -> int:
        # Enough to reach decode in the shortest chunks; longer ones take what is free then.
        num_live = len(table) - table.count(NO_BLOCK)
        fresh = min(ceil_div(num_tokens, self.block_size) - len(table), self.peak(num_tokens) - num_live)
        return fresh + self.pool.num_unreferenced(table)

    def cut_chunk(self, seq: Sequence, start: int, end: int) -> int:
        return max(start, min(end, (self._next_column(seq) + self.pool.num_free) * self.block_size))

    def reserve(self, seq: Sequence, upto: int, patches: list[Patch] | None) -> int:
        table = seq.tables[self.index]
        if len(table) <= self._first_needed(seq.num_computed):
            table.extend([NO_BLOCK] * (self._next_column(seq) - len(table)))
        return super().reserve(seq, upto, patches)

    def can_reserve(self, seq: Sequence, upto: int) -> bool:
        return ceil_div(upto, self.block_size) - self._next_column(seq) <= self.pool.num_free

    def _next_column(self, seq: Sequence) -> int:
        """Where the next block goes. An external load may start past the hit: columns that no query will
        see stay empty.
        """
        return max(len(seq.tables[self.index]), self._first_needed(seq.num_computed))

    def release(self, seq: Sequence) -> None:
        table, free = seq.tables[self.index], self.pool.free
        column = min(self._first_needed(seq.num_computed), len(table)) - 1
        while column >= 0 and table[column] >= 0:
            free(table[column])
            table[column] = NO_BLOCK
            column -= 1

    def _first_needed(self, position: int) -> int:
        """The first column that a query at ``position`` or later sees."""
        return max(0, position - self.window + 1) // self.block_size

    def peak(self, num_tokens: int, chunk: int = 1) -> int:
        # Release waits for a full block, so up to a block more than window and step is held.
        span = self.window - 1 + max(chunk, self.lookahead)
        return min(ceil_div(num_tokens, self.block_size), ceil_div(span, self.block_size) + 2)

    @property
    def capacity(self) -> int:
        if self.pool.num_blocks >= self.peak(UNBOUNDED):
            return UNBOUNDED
        return self.pool.num_blocks * self.block_size


def build_groups(
    specs: Iterable[CacheGroupSpec | CacheGroup], block_size: int, lookahead: int = 2
) -> list[CacheGroup]:
    """The groups of a model. A kind without an implementation here is passed as a ready CacheGroup.

    Raises ConfigError for a spec that cannot be served.
    """
    groups: list[CacheGroup] = []
    for index, spec in enumerate(specs):
        if isinstance(spec, CacheGroup):
            group = spec
        elif spec.num_blocks < 1:
            raise ConfigError(f"num_blocks of cache group {index} must be at least 1, got {spec.num_blocks}")
        elif spec.kind == GroupKind.FULL:
            group = FullGroup(index, block_size, spec.num_blocks)
        elif spec.kind == GroupKind.SLIDING:
            if spec.window is None or spec.window < 1:
                raise ConfigError(f"window of cache group {index} must be at least 1, got {spec.window}")
            group = SlidingGroup(index, block_size, spec.num_blocks, spec.window, lookahead)
        else:
            raise ConfigError(
                f"cache group {index} has kind {spec.kind}, which needs a group object of its own"
            )
        if group.index != index:
            raise ConfigError(f"cache group {index} was built with index {group.index}")
        groups.append(group)
    if not groups:
        raise ConfigError("a model needs at least one cache group, got none")
    return groups
