"""The page cache is warmed block by block, only where needed, and never to the harm of a load."""

import threading

import pytest

from atom.model_loader import prefetch as module
from atom.model_loader.prefetch import prefetch


@pytest.fixture
def reads(monkeypatch):
    """Blocks that the background threads read."""
    blocks = []
    monkeypatch.setattr(module, "_read_block", lambda *block: blocks.append(block))
    return blocks


def wait_for_readers():
    for thread in threading.enumerate():
        if thread.name == "atom-prefetch":
            thread.join(5)


def test_every_byte_is_read_once(tmp_path, monkeypatch, reads):
    monkeypatch.setenv("ATOM_LOADER_PREFETCH_BLOCK_MB", "1")
    files = [tmp_path / "a", tmp_path / "b"]
    files[0].write_bytes(bytes((2 << 20) + 5))
    files[1].write_bytes(b"x")
    with prefetch(files):
        wait_for_readers()
    mib = 1 << 20
    assert sorted(reads) == [
        (files[0], 0, mib),
        (files[0], mib, mib),
        (files[0], 2 * mib, 5),
        (files[1], 0, 1),
    ]


def test_off_by_variable(tmp_path, monkeypatch, reads):
    monkeypatch.setenv("ATOM_LOADER_PREFETCH", "0")
    monkeypatch.setenv("ATOM_LOADER_FADVISE", "1")
    (tmp_path / "a").write_bytes(b"x")
    with prefetch([tmp_path / "a"]):
        assert not [thread for thread in threading.enumerate() if thread.name == "atom-prefetch"]
    assert reads == []


def test_cached_blocks_are_skipped_and_others_read(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes(bytes(3 << 20))
    read = []
    real = module.os.preadv

    def preadv(fd, buffers, offset, *flags):
        if not flags:
            read.append(offset)
        return real(fd, buffers, offset, *flags)

    monkeypatch.setattr(module.os, "preadv", preadv)
    monkeypatch.setattr(module, "_is_cached", lambda fd, offset: True)
    module._read_block(path, 0, 3 << 20)
    assert read == []
    monkeypatch.setattr(module, "_is_cached", lambda fd, offset: offset == 0)
    module._read_block(path, 0, 3 << 20)
    assert read == [0, 1 << 20, 2 << 20]


def test_a_failing_reader_does_not_reach_the_load(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk on fire")

    monkeypatch.setattr(module, "_read_block", fail)
    (tmp_path / "a").write_bytes(b"x")
    with prefetch([tmp_path / "a"]):
        wait_for_readers()


def test_readers_stop_when_the_load_ends(tmp_path, monkeypatch):
    monkeypatch.setenv("ATOM_LOADER_PREFETCH_BLOCK_MB", "1")
    started = threading.Event()
    (tmp_path / "a").write_bytes(bytes(8 << 20))
    monkeypatch.setattr(module, "_read_block", lambda *_: started.set())
    with pytest.raises(ValueError), prefetch([tmp_path / "a"]):
        started.wait(5)
        raise ValueError
    assert not [thread for thread in threading.enumerate() if thread.name == "atom-prefetch"]
