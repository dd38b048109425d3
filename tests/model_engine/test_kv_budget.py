"""The KV budget: what fits, what is lowered, what is refused and how the refusal helps."""

from dataclasses import replace

import pytest

from atom.core import CacheGroupSpec, GroupKind
from atom.errors import CacheBudgetError
from atom.model_engine.runner.kv_budget import (
    CacheLimits,
    MemoryFacts,
    format_bytes,
    plan_cache,
    with_block_count,
)

MIB = 2**20
FULL = CacheGroupSpec(GroupKind.FULL, ("a",), bytes_per_block=64 * 1024)
SLIDING = CacheGroupSpec(GroupKind.SLIDING, ("b",), bytes_per_block=256 * 1024, window=512)
STATE = CacheGroupSpec(GroupKind.STATE, ("c",), bytes_per_block=MIB)


def facts(**changes):
    values = dict(
        device="cpu", total=16 * 1024 * MIB, free=8 * 1024 * MIB, weights=500 * MIB, activations=100 * MIB
    )
    return MemoryFacts(**(values | changes))


def limits(**changes):
    values = dict(
        block_size=16,
        max_model_len=8192,
        max_model_len_is_explicit=False,
        max_num_seqs=64,
        chunk_tokens=512,
        kv_cache_memory=None,
        gpu_memory_utilization=None,
    )
    return CacheLimits(**(values | changes))


def used(plan):
    return sum(group.num_blocks * group.bytes_per_block for group in plan.groups)


def test_default_takes_a_share_of_free_memory_and_stays_within_it():
    plan = plan_cache([FULL, SLIDING], facts(), limits(max_num_seqs=512))
    assert plan.max_model_len == 8192
    assert 0.95 * plan.budget < used(plan) <= plan.budget
    assert plan.budget == int((8192 - 600) * MIB * 0.4)


def test_a_number_of_blocks_is_taken_as_given_and_bounds_the_context():
    planned = plan_cache([FULL, SLIDING, STATE], facts(), limits())
    plan = with_block_count(planned, 24, limits())
    assert [group.num_blocks for group in plan.groups] == [24, 24, planned.groups[2].num_blocks]
    assert (plan.num_tokens, plan.max_model_len) == (24 * 16, 24 * 16)
    assert with_block_count(planned, 10_000, limits()).max_model_len == planned.max_model_len


def test_recorded_graphs_are_left_room_and_are_told_of():
    device = facts(device="cuda", graphs=300 * MIB)
    plan = plan_cache([FULL], device, limits(gpu_memory_utilization=0.5, max_num_seqs=512))
    assert plan.budget == int(16384 * MIB * 0.48) - 900 * MIB
    with pytest.raises(CacheBudgetError, match="recorded graphs +300 MiB"):
        plan_cache(
            [FULL],
            replace(device, free=1000 * MIB),
            limits(gpu_memory_utilization=0.5, max_model_len_is_explicit=True, max_model_len=1 << 20),
        )


def test_buffers_of_decode_steps_are_left_room_and_are_told_of():
    device = facts(device="cuda", buffers=60 * MIB)
    given = limits(gpu_memory_utilization=0.5, max_num_seqs=512)
    assert plan_cache([FULL], device, given).budget == int(16384 * MIB * 0.48) - 660 * MIB
    given = replace(given, max_model_len_is_explicit=True, max_model_len=1 << 20)
    with pytest.raises(CacheBudgetError, match="decode steps' buffers +60 MiB"):
        plan_cache([FULL], replace(device, free=1000 * MIB), given)


def test_absolute_size_wins_over_shares():
    plan = plan_cache([FULL], facts(), limits(kv_cache_memory=128 * MIB, gpu_memory_utilization=0.9))
    assert plan.budget == 128 * MIB
    assert used(plan) <= 128 * MIB


def test_a_sliding_group_gets_fewer_tokens_than_the_full_one_but_enough_for_a_request():
    long = limits(max_model_len=65536)
    full, sliding = plan_cache([FULL, SLIDING], facts(), long).groups
    assert sliding.num_blocks < full.num_blocks
    assert sliding.num_blocks * 16 >= 512 + 512  # window and chunk


def test_state_slots_are_served_first():
    plan = plan_cache([FULL, STATE], facts(), limits(kv_cache_memory=100 * MIB))
    assert plan.groups[1].num_blocks >= 1
    assert used(plan) <= 100 * MIB


def test_no_more_blocks_than_the_running_requests_can_use():
    plan = plan_cache([FULL], facts(), limits(max_num_seqs=1, max_model_len=1024))
    assert plan.groups[0].num_blocks == 1024 // 16 + 1


def test_I7_context_is_lowered_to_what_fits_when_nobody_asked_for_it():
    plan = plan_cache([FULL], facts(), limits(kv_cache_memory=8 * MIB))
    assert 128 <= plan.max_model_len < 8192
    assert plan.groups[0].num_blocks * 16 >= plan.max_model_len
    assert used(plan) <= 8 * MIB


def test_I3_an_explicit_context_that_does_not_fit_is_refused_with_a_table():
    with pytest.raises(CacheBudgetError) as caught:
        plan_cache([FULL], facts(), limits(kv_cache_memory=8 * MIB, max_model_len_is_explicit=True))
    message = str(caught.value)
    for word in ("total memory", "free memory", "weights", "activations", "per token", "--max-model-len"):
        assert word in message
    flag = message.split("--kv-cache-memory ")[1].split("MiB")[0]
    again = plan_cache(
        [FULL], facts(), limits(kv_cache_memory=int(flag) * MIB, max_model_len_is_explicit=True)
    )
    assert again.max_model_len == 8192  # the advice works


def test_I3_a_share_that_is_too_small_names_one_that_fits():
    tight = limits(gpu_memory_utilization=0.05, max_model_len_is_explicit=True)
    with pytest.raises(CacheBudgetError) as caught:
        plan_cache([FULL], facts(), tight)
    share = float(str(caught.value).split("--gpu-memory-utilization ")[1].split(";")[0])
    assert plan_cache([FULL], facts(), limits(gpu_memory_utilization=share)).max_model_len == 8192


def test_I3_raising_a_share_is_not_advised_when_free_memory_binds():
    with pytest.raises(CacheBudgetError) as caught:
        plan_cache([FULL], facts(free=600 * MIB), limits(gpu_memory_utilization=0.9))
    message = str(caught.value)
    assert "--gpu-memory-utilization" not in message
    assert "will not help" in message


@pytest.mark.parametrize(
    "n, text", [(512, "512 B"), (2048, "2 KiB"), (3 * MIB, "3 MiB"), (2**31, "2.00 GiB")]
)
def test_bytes_for_a_person(n, text):
    assert format_bytes(n) == text
