"""Child processes, their liveness page and the connection to them."""

import os
import signal
import threading
import time

import msgspec
import pytest

from atom.model_engine.messages import (
    Abort,
    AddRequests,
    Failed,
    FromEngine,
    Metrics,
    ToEngine,
    Utility,
)
from atom.runtime.liveness import HEARTBEAT_LIMIT_S, LivenessPage, ProcessState
from atom.runtime.process import ChildProcess, stop_children
from atom.runtime.startup_phases import StartupPhases, format_phases, process_age_s
from atom.runtime.transport import Listener, MessageStream, connect

CHILD = "tests.runtime.child"


@pytest.fixture
def page(tmp_path):
    page = LivenessPage(str(tmp_path / "page"), create=True)
    yield page
    page.close()


def test_a_starting_engine_is_not_healthy_and_says_so(page):
    assert (page.health().ok, page.health().state) == (False, "starting")
    page.set_state(ProcessState.READY)
    assert page.health().ok


def test_a_stale_heartbeat_is_reported(page, monkeypatch):
    page.set_state(ProcessState.READY)
    later = time.monotonic_ns() + int((HEARTBEAT_LIMIT_S + 1) * 1e9)
    monkeypatch.setattr(time, "monotonic_ns", lambda: later)
    health = page.health()
    assert not health.ok and "heartbeat" in health.reason


def test_a_step_past_its_deadline_is_reported_and_a_finished_one_is_not(page):
    page.set_state(ProcessState.READY)
    page.begin_step(-0.001)
    assert "deadline" in page.health().reason
    page.end_step(5)
    assert page.health().ok and page.health().num_steps == 5


def test_a_child_reads_its_configuration_and_its_exit_is_noticed_at_once(tmp_path):
    gone = threading.Event()
    child = ChildProcess(
        CHILD, {"file": str(tmp_path / "out"), "seconds": 0.0}, "child", lambda _: gone.set()
    )
    assert gone.wait(20)
    assert child.returncode == 0
    assert (tmp_path / "out").read_text() == "hello"


def test_children_that_do_not_end_are_ended_by_the_deadline(tmp_path):
    child = ChildProcess(CHILD, {"file": str(tmp_path / "out"), "seconds": 60.0}, "child", lambda _: None)
    while not (tmp_path / "out").exists():
        assert child.is_alive
        time.sleep(0.02)
    began = time.monotonic()
    stop_children([child], began + 0.1)
    assert not child.is_alive and child.returncode == -signal.SIGTERM
    assert time.monotonic() - began < 3


def test_a_child_dies_with_its_parent(tmp_path):
    """The parent is killed, so nobody is left to end the child but the kernel."""
    out = tmp_path / "out"
    parent = ChildProcess(
        "tests.runtime.parent", {"file": str(out), "seconds": 60.0}, "parent", lambda _: None
    )
    while not out.exists():
        assert parent.is_alive
        time.sleep(0.02)
    grandchild = int((tmp_path / "out.pid").read_text())
    parent.signal(signal.SIGKILL)
    deadline = time.monotonic() + 5
    while os.path.exists(f"/proc/{grandchild}") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{grandchild}")


@pytest.fixture
def ends(tmp_path):
    """The front end's and the engine's end of a connection."""
    listener = Listener(str(tmp_path), 0)
    to_engine, from_engine = msgspec.msgpack.Decoder(ToEngine), msgspec.msgpack.Decoder(FromEngine)
    assert listener.accept(0.01, from_engine) is None
    engine = connect(str(tmp_path), 0, to_engine)
    front = listener.accept(5.0, from_engine)
    yield front, engine
    for end in (front, engine, listener):
        end.close()


def receive(end: MessageStream, count: int) -> list:
    messages = []
    deadline = time.monotonic() + 20
    while len(messages) < count and time.monotonic() < deadline:
        messages += end.receive(1.0)
    return messages


def test_messages_arrive_in_order_and_garbage_is_dropped(ends):
    front, engine = ends
    front.send(AddRequests([], []))
    front.send({"not": "a message"})
    front.send(Abort([3], [-1], ["aborted"]))
    assert receive(engine, 2) == [AddRequests([], []), Abort([3], [-1], ["aborted"])]
    engine.send(Metrics({"x": 1.5}))
    assert front.receive(5.0) == [Metrics({"x": 1.5})]
    assert front.receive(0.0) == [] == front.receive(0.02)


def test_nobody_waits_for_the_other_side_to_read(ends):
    """Far more than the kernel holds is sent while nobody reads; all of it arrives, by threads of both sides."""
    front, engine = ends
    sent = [Utility(i, "x" * 300_000, {}) for i in range(20)]
    began = time.monotonic()
    for message in sent:
        front.send(message)
    assert time.monotonic() - began < 2  # of copying
    reader = threading.Thread(target=receive, args=(front, 1))  # what the front end's reading thread does
    reader.start()
    late = Utility(20, "late", {})
    front.send(late)
    assert receive(engine, 21) == [*sent, late]
    engine.send(Metrics({}))
    reader.join(10)
    assert not reader.is_alive()


def test_what_was_sent_last_leaves_before_the_connection_ends(ends):
    front, engine = ends
    for i in range(20):
        engine.send(Failed("EngineDeadError", f"{i}" * 100_000))
    threading.Thread(target=engine.close, args=(10.0,)).start()
    assert [message.message[0] for message in receive(front, 20)] == [f"{i}"[0] for i in range(20)]


def test_a_wait_ends_when_it_is_told_to_and_takes_its_time_when_the_other_side_has_left(ends):
    front, engine = ends
    threading.Timer(0.05, front.wake).start()
    began = time.monotonic()
    assert front.receive(10.0) == [] and time.monotonic() - began < 5
    engine.send(Metrics({}))
    engine.close()
    assert front.receive(5.0) == [Metrics({})]
    began, busy = time.monotonic(), time.thread_time()
    assert front.receive(0.2) == []
    assert time.monotonic() - began >= 0.19 and time.thread_time() - busy < 0.1
    front.send(AddRequests([], []))  # nobody is left: no error
    front.send(AddRequests([], []))


def test_phases_leave_no_gap():
    phases = StartupPhases(since_creation=True)
    age = process_age_s()
    began = time.monotonic()
    phases.begin("second")
    time.sleep(0.02)
    phases.begin("third")
    seconds = phases.end()
    assert list(seconds) == ["imports", "second", "third"]
    assert seconds["second"] >= 0.02
    assert abs(seconds["imports"] - age) < 0.1
    assert abs(seconds["second"] + seconds["third"] - (time.monotonic() - began)) < 0.01
    assert "second 0.02 s" in format_phases(seconds)
