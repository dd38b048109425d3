"""A lazy tensor looks like a tensor and is read in pieces."""

import pytest
import torch

from atom.model_loader import lazy_tensor
from atom.model_loader.lazy_tensor import LazyTensor, RowSource


class Recorded(RowSource):
    def __init__(self, tensor):
        self.tensor, self.shape, self.dtype = tensor, tuple(tensor.shape), tensor.dtype
        self.reads, self.releases = [], []

    def read_rows(self, start, stop):
        self.reads.append((start, stop))
        return self.tensor[start:stop]

    def release(self, start, stop):
        self.releases.append((start, stop))


@pytest.fixture
def source(monkeypatch):
    monkeypatch.setattr(lazy_tensor, "CHUNK_BYTES", 2 * 3 * 4)  # two rows of three floats
    return Recorded(torch.arange(21.0).view(7, 3))


def test_copy_reads_and_forgets_two_rows_at_a_time(source):
    target = torch.zeros(7, 3, dtype=torch.float64)
    target.copy_(LazyTensor(source))
    assert torch.equal(target, source.tensor.double())
    assert source.reads == source.releases == [(0, 2), (2, 4), (4, 6), (6, 7)]


def test_shape_is_known_without_reading(source):
    lazy = LazyTensor(source)
    assert (lazy.shape, lazy.dtype, lazy.device.type) == ((7, 3), torch.float32, "cpu")
    assert (lazy.dim(), lazy.ndim, lazy.numel(), lazy.size(0), lazy.size(), len(lazy)) == (
        2,
        2,
        21,
        7,
        (7, 3),
        7,
    )
    assert isinstance(lazy, torch.Tensor) and lazy.is_floating_point() and lazy.nbytes == 84
    assert "7, 3" in repr(lazy)
    assert source.reads == []


@pytest.mark.parametrize(
    "narrow",
    [
        lambda t: t.narrow(0, 2, 4),
        lambda t: torch.narrow(t, 0, 2, 4),
        lambda t: t[2:6],
        lambda t: t[1:].narrow(-2, 1, 4),
        lambda t: t.narrow(1, 0, 3)[2:-1],
        lambda t: t.data.detach()[2:6],
    ],
)
def test_rows_stay_lazy(source, narrow):
    part = narrow(LazyTensor(source))
    assert isinstance(part, LazyTensor) and source.reads == []
    target = torch.zeros(4, 3)
    target[:] = part
    assert torch.equal(target, source.tensor[2:6])
    assert source.reads == [(2, 4), (4, 6)]


@pytest.mark.parametrize(
    "operation",
    [
        lambda t: t - 1,
        lambda t: 1 - t,
        lambda t: t.narrow(1, 1, 2),
        lambda t: t.t(),
        lambda t: t[3],
        lambda t: t[::2],
        lambda t: t.reshape(3, 7),
        lambda t: torch.cat([t, t]),
        lambda t: t.to(torch.float64),
        lambda t: torch.stack((t, t), dim=1),
        lambda t: t.view(torch.int32),
        lambda t: torch.nn.functional.relu(input=t),
    ],
)
def test_anything_else_makes_the_tensor(source, operation):
    result = operation(LazyTensor(source))
    assert type(result) is torch.Tensor
    assert torch.equal(result, operation(source.tensor))


@pytest.mark.parametrize("shape", [(3,), (1, 3), (7, 1), (6, 3)])
def test_a_copy_never_broadcasts(source, shape):
    with pytest.raises(ValueError, match=r"shape \[7, 3\] does not fit"):
        torch.zeros(shape).copy_(LazyTensor(source))
    with pytest.raises(ValueError, match="does not fit"):
        torch.zeros(2, 7, 3)[:] = LazyTensor(source)


def test_rows_out_of_range(source):
    with pytest.raises(IndexError, match="rows 5..9 of a tensor with 7 rows"):
        LazyTensor(source).narrow(0, 5, 4)
    assert LazyTensor(source)[5:99].shape == (2, 3)


def test_vectors(source):
    vector = Recorded(torch.arange(13.0))
    target = torch.zeros(5)
    target.copy_(LazyTensor(vector)[4:9])
    assert torch.equal(target, torch.arange(4.0, 9.0))
