"""Inductor's artifacts across processes: compiled once, even by two at a time; loaded whole, or built again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def start(cache_dir: Path) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, "-m", "tests.helpers.toy_compiled", str(cache_dir)]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> dict:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return json.loads(output.splitlines()[-1])


def libraries(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.rglob("*.so")}


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """Filled by two processes that start together."""
    folder = tmp_path_factory.mktemp("compiled")
    first, second = start(folder), start(folder)
    counters = [finish(first), finish(second)]
    assert all(counter["is_equal"] for counter in counters)
    assert sum(counter["num_compiled"] for counter in counters) == 2
    assert sum(counter["num_loaded"] for counter in counters) == 2
    assert all(counter["num_rejected"] == 0 for counter in counters)
    return folder


def test_a_second_start_compiles_nothing(cache):
    before = libraries(cache)
    assert before  # C++ was compiled, and is part of the artifacts
    counter = finish(start(cache))
    assert counter["is_equal"]
    assert (counter["num_compiled"], counter["num_loaded"], counter["num_saved"]) == (0, 2, 0)
    assert libraries(cache) == before  # nor was g++ run behind the counter's back


def test_a_truncated_library_is_built_again(cache):
    folder = next(cache.glob("*/rank_0/backbone/artifact_shape_None_subgraph_1"))
    library = max(folder.rglob("*.main.so"), key=lambda path: path.stat().st_size)
    content = library.read_bytes()
    library.unlink()  # a hard link to the other artifact's
    library.write_bytes(content[: len(content) // 2])
    counter = finish(start(cache))
    assert counter["is_equal"]
    assert (counter["num_compiled"], counter["num_loaded"], counter["num_rejected"]) == (1, 1, 1)
    assert finish(start(cache))["num_compiled"] == 0


def test_only_this_user_can_read_the_artifacts_and_no_scratch_is_left(cache):
    (module,) = cache.glob("*/rank_0/backbone")
    for path in (module, *module.glob("artifact_*")):
        assert path.stat().st_mode & 0o077 == 0, path
    assert list(module.glob("work-*")) == [] and list(module.glob(".artifact*")) == []
