"""Safetensors into a model: what arrives, what is refused and how much memory it takes."""

import json
import struct
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from atom.errors import ConfigError, ModelLoadError
from atom.model_loader.loader import load_dummy, load_weights
from atom.model_loader.model_files import ModelFiles

CONFIG = {"model_type": "llama", "architectures": ["Pair"], "dtype": "float32", "num_hidden_layers": 1}


class Pair(nn.Module):
    """A merged parameter of two shards and a plain one."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.merged = nn.Parameter(torch.zeros(6, 4, dtype=dtype), requires_grad=False)
        self.merged.expected_shards = (0, 1)
        self.merged.weight_loader = self.load_shard
        self.norm = nn.Parameter(torch.zeros(4, dtype=dtype), requires_grad=False)
        self.is_packed = False

    @staticmethod
    def load_shard(parameter, tensor, shard_id):
        start, size = ((0, 4), (4, 2))[shard_id]
        parameter.data.narrow(0, start, size).copy_(tensor)

    def map_checkpoint_name(self, name):
        known = {"a.weight": ("merged", 0), "b.weight": ("merged", 1), "n.weight": ("norm", None)}
        return None if name == "ignored" else known.get(name, (name, None))

    def after_load(self):
        self.is_packed = True


def tensors():
    return {
        "a.weight": torch.arange(16.0).view(4, 4),
        "b.weight": -torch.arange(8.0).view(2, 4),
        "n.weight": torch.tensor([1.5, 2.5, 3.5, 4.5]),
        "ignored": torch.ones(2),
    }


def write(folder, shards):
    """Write ``shards`` (file name -> tensors) with config and, for several, an index."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name, content in shards.items():
        save_file(content, folder / name)
    if len(shards) > 1:
        weight_map = {tensor: name for name, content in shards.items() for tensor in content}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return ModelFiles.resolve(str(folder))


def two_shards(content=None):
    content = content or tensors()
    first = {name: content[name] for name in list(content)[:1]}
    return {
        "model-1.safetensors": first,
        "model-2.safetensors": {k: v for k, v in content.items() if k not in first},
    }


@pytest.mark.parametrize("use_mmap", [True, False])
@pytest.mark.parametrize("is_sharded", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_arrives_in_its_place(tmp_path, monkeypatch, use_mmap, is_sharded, dtype):
    monkeypatch.setenv("ATOM_DISABLE_MMAP", "0" if use_mmap else "1")
    files = write(tmp_path, two_shards() if is_sharded else {"model.safetensors": tensors()})
    model = Pair(dtype)
    reports = []
    load_weights(model, files, report=lambda phase, fraction: reports.append((phase, fraction)))
    expected = tensors()
    assert torch.equal(model.merged.data, torch.cat([expected["a.weight"], expected["b.weight"]]).to(dtype))
    assert torch.equal(model.norm.data, expected["n.weight"].to(dtype))
    assert model.is_packed
    assert reports[-1] == ("weights", 1.0)
    assert [fraction for _, fraction in reports] == sorted(fraction for _, fraction in reports)


def test_a_scalar_and_sliced_columns_load(tmp_path):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(()), requires_grad=False)
            self.part = nn.Parameter(torch.zeros(3, 2), requires_grad=False)
            self.part.weight_loader = lambda p, tensor, _: p.data.copy_(tensor.narrow(1, 2, 2))

        def map_checkpoint_name(self, name):
            return name, None

    half = torch.randn(3, 4)
    save_file({"scale": torch.tensor(2.5), "part": half}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model = Odd()
    load_weights(model, ModelFiles.resolve(str(tmp_path)))
    assert model.scale.item() == 2.5
    assert torch.equal(model.part.data, half[:, 2:])


def refused(files, model=None):
    with pytest.raises(ModelLoadError) as caught:
        load_weights(model or Pair(), files)
    return str(caught.value)


def test_missing_tensor_names_parameter_and_shard(tmp_path):
    content = tensors()
    del content["b.weight"]
    message = refused(write(tmp_path, {"model.safetensors": content}))
    assert "lacks tensors" in message and "merged shard 1" in message and "[6, 4]" in message


def test_unknown_tensor_names_file_and_shape(tmp_path):
    message = refused(write(tmp_path, {"model.safetensors": tensors() | {"c.bias": torch.ones(3, 5)}}))
    assert "does not know (1)" in message and "c.bias (model.safetensors, shape [3, 5])" in message


def test_all_misfits_are_listed_with_found_and_expected(tmp_path):
    content = tensors() | {"a.weight": torch.ones(5, 4), "n.weight": torch.ones(1)}
    message = refused(write(tmp_path, two_shards(content)))
    assert "a.weight in model-1.safetensors: found shape [5, 4]" in message
    assert "merged shard 0 of shape [6, 4]" in message
    assert (
        "n.weight in model-2.safetensors: found shape [1], expected what fills norm of shape [4]" in message
    )


def test_a_weight_that_would_broadcast_is_refused(tmp_path):
    message = refused(write(tmp_path, {"model.safetensors": tensors() | {"b.weight": torch.ones(1, 4)}}))
    assert "b.weight" in message and "[1, 4]" in message


def test_truncated_file_is_noticed_before_loading(tmp_path):
    files = write(tmp_path, two_shards())
    path = tmp_path / "model-2.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-5])
    model = Pair()
    message = refused(files, model)
    assert "model-2.safetensors is truncated" in message
    assert str(len(content)) in message and str(len(content) - 5) in message
    assert not model.merged.any()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a safetensors file"),
        (b"PK\x03\x04 a zip archive, pickled weights", "not a safetensors file"),
        (struct.pack("<Q", 1000) + b"{}", "is truncated: its header ends at byte 1008, the file has 10"),
        (struct.pack("<Q", 2) + b"{]", "bad header"),
        (struct.pack("<Q", 2) + b"{}xxxx", "bytes that no tensor owns"),
    ],
)
def test_foreign_file_is_named(tmp_path, content, reason):
    files = write(tmp_path, {"model.safetensors": tensors()})
    (tmp_path / "model.safetensors").write_bytes(content)
    message = refused(files)
    assert str(tmp_path / "model.safetensors") in message and reason in message


