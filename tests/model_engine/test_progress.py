"""What a person at a terminal sees while an engine starts."""

from atom.model_engine.progress import StartupProgress

RECORDINGS = [
    "record graphs (prefill 256, 2 MiB)",
    "record graphs (decode 8, 0 B)",
    "record graphs (decode 4, 1 KiB)",
]


def test_a_phase_has_one_bar_whatever_it_is_at(capsys):
    with StartupProgress(enabled=True) as progress:
        progress.update("load weights", 0.5)
        progress.update("load weights", 1.0)
        for number, phase in enumerate(RECORDINGS, 1):
            progress.update(phase, number / len(RECORDINGS))
    bars = capsys.readouterr().err.rstrip("\n").split("\n")
    assert [bar.strip("\r").split("  ")[0].strip() for bar in bars] == ["load weights", "record graphs"]
    assert "100%" in bars[0].split("\r")[-1]
    assert bars[1].split("\r")[-1].endswith(", decode 4, 1 KiB")


def test_nothing_is_shown_unless_asked_for(capsys):
    with StartupProgress(enabled=None) as progress:  # standard error is no terminal
        progress.update("load weights", 0.5)
    assert capsys.readouterr().err == ""
