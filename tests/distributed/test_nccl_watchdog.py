"""Waiting for NCCL's watchdog: whom it asks, and what it does where a group cannot be asked."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from atom.distributed import nccl_watchdog
from atom.distributed.nccl_watchdog import drain_nccl_works


class Group:
    def __init__(self, error=None):
        self.num_waits = 0
        self.error = error

    def _wait_for_pending_works(self):
        self.num_waits += 1
        if self.error is not None:
            raise self.error


@pytest.fixture
def events(monkeypatch):
    """What was done about the device and the clock, in order."""
    done = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: done.append("synchronize"))
    monkeypatch.setattr(nccl_watchdog.time, "sleep", lambda seconds: done.append(f"sleep {seconds}"))
    return done


def join(monkeypatch, groups):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    world = type("World", (), {"pg_backend_config": groups})()
    monkeypatch.setattr(distributed_c10d, "_world", world)


def test_a_process_that_works_alone_does_nothing(events):
    assert not dist.is_initialized()
    drain_nccl_works()
    assert events == []


def test_groups_without_nccl_are_left_alone(monkeypatch, events):
    group = Group()
    join(monkeypatch, {group: "cpu:gloo"})
    drain_nccl_works()
    assert (group.num_waits, events) == (0, [])


def test_every_nccl_group_is_waited_for_after_the_device(monkeypatch, events):
    world, part, gloo = Group(), Group(), Group()
    join(monkeypatch, {world: "cpu:gloo,cuda:nccl", part: "cuda:NCCL", gloo: "cpu:gloo"})
    drain_nccl_works()
    assert [group.num_waits for group in (world, part, gloo)] == [1, 1, 0]
    assert events == ["synchronize"]


@pytest.mark.parametrize("silent", [object(), Group(RuntimeError("Only ProcessGroupNCCL supports it"))])
def test_a_group_that_cannot_be_asked_gets_several_passes_of_the_watchdog(monkeypatch, events, silent):
    asked = Group()
    join(monkeypatch, {silent: "cuda:nccl", asked: "cuda:nccl"})
    drain_nccl_works()
    assert asked.num_waits == 1
    assert events == ["synchronize", f"sleep {nccl_watchdog.WATCHDOG_WAIT_S}"]


def test_a_real_group_without_nccl(tmp_path, events):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        assert list(distributed_c10d._world.pg_backend_config)  # the table that is read exists in this torch
        assert hasattr(dist.ProcessGroup, "_wait_for_pending_works")
        drain_nccl_works()
    finally:
        dist.destroy_process_group()
    assert events == []
