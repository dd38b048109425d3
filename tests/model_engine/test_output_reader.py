"""One reads at a time: a caller while all that comes is its own, the thread otherwise; nothing is lost between them."""

import os
import queue
import signal
import threading
import time

import pytest

from atom import LLMEngine, SamplingParams
from atom.errors import EngineDeadError
from atom.model_engine import output_reader
from atom.model_engine.output_reader import OutputReader
from tests.helpers.tiny_model import make_tiny_model

SCRIPTED = "atom.model_engine.runner.scripted_worker.ScriptedWorker"
GREEDY = SamplingParams(temperature=0.0, max_tokens=200)


class Client:
    """Says what a test puts into it; two readers at once are noticed."""

    may_change_readers = True

    def __init__(self):
        self.said = queue.Queue()
        self._is_read = threading.Lock()

    def receive(self, timeout_s, spin_s=0.0):
        assert self._is_read.acquire(blocking=False), "two read at once"
        try:
            message = self.said.get(timeout=timeout_s)
        except queue.Empty:
            return []
        finally:
            self._is_read.release()
        if isinstance(message, Exception):
            raise message
        return [] if message is None else [message]

    def wake(self):
        self.said.put(None)


class Harness:
    def __init__(self):
        self.client = Client()
        self.handled = []  # message, whether by the thread of the test
        self.failures = queue.Queue()
        self.on_message = lambda message: None
        self.reader = OutputReader(self.client, self._handle, self.failures.put)

    def _handle(self, message):
        self.handled.append((message, threading.current_thread() is threading.main_thread()))
        self.on_message(message)

    def wait_for(self, count):
        deadline = time.monotonic() + 10
        while len(self.handled) < count and time.monotonic() < deadline:
            time.sleep(0.002)
        return self.handled


@pytest.fixture(autouse=True)
def no_handlers_of_the_test_runner(monkeypatch):
    """Its time limit is a signal whose handler raises: callers would not read at all."""
    monkeypatch.setattr(output_reader, "_INTERRUPTING", ("SIGUSR1",))


@pytest.fixture
def harness():
    harness = Harness()
    yield harness
    harness.reader.stop(5)
    assert not harness.reader._thread.is_alive()


def test_a_caller_reads_what_is_its_own_and_the_thread_the_rest(harness):
    say, handled = harness.client.said.put, harness.handled
    say("before")
    assert harness.wait_for(1) == [("before", False)]
    for round_ in (1, 2, 3):  # the thread still reads, or has not yet come back
        timer = threading.Timer(0.02, say, [f"own {round_}"])
        timer.start()
        harness.reader.read_until(lambda wanted=1 + round_: len(handled) == wanted, lambda: True)
        assert handled[-1] == (f"own {round_}", True)
    say("after")  # nobody has asked for it: in time all the same
    assert harness.wait_for(5)[-1] == ("after", False)


def test_what_is_not_a_callers_own_is_left_to_the_thread_in_order(harness):
    others = []
    threading.Timer(0.02, lambda: (others.append(1), [harness.client.said.put(i) for i in range(50)])).start()
    harness.reader.read_until(lambda: False, lambda: not others)
    assert harness.wait_for(50) == [(i, False) for i in range(50)]
    harness.reader.read_until(lambda: False, lambda: False)  # not even begun


def test_one_who_does_not_read_is_heard_at_once(harness):
    is_over = []
    harness.on_message = is_over.append
    own = threading.Thread(target=harness.reader.read_until, args=(lambda: len(is_over) > 1, lambda: True))
    own.start()
    time.sleep(0.05)
    harness.reader.read_until(lambda: True, lambda: True)  # lent already
    harness.reader.attend()
    harness.client.said.put("other's")
    harness.client.said.put("own")
    own.join(5)
    assert [message for message, _ in harness.wait_for(2)] == ["other's", "own"]
    harness.client.said.put("late")
    assert harness.wait_for(3)[-1] == ("late", False)


def test_an_error_that_a_caller_meets_is_told_by_the_thread(harness):
    threading.Timer(0.02, harness.client.said.put, [EngineDeadError("gone")]).start()
    harness.reader.read_until(lambda: False, lambda: True)
    assert str(harness.failures.get(timeout=5)) == "gone"
    harness.reader.read_until(lambda: False, lambda: True)  # returns: the caller waits for its requests' end


def test_ctrl_c_waits_until_a_message_is_handled(harness):
    def interrupted(message):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.02)
        harness.handled.append("whole")

    harness.on_message = interrupted
    harness.client.said.put("own")
    with pytest.raises(KeyboardInterrupt):
        harness.reader.read_until(lambda: False, lambda: True)
    assert harness.handled[-1] == "whole"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_where_a_handler_may_raise_the_thread_reads(harness):
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    try:
        harness.client.said.put("own")
        harness.reader.read_until(lambda: False, lambda: True)
        assert harness.wait_for(1) == [("own", False)]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_engine_of_its_own_process_answers_callers_and_callbacks_side_by_side(tmp_path):
    folder = make_tiny_model(tmp_path / "tiny")
    options = {"runner_qualname": SCRIPTED, "max_model_len": 512, "max_num_seqs": 8, "show_progress": False}
    texts, threads, ended = {}, set(), queue.Queue()

    def on_delta(output):
        threads.add(threading.current_thread())
        texts[output.request_id] = texts.get(output.request_id, "") + output.text
        if output.finished:
            ended.put(output.request_id)

    with LLMEngine(str(folder), **options) as engine:
        assert [a["text"] for a in engine.generate(["one", "two"], GREEDY)] == ["one", "two"]
        callers = [threading.Thread(target=engine.generate, args=("x" * 100, GREEDY)) for _ in range(3)]
        for caller in callers:
            caller.start()
        ids = [engine.add_request("y" * n, GREEDY, on_delta)[0] for n in range(50, 60)]
        assert engine.generate("z" * 90, GREEDY)[0]["text"] == "z" * 90
        for caller in callers:
            caller.join(20)
        assert {ended.get(timeout=20) for _ in ids} == set(ids)
        assert [texts[request_id] for request_id in ids] == ["y" * n for n in range(50, 60)]
        assert threads == {engine._reader._thread}  # no caller has run others' callbacks
        assert engine.get_cache_statistics()["kv_blocks_used"] == 0
        os.kill(engine._client.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            engine.generate("again" * 50, GREEDY)
