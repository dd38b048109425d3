"""Child processes, their liveness page and their sockets."""

import os
import signal
import threading
import time

import msgspec
import pytest
import zmq

from atom.model_engine.messages import Abort, AddRequests, FromEngine, Metrics, Shutdown, ToEngine
from atom.runtime.liveness import HEARTBEAT_LIMIT_S, LivenessPage, ProcessState
from atom.runtime.process import ChildProcess, stop_children
from atom.runtime.startup_phases import StartupPhases, format_phases, process_age_s
from atom.runtime.transport import EngineSockets, FrontSockets

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


def test_messages_cross_the_sockets_and_garbage_is_dropped(tmp_path):
    context = zmq.Context()
    front = FrontSockets(context, str(tmp_path), 0, msgspec.msgpack.Decoder(FromEngine))
    assert not front.connect(0.01)
    engine = EngineSockets(str(tmp_path), 0, msgspec.msgpack.Decoder(ToEngine))
    while not front.connect(1.0):
        pass
    front.send(AddRequests([], []))
    front._input.send_multipart((b"engine", b"\xc1 not a message"))
    front.send(Abort([3], [-1], ["aborted"]))
    front.send_control(Shutdown())
    received = []
    while len(received) < 3:
        received += engine.receive(1000)
    assert [type(message) for message in received if type(message) is not Shutdown] == [AddRequests, Abort]
    engine.send(Metrics({"x": 1.5}))
    assert front.receive(5.0) == [Metrics({"x": 1.5})]
    engine.close()
    front.close()
    context.term()


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
