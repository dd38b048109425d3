"""Install, start and memory budget of users' cases."""

import os
import re
import subprocess
import sys
import time
import tomllib

import pytest

from tests.helpers.server_process import ROOT, ServerProcess
from tests.integration.conftest import CONTEXT

BROKEN_TORCH = "raise ImportError('libtorch_cpu.so: undefined symbol: _ZN5torch3jit17parseSchemaOrName')\n"


@pytest.fixture
def broken_torch(tmp_path) -> dict[str, str]:
    """An environment in which torch is installed and cannot be imported."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(BROKEN_TORCH)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}


def run_python(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=60)


def test_I1_import_works_with_a_broken_torch_and_needs_nothing_compiled(broken_torch):
    code = "import atom, atom.cli, atom.model_engine.llm_engine; atom.LLMEngine; print(atom.__version__)"
    done = run_python("-c", code, env=broken_torch)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", done.stdout)
    compiled = {
        ".so",
        ".pyd",
        ".cpp",
        ".cu",
        ".pyx",
    }  # C sources are there: kernels that are built on first use
    assert not [path for path in (ROOT / "atom").rglob("*") if path.suffix in compiled]


def test_I1_doctor_says_what_is_missing_in_one_line_each(broken_torch):
    done = run_python("-m", "atom.cli", "doctor", env=broken_torch)
    assert done.returncode == 1  # not usable like this
    assert "Traceback" not in done.stderr
    report = done.stdout
    for name in ("atom", "python", "torch", "triton"):
        assert re.search(rf"^  {name} +\S+$", report, re.MULTILINE), report
    missing = report[report.index("missing or without effect:") :].splitlines()[1:]
    assert [line for line in missing if "torch" in line and "undefined symbol" in line], report


def test_I1_serve_with_a_broken_torch_ends_in_one_line(broken_torch, tiny_model):
    flags = ("--device", "cpu", "--server-port", "0")
    done = run_python("-m", "atom.cli", "serve", str(tiny_model), *flags, env=broken_torch)
    assert done.returncode == 1
    assert "undefined symbol" in done.stderr.splitlines()[-1]


def test_I2_dependencies_are_ranges():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in project["dependencies"]:
        assert re.fullmatch(r"[A-Za-z0-9_.-]+>=[0-9.]+(,<[0-9.]+)?(;.*)?", requirement), requirement


def test_I2_the_first_lines_of_the_log_name_the_device_and_why(server):
    assert [line for line in server.lines[:3] if "device cpu (--device cpu)" in line], server.lines[:5]


def test_I3_budget_that_does_not_fit_is_told_in_seconds_with_what_would(tiny_model, tmp_path):
    """It is told before weights are read: here they are unreadable, and nobody notices."""
    for path in tiny_model.iterdir():
        if path.suffix == ".json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = (tiny_model / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    began = time.monotonic()
    server = ServerProcess(
        tmp_path, "--kv-cache-memory", "40KiB", "--max-model-len", str(CONTEXT), wait=False
    )
    assert server.wait_until_gone(30) == 2
    assert time.monotonic() - began < 15
    for row in ("total memory", "free memory", "weights", "activations", "KV cache per token", "budget"):
        assert re.search(rf"{row}.* \d[\d.]* (B|KiB|MiB|GiB)", server.log), server.log
    assert "Traceback" not in server.log
    advice = re.search(r"What would fit: --kv-cache-memory (\w+)", server.log)
    assert advice, server.log
    server = ServerProcess(tiny_model, "--kv-cache-memory", advice[1], "--max-model-len", str(CONTEXT))
    try:
        check_longest_requests(server, CONTEXT)
    finally:
        server.kill()


def test_I7_limits_that_do_not_fit_are_lowered_told_and_then_hold(tiny_model):
    server = ServerProcess(tiny_model, "--kv-cache-memory", "200KiB")
    try:
        lowered = re.search(rf"context lowered from {CONTEXT} to (\d+) tokens.*--kv-cache-memory", server.log)
        assert lowered, server.log
        limit = int(lowered[1])
        assert 128 <= limit < CONTEXT
        assert server.http.get("/v1/models").json()["data"][0]["max_model_len"] == limit
        answer = server.post(prompt="y" * limit)
        assert answer.status_code == 400 and str(limit) in answer.json()["error"]["message"]
        check_longest_requests(server, limit)
    finally:
        server.kill()


def check_longest_requests(server: ServerProcess, limit: int) -> None:
    for num_prompt in (limit - 1, limit // 2, 2):
        answer = server.post(prompt="y" * (num_prompt - 1), max_tokens=limit - num_prompt, ignore_eos=True)
        assert answer.json()["usage"]["total_tokens"] == limit
    server.check_sound()
