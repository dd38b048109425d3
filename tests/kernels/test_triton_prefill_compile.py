"""The sm_90 kernels of prefill attention compile without a device, and their softmax runs beside a product."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "helpers" / "compile_prefill_for_sm90.py"


@pytest.mark.parametrize("kernel, warps", [("specialised", 12), ("plain", 8)])
def test_prefill_kernels_compile_for_sm_90(kernel, warps, tmp_path):
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": ":".join(sys.path),
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    result = subprocess.run(
        [sys.executable, str(PROGRAM), kernel], capture_output=True, text=True, env=environment, timeout=300
    )
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads(result.stdout)[kernel]
    assert found["warps"] == warps and found["copies"] > 0 and found["products"] > 0
    assert found["overlapped"] and all(count >= 60 for count in found["overlapped"])
    assert found["shared"] <= 227 * 1024
