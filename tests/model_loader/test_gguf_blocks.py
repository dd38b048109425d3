"""Blocks of a GGUF file stay packed: the same values as the widened ones, less memory, mixed types, named refusals."""

from types import SimpleNamespace

import pytest
import torch

from atom.config import Config
from atom.errors import ConfigError
from atom.kernels.cpu.native.gguf import PackedBlocks
from atom.kernels.cpu.native.library import native_library
from atom.model_engine.runner import weight_format
from atom.model_loader.loader import announce_blocks, load_weights
from atom.model_loader.model_files import ModelFiles
from atom.models.registry import get_model_class
from tests.helpers.tiny_gguf import write_gguf
from tests.helpers.tiny_model import make_tiny_model

needs_native = pytest.mark.skipif(native_library() is None, reason="no compiler here")
MIXED = {
    "attn_v": "Q8_0",
    "attn_q": "Q5_0",
    "ffn_up": "Q4_0",
    "ffn_gate": "Q8_0",
    "attn_output": "F16",
    "ffn_down": "Q5_1",
}


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def folder(request, tmp_path_factory):
    return make_tiny_model(
        tmp_path_factory.mktemp("tiny") / request.param, request.param, max_position_embeddings=256
    )


def load(path, keep: bool):
    """The loaded model, and what its weights were counted as before."""
    files = ModelFiles.resolve(str(path))
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = get_model_class(files.hf_config.architectures)(files.hf_config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    num_kept = announce_blocks(model, files) if keep else 0
    size = model.num_weight_bytes()
    load_weights(model, files)
    return model, size, num_kept


@needs_native
@pytest.mark.parametrize("types", ["Q8_0", MIXED], ids=["one type", "mixed"])
def test_kept_blocks_are_the_widened_values(folder, tmp_path, types):
    path = write_gguf(folder, tmp_path / "m.gguf", "Q8_0", types=types if isinstance(types, dict) else {})
    kept, kept_bytes, num_kept = load(path, keep=True)
    wide, wide_bytes, _ = load(path, keep=False)
    assert num_kept >= 5
    assert kept_bytes < 0.75 * wide_bytes
    for mine, theirs in zip(kept.model.layers, wide.model.layers, strict=True):
        mine, theirs = mine.self_attn.qkv_proj.packed, theirs.self_attn.qkv_proj.packed
        assert isinstance(mine, PackedBlocks)
        assert mine.parts  # of several types, or of rows that fill no panel
        # The widened model holds bf16.
        torch.testing.assert_close(mine.unpack(), theirs.unpack(), rtol=2**-8, atol=1e-7)
    ids = torch.arange(kept.config.vocab_size)
    torch.testing.assert_close(
        kept.model.embed_tokens(ids).float(), wide.model.embed_tokens(ids).float(), rtol=2**-7, atol=1e-7
    )


@needs_native
def test_mixed_gate_and_up_and_unread_types_become_q8_0(folder, tmp_path):
    kept, _, _ = load(write_gguf(folder, tmp_path / "m.gguf", "Q8_0", types=MIXED), keep=True)
    wide, _, _ = load(write_gguf(folder, tmp_path / "m.gguf", "Q8_0", types=MIXED), keep=False)
    mine, theirs = kept.model.layers[0].mlp, wide.model.layers[0].mlp
    assert (mine.gate_up_proj.packed.format, mine.down_proj.packed.format) == ("q8_0", "q8_0")
    assert kept.model.layers[0].self_attn.o_proj.packed.format == "bf16"  # F16 is no block type
    x = torch.randn(4, kept.config.hidden_size).bfloat16()
    scale = theirs(x).float().abs().max()
    assert (mine(x).float() - theirs(x).float()).abs().max() < 0.03 * scale


@needs_native
def test_a_shape_that_does_not_fit_is_named(folder, tmp_path):
    from atom.errors import ModelLoadError

    files = ModelFiles.resolve(str(write_gguf(folder, tmp_path / "m.gguf", "Q8_0")))
    model = get_model_class(files.hf_config.architectures)(files.hf_config)
    assert announce_blocks(model, files)
    model.model.layers[0].mlp.down_proj.weight.block_weight.shards[None] += 64
    with pytest.raises(ModelLoadError, match=r"blk\.0\.ffn_down\.weight .*expected shape"):
        load_weights(model, files)


GGUF = SimpleNamespace(kind="gguf", path="m.gguf")


@pytest.mark.parametrize(
    ("fields", "platform", "files", "message"),
    [
        ({}, "cpu", SimpleNamespace(kind="safetensors", path="folder"), "needs a GGUF file, got folder"),
        ({}, "cuda", GGUF, "needs --device cpu, got cuda"),
        ({"compilation_config": {"level": 3}}, "cpu", GGUF, "needs --level 0, got 3"),
        ({"load_dummy": "zero"}, "cpu", GGUF, "got --load_dummy zero"),
    ],
)
def test_keep_is_refused_by_name(fields, platform, files, message):
    config = Config.build("m", gguf_dtype="keep", **fields)
    with pytest.raises(ConfigError, match=f"--gguf-dtype keep .*{message}"):
        weight_format.keeps_gguf_blocks(config, platform, files)
    automatic = config.replace(gguf_dtype="auto")
    assert not weight_format.keeps_gguf_blocks(automatic, platform, files)


@pytest.mark.parametrize(
    ("fields", "is_kept"),
    [
        ({}, True),
        ({"gguf_dtype": "keep", "dtype": "float32"}, True),
        ({"dtype": "float32"}, False),
        ({"gguf_dtype": "dequantize"}, False),
        ({"cpu_weights": "int8"}, False),
    ],
)
def test_automatic_choice(monkeypatch, fields, is_kept):
    monkeypatch.setattr(weight_format, "native_library", lambda: object())
    assert weight_format.keeps_gguf_blocks(Config("m", **fields), "cpu", GGUF) is is_kept
    monkeypatch.setattr(weight_format, "native_library", lambda: None)
    assert not weight_format.keeps_gguf_blocks(Config("m", **fields), "cpu", GGUF)


def test_cpu_weights_are_refused_elsewhere():
    config = Config("m", cpu_weights="int4")
    weight_format.check_cpu_weights(config, "cpu")
    with pytest.raises(ConfigError, match="--cpu-weights int4 needs --device cpu, got cuda"):
        weight_format.check_cpu_weights(config, "cuda")
    with pytest.raises(ConfigError, match="--cpu-weights int4 needs --level 0, got 3"):
        weight_format.check_cpu_weights(
            Config.build("m", cpu_weights="int4", compilation_config={"level": 3}), "cpu"
        )
    with pytest.raises(ConfigError, match="gguf_dtype must not be 'keep' with cpu_weights 'int4'"):
        Config("m", cpu_weights="int4", gguf_dtype="keep")
