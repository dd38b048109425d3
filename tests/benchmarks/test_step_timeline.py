"""Gaps between kernels that may overlap, and what the program says without a device."""

import pytest
import torch

from atom.benchmarks.step_timeline import Span, main, report, timeline


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert main([]) == 2
    assert "needs a GPU" in capsys.readouterr().err
