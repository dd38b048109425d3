"""Log lines and the frozen start-up heap."""

import gc
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from atom.utils import gc_utils
from atom.utils import logging as atom_logging

ROOT = Path(__file__).resolve().parents[2]
CODE = """
from atom.utils.logging import init_logger, set_process_name
logger = init_logger("atom.somewhere")
set_process_name("EngineCore")
def speak():
    logger.info("hello %d", 7)
speak()
init_logger("other").debug("a fact for finding faults")
"""


def run(**env):
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    return done.stderr


def test_a_line_names_its_process_and_comes_once():
    lines = run(ATOM_PROCESS_NAME_PREFIX="X").splitlines()
    assert len(lines) == 1
    assert lines[0].endswith("INFO [X::EngineCore] hello 7")


def test_log_more_adds_id_path_line_and_function_and_lines_for_finding_faults():
    line, more = run(ATOM_LOG_MORE="1").splitlines()
    assert "DEBUG" in more and more.endswith("a fact for finding faults")
    assert "[ATOM::EngineCore pid=" in line
    assert "<string>:6 speak: hello 7" in line


def test_a_program_that_configured_logging_gets_the_lines_there(caplog, capsys):
    with caplog.at_level(logging.INFO):
        atom_logging.init_logger("atom.test").info("once")
    assert [record.getMessage() for record in caplog.records] == ["once"]
    assert "once" not in capsys.readouterr().err


def test_freeze_takes_the_heap_out_of_collections(monkeypatch):
    monkeypatch.delenv("ATOM_GC_FREEZE", raising=False)
    heap = [[] for _ in range(1000)]
    try:
        assert gc_utils.freeze_heap() >= len(heap)
        assert gc.get_freeze_count() >= len(heap)
    finally:
        gc_utils.unfreeze_heap()
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("value", ["0", "off"])
def test_freeze_can_be_turned_off(monkeypatch, value):
    monkeypatch.setenv("ATOM_GC_FREEZE", value)
    before = gc.get_freeze_count()
    assert gc_utils.freeze_heap() == 0
    assert gc.get_freeze_count() == before


def test_thresholds_come_from_the_environment(monkeypatch, caplog):
    before = gc.get_threshold()
    try:
        monkeypatch.setenv("ATOM_GC_THRESHOLD", "1234, 5, 6")
        gc_utils.configure_gc()
        assert gc.get_threshold()[:2] == (1234, 5)
        for bad in ("1,2", "a,b,c", "0,1,2", "5,-1,2"):
            monkeypatch.setenv("ATOM_GC_THRESHOLD", bad)
            with caplog.at_level(logging.WARNING):
                gc_utils.configure_gc()
            assert gc.get_threshold()[:2] == (1234, 5) and "ATOM_GC_THRESHOLD" in caplog.text
    finally:
        gc.set_threshold(*before)


def test_debug_logs_every_pass(monkeypatch, caplog):
    monkeypatch.setenv("ATOM_GC_DEBUG", "1")
    before = list(gc.callbacks)
    try:
        gc_utils.configure_gc()
        gc_utils.configure_gc()
        assert len(gc.callbacks) == len(before) + 1
        cycle: list = []
        cycle.append(cycle)
        del cycle
        with caplog.at_level(logging.INFO):
            gc.collect()
    finally:
        gc.callbacks[:] = before
    line = [r.getMessage() for r in caplog.records if r.getMessage().startswith("gc generation 2:")][-1]
    assert " ms, " in line and int(line.split("ms, ")[1].split()[0]) >= 1 and line.endswith("tracked")


def test_the_reclaim_watch_warns_once(caplog):
    gc.collect()
    watch = gc_utils.ReclaimWatch()
    with caplog.at_level(logging.WARNING):
        watch.check()
        assert not caplog.records
        for _ in range(2):
            cycle: list = []
            cycle.append(cycle)
            del cycle
            gc.collect()
            watch.check()
    assert watch.has_warned and len(caplog.records) == 1
