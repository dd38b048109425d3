"""Gaps between kernels that may overlap, and what the program says without a device."""

import pytest
import torch

from atom.benchmarks.step_timeline import Span, decode_timeline, main, report, report_decode, timeline


def test_gaps_are_told_with_their_neighbours_and_overlaps_are_counted_once():
    spans = [
        Span(10_000, 20_000, "first"),
        Span(15_000, 18_000, "inside"),
        Span(19_000, 30_000, "dependent"),
        Span(34_000, 40_000, "late"),
        Span(41_000, 45_000, "last"),
    ]
    found = timeline(reversed(spans), 4_000, 47_000)
    assert (found.before, found.busy, found.behind) == (6.0, 30.0, 2.0)
    assert found.gaps == [(4.0, 20.0, "dependent", "late"), (1.0, 30.0, "late", "last")]
    assert found.idle == 5.0
    text = report("model 1 x 2", [3.0, 1.0, 2.0], found)
    assert "2.00 ms (of 3: 1.00 to 3.00)" in text and "dependent -> late" in text


def test_no_kernel_is_an_error():
    with pytest.raises(ValueError, match="at least 1 kernel, got 0"):
        timeline([], 0, 1)


def test_between_recorded_steps_lie_a_gap_and_whatever_else_was_launched():
    spans = [
        Span(1_000, 5_000, "prepare", launch=1),
        Span(4_000, 9_000, "head", launch=1),  # begins while the one before it runs
        Span(10_000, 11_500, "copy", launch=2),
        Span(13_000, 15_000, "prepare", launch=3),
        Span(16_000, 21_000, "head", launch=3),
        Span(23_000, 24_000, "prepare", launch=4),
        Span(24_000, 29_000, "head", launch=4),
        Span(30_000, 31_000, "copy", launch=5),
    ]
    found = decode_timeline(reversed(spans))
    assert found.steps == [8.0, 8.0, 6.0] and found.busy == [8.0, 7.0, 6.0]
    assert [gap.length for gap in found.gaps] == [4.0, 2.0]
    assert found.gaps[0].names == ["head", "copy", "prepare"] and found.gaps[1].names == ["head", "prepare"]
    assert found.longest[0] is found.gaps[0]
    assert found.others == {"copy": [1.5, 1.0]}
    text = report_decode("model decode 1", 0.5123, found)
    assert "0.5123 ms a step" in text and "between two 3.0 us (median of 2)" in text
    assert "4.0 us  head -> copy -> prepare" in text and "2 x 1.2 us  copy" in text


def test_steps_that_are_not_recorded_are_an_error():
    with pytest.raises(ValueError, match="at least 2 recorded steps, got 1"):
        decode_timeline([Span(0, 1, "a", 1), Span(1, 2, "b", 1), Span(2, 3, "c", 2)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert main([]) == 2
    assert "needs a GPU" in capsys.readouterr().err
