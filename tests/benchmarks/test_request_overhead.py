"""The benchmark of what a request costs: every stage is there, and together they are the whole."""

import pytest

from atom.benchmarks import request_overhead
from atom.benchmarks.request_overhead import STAGES


@pytest.mark.parametrize("in_process", [False, True])
def test_stages_are_positive_and_make_up_the_total(in_process):
    result = request_overhead.measure(2, 40, in_process, repeats=1)
    assert list(result.stages) == list(STAGES) and min(result.stages.values()) > 0
    assert sum(result.stages.values()) == pytest.approx(result.total)
    table = request_overhead.format_table([result])
    assert ("2 x 40, in process" in table) is in_process and f"{result.total:.0f}" in table
