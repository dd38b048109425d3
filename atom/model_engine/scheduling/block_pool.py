"""Who owns which cache block, and which blocks still hold a known prefix. Plain integers, no tensors."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping

NO_BLOCK = -1  # a table column without a block: outside the sliding window, or not loaded
MAX_LOGGED_CHANGES = 8192


class ChangeLog:
    """Hashes whose place in a prefix index changed, in order; lets a memoised walk know that it still holds.

    ``position`` counts every change ever made. Only the last ``MAX_LOGGED_CHANGES`` are sure to be kept.
    """

    def __init__(self) -> None:
        self._entries: list[int] = []
        self._start = 0  # the position of _entries[0]

    @property
    def position(self) -> int:
        return self._start + len(self._entries)

    def record(self, block_hash: int) -> None:
        self._entries.append(block_hash)
        if len(self._entries) > 2 * MAX_LOGGED_CHANGES:
            del self._entries[:MAX_LOGGED_CHANGES]
            self._start += MAX_LOGGED_CHANGES

    def record_clear(self) -> None:
        """Everything changed: no position before this one can be caught up with."""
        self._start += len(self._entries) + MAX_LOGGED_CHANGES + 1
        self._entries.clear()

    def since(self, position: int) -> list[int] | None:
        """The hashes changed since ``position``; None when there are more than can be told."""
        if self.position - position > MAX_LOGGED_CHANGES:
            return None
        return self._entries[position - self._start :]


class BlockPool:
    """``num_blocks`` cache blocks of one group.

    A block is *used* (``ref_count`` > 0), *cached* (free, its hash still finds it) or *vacant* (free, no
    hash). Vacant blocks are handed out first, the one released last first (memory that was never touched stays
    untouched); then the cached block that was released longest ago loses its hash (``on_evict(block, hash)`` is
    told) and is handed out.
    """

    def __init__(self, num_blocks: int, changes: ChangeLog | None = None):
        self.num_blocks = num_blocks
        self.changes = changes if changes is not None else ChangeLog()
        self.on_evict: list[Callable[[int, int], None]] = []
        self._refs = [0] * num_blocks
        self._hashes: list[int | None] = [None] * num_blocks
        self._tokens: list[tuple[int, ...] | None] = [None] * num_blocks
        self._index: dict[int, int] = {}
        self._vacant = list(range(num_blocks - 1, -1, -1))  # a stack: block 0 is taken first
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest release first
        self.find = self._index.get  # hash -> block or None; for map() over many hashes

    @property
    def num_free(self) -> int:
        return len(self._vacant) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_indexed(self) -> int:
        return len(self._index)

    def ref_count(self, block: int) -> int:
        return self._refs[block]

    def tokens(self, block: int) -> tuple[int, ...] | None:
        """The ids that ``block`` was published with; None when it has no hash."""
        return self._tokens[block]

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` (``NO_BLOCK`` ignored) a claim would take out of the free ones."""
        refs = self._refs
        return sum(1 for block in blocks if block >= 0 and refs[block] == 0)

    def allocate(self) -> int:
        """A fresh block with one reference; ``NO_BLOCK`` when none is free."""
        if self._vacant:
            block = self._vacant.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            evicted = self._forget(block)
            for tell in self.on_evict:
                tell(block, evicted)
        else:
            return NO_BLOCK
        self._refs[block] = 1
        return block

    def allocate_many(self, count: int) -> list[int]:
        """``count`` fresh blocks, or as many as are free. A prompt takes hundreds: no call for each."""
        vacant, refs = self._vacant, self._refs
        num_vacant = min(count, len(vacant))
        blocks = vacant[len(vacant) - num_vacant :]
        del vacant[len(vacant) - num_vacant :]
        blocks.reverse()
        for block in blocks:
            refs[block] = 1
        while len(blocks) < count and (block := self.allocate()) != NO_BLOCK:
            blocks.append(block)
        return blocks

    def claim(self, block: int) -> None:
        """One more owner of a used or cached block; its content stays."""
        if self._refs[block] == 0:
            del self._cached[block]
        self._refs[block] += 1

    def free(self, block: int) -> None:
        """One owner less; without owners the block is cached, or vacant when it has no hash."""
        refs = self._refs[block] - 1
        if refs < 0:
            raise ValueError(f"cache block {block} is freed more often than it was claimed")
        self._refs[block] = refs
        if refs == 0:
            self._to_free(block)

    def free_many(self, blocks: Iterable[int]) -> None:
        """As :meth:`free` for each of ``blocks``, in their order; ``NO_BLOCK`` is skipped."""
        refs, hashes, vacate, cached = self._refs, self._hashes, self._vacant.append, self._cached
        for block in blocks:
            if block < 0:
                continue
            if refs[block] != 1:
                self.free(block)
                continue
            refs[block] = 0
            if hashes[block] is None:
                vacate(block)
            else:
                cached[block] = None

    def publish(self, block: int, block_hash: int, tokens: tuple[int, ...]) -> None:
        """Let ``block_hash`` find ``block``, whose KV is complete. The latest block of a hash wins."""
        former = self._index.get(block_hash)
        if former == block:
            return
        if self._hashes[block] is not None:
            self._forget(block)
        if former is not None:
            self._drop_hash(former)
        self._index[block_hash] = block
        self._hashes[block] = block_hash
        self._tokens[block] = tokens
        self.changes.record(block_hash)

    def unpublish(self, block: int) -> None:
        """Make ``block`` unfindable; its owners keep it."""
        if self._hashes[block] is not None:
            self._forget(block)
            if block in self._cached:
                del self._cached[block]
                self._vacant.append(block)

    def clear_cache(self) -> None:
        """Forget every hash. Used blocks stay with their owners, cached ones become vacant."""
        for block in self._index.values():
            self._hashes[block] = None
            self._tokens[block] = None
        self._index.clear()
        for block in self._cached:
            self._vacant.append(block)
        self._cached.clear()
        self.changes.record_clear()

    def _to_free(self, block: int) -> None:
        if self._hashes[block] is None:
            self._vacant.append(block)
        else:
            self._cached[block] = None

    def _forget(self, block: int) -> int:
        """Take the hash of ``block`` out of the index."""
        block_hash = self._hashes[block]
        del self._index[block_hash]
        self._hashes[block] = None
        self._tokens[block] = None
        self.changes.record(block_hash)
        return block_hash

    def _drop_hash(self, block: int) -> None:
        """``block`` lost its hash to another one: it is no longer worth keeping."""
        self._hashes[block] = None
        self._tokens[block] = None
        if block in self._cached:
            del self._cached[block]
            self._vacant.append(block)

    def check_integrity(self, owners: Mapping[int, int]) -> list[str]:
        """What is wrong, one sentence a fault. ``owners[block]`` counts the tables that hold the block."""
        return [] if self._is_sound(owners) else self._faults(owners)

    def _is_sound(self, owners: Mapping[int, int]) -> bool:
        """Whether :meth:`_faults` would find nothing, without a Python loop over blocks that nobody uses."""
        refs, hashes, cached = self._refs, self._hashes, self._cached
        free = set(self._vacant)
        num_free = len(self._vacant) + len(cached)
        return (
            num_free == self.num_blocks - len(owners)
            and len(free) == len(self._vacant)
            and free.isdisjoint(cached)
            and free.isdisjoint(owners)
            and cached.keys().isdisjoint(owners)
            and refs.count(0) == num_free
            and all(0 < count == refs[block] for block, count in owners.items())
            and len(self._index) == self.num_blocks - hashes.count(None)
            and all(hashes[block] == block_hash for block_hash, block in self._index.items())
            and all(hashes[block] is not None for block in cached)
        )

    def _faults(self, owners: Mapping[int, int]) -> list[str]:
        faults = []
        vacant, cached = set(self._vacant), set(self._cached)
        if len(vacant) != len(self._vacant) or vacant & cached:
            faults.append("a block is in the free lists twice")
        for block in range(self.num_blocks):
            refs, expected = self._refs[block], owners.get(block, 0)
            if refs != expected:
                faults.append(f"block {block} counts {refs} owners, tables hold it {expected} times")
            is_free = block in vacant or block in cached
            if is_free and refs:
                faults.append(f"block {block} is free and has {refs} owners")
            if not is_free and not refs:
                faults.append(f"block {block} is lost: neither used nor free")
            block_hash = self._hashes[block]
            if block_hash is None and block in cached:
                faults.append(f"block {block} is cached without a hash")
            if block_hash is not None and self._index.get(block_hash) != block:
                faults.append(f"block {block} has a hash that does not find it")
        for block_hash, block in self._index.items():
            if self._hashes[block] != block_hash:
                faults.append(f"hash {block_hash:#x} finds block {block}, which does not carry it")
        return faults

    def rebuild(self, owners: Mapping[int, int]) -> None:
        """Take ``owners`` as the truth: restore counts and free lists, and forget every hash."""
        self._refs = [owners.get(block, 0) for block in range(self.num_blocks)]
        self._vacant = [block for block in range(self.num_blocks - 1, -1, -1) if not self._refs[block]]
        self._cached.clear()
        self._hashes = [None] * self.num_blocks
        self._tokens = [None] * self.num_blocks
        self._index.clear()
        self.changes.record_clear()
