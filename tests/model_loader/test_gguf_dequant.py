"""Every block format of the gguf package: our values are its values, bit for bit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from atom.errors import ModelLoadError
from atom.kernels.cpu.native.dequantize import TYPES, dequantize
from atom.kernels.cpu.native.library import native_library
from atom.model_loader.checkpoint import TensorInfo
from atom.model_loader.gguf_dequant import FAST_TYPES, QuantisedRows, check_type
from atom.model_loader.lazy_tensor import LazyTensor
from atom.model_loader.weight_file import open_weight_file

BLOCK_TYPES = [kind for kind, (elements, _) in GGML_QUANT_SIZES.items() if elements > 1]
UNREADABLE = {"Q8_1", "Q8_K", "Q1_0"}  # formats of activations, or without a reader in the gguf package


def stored(tmp_path, kind, num_rows=5, blocks_a_row=2, padding=3):
    """A file with one tensor of ``kind``: quantised noise where the package can, else random blocks."""
    elements, num_bytes = GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(int(kind))
    try:
        noise = generator.normal(size=(num_rows, blocks_a_row * elements)).astype(np.float32)
        raw = quants.quantize(noise, kind)
    except NotImplementedError:
        raw = generator.integers(0, 256, (num_rows, blocks_a_row * num_bytes), dtype=np.uint8)
        # Keep random halves finite: scales sit at unknown places, so no byte may look like an fp16 exponent of 31.
        raw &= 0x3B
    path = tmp_path / f"{kind.name}.bin"
    path.write_bytes(bytes(padding) + raw.tobytes())
    info = TensorInfo("t", Path(path), kind.name, (num_rows, blocks_a_row * elements), padding, raw.nbytes)
    return info, raw


@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=lambda kind: kind.name)
def test_values_equal_the_gguf_package(tmp_path, kind):
    info, raw = stored(tmp_path, kind)
    if kind.name in UNREADABLE:
        with pytest.raises(ModelLoadError, match=f"tensor t in {kind.name}.bin has type {kind.name}"):
            check_type(info)
        return
    check_type(info)
    expected = torch.from_numpy(quants.dequantize(raw, kind))
    source = QuantisedRows(open_weight_file(info.file), info)
    assert torch.equal(source.read_rows(0, 5), expected)
    assert torch.equal(source.read_rows(2, 4), expected[2:4])
    assert expected.isfinite().all() and expected.unique().numel() > 2


@pytest.mark.parametrize("name", sorted(FAST_TYPES))
def test_fast_paths_agree_on_any_bytes(tmp_path, name):
    """Blocks that no quantiser writes: all scales, also infinite and not-a-number ones."""
    kind = GGMLQuantizationType[name]
    raw = np.random.default_rng(1).integers(0, 256, (64, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(quants.dequantize(raw, kind))
    assert torch.equal(FAST_TYPES[name](torch.from_numpy(raw)).nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.skipif(native_library() is None, reason="needs the native library")
@pytest.mark.parametrize("name", sorted(TYPES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_values_agree_on_any_bytes(name, dtype):
    elements, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    raw = np.random.default_rng(2).integers(0, 256, (2500, num_bytes), dtype=np.uint8)
    expected = FAST_TYPES[name](torch.from_numpy(raw)).to(dtype)
    found = torch.zeros(2500, elements, dtype=dtype)
    assert dequantize(torch.from_numpy(raw), name, found)
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_what_has_no_native_form_is_left_alone():
    blocks = torch.zeros(4, 34, dtype=torch.uint8)
    for name, out in (
        ("IQ4_NL", torch.ones(4, 32)),
        ("Q8_0", torch.ones(4, 32).half()),
        ("Q8_0", torch.ones(32, 4).t()),
    ):
        assert not dequantize(blocks, name, out)
        assert bool((out == 1).all())


def test_the_demo_models_types_are_fast():
    assert {"Q4_K", "Q6_K", "Q8_0", "Q5_0"} <= set(FAST_TYPES)


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q4_K, GGMLQuantizationType.IQ4_NL])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunked_copy_equals_the_whole(tmp_path, monkeypatch, kind, dtype):
    info, raw = stored(tmp_path, kind)
    monkeypatch.setattr("atom.model_loader.lazy_tensor.CHUNK_BYTES", info.shape[1] * 4 * 2)  # two rows
    lazy = LazyTensor(QuantisedRows(open_weight_file(info.file, use_mmap=False), info))
    target = torch.zeros(info.shape, dtype=dtype)
    target.copy_(lazy)
    assert torch.equal(target, torch.from_numpy(quants.dequantize(raw, kind)).to(dtype))


def test_vectors_and_stacks_of_matrices(tmp_path):
    info, raw = stored(tmp_path, GGMLQuantizationType.Q8_0, num_rows=6)
    expected = torch.from_numpy(quants.dequantize(raw, GGMLQuantizationType.Q8_0))
    file = open_weight_file(info.file)
    stack = TensorInfo("t", info.file, "Q8_0", (3, 2, 64), info.offset, info.num_bytes)
    assert torch.equal(QuantisedRows(file, stack).read_rows(1, 3), expected.view(3, 2, 64)[1:3])
    vector = TensorInfo("t", info.file, "Q8_0", (384,), info.offset, info.num_bytes)
    assert torch.equal(QuantisedRows(file, vector).read_rows(10, 50), expected.flatten()[10:50])
