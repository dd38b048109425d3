"""Levels 2 and 3 on a CUDA device: Triton kernels, their cache across processes, and recording compiled code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]

PROGRAM = """
import dataclasses, json, sys
import torch
from atom.config import set_current_atom_config
from atom.utils.compile_cache import compilation_counter
from tests.helpers.toy_compiled import ToyModel, toy_config

torch.set_grad_enabled(False)
# Tuning for a size takes minutes and is not the subject.
untuned = {"max_autotune": False, "coordinate_descent_tuning": False}
config = toy_config(
    int(sys.argv[1]), sys.argv[2], device="cuda", compile_sizes=[4], inductor_compile_config=untuned
)
with set_current_atom_config(config), torch.device("cuda"):
    model = ToyModel(3)

def inputs(n):
    return torch.arange(n, device="cuda") % 10, torch.arange(n, device="cuda")

def differs(n):
    a, b = model(*inputs(n)), model.forward(*inputs(n))
    return a.shape != b.shape or not torch.allclose(a, b, atol=1e-5)

wrong = [n for n in (64, 1, 2, 4, 4, 65, 300) if differs(n)]
static = inputs(4)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = model(*static)
static[0].fill_(3)
graph.replay()
if not torch.allclose(out, model.forward(*static), atol=1e-5):
    wrong.append("replay")
print(json.dumps(dataclasses.asdict(compilation_counter) | {"wrong": wrong}))
"""


def run(level: int, folder: Path) -> dict:
    command = [sys.executable, "-c", PROGRAM, str(level), str(folder)]
    process = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=280)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.parametrize(("level", "num_artifacts"), [(2, 2), (3, 6)])
def test_compiled_code_is_right_recordable_and_kept(tmp_path, level, num_artifacts):
    """``num_artifacts``: general code and code for 4 tokens, at level 3 of three different pieces."""
    assert torch.cuda.is_available()
    cold = run(level, tmp_path)
    assert cold["wrong"] == []
    assert (cold["num_compiled"], cold["num_saved"]) == (num_artifacts, num_artifacts)
    for _ in range(2):  # what the first load leaves behind must not make the second refuse
        warm = run(level, tmp_path)
        assert warm["wrong"] == []
        assert (warm["num_compiled"], warm["num_loaded"], warm["num_rejected"]) == (0, num_artifacts, 0)
