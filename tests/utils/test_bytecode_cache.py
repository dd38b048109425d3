"""The bytecode of packages that keep none is kept in ATOM's cache, and nobody else's habits change."""

import subprocess
import sys
from pathlib import Path

import pytest

from atom.utils.bytecode_cache import keep_bytecode


@pytest.fixture(autouse=True)
def untouched(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "packages" / "large").mkdir(parents=True)
    (tmp_path / "packages" / "large" / "__init__.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    return tmp_path


def test_a_package_without_bytecode_gets_it_in_the_cache(untouched):
    assert keep_bytecode("large")
    assert sys.dont_write_bytecode is False
    assert Path(sys.pycache_prefix) == untouched / "cache/atom/bytecode" / sys.implementation.cache_tag
    assert (untouched / "cache/atom/bytecode").stat().st_mode & 0o777 == 0o700


def test_a_second_process_finds_the_bytecode(untouched):
    code = "from atom.utils.bytecode_cache import keep_bytecode; print(keep_bytecode('large')); import large"
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(untouched),
        "XDG_CACHE_HOME": str(untouched / "cache"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": f"{untouched / 'packages'}:{Path(__file__).parents[2]}",
    }
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert done.stdout.strip() == "True", done.stderr
    assert list((untouched / "cache/atom/bytecode").rglob("large/__init__.*.pyc"))
    assert not (untouched / "packages/large/__pycache__").exists()


@pytest.mark.parametrize("why", ["off", "prefix", "found", "writable", "absent"])
def test_nothing_changes_where_it_is_not_needed(untouched, monkeypatch, why):
    package = "large"
    if why == "off":
        monkeypatch.setenv("ATOM_BYTECODE_CACHE", "0")
    elif why == "prefix":
        monkeypatch.setattr(sys, "pycache_prefix", "/elsewhere")
    elif why == "found":
        folder = untouched / "packages/large/__pycache__"
        folder.mkdir()
        (folder / f"__init__.{sys.implementation.cache_tag}.pyc").write_bytes(b"")
    elif why == "writable":
        monkeypatch.setattr(sys, "dont_write_bytecode", False)
    else:
        package = "no_such_package"
    before = sys.pycache_prefix, sys.dont_write_bytecode
    assert not keep_bytecode(package)
    assert (sys.pycache_prefix, sys.dont_write_bytecode) == before
