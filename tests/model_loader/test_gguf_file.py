"""GGUF headers: equal to the gguf package's reading, and damaged files are named, never followed."""

import struct

import gguf
import numpy as np
import pytest

from atom.errors import ModelLoadError
from atom.model_loader import gguf_file
from atom.model_loader.gguf_file import GGUFFile, open_gguf
from atom.model_loader.model_files import ModelFiles


def write(path, tensors=None, alignment=None):
    writer = gguf.GGUFWriter(str(path), "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    writer.add_uint32("a.u32", 7)
    writer.add_float32("a.f32", 1e-6)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "žluťoučký")
    writer.add_array("a.strings", ["", "ab", "é🙂", "\n"])
    writer.add_array("a.ints", [3, -2, 1])
    writer.add_array("a.bools", [True, False])
    for name, tensor in (tensors or {"t.weight": np.arange(6, dtype=np.float32).reshape(2, 3)}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("alignment", [None, 128])
def test_metadata_and_tensors(tmp_path, alignment):
    path = write(
        tmp_path / "m.gguf",
        {
            "a": np.ones((2, 3), np.float32),
            "b": np.arange(4, dtype=np.float16),
            "c": np.arange(5, dtype=np.int8),
        },
        alignment,
    )
    file = GGUFFile(path)
    data = file.metadata
    assert file.architecture() == "llama"
    assert (data["a.u32"], data["a.f32"], data["a.f64"], data["a.bool"]) == (7, 1e-6, 0.1, True)
    assert data["a.string"] == "žluťoučký"
    assert list(data["a.strings"]) == ["", "ab", "é🙂", "\n"] and len(data["a.strings"]) == 4
    assert list(data["a.ints"]) == [3, -2, 1] and list(data["a.bools"]) == [True, False]
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(str(path)).tensors}
    assert {n: (i.offset, i.num_bytes) for n, i in file.tensors.items()} == {
        n: (int(t.data_offset), int(t.n_bytes)) for n, t in reader.items()
    }
    assert {n: (i.dtype, i.shape) for n, i in file.tensors.items()} == {
        "a": ("float32", (2, 3)),
        "b": ("float16", (4,)),
        "c": ("int8", (5,)),
    }


def test_header_longer_than_the_first_read(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_file, "_FIRST_READ", 16)
    assert list(GGUFFile(write(tmp_path / "m.gguf")).metadata["a.strings"])[1] == "ab"


@pytest.mark.parametrize("num_bytes", [0, 3, 4, 8, 20, 24, 40, 100, 200, 300, -1, -30])
def test_truncated_anywhere(tmp_path, num_bytes):
    path = write(tmp_path / "m.gguf")
    content = path.read_bytes()
    # The writer pads the data: cut into the tensor itself.
    end = max(i.offset + i.num_bytes for i in GGUFFile(path).tensors.values())
    path.write_bytes(content[: num_bytes if num_bytes >= 0 else end + num_bytes])
    with pytest.raises(ModelLoadError, match=r"m\.gguf is (truncated|not a GGUF file|damaged)"):
        GGUFFile(path)


@pytest.mark.parametrize(
    ("offset", "replacement", "message"),
    [
        (0, b"PK\x03\x04", "not a GGUF file: it starts with b'PK"),
        (4, struct.pack("<I", 1), "GGUF version 1"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 1 << 60), "claims"),
        (16, struct.pack("<Q", 1 << 60), "claims"),
        (24, struct.pack("<Q", 1 << 60), "truncated"),
    ],
)
def test_damaged_start(tmp_path, offset, replacement, message):
    path = write(tmp_path / "m.gguf")
    content = bytearray(path.read_bytes())
    content[offset : offset + len(replacement)] = replacement
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=message):
        GGUFFile(path)


def test_random_damage_never_escapes_the_error_type(tmp_path):
    path = write(tmp_path / "m.gguf")
    content = path.read_bytes()
    generator = np.random.default_rng(0)
    num_refused = 0
    for _ in range(400):
        damaged = bytearray(content)
        for position in generator.integers(4, len(content) - 24, 3):
            damaged[position] = generator.integers(0, 256)
        path.write_bytes(damaged)
        try:
            GGUFFile(path)
        except ModelLoadError as error:
            num_refused += 1
            assert "m.gguf" in str(error)
    assert num_refused > 20


def test_unknown_tensor_type_is_named(tmp_path):
    path = write(tmp_path / "m.gguf")
    content = path.read_bytes()
    name = b"t.weight"
    start = content.index(name) + len(name) + 4 + 16
    path.write_bytes(content[:start] + struct.pack("<I", 999) + content[start + 4 :])
    with pytest.raises(ModelLoadError, match="'t.weight' has type 999"):
        GGUFFile(path)
    path.write_bytes(content[:start] + struct.pack("<I", 8) + content[start + 4 :])
    with pytest.raises(ModelLoadError, match="rows of 3 elements, Q8_0 needs a multiple of 32"):
        GGUFFile(path)


def test_split_models(tmp_path):
    first = write(tmp_path / "m-00001-of-00002.gguf", {"a": np.ones(3, np.float32)})
    second = write(tmp_path / "m-00002-of-00002.gguf", {"b": np.ones(3, np.float32)})
    metadata, tensors = open_gguf(first)
    assert set(tensors) == {"a", "b"} and tensors["b"].file == second and metadata["a.u32"] == 7
    assert ModelFiles.resolve(str(tmp_path)).path == first
    write(second, {"a": np.ones(3, np.float32)})
    with pytest.raises(ModelLoadError, match="'a' is in m-00001-of-00002.gguf and in m-00002-of-00002.gguf"):
        open_gguf(first)
    second.unlink()
    with pytest.raises(ModelLoadError, match="1 of 2 parts .* missing: m-00002-of-00002.gguf"):
        open_gguf(first)


def test_large_vocabularies_parse_fast(tmp_path):
    """Half a million strings within a second; the gguf package's reader takes about 20."""
    import time

    writer = gguf.GGUFWriter(str(tmp_path / "v.gguf"), "llama")
    writer.add_array("tokens", [f"token{i}" for i in range(500_000)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    start = time.perf_counter()
    tokens = GGUFFile(tmp_path / "v.gguf").metadata["tokens"]
    assert time.perf_counter() - start < 1.0
    assert tokens[499_999] == "token499999"
