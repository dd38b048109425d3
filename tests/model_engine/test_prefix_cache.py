"""Prefix hits: what is found, when it is compared, remembered and forgotten, in each kind of group."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import Driver, full, make_scheduler, make_seq, sliding

from atom.core import CacheGroupSpec, GroupKind, Sequence
from atom.errors import ConfigError
from atom.model_engine.scheduling.block_pool import MAX_LOGGED_CHANGES
from atom.model_engine.scheduling.cache_group import UNBOUNDED, CacheGroup
from atom.model_engine.scheduling.prefix_hash import adopt, hash_prompt

BLOCK = 4


def ids(length: int, start: int = 1) -> list[int]:
    return [(start * 17 + i * i) % 50 for i in range(length)]


def warm(scheduler, prompt, max_new=1):
    driver = Driver(scheduler)
    driver.add(make_seq(100, prompt, max_new, stop=False))
    driver.run()
    return driver.seqs[100]


def probe(scheduler, prompt, *, memoized=False, seq_id=1, **kwargs):
    """Blocks that a new request with this prompt would hit."""
    seq = make_seq(seq_id, prompt, 1, **kwargs)
    scheduler.manager.prepare(seq)
    manager = scheduler.manager
    return manager.can_allocate(seq, memoized=memoized)


@pytest.mark.parametrize("length, hit", [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (40, 9), (41, 10), (60, 10)])
def test_the_last_block_is_always_computed(length, hit):
    scheduler = make_scheduler()
    warm(scheduler, ids(41))
    assert probe(scheduler, ids(60)[:length]) == hit


def test_generated_blocks_are_hit_by_the_next_turn():
    scheduler = make_scheduler()
    first = warm(scheduler, ids(10), 22)
    assert probe(scheduler, [*first.token_ids, 3, 4, 5]) == 31 // BLOCK  # the last id has no KV


def test_a_block_is_published_when_its_last_position_is_computed_not_when_its_id_is_known():
    scheduler = make_scheduler()
    driver = Driver(scheduler)
    driver.add(make_seq(1, ids(7), 6, stop=False))
    driver.step()
    assert len(driver.answers[1]) == 1  # the eighth id is known, its KV comes with the next step
    driver.add(make_seq(2, [*driver.seqs[1].token_ids, 3, 4], 2, stop=False))
    driver.run()
    assert driver.cached[2] == 4
    driver.check_answers()


def test_switched_off_nothing_is_hit_or_hashed():
    scheduler = make_scheduler(enable_prefix_caching=False)
    warm(scheduler, ids(41))
    seq = make_seq(1, ids(41))
    scheduler.add(seq)
    scheduler.schedule()
    assert seq.num_cached_tokens == 0 and seq.chain is None
    assert scheduler.stats()["kv_blocks_indexed"] == 0


def test_seeds_keep_prompts_apart():
    scheduler = make_scheduler()
    warm(scheduler, ids(41))
    assert probe(scheduler, ids(41), hash_seed=5) == 0


@pytest.mark.parametrize("fast", ["1", "0"])
def test_statistics_count_first_admissions(fast, monkeypatch):
    monkeypatch.setenv("ATOM_PREFIX_FAST_WALK", fast)
    scheduler = make_scheduler()
    driver = Driver(scheduler)
    for seq_id in (1, 2):
        driver.add(make_seq(seq_id, ids(41), 1))
        driver.run()
    stats = scheduler.stats()
    assert stats["prefix_requests"] == 2
    assert stats["prefix_query_tokens"] == 82 and stats["prefix_hit_tokens"] == 40
    assert stats["kv_blocks_indexed"] == 10 == stats["kv_blocks_indexed_g0"]


def collide(scheduler, column):
    """Pretend that block ``column`` of the warm prompt holds other tokens under the same hash."""
    group = scheduler.groups[0]
    seq = make_seq(9, ids(41))
    scheduler.manager.prepare(seq)
    block = group.pool.find(seq.chain.extend(seq.token_ids)[column])
    group.pool._tokens[block] = (0, 0, 0, 0)


@pytest.mark.parametrize(
    "fast, salted, column, hit",
    [
        ("1", False, 9, 9),  # the last hit block is compared
        ("1", False, 3, 10),  # the stated risk of the fast walk
        ("0", False, 3, 3),
        ("1", True, 3, 3),  # a salted request compares every block whatever the switch says
    ],
)
def test_token_comparison(fast, salted, column, hit, monkeypatch):
    monkeypatch.setenv("ATOM_PREFIX_FAST_WALK", fast)
    scheduler = make_scheduler()
    warm(scheduler, ids(41))
    collide(scheduler, column)
    assert probe(scheduler, ids(41), cache_salted=salted) == hit


def test_when_the_last_block_differs_all_are_compared():
    scheduler = make_scheduler()
    warm(scheduler, ids(41))
    collide(scheduler, 9)
    collide(scheduler, 2)
    assert probe(scheduler, ids(41)) == 2


def test_a_cold_prompt_costs_one_lookup():
    scheduler = make_scheduler([full(400)], max_model_len=1200)
    looked_up = []
    pool = scheduler.groups[0].pool
    find = pool.find
    pool.find = lambda block_hash: looked_up.append(block_hash) or find(block_hash)
    assert probe(scheduler, ids(1000)) == 0 and len(looked_up) == 1
    seq = make_seq(2, ids(1000))
    scheduler.manager.prepare(seq)
    scheduler.manager.can_allocate(seq)
    assert len(seq.chain) == 1  # nor is more of it hashed


# -- memo ---------------------------------------------------------------------------------------------
def waiting(scheduler, prompt):
    seq = make_seq(7, prompt, 1)
    scheduler.manager.prepare(seq)
    return seq


def num_walks(scheduler, seq):
    before = scheduler.manager.num_walks
    answer = scheduler.manager.can_allocate(seq, memoized=True)
    return answer, scheduler.manager.num_walks - before


def test_memo_is_reused_until_something_it_read_changes():
    scheduler = make_scheduler([full(30)])
    warm(scheduler, ids(21))
    pool = scheduler.groups[0].pool
    seq = waiting(scheduler, ids(40))
    assert num_walks(scheduler, seq) == (5, 1)
    assert num_walks(scheduler, seq) == (5, 0)
    other = pool.allocate()
    pool.publish(other, 12345, (1, 2, 3, 4))
    assert num_walks(scheduler, seq) == (5, 0)  # a hash that it never read
    missing = seq.chain.extend(seq.token_ids)[5]
    pool.publish(other, missing, tuple(ids(40)[20:24]))
    assert num_walks(scheduler, seq) == (6, 1)  # its first miss was published, and 12345 revoked
    block = pool.find(seq.chain.hashes[2])
    pool.unpublish(block)
    assert num_walks(scheduler, seq) == (2, 1)
    assert num_walks(scheduler, seq) == (2, 0)
    pool.publish(other, 777, (1, 2, 3, 4))  # revokes block 5, beyond what the new walk read
    assert num_walks(scheduler, seq) == (2, 0)


def test_memo_sees_eviction_remapping_revocation_and_clearing():
    def fresh():
        scheduler = make_scheduler([full(30)])
        warm(scheduler, ids(21))
        seq = waiting(scheduler, ids(40))
        assert num_walks(scheduler, seq) == (5, 1)
        return scheduler, scheduler.groups[0].pool, seq

    scheduler, pool, seq = fresh()
    for _ in range(26):
        pool.allocate()  # the last of these evicts a block of the prefix
    answer, walks = num_walks(scheduler, seq)
    assert walks == 1

    scheduler, pool, seq = fresh()
    pool.publish(pool.allocate(), seq.chain.hashes[0], tuple(ids(4)))  # remapped
    assert num_walks(scheduler, seq) == (5, 1)

    scheduler, pool, seq = fresh()
    block = pool.find(seq.chain.hashes[1])
    pool.claim(block)
    pool.publish(block, 99, (0, 0, 0, 0))  # revoked by republishing its block
    assert num_walks(scheduler, seq) == (1, 1)

    scheduler, pool, seq = fresh()
    scheduler.clear_prefix_cache()
    assert num_walks(scheduler, seq) == (0, 1)

    scheduler, pool, seq = fresh()
    block = pool.allocate()
    for block_hash in range(MAX_LOGGED_CHANGES // 2 + 1):  # each revokes the one before: two changes
        pool.publish(block, block_hash, (0, 0, 0, 0))
    assert num_walks(scheduler, seq) == (5, 1)

    scheduler, pool, seq = fresh()
    seq.token_ids.append(1)
    assert num_walks(scheduler, seq)[1] == 1
    seq.chain.seed = 5
    assert num_walks(scheduler, seq)[1] == 1


def test_memo_of_a_sliding_group_sees_the_first_publication():
    scheduler = make_scheduler([sliding(20, 12)])
    driver = Driver(scheduler)
    seq = waiting(scheduler, ids(9))
    assert num_walks(scheduler, seq) == (0, 1) and num_walks(scheduler, seq) == (0, 0)
    driver.add(make_seq(1, ids(9), 1))
    driver.run()
    assert num_walks(scheduler, seq) == (2, 1)


def test_memo_asks_the_fit_anew():
    scheduler = make_scheduler([full(12)])
    warm(scheduler, ids(21))
    seq = waiting(scheduler, ids(40))
    assert num_walks(scheduler, seq) == (5, 1)
    held = [scheduler.groups[0].pool.allocate() for _ in range(3)]
    assert num_walks(scheduler, seq) == (-1, 0)
    scheduler.groups[0].pool.free(held[0])
    assert num_walks(scheduler, seq) == (5, 0)


def test_memo_switch(monkeypatch):
    monkeypatch.setenv("ATOM_PREFIX_WALK_MEMO", "0")
    scheduler = make_scheduler([full(30)])
    warm(scheduler, ids(21))
    seq = waiting(scheduler, ids(40))
    assert num_walks(scheduler, seq) == (5, 1) and num_walks(scheduler, seq) == (5, 1)


operations = st.lists(st.tuples(st.sampled_from("afpuc"), st.integers(0, 30), st.integers(0, 9)), max_size=30)


@settings(max_examples=150, deadline=None)
@given(operations)
def test_memo_equals_the_exact_probe_after_any_change(steps):
    scheduler = make_scheduler([full(16)])
    warm(scheduler, ids(29))
    pool = scheduler.groups[0].pool
    seq = waiting(scheduler, ids(40))
    held = []
    for kind, number, column in steps:
        if kind == "a" and pool.num_free:
            held.append(pool.allocate())
        elif kind == "f" and held:
            pool.free(held.pop(number % len(held)))
        elif kind == "p" and held:
            tokens = tuple(seq.token_ids[column * 4 : column * 4 + 4])
            pool.publish(held[number % len(held)], seq.chain.extend(seq.token_ids)[column], tokens)
        elif kind == "u":
            pool.unpublish(number % 16)
        elif kind == "c" and number == 0:
            scheduler.clear_prefix_cache()
        memoized = scheduler.manager.can_allocate(seq, memoized=True)
        hit = scheduler.manager._walk(seq)
        exact = hit.num_tokens // BLOCK if scheduler.manager.fits(seq, hit) else -1
        assert memoized == exact == scheduler.manager.can_allocate(seq)


# -- front-end hashing --------------------------------------------------------------------------------
def test_front_end_hash_changes_no_hit_and_spares_the_engine_the_hashing():
    def play(adopted):
        scheduler = make_scheduler()
        driver = Driver(scheduler)
        for seq_id in range(4):
            prompt = [*ids(30), seq_id, *ids(20, seq_id)]
            seq = make_seq(seq_id, prompt, 9, stop=False, hash_seed=77)
            if adopted:
                seq.chain = adopt(hash_prompt(prompt, BLOCK, 77), prompt, BLOCK, 77)
            driver.add(seq)
            if adopted:
                assert len(seq.chain) == 12
            driver.run()
        driver.check_answers()
        return driver.cached, [(b.rows, b.starts, b.patches) for b in driver.device.launched]

    assert play(True) == play(False)


def test_a_chain_of_another_seed_is_not_used():
    scheduler = make_scheduler()
    seq = make_seq(1, ids(20), hash_seed=5)
    seq.chain = adopt(hash_prompt(ids(20), BLOCK, 6), ids(20), BLOCK, 6)
    scheduler.add(seq)
    assert seq.chain.seed == 5 and len(seq.chain) == 0


# -- groups -------------------------------------------------------------------------------------------
def test_a_sliding_hit_needs_the_window_alone():
    scheduler = make_scheduler([sliding(40, 9)])  # eight tokens before: two blocks
    warm(scheduler, ids(41))
    pool = scheduler.groups[0].pool
    seq = waiting(scheduler, ids(60))
    hashes = seq.chain.extend(seq.token_ids)
    for column in range(8):
        pool.unpublish(pool.find(hashes[column]))
    assert scheduler.manager.can_allocate(seq) == 10
    hit = scheduler.manager.probe(seq)
    assert hit.tables[0][:8] == [-1] * 8 and min(hit.tables[0][8:]) >= 0
    pool.unpublish(pool.find(hashes[9]))
    assert scheduler.manager.can_allocate(seq) == 0


def test_groups_agree_on_the_shortest_hit():
    scheduler = make_scheduler([full(40), sliding(40, 9)])
    warm(scheduler, ids(41))
    full_pool, sliding_pool = (group.pool for group in scheduler.groups)
    seq = waiting(scheduler, ids(60))
    hashes = seq.chain.extend(seq.token_ids)
    sliding_pool.unpublish(sliding_pool.find(hashes[8]))
    assert scheduler.manager.can_allocate(seq) == 8  # 9 and 10 need block 8
    full_pool.unpublish(full_pool.find(hashes[5]))
    assert scheduler.manager.can_allocate(seq) == 5
    sliding_pool.unpublish(sliding_pool.find(hashes[4]))
    assert scheduler.manager.can_allocate(seq) == 4
    sliding_pool.unpublish(sliding_pool.find(hashes[0]))
    assert scheduler.manager.can_allocate(seq) == 4  # blocks 2 and 3 are enough


def test_sliding_blocks_are_released_in_place_and_stay_hittable():
    scheduler = make_scheduler([full(40), sliding(40, 9)])
    driver = Driver(scheduler)
    seq = make_seq(1, ids(30), 30, stop=False)
    driver.add(seq)
    for _ in range(20):
        driver.step()
        table = seq.tables[1]
        live = [column for column, block in enumerate(table) if block >= 0]
        assert len(table) == len(seq.tables[0])
        assert live == list(range(live[0], len(table))) and len(live) <= 5
        assert live[0] == (seq.num_computed // BLOCK * BLOCK - 8) // BLOCK
    assert probe(scheduler, ids(29)) == 7
    driver.run()
    driver.check_idle()


class FakeStateGroup(CacheGroup):
    """Recurrent state in slots: a prefix can be resumed only where a chunk ended on a multiple of ``every``."""

    kind = GroupKind.STATE

    def __init__(self, index, block_size, num_slots, every):
        super().__init__(index, block_size)
        self.every, self.num_slots = every, num_slots
        self.slots = list(range(num_slots))
        self.checkpoints = set()

    def attach(self, changes):
        self.changes = changes

    def resumable_hit(self, query, limit):
        hit = limit // self.every * self.every
        while (
            hit and query.hashes(hit // self.block_size)[hit // self.block_size - 1] not in self.checkpoints
        ):
            hit -= self.every
        return hit

    def hit_table(self, query, hit):
        return []

    def num_needed(self, table, num_tokens):
        return 1

    def admit(self, seq: Sequence, table, num_tokens):
        seq.tables.append([self.slots.pop()])

    def cut_chunk(self, seq, start, end):
        boundary = (start // self.every + 1) * self.every
        return min(end, boundary)

    def can_reserve(self, seq, upto):
        return True

    def reserve(self, seq, upto, patches):
        return UNBOUNDED

    def publish(self, seq, first, last):
        if seq.num_computed % self.every == 0:
            self.checkpoints.add(seq.chain.hashes[last - 1])
            self.changes.record(seq.chain.hashes[last - 1])

    def free(self, seq):
        self.slots += seq.tables[self.index]

    def step_meta(self):
        return len(self.checkpoints)

    @property
    def num_free(self):
        return len(self.slots)

    @property
    def num_total(self):
        return self.num_slots

    def peak(self, num_tokens, chunk=1):
        return 1

    @property
    def capacity(self):
        return UNBOUNDED


@settings(max_examples=30, deadline=None)
@given(st.booleans(), st.lists(st.tuples(st.integers(0, 1), st.integers(1, 60)), min_size=1, max_size=8))
def test_a_state_group_plugs_in(overlapped, requests):
    scheduler = make_scheduler([full(60), FakeStateGroup(1, BLOCK, 3, 16)])
    driver = Driver(scheduler, overlapped)
    driver.add(*[make_seq(i, ids(n, start), 6) for i, (start, n) in enumerate(requests)])
    driver.run()
    driver.check_answers()
    driver.check_idle()
    for batch in driver.device.launched:
        assert batch.group_meta[0] is None and batch.group_meta[1] is not None
        for start, count in zip(batch.starts, batch.num_scheduled, strict=True):
            assert not batch.num_prefill_seqs or start // 16 == (start + count - 1) // 16
        for seq in batch.new_seqs:
            assert batch.starts[batch.seqs.index(seq)] % 16 == 0
    assert max(len(b.seqs) for b in driver.device.launched) <= 3


def test_state_checkpoints_shorten_the_hit():
    scheduler = make_scheduler([full(60), FakeStateGroup(1, BLOCK, 3, 16)])
    warm(scheduler, ids(41))
    assert probe(scheduler, ids(60)) == 8  # ten blocks are cached, a state only after 16 and 32 tokens


@pytest.mark.parametrize(
    "spec, words",
    [
        (CacheGroupSpec(GroupKind.STATE, ("s",), 1, num_blocks=4), "needs a group object"),
        (
            CacheGroupSpec(GroupKind.SLIDING, ("s",), 1, num_blocks=4),
            "window .* must be at least 1, got None",
        ),
        (CacheGroupSpec(GroupKind.FULL, ("s",), 1), "num_blocks .* at least 1, got 0"),
    ],
)
def test_groups_that_cannot_be_served_are_config_errors(spec, words):
    with pytest.raises(ConfigError, match=words):
        make_scheduler([spec])