def test_header_that_contradicts_itself(tmp_path):
    files = write(tmp_path, {"model.safetensors": tensors()})
    header = json.dumps({"a.weight": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 8]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    assert "'a.weight' of shape [4, 4] and dtype float32 needs 64 bytes, its offsets are 0..8" in refused(
        files
    )
    path.write_bytes(struct.pack("<Q", len(header)) + header.replace(b"F32", b"X32") + bytes(8))
    assert "unknown dtype 'X32'" in refused(files)


def test_missing_shard_is_named_before_loading(tmp_path):
    files = write(tmp_path, two_shards())
    (tmp_path / "model-2.safetensors").unlink()
    assert "1 of 2 weight files" in refused(files) and "model-2.safetensors" in refused(files)


def test_index_that_lies(tmp_path):
    files = write(tmp_path, two_shards())
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"n.weight": "model-1.safetensors"}}))
    assert "'n.weight' in model-1.safetensors" in refused(files)
    index.write_text(json.dumps({"weight_map": {"n.weight": "../model-1.safetensors"}}))
    assert "outside of its folder" in refused(files)


def test_same_tensor_twice_without_index(tmp_path):
    files = write(tmp_path, two_shards())
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file({"a.weight": torch.zeros(4, 4)}, tmp_path / "model-3.safetensors")
    assert "model-1.safetensors and in model-3.safetensors" in refused(files)


def test_pickled_weights_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert "pytorch_model.bin" in refused(ModelFiles.resolve(str(tmp_path)))


@pytest.mark.parametrize("mode", ["zero", "xavier"])
def test_dummy_weights_are_repeatable(mode):
    first, second = Pair(), Pair()
    for model in (first, second):
        model.merged.data.fill_(9.0)
        model.norm.data.fill_(9.0)
        load_dummy(model, mode)
    assert torch.equal(first.merged, second.merged) and torch.equal(first.norm, second.norm)
    assert first.is_packed
    bound = (6 / (6 + 4)) ** 0.5 if mode == "xavier" else 0.0
    assert first.merged.abs().max() <= bound
    assert (first.merged.unique().numel() > 10) == (mode == "xavier")


def test_dummy_weights_fill_what_is_larger_than_a_tile(monkeypatch):
    monkeypatch.setattr("atom.model_loader.dummy._TILE", 10)
    model = Pair()
    model.merged.data.fill_(9.0)
    load_dummy(model, "xavier")
    assert model.merged.abs().max() < 9.0
    assert torch.equal(model.merged.view(-1)[:10], model.merged.view(-1)[10:20])


def test_dummy_mode_is_checked():
    load_dummy(Pair(), "empty")
    with pytest.raises(ConfigError, match="empty, zero, xavier, got 'ones'"):
        load_dummy(Pair(), "ones")


@pytest.mark.parametrize("use_mmap", [True, False])
def test_peak_memory_of_a_load_stays_below_1_3_of_the_weights(tmp_path, use_mmap):
    """Also when one tensor is most of the model, as embeddings of small models are."""
    generator = torch.Generator().manual_seed(0)
    content = {f"w{i}": torch.empty(1024, 4096, dtype=torch.bfloat16) for i in range(8)}
    content["w8"] = torch.empty(65536, 1024, dtype=torch.bfloat16)
    for tensor in content.values():
        tensor.view(torch.int16).random_(generator=generator)
    total = sum(tensor.nbytes for tensor in content.values())
    save_file(content, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    code = f"""
        import torch
        from torch import nn
        from atom.model_loader.loader import load_weights
        from atom.model_loader.model_files import ModelFiles

        def kib(key):
            return int(next(l for l in open("/proc/self/status") if l.startswith(key)).split()[1])

        class Plain(nn.Module):
            def map_checkpoint_name(self, name):
                return name, None

        files = ModelFiles.resolve({str(tmp_path)!r})
        model = Plain()
        for name, info in files.tensors.items():
            model.register_parameter(name, nn.Parameter(torch.empty(info.shape, dtype=torch.bfloat16), False))
        torch.ones(1 << 20).sum()  # threads are up
        open("/proc/self/clear_refs", "w").write("5")  # the peak starts here
        before = kib("VmRSS")
        load_weights(model, files)
        print((kib("VmHWM") - before) * 1024, sum(int(p.view(torch.int16).sum()) for p in model.parameters()))
    """
    env = {"ATOM_DISABLE_MMAP": "0" if use_mmap else "1", "OMP_NUM_THREADS": "2", "PATH": ""}
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True, check=True
    )
    peak, checksum = map(int, ran.stdout.split())
    assert checksum == sum(int(tensor.view(torch.int16).sum()) for tensor in content.values())
    assert total <= peak < 1.3 * total, f"{peak / total:.2f} of the weights"
