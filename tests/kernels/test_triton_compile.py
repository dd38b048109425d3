"""Every Triton kernel compiles for sm_90 without a device, keeps its registers and reads its pages in wide loads."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BY_ELEMENT = ("plan", "patch_tables", "prepare_tokens", "mask", "narrow", "pick_kept")  # they look things up
PROGRAM = Path(__file__).parents[1] / "helpers" / "compile_for_sm90.py"


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_kernels_compile_for_sm_90(dtype, tmp_path):
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": ":".join(sys.path),
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    result = subprocess.run(
        [sys.executable, str(PROGRAM), dtype], capture_output=True, text=True, env=environment, timeout=300
    )
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads(result.stdout)
    for name, facts in found.items():
        assert facts["spilled"] == 0 or dtype == "fp32", f"{name} spills {facts['spilled']} bytes"
        assert facts["shared"] <= 227 * 1024, f"{name} wants {facts['shared']} bytes of shared memory"
        assert facts["specialised"] == [], f"{name} would be compiled again while serving"
        assert facts["wide"] > 0 or name in BY_ELEMENT, f"{name} has no 16-byte load"


def test_sampling_compiles_for_every_kind_of_argument(tmp_path):
    """Vocabularies of one id and up, strides beyond 32 bits, either width of integers, with tables and without."""
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": ":".join(sys.path),
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    result = subprocess.run(
        [sys.executable, str(PROGRAM.with_name("compile_sampling_for_sm90.py"))],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads(result.stdout)
    assert found["kernels"] == ["_mask", "_measure_spans", "_narrow", "_pick", "_pick_kept"]
    assert found["launches"] == 16 and found["failures"] == []
