"""The block pool against a naive model, its order of reuse, and its self-check."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from atom.model_engine.scheduling.block_pool import MAX_LOGGED_CHANGES, NO_BLOCK, BlockPool, ChangeLog


def test_vacant_blocks_come_first_then_the_oldest_cached_one():
    pool = BlockPool(4)
    evicted = []
    pool.on_evict.append(lambda block, block_hash: evicted.append((block, block_hash)))
    blocks = [pool.allocate() for _ in range(4)]
    assert blocks == [0, 1, 2, 3] and pool.allocate() == NO_BLOCK
    pool.publish(1, 11, (1,))
    pool.publish(3, 33, (3,))
    for block in (3, 1, 2, 0):
        pool.free(block)
    assert [pool.allocate() for _ in range(2)] == [0, 2]  # vacant, the one released last first
    assert pool.find(11) == 1 and pool.find(33) == 3 and not evicted
    assert pool.allocate() == 3 and evicted == [(3, 33)] and pool.find(33) is None
    pool.claim(1)
    assert pool.num_free == 0 and pool.ref_count(1) == 1 and pool.tokens(1) == (1,)


def test_the_latest_block_of_a_hash_wins():
    pool = BlockPool(3)
    first, second = pool.allocate(), pool.allocate()
    pool.publish(first, 5, (5,))
    pool.publish(second, 5, (5,))
    assert pool.find(5) == second and pool.tokens(first) is None
    pool.free(first)
    assert pool.allocate() == first  # no longer worth keeping
    pool.publish(second, 6, (6,))
    assert pool.find(5) is None and pool.find(6) == second


def test_many_blocks_are_what_as_many_calls_would_give():
    one, many = BlockPool(9), BlockPool(9)
    for pool in (one, many):
        for block in [pool.allocate() for _ in range(6)]:
            if block in (1, 4):
                pool.publish(block, 10 + block, (block,))
            pool.free(block)
    assert many.allocate_many(8) == [one.allocate() for _ in range(8)] == [5, 3, 2, 0, 6, 7, 8, 1]
    assert many.allocate_many(3) == [4] and many.allocate_many(1) == []


def test_freed_tables_come_back_in_their_order():
    pool = BlockPool(8)
    table = pool.allocate_many(5)
    pool.free_many(reversed(table))
    assert pool.allocate_many(5) == table == [0, 1, 2, 3, 4]


def test_a_double_free_is_an_error():
    pool = BlockPool(1)
    block = pool.allocate()
    pool.free(block)
    try:
        pool.free_many([block])
    except ValueError as error:
        assert "block 0" in str(error)
    else:
        raise AssertionError("a block was freed twice")


def test_change_log_tells_what_changed_or_that_it_cannot():
    log = ChangeLog()
    start = log.position
    for block_hash in range(MAX_LOGGED_CHANGES):
        log.record(block_hash)
    assert log.since(start) == list(range(MAX_LOGGED_CHANGES))
    log.record(-1)
    assert log.since(start) is None and log.since(log.position - 1) == [-1]
    for block_hash in range(5 * MAX_LOGGED_CHANGES):
        log.record(block_hash)
    assert log.since(log.position - 3) == [5 * MAX_LOGGED_CHANGES - 3 + i for i in range(3)]
    position = log.position
    log.record_clear()
    assert log.since(position) is None and log.since(log.position) == []


def test_integrity_check_finds_each_kind_of_damage_and_rebuild_repairs_it():
    def damaged():
        pool = BlockPool(4)
        blocks = [pool.allocate() for _ in range(3)]
        pool.publish(0, 10, (0,))
        pool.publish(1, 11, (1,))
        pool.free(blocks[0])
        return pool, {1: 1, 2: 1}

    pool, owners = damaged()
    assert pool.check_integrity(owners) == []
    damages = [
        lambda p: p._vacant.clear(),
        lambda p: p._vacant.append(0),
        lambda p: p._vacant.append(2),
        lambda p: p._index.pop(11),
        lambda p: p._index.update({77: 2}),
        lambda p: p._refs.__setitem__(1, 2),
        lambda p: p._hashes.__setitem__(0, None),
    ]
    for damage in damages:
        pool, owners = damaged()
        damage(pool)
        assert pool.check_integrity(owners)
        pool.rebuild(owners)
        assert pool.check_integrity(owners) == []
        assert pool.num_free == 2 and pool.num_indexed == 0
        assert [pool.allocate(), pool.allocate(), pool.allocate()] == [0, 3, NO_BLOCK]


class PoolMachine(RuleBasedStateMachine):
    """The pool beside dictionaries that say the same the slow way."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(6)
        self.refs: dict[int, int] = {}
        self.hash_of: dict[int, int] = {}
        self.release_order: list[int] = []
        self.pool.on_evict.append(self._evicted)

    def _evicted(self, block, block_hash):
        assert self.hash_of.pop(block) == block_hash

    @rule()
    def allocate(self):
        vacant = [b for b in range(6) if b not in self.refs and b not in self.hash_of]
        cached = [b for b in self.release_order if b not in self.refs and b in self.hash_of]
        block = self.pool.allocate()
        assert block in vacant if vacant else block == (cached[0] if cached else NO_BLOCK)
        if block != NO_BLOCK:
            self.refs[block] = 1
            assert block not in self.hash_of

    @rule(count=st.integers(0, 7))
    def allocate_many(self, count):
        num_free = self.pool.num_free
        blocks = self.pool.allocate_many(count)
        assert len(blocks) == len(set(blocks)) == min(count, num_free) and not self.refs.keys() & set(blocks)
        self.refs.update((block, 1) for block in blocks)
        assert not self.hash_of.keys() & set(blocks)

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def free_many(self, data):
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.refs)), unique=True))
        self.pool.free_many([NO_BLOCK, *blocks])
        for block in blocks:
            self._released(block)

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def free(self, data):
        block = data.draw(st.sampled_from(sorted(self.refs)))
        self.pool.free(block)
        self._released(block)

    def _released(self, block):
        self.refs[block] -= 1
        if not self.refs[block]:
            del self.refs[block]
            self.release_order = [b for b in self.release_order if b != block] + [block]

    @precondition(lambda self: self.refs)
    @rule(data=st.data(), block_hash=st.integers(0, 7))
    def publish(self, data, block_hash):
        block = data.draw(st.sampled_from(sorted(self.refs)))
        self.pool.publish(block, block_hash, (block_hash,))
        for other in [b for b, h in self.hash_of.items() if h == block_hash]:
            del self.hash_of[other]
        self.hash_of[block] = block_hash

    @rule(block_hash=st.integers(0, 7))
    def claim(self, block_hash):
        block = self.pool.find(block_hash)
        assert (block is None) == (block_hash not in self.hash_of.values())
        if block is not None:
            assert self.hash_of[block] == block_hash and self.pool.tokens(block) == (block_hash,)
            self.pool.claim(block)
            self.refs[block] = self.refs.get(block, 0) + 1

    @rule(block=st.integers(0, 5))
    def unpublish(self, block):
        self.pool.unpublish(block)
        self.hash_of.pop(block, None)

    @rule()
    def clear(self):
        self.pool.clear_cache()
        self.hash_of.clear()

    @invariant()
    def is_sound(self):
        assert self.pool.check_integrity(self.refs) == []
        assert self.pool.num_free == 6 - len(self.refs)
        assert self.pool.num_unreferenced([*range(6), NO_BLOCK]) == 6 - len(self.refs)
        assert self.pool.num_indexed == len(self.hash_of)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
