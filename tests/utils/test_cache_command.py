"""``atom cache``: what is kept on disk, and removing it."""

import json
import os
import time

import pytest

from atom import cli
from atom.errors import ConfigError
from atom.utils.cache_list import format_size, list_entries, parse_age, render
from atom.utils.compile_cache import ENTRY, ArtifactFolder, record_entry

DAY = 86400


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Two compile caches, the second unused for ten days, and a tokenizer."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    root = tmp_path / "atom"
    for name, age in (("aaaaaaaaaa", 0), ("bbbbbbbbbb", 10 * DAY)):
        entry = root / "torch_compile_cache" / name
        ArtifactFolder(entry / "rank_0" / "backbone").publish(
            "artifact_0", "", lambda aside: (aside / "code").write_bytes(b"x" * 2048)
        )
        record_entry(entry, {"model": f"model-{name[0]}", "level": 3})
        os.utime(entry / ENTRY, (time.time() - age,) * 2)
    (root / "tokenizers").mkdir()
    (root / "tokenizers" / "t.json").write_text("{}")
    return root


def test_list_shows_model_size_age_and_last_use(kept, capsys):
    assert cli.main(["cache", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["KIND", "NAME", "MODEL", "SIZE", "AGE", "LAST", "USE"]
    rows = [line.split() for line in lines[1:-1]]
    assert [row[:2] for row in rows] == [
        ["tokenizers", "t.json"],
        ["torch_compile_cache", "aaaaaaaaaa"],
        ["torch_compile_cache", "bbbbbbbbbb"],
    ]
    assert rows[2][2] == "model-b" and rows[2][-1] == "10d" and rows[2][4] == "KiB"
    assert lines[-1].startswith("3 entries, ")


def test_list_as_json(kept, capsys):
    assert cli.main(["cache", "list", "--json", "--kind", "torch_compile_cache"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["model"], second["name"]) == ("model-a", "bbbbbbbbbb")
    assert first["num_bytes"] > 2048 and first["last_used"] - second["last_used"] > 9 * DAY


def test_clear_by_age_and_kind(kept, capsys):
    assert cli.main(["cache", "clear", "--older-than", "7d", "--yes"]) == 0
    assert {entry.name for entry in list_entries()} == {"aaaaaaaaaa", "t.json"}
    assert cli.main(["cache", "clear", "--kind", "tokenizers", "-y"]) == 0
    assert {entry.name for entry in list_entries()} == {"aaaaaaaaaa"}
    assert list((kept / "torch_compile_cache").glob(".*")) == []
    assert "freed" in capsys.readouterr().out


def test_plans_go_with_their_artifacts(kept):
    plans = kept / "torch_compile_cache" / ".plans"
    plans.mkdir()
    for name in ("aaaaaaaaaa", "bbbbbbbbbb"):
        (plans / f"{name}-key.json").write_text("{}")
    assert cli.main(["cache", "clear", "--older-than", "5d", "--kind", "torch_compile_cache", "--yes"]) == 0
    assert [path.name for path in plans.iterdir()] == ["aaaaaaaaaa-key.json"]


def test_clear_asks(kept, capsys, monkeypatch):
    assert cli.main(["cache", "clear"]) == 2  # no terminal
    assert "give --yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for answer, code, left in (("", 1, 3), ("n", 1, 3), ("y", 0, 0)):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        assert cli.main(["cache", "clear"]) == code
        assert len(list_entries()) == left


def test_an_empty_cache(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cli.main(["cache", "list"]) == 0 and cli.main(["cache", "clear"]) == 0
    assert capsys.readouterr().out == "nothing is kept\nnothing to remove\n"


def test_a_damaged_entry_is_listed_all_the_same(kept):
    (kept / "torch_compile_cache" / "aaaaaaaaaa" / ENTRY).write_text("{")
    (entry,) = [entry for entry in list_entries() if entry.name == "aaaaaaaaaa"]
    assert entry.model == "?" and "aaaaaaaaaa" in render([entry])


@pytest.mark.parametrize(
    ("text", "seconds"), [("30d", 30 * DAY), ("2", 2 * DAY), ("12h", 43200), ("1 w", 7 * DAY)]
)
def test_ages(text, seconds):
    assert parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "d", "-1d", "1y", "1.5d"])
def test_bad_ages_are_named(text):
    with pytest.raises(ConfigError, match="--older-than must be an age such as 30d"):
        parse_age(text)


def test_bad_kinds_are_named(kept, capsys):
    assert cli.main(["cache", "list", "--kind", "tokenizer"]) == 2
    assert "'tokenizer'" in (error := capsys.readouterr().err) and "tokenizers" in error


def test_sizes():
    assert [format_size(n) for n in (0, 1023, 1536, 3 << 30)] == ["0 B", "1023 B", "1.5 KiB", "3.0 GiB"]
