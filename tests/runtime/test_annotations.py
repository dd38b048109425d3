"""The names of steps in a trace, and what naming them costs while nothing is recorded."""

import pytest
import torch
from torch import nn

from atom.core import ScheduledBatch, Sequence
from atom.runtime.annotations import ModuleRanges, StepAnnotations, step_label
from atom.sampling_params import SamplingParams


def make_batch(prefill: list[tuple[int, int]] = (), decode: list[tuple[int, int]] = ()) -> ScheduledBatch:
    """``(start, query tokens)`` of each sequence."""
    chunks = [*prefill, *decode]
    seqs = [Sequence(i, [1], SamplingParams(), max_output_tokens=4) for i in range(len(chunks))]
    return ScheduledBatch(
        step=1, seqs=seqs, epochs=[0] * len(seqs), rows=list(range(len(seqs))),
        starts=[start for start, _ in chunks], num_scheduled=[count for _, count in chunks],
        samples=[True] * len(seqs), num_prefill_seqs=len(prefill), num_tokens=sum(count for _, count in chunks),
        new_seqs=[], patches=[],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("batch", "how", "label"),
    [
        (make_batch([(0, 64), (32, 32)]), {}, "prefill[bs=2 tok=96 ctx=64]"),
        (make_batch([(100, 5)]), {"is_dummy": True}, "dummy_prefill[bs=1 tok=5 ctx=105]"),
        (
            make_batch(decode=[(7, 1), (9, 3)]),
            {"is_graph": True, "padded_bs": 8},
            "decode[bs=2/8 tok=4 p=0 d=2 spec=2]",
        ),
        (make_batch([(0, 10)], [(7, 1)]), {}, "eager_decode[bs=2/2 tok=11 p=1 d=1 spec=0]"),
        (make_batch(decode=[(7, 1)]), {"is_dummy": True}, "dummy_decode[bs=1/1 tok=1 p=0 d=1 spec=0]"),
        (
            make_batch([(2, 3), (0, 2)]),
            {"is_detailed": True},
            f"prefill[bs=2 tok=5 ctx=5 sqsq={9 + 4} sqsk={3 * 5 + 2 * 2} sk={5 + 2}]",
        ),
        (
            make_batch(decode=[(9, 2)]),
            {"is_detailed": True, "is_graph": True},
            "decode[bs=1/1 tok=2 p=0 d=1 spec=1 sqsq=4 sqsk=22 sk=11]",
        ),
    ],
)
def test_labels_say_what_a_step_computed(batch, how, label):
    assert step_label(batch, **how) == label


def recorded_names(action) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        action()
    return [event.name for event in profile.events()]


def test_steps_are_named_between_start_and_stop_only(monkeypatch):
    annotations = StepAnnotations()
    batch = make_batch([(0, 4)])

    def step():
        with annotations.step(batch):
            torch.ones(1)

    monkeypatch.delenv("ATOM_ENABLE_DETAILED_ANNOTATION", raising=False)
    assert not any("prefill" in name for name in recorded_names(step))
    assert annotations.step(batch) is annotations.step(batch)  # one object stands for nothing
    annotations.start()
    assert "prefill[bs=1 tok=4 ctx=4]" in recorded_names(step)
    annotations.stop()
    assert not any("prefill" in name for name in recorded_names(step))
    monkeypatch.setenv("ATOM_ENABLE_DETAILED_ANNOTATION", "1")
    annotations.start()
    assert "prefill[bs=1 tok=4 ctx=4 sqsq=16 sqsk=16 sk=4]" in recorded_names(step)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(2, 2))

    def forward(self, x):
        if x.shape[0] > 1:
            raise ValueError("one row only")
        return self.mlp(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm = nn.LayerNorm(2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def test_modules_down_to_the_parts_of_layers_are_marked_while_started():
    model = Model()
    ranges = ModuleRanges(model)
    marked = {"layers.0", "layers.0.mlp", "layers.1", "layers.1.mlp", "norm"}
    ranges.start()
    names = recorded_names(lambda: model(torch.ones(1, 2)))
    assert marked <= set(names) and "layers.0.mlp.0" not in names and "layers" not in names
    ranges.stop()
    assert not marked & set(recorded_names(lambda: model(torch.ones(1, 2))))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_call_that_fails_leaves_no_range_open():
    model = Model()
    ranges = ModuleRanges(model)
    ranges.start()
    with pytest.raises(ValueError, match="one row only"):
        model(torch.ones(2, 2))
    assert ranges._open == []
    model(torch.ones(1, 2))
    assert ranges._open == []
