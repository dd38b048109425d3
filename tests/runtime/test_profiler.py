"""Traces on disk: their folders, options, and that they open as what they are."""

import gzip
import json

import pytest
import torch

from atom.platforms import get_platform
from atom.runtime.profiler import Profiler, capture_trace, rank_folder

CPU = get_platform("cpu")
OPTIONS = ("RECORD_SHAPES", "WITH_STACK", "PROFILE_MEMORY")


def event_names(path) -> set[str]:
    with gzip.open(path, "rt") as file:
        return {event.get("name") for event in json.load(file)["traceEvents"]}


def test_a_recording_becomes_a_chrome_trace_below_the_folder_of_its_rank(tmp_path):
    profiler = Profiler(str(tmp_path / "new"), rank_folder(2), CPU)
    profiler.start()
    torch.ones(4) @ torch.ones(4)
    path = profiler.stop()
    assert path.startswith(str(tmp_path / "new" / "rank_2")) and path.endswith(".pt.trace.json.gz")
    assert "aten::dot" in event_names(path)


def test_folders_tell_ranks_and_engines_apart():
    assert rank_folder(1) == "rank_1"
    assert rank_folder(1, 3) == "dp3_tp1"
    assert rank_folder(0, 0) == "dp0_tp0"


@pytest.mark.parametrize("more", [None, "0", "1"])
@pytest.mark.parametrize("own", [None, "", "0", "1"])
@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_follows_its_switch_and_else_more(tmp_path, monkeypatch, option, own, more):
    for name, value in {"MORE": more, **dict.fromkeys(OPTIONS), option: own}.items():
        if value is None:
            monkeypatch.delenv(f"ATOM_PROFILER_{name}", raising=False)
        else:
            monkeypatch.setenv(f"ATOM_PROFILER_{name}", value)
    given = {}
    monkeypatch.setattr(torch.profiler, "profile", lambda **options: given.update(options))
    Profiler(str(tmp_path), "rank_0", CPU)
    expected = dict.fromkeys([name.lower() for name in OPTIONS], more == "1")
    if own:
        expected[option.lower()] = own == "1"
    assert {name: given[name] for name in expected} == expected


def test_the_capture_of_a_graph_has_a_trace_of_its_own(tmp_path):
    with capture_trace(str(tmp_path), CPU, batch_size=8, query_len=2, rank=1):
        torch.ones(4) @ torch.ones(4)
    path = tmp_path / "capture_traces" / "bs_8_q_2_rank1.json.gz"
    assert "aten::dot" in event_names(path)


def test_a_capture_that_fails_leaves_no_trace_and_says_why(tmp_path):
    with pytest.raises(RuntimeError, match="no graph"):
        with capture_trace(str(tmp_path), CPU, batch_size=8, query_len=1, rank=0):
            raise RuntimeError("no graph")
    assert list((tmp_path / "capture_traces").iterdir()) == []
