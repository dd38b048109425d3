"""The table of starts and decode steps: figures of both starts in their columns, and a start that failed is told."""

from atom.benchmarks import level_suite
from atom.benchmarks.child import ChildError
from atom.benchmarks.level_suite import LevelResult, run_suite, table

COLD = LevelResult({"imports": 0.1, "import torch": 1.3, "warm up": 14.0}, {}, 3 << 20, 7, 3, 0)
WARM = LevelResult(
    {"imports": 0.1, "import torch": 1.1, "warm up": 2.0}, {"1": 0.5091, "8": 0.7}, 5 << 20, 7, 0, 3
)


def test_a_line_has_both_starts_and_imports_apart():
    text = table({("m", 3, "FULL"): {"cold": COLD, "warm": WARM}}, [1, 8])
    head, rule, line = text.splitlines()
    assert head.split(" | ")[3:] == [
        "imports (s)", "start cold (s)", "start warm (s)", "decode 1 (ms)", "decode 8 (ms)", "graph memory (MiB) |",
    ]  # fmt: skip
    assert line == "| m | 3 | FULL | 1.2 | 15.4 | 3.2 | 0.509 | 0.700 | 5 |"
    assert head.count("|") == rule.count("|") == line.count("|")


def test_a_start_that_fails_leaves_the_others(monkeypatch, capsys):
    started = []

    def start(model, level, mode, device, folder, batches):
        started.append((level, mode, bool(batches)))
        if mode == "FULL":
            raise ChildError("out of memory")
        return WARM if batches else COLD

    monkeypatch.setattr(level_suite, "_start", start)
    results = run_suite(["m"], "cpu", [0, 3], ["NONE", "FULL"], [1, 8])
    assert set(results[("m", 3, "NONE")]) == {"cold", "warm"} and results[("m", 3, "FULL")] == {}
    assert sorted(started[:4]) == [
        (0, "FULL", False),
        (0, "NONE", False),
        (3, "FULL", False),
        (3, "NONE", False),
    ]
    assert capsys.readouterr().err.count("out of memory") == 4
    failed = table(results, [1, 8]).splitlines()[3]
    assert failed == "| m | 0 | FULL |" + " failed |" * 6
