"""Grammar masks on a CUDA device: the logits, and guided answers that equal the CPU's in both loops."""

import re

import numpy as np
import pytest
import torch

from atom import LLMEngine, SamplingParams
from atom.core import TokenMasks
from atom.guide import Guide
from atom.model_engine.structured.backend import installed_backends
from atom.model_ops.token_masks import apply_masks
from tests.helpers.no_waiting import steps_that_wait_raise, waiting_raises
from tests.helpers.tiny_model import make_tiny_model

pytestmark = pytest.mark.gpu


def test_masks_on_the_device_equal_the_hosts():
    bits = np.random.default_rng(1).integers(-(2**31), 2**31, (4, 8192), np.int64).astype(np.int32)
    bits[1] = 0
    bits[1, 77] = 5
    logits = torch.randn(6, 262_150)
    for rows in ([5, 0, 3, 1], [0, 1, 2, 3]):
        on_host, on_device = logits[: max(rows) + 1].clone(), logits[: max(rows) + 1].cuda()
        apply_masks(on_host, TokenMasks(rows, bits))
        with waiting_raises():
            apply_masks(on_device, TokenMasks(rows, bits))
        assert torch.equal(on_device.cpu(), on_host)


@pytest.mark.skipif(not installed_backends(), reason="needs xgrammar or llguidance")
@pytest.mark.parametrize("loop", ["plain", "overlapped"])
def test_guided_answers_equal_the_cpus(tmp_path, loop):
    folder = make_tiny_model(tmp_path)
    guides = [
        Guide(kind="regex", text="[a-z]{20}"),
        Guide(kind="choice", choices=("left", "right")),
        Guide(kind="json_schema", text='{"properties": {"x": {"type": "boolean"}}, "required": ["x"]}'),
        None,
    ]
    given = [SamplingParams(temperature=0.0, max_tokens=60, guide=guide) for guide in guides]
    texts = {}
    for device in ("cpu", "cuda"):
        with LLMEngine(
            str(folder), in_process=True, show_progress=False, device=device, dtype="float32", loop=loop,
            kv_cache_memory=2**24,
        ) as engine:  # fmt: skip
            texts[device] = [answer["text"] for answer in engine.generate(["go"] * 4, given)]
            if device == "cuda":  # once more, now that what it needs is loaded
                with steps_that_wait_raise():
                    again = [answer["text"] for answer in engine.generate(["go"] * 4, given)]
    assert texts["cuda"] == again == texts["cpu"]
    assert re.fullmatch("[a-z]{20}", texts["cuda"][0]) and texts["cuda"][1] in ("left", "right")
