"""What ``decode_chain --variants`` does around the device: it tries every form, and leaves the step as it was."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from atom.benchmarks import decode_variants
from atom.benchmarks.child import lines_of_child
from atom.benchmarks.decode_launches import SHAPES
from atom.benchmarks.decode_variants import attention_shapes, grouped_shapes, time_variants
from atom.benchmarks.gpu_measure import device_us, record_graph, relative_error
from atom.kernels.triton.fused_attention_launch import WarpShape

SHAPE = SHAPES[0]


class Replays:
    """Stands for recorded steps; takes down how attention was built at each recording."""

    def __init__(self, fused, batch):
        self.fused, self.batch, self.seen = fused, batch, []

    def record(self):
        attention = self.fused._attention
        if callable(attention):
            self.seen.append(None)
            return
        found = (attention._batch_shape, attention._grouped_shape, attention._column_shape)
        self.seen.append(next((one for one in found if one is not None), "usual"))

    def time_ms(self, **options):
        if self.seen[-1] == WarpShape(1, 16, 4, 4, 128):
            raise RuntimeError("out of resource: shared memory")
        return float(len(self.seen))


@pytest.fixture
def fused():
    attention = SimpleNamespace(_batch_shape=None, _grouped_shape=None, _column_shape=None)
    return SimpleNamespace(_attention=attention)


def test_batches_are_timed_in_every_form_and_without_attention(fused, capsys):
    replays, attention = Replays(fused, 8), fused._attention
    found = time_variants(fused, replays, SHAPE)
    assert replays.seen == ["usual", *attention_shapes(SHAPE, 8), None, "usual"]
    assert set(found) == {"usual", "no attention", *map(str, attention_shapes(SHAPE, 8))} - {
        "WarpShape(splits=1, keys=16, num_warps=4, num_stages=4, max_registers=128)"
    }
    assert "out of resource" in capsys.readouterr().out
    assert fused._attention is attention and attention._batch_shape is None


def test_few_sequences_are_timed_in_the_forms_that_are_right(fused, monkeypatch):
    wrong = grouped_shapes(SHAPE)[1]
    monkeypatch.setattr(
        decode_variants, "check_attention", lambda shape, batch, *one: 0.5 if one[0] == wrong else 1e-3
    )
    replays = Replays(fused, 1)
    found = time_variants(fused, replays, SHAPE)
    assert replays.seen == ["usual", *grouped_shapes(SHAPE), *decode_variants.COLUMNS, "usual"]
    assert [name for name in found if "WRONG" in name] == [f"{wrong} error 5.0e-01 WRONG"]


def test_without_time_only_the_last_figure_is_taken(fused):
    assert set(time_variants(fused, Replays(fused, 32), SHAPE, -1.0)) == {"no attention"}
    assert time_variants(fused, Replays(fused, 1), SHAPE, -1.0) == {}


def test_lines_of_a_child_are_read_and_the_rest_is_passed_on(tmp_path, monkeypatch, capfd):
    (tmp_path / "child_of_a_test.py").write_text(
        "from atom.benchmarks.child import print_line\n"
        "print_line({'us': 1.5})\nprint('on its way')\nprint_line({'us': 2})\nraise SystemExit(3)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{decode_variants.__file__.rsplit('/', 3)[0]}")
    assert lines_of_child("child_of_a_test", [], "a model") == [{"us": 1.5}, {"us": 2}]
    told = capfd.readouterr().out
    assert told.startswith("on its way\n[a model: ") and told.endswith("exit status 3]\n")


def test_a_graph_is_recorded_behind_a_run_and_timed_by_events(monkeypatch):
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("event")

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, end):
            return 0.5  # milliseconds

    stream = SimpleNamespace(wait_stream=lambda other: log.append("behind"))
    stand_in = SimpleNamespace(
        Stream=lambda: stream, current_stream=lambda: None, stream=contextlib.nullcontext,
        CUDAGraph=lambda: "graph", synchronize=lambda: log.append("synchronize"), Event=Event,
        graph=lambda graph, stream: contextlib.nullcontext(log.append("capture")),
    )  # fmt: skip
    monkeypatch.setattr(torch, "cuda", stand_in)
    assert record_graph(lambda: log.append("run")) == "graph"
    assert log == ["behind", "run", "synchronize", "capture", "run"]
    log.clear()
    assert device_us(lambda: log.append("run"), 2) == 250.0
    assert log == ["event", "run", "run", "event", "wait"]


def test_errors_are_shares_of_what_is_wanted():
    wanted = torch.tensor([3.0, 4.0])
    assert relative_error(wanted + torch.tensor([0.5, 0.0]), wanted) == pytest.approx(0.1)
    assert not relative_error(torch.tensor([float("nan"), 4.0]), wanted) < 1.0
