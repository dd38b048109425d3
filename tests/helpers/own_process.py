"""Programs of this folder in processes of their own, which are not under Triton's interpreter."""

import json
import subprocess
import sys
from pathlib import Path

HELPERS = Path(__file__).parent


def json_of(program, cache, *arguments):
    """What ``program`` prints, Triton's compiled kernels kept in the folder ``cache``."""
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": ":".join([str(HELPERS.parents[1]), *sys.path]),
        "TRITON_CACHE_DIR": str(cache),
    }
    result = subprocess.run(
        [sys.executable, str(HELPERS / program), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)
