import time

import pytest

from atom.benchmarks import cpu_kernels
from atom.kernels.cpu.native.library import native_library

pytestmark = pytest.mark.skipif(native_library() is None, reason="no compiler, no native kernels")


@pytest.mark.parametrize("format", cpu_kernels.FORMATS)
def test_a_line_has_the_rate_its_share_and_torch(monkeypatch, format):
    monkeypatch.setitem(cpu_kernels.SHAPES, "small", (128, 64))
    monkeypatch.setattr(cpu_kernels, "_MIN_SECONDS", 0.01)
    limits = cpu_kernels.Limits(read=1e9, floating=1e9, int8=1e9)
    for rows, unit in ((1, "GB/s"), (16, "Gop/s")):
        line = cpu_kernels.measure("small", format, rows, time.perf_counter, cold_bytes=1 << 16)
        assert 0 < line.seconds < 1
        assert line.operations == 2 * rows * 128 * 64
        assert bool(line.torch_seconds) == (format != "int4")
        text = line.text(limits)
        assert unit in text and "%" in text and "small" in text


def test_unknown_names_are_refused(capsys):
    with pytest.raises(SystemExit):
        cpu_kernels.main(["--shapes", "qkv,knee"])
    assert "--shapes must be of qkv, o, gate_up, down, head, got 'knee'" in capsys.readouterr().err
