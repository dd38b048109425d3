"""The runner of the GPU tests: how it cuts them, and what it says of groups that pass, fail, die or hang."""

import threading

import pytest

from atom.kernels.cpu.native.build import BuildError, Target
from atom.platforms.cpu import cpu_facts
from tests.gpu import run as runner


def test_groups_are_neighbours_of_one_file_and_slow_files_come_first():
    quick = [f"tests/a.py::test_one[{i}]" for i in range(40)]
    slow = [f"tests/gpu/test_cuda_compile.py::test_two[{i}]" for i in range(2)]
    groups = runner.cut(quick + slow)
    assert [test_id for group in groups for test_id in group.ids] == slow + quick
    assert [len(group.ids) for group in groups] == [1, 1, 13, 13, 14]
    assert groups[-1].name == "tests/a.py 3/3"


@pytest.mark.parametrize(
    ("num_groups", "device_gib", "host_gib", "wanted"),
    [(40, 139, 128, 16), (5, 139, 128, 5), (40, 24, 128, 3), (40, 139, 20, 5), (40, 2, 2, 1)],
)
def test_no_more_processes_than_the_machine_has_room_for(num_groups, device_gib, host_gib, wanted):
    assert runner.num_processes_for(num_groups, 16, device_gib << 30, host_gib << 30) == wanted


FILES = {
    "test_good.py": "import pytest\ndef test_good(): pass\n@pytest.mark.skip\ndef test_not_here(): pass\n",
    "test_bad.py": "def test_good(): pass\ndef test_bad(): assert 1 + 1 == 3\n",
    "test_dying.py": "import os\ndef test_dying(): os._exit(7)\n",
    "test_hanging.py": "import signal\ndef test_hanging(): signal.pause()\n",
}


@pytest.fixture
def ids(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "pytest.ini").touch()
    return runner.collect([str(tmp_path)])


def test_every_way_to_end_is_told(ids, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    *groups, hanging = runner.cut(ids)
    assert [len(group.ids) for group in groups] == [2, 1, 2]
    results = runner.run_groups(groups, 3) + runner.run_groups([hanging], 1, timeout=1)
    assert runner.summarize(results, 5.0) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("E ") and "assert (1 + 1) == 3" in line for line in lines), "a traceback"
    told = [line for line in lines if line.startswith("FAILED ") and " - " not in line]
    assert told == [
        "FAILED test_bad.py::test_bad: assert (1 + 1) == 3",
        "FAILED test_dying.py: its process ended with status 7 before it reported",
        "FAILED test_hanging.py: killed after 1 s",
    ]
    assert lines[-1] == "2 passed, 1 failed, 1 skipped, 2 groups broken: 4 groups in 5 s"
    good = [result for result in results if result.group.name == "test_good.py"]
    assert runner.summarize(good, 5.0) == 0
    assert runner.summarize([], 0.0) == 5


@pytest.mark.parametrize("error", [None, BuildError("there is no gcc, clang or cc")])
def test_the_cpu_kernels_are_built_before_the_first_group(error, monkeypatch, capsys):
    import torch

    events, is_collected = [], threading.Event()

    def build(target):
        events.append(f"builds {target.tier}")
        if error is not None:
            raise error
        assert is_collected.wait(30), "tests are collected meanwhile"
        events.append("has built")

    def collect(selection):
        is_collected.set()
        return ["tests/a.py::test_one"]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (139 << 30, 140 << 30))
    monkeypatch.setattr(runner.signal, "signal", lambda *_: None)
    monkeypatch.setattr(runner, "build_library", build)
    monkeypatch.setattr(runner, "collect", collect)
    monkeypatch.setattr(runner, "run_groups", lambda groups, _: events.append(len(groups)) or [])
    assert runner.main([]) == 5
    tier = Target.of(cpu_facts()).tier
    assert events == [f"builds {tier}", *([] if error else ["has built"]), 1]
    events.clear()
    monkeypatch.setenv("ATOM_CPU_NATIVE", "0")
    assert runner.main([]) == 5 and events == [1]


def test_nothing_to_collect_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="no tests|not found"):
        runner.collect([str(tmp_path)])


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert runner.main([]) == 2
    assert "no GPU" in capsys.readouterr().out
