"""What benchmarks of kernels on a GPU share: graphs of launches, the device's time for them, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def record_graph(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """What ``run`` launches as a graph. It runs once before, so that nothing is compiled while it is recorded."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            run()
    return graph


def device_us(run: Callable[[], Any], count: int = 1) -> float:
    """Microseconds on the device of one of ``count`` calls in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / count


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over that of ``wanted``. NaN stays NaN, which passes no comparison."""
    wanted = wanted.float()
    return float((found.float() - wanted).norm() / wanted.norm())
