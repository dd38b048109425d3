"""Ids equal those of transformers' AutoTokenizer, for tokenizer.json and for vocabularies inside GGUF."""

import json
import os
import subprocess
import sys
import threading
import time

import gguf
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from atom.errors import ConfigError, ModelLoadError, RequestError
from atom.model_loader import gguf_tokenizer
from atom.model_loader.gguf_file import GGUFFile
from atom.model_loader.gguf_tokenizer import build_gguf_tokenizer, load_gguf_tokenizer, recover_merges
from atom.model_loader.model_files import ModelFiles
from atom.model_loader.tokenizer import Tokenizer, byte_characters
from atom.utils.cache_folder import private_cache_folder
from tests.helpers.tiny_model import CHAT_TEMPLATE, write_byte_tokenizer

TEXTS = [
    "The capital of France is",
    " leading space",
    "  two, and trailing  ",
    "three   inside",
    "\n\n\nnew\n lines\r\n\ttabs\t\t",
    "Příliš žluťoučký kůň, naïve café",
    "日本語のテキスト、中文",
    "🙂🏽 👩‍👩‍👧‍👦 🇨🇿",
    "<bos>a <eos>b<turn>user\nhi <turn> x",
    "<0x0A> <0x41>",
    "\u2581 \u2581\u2581x",
    "don't I'll WE'VE 1234567 3.14",
    "\x00\x01\u200b",
    "x" * 300,
    "a",
    " ",
    "   ",
    "",
]
CORPUS = [
    "the cat sat on the mat and the dog ran to the house of the man",
    "in the beginning was the word and the word was with them, don't we know it's so",
    "    indented code\n    return value\n\n\nthe end 12345 3.14",
    "žluťoučký kůň úpěl ďábelské ódy",
] * 20


def folder_with(tmp_path, backend, **settings):
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def byte_level(pattern=None):
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<bos>", "<eos>", "<turn>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def byte_fallback():
    """A SentencePiece-like model: spaces become U+2581, unknown characters their bytes."""
    vocab = {token: index for index, token in enumerate(sentencepiece_tokens())}
    merges = recover_merges(list(vocab), vocab, -gguf_tokenizer.np.arange(len(vocab)))
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1)]
    )
    backend.add_special_tokens(["<unk>", "<bos>", "<eos>", "<turn>"])
    return backend


def sentencepiece_tokens():
    words = [
        "the",
        "The",
        "▁the",
        "▁cat",
        "▁of",
        "▁is",
        "▁▁",
        "▁▁▁",
        "▁▁▁▁",
        "ca",
        "at",
        "in",
        "▁in",
        "on",
        "er",
        "he",
    ]
    pieces = {piece[:end]: None for piece in words for end in range(1, len(piece) + 1)}
    pieces |= {piece[start:]: None for piece in words for start in range(len(piece))}
    letters = [chr(c) for c in range(33, 127)] + ["▁", "ž", "é"]
    special = ["<unk>", "<bos>", "<eos>", "<turn>"]
    return special + [f"<0x{byte:02X}>" for byte in range(256)] + list(dict.fromkeys([*letters, *pieces]))


def with_template(backend):
    bos = backend.token_to_id("<bos>")
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", bos)]
    )
    return backend


NAMED = {"bos_token": "<bos>", "eos_token": "<eos>"}


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (byte_level, NAMED),
        (lambda: with_template(byte_level()), NAMED),
        (lambda: with_template(byte_level()), NAMED | {"add_bos_token": False}),
        (byte_level, NAMED | {"add_bos_token": True, "add_eos_token": True}),
        (byte_level, {"add_bos_token": True}),
        (byte_level, {"bos_token": {"content": "<bos>", "__type": "AddedToken"}, "eos_token": "<new>"}),
        (byte_level, NAMED | {"additional_special_tokens": ["cat", "<other>"]}),
        (byte_level, NAMED | {"added_tokens_decoder": {"400": {"content": "dog", "special": False}}}),
        (byte_fallback, NAMED),
        (lambda: with_template(byte_fallback()), NAMED | {"unk_token": "<unk>"}),
    ],
)
def test_ids_and_text_equal_transformers(tmp_path, make, settings):
    from transformers import AutoTokenizer

    folder = folder_with(tmp_path, make(), **settings)
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = ModelFiles.resolve(str(folder)).load_tokenizer()
    for text in TEXTS:
        ids = theirs(text).input_ids
        assert ours.encode(text) == ids, text
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False).input_ids
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.encode_batch(TEXTS) == theirs(TEXTS).input_ids
    assert ours.vocab_size == len(theirs)
    assert (ours.eos_token, ours.bos_token) == (theirs.eos_token, theirs.bos_token or ours.bos_token)


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path):
    backend = byte_level()
    plain = backend.encode("the cat").ids
    backend.enable_truncation(2)
    backend.enable_padding(length=20)
    tokenizer = ModelFiles.resolve(str(folder_with(tmp_path, backend))).load_tokenizer()
    assert tokenizer.encode("the cat") == plain


@pytest.fixture
def tokenizer(tmp_path):
    write_byte_tokenizer(tmp_path, CHAT_TEMPLATE)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 5}))
    return ModelFiles.resolve(str(tmp_path)).load_tokenizer()


def test_attributes(tokenizer):
    assert (tokenizer.bos_id, tokenizer.bos_token, tokenizer.eos_token) == (256, "<bos>", "<eos>")
    assert tokenizer.vocab_size == 260
    assert tokenizer.special_ids == {256, 257, 258, 259}
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.id_to_token(256) == "<bos>" and tokenizer.id_to_token(9999) is None
    assert tokenizer.token_to_id("<eos>") == 257 and tokenizer.token_to_id("nothing") is None
    assert tokenizer.encode("Hi") == [256, 72, 105]


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, [257, 5]),  # the configuration's
        ({"eos_token_id": 2}, [257, 2]),
        ({"eos_token_id": [2, 11, 257]}, [257, 2, 11]),
        ({"eos_token_id": []}, [257]),
        ({"temperature": 0.5}, [257, 5]),
    ],
)
def test_end_ids_of_tokenizer_and_generation_settings(tmp_path, tokenizer, generation, expected):
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert ModelFiles.resolve(str(tmp_path)).load_tokenizer().eos_ids == expected


def test_token_bytes_join_to_the_text(tokenizer, tmp_path):
    fallback = ModelFiles.resolve(str(folder_with(tmp_path, byte_fallback(), **NAMED))).load_tokenizer()
    merged = ModelFiles.resolve(str(folder_with(tmp_path, byte_level(), **NAMED))).load_tokenizer()
    for text in TEXTS:
        raw = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text, add_special_tokens=False)))
        assert raw == text.encode()
        raw = b"".join(map(merged.token_bytes, merged.encode(text)))
        assert raw == text.encode()
        if text and "▁" not in text and "<" not in text:
            raw = b"".join(map(fallback.token_bytes, fallback.encode(text)))
            assert raw == b" " + text.encode()
    assert tokenizer.token_bytes(195) == b"\xc3"
    assert fallback.token_bytes(fallback.token_to_id("<0xC3>")) == b"\xc3"
    assert fallback.token_bytes(fallback.token_to_id("▁the")) == b" the"
    assert fallback.token_bytes(fallback.token_to_id("<eos>")) == b"<eos>"
    assert tokenizer.token_bytes(100_000) == b""


def test_byte_characters_are_the_librarys_alphabet():
    characters = byte_characters()
    assert set(characters) == set(pre_tokenizers.ByteLevel.alphabet())
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("Aé \n")
    assert "".join(piece for piece, _ in pieces) == "".join(characters[byte] for byte in "Aé \n".encode())


def test_half_a_surrogate_pair_is_a_request_error(tokenizer):
    with pytest.raises(RequestError, match="lone surrogate at character 2"):
        tokenizer.encode("ab\ud83d")


def test_ids_with_holes_give_the_largest_plus_one():
    backend = Backend(models.WordLevel({"a": 0, "b": 9}, unk_token="a"))
    assert Tokenizer(backend).vocab_size == 10
    assert Tokenizer(Backend(models.BPE())).vocab_size == 0


def test_other_threads_run_while_a_long_text_is_encoded(tokenizer):
    text = "the quick brown fox " * 100_000
    tokenizer.encode(text[:1000])
    thread = threading.Thread(target=tokenizer.encode, args=(text,))
    longest, last = 0.0, time.perf_counter()
    thread.start()
    start = last
    while thread.is_alive():
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    total = time.perf_counter() - start
    # What is left of the GIL's time is making the list of ids.
    assert longest < 0.7 * total, f"blocked {longest:.2f} s of {total:.2f} s"


def test_damaged_tokenizer_is_named(tmp_path, tokenizer):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="tokenizer.json is not a tokenizer"):
        ModelFiles.resolve(str(tmp_path)).load_tokenizer()


def test_without_tokenizer_json_transformers_is_named(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match="has no tokenizer.json, and transformers reads no tokenizer"):
        ModelFiles.resolve(str(tmp_path)).load_tokenizer()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ConfigError, match="transformers, which could convert its tokenizer, is not installed"
    ):
        ModelFiles.resolve(str(tmp_path)).load_tokenizer()


def test_without_tokenizer_json_transformers_converts(tmp_path):
    from transformers import AutoTokenizer

    backend = byte_level()
    model = json.loads(backend.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(merge) for merge in model["merges"]))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"} | NAMED))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = ModelFiles.resolve(str(tmp_path)).load_tokenizer()
    for text in TEXTS:
        assert ours.encode(text) == theirs(text).input_ids


def test_neither_torch_nor_transformers_is_imported(tmp_path, tokenizer):
    code = (
        "import sys; from atom.model_loader.model_files import ModelFiles\n"
        "files = ModelFiles.resolve(sys.argv[1]); files.load_tokenizer().encode('x'); files.hf_config\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0


# ---- GGUF vocabularies


def gguf_vocabulary(path, model, tokens, types, arch="llama", **keys):
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in keys.items():
        if isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{name}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"tokenizer.ggml.{name}", value)
        elif isinstance(value, str):
            writer.add_string(f"tokenizer.ggml.{name}", value)
        else:
            writer.add_array(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


IDS = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def sentencepiece_gguf(path, arch="llama", scores=None, **keys):
    tokens = sentencepiece_tokens()
    types = [3] * 4 + [6] * 256 + [1] * (len(tokens) - 260)
    if arch == "gemma3":
        tokens = [" " * len(t) if set(t) == {"▁"} and len(t) > 1 else t for t in tokens]
        types[tokens.index("  ")] = 4
        tokens += ["\n\n", "[img]"]
        types += [4, 4]
    scores = scores or [0.0 if kind != 1 else -float(index) for index, kind in enumerate(types)]
    return gguf_vocabulary(path, "llama", tokens, types, arch, scores=scores, **(IDS | keys))


def byte_level_gguf(path, pre, **keys):
    model = json.loads(byte_level().to_str())["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    types = [3 if token in ("<bos>", "<eos>", "<turn>") else 1 for token in tokens]
    tokens, types = tokens + ["<think>", "[PAD401]"], types + [4, 5]
    ids = {"bos_token_id": tokens.index("<bos>"), "eos_token_id": tokens.index("<eos>")}
    merges = [" ".join(merge) for merge in model["merges"]]
    return gguf_vocabulary(path, "gpt2", tokens, types, "qwen2", pre=pre, merges=merges, **(ids | keys))


@pytest.mark.parametrize(
    "write",
    [
        sentencepiece_gguf,
        lambda path: sentencepiece_gguf(path, add_bos_token=False, add_eos_token=True),
        lambda path: sentencepiece_gguf(path, "gemma3", add_space_prefix=False),
        lambda path: byte_level_gguf(path, "qwen2", add_bos_token=False),
        lambda path: byte_level_gguf(path, "llama-bpe", add_bos_token=True),
        lambda path: byte_level_gguf(path, "gpt-2", add_bos_token=True),
        lambda path: byte_level_gguf(path, "tekken", add_bos_token=True),
        lambda path: byte_level_gguf(path, "gpt-4o", add_bos_token=False),
    ],
    ids=["spm", "spm-eos", "gemma", "qwen2", "llama-bpe", "gpt-2", "tekken", "gpt-4o"],
)
def test_gguf_ids_equal_transformers(tmp_path, write):
    from transformers import AutoTokenizer

    path = write(tmp_path / "m.gguf")
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    ours = Tokenizer(build_gguf_tokenizer(GGUFFile(path).metadata))
    for text in [*TEXTS, "the cat<think> [img]\n\nthe  in"]:
        ids = theirs(text).input_ids
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_rows_that_pad_the_vocabulary_are_no_tokens(tmp_path):
    tokenizer = Tokenizer(
        build_gguf_tokenizer(GGUFFile(byte_level_gguf(tmp_path / "m.gguf", "qwen2")).metadata)
    )
    assert tokenizer.id_to_token(tokenizer.vocab_size - 1) == "<think>"
    assert tokenizer.token_to_id("[PAD401]") is None


def test_bos_defaults_follow_the_kind(tmp_path):
    for pre, adds in (("llama-bpe", True), ("qwen2", False), ("tekken", True)):
        metadata = GGUFFile(byte_level_gguf(tmp_path / "m.gguf", pre)).metadata
        tokenizer = Tokenizer(build_gguf_tokenizer(metadata))
        bos = metadata["tokenizer.ggml.bos_token_id"]
        assert (tokenizer.encode("the")[0] == bos) == adds


def test_scores_order_the_merges(tmp_path):
    tokens = ["<unk>", "a", "b", "c", "ab", "bc"]
    for ab, bc, expected in ((-1.0, -2.0, ["ab", "c"]), (-2.0, -1.0, ["a", "bc"])):
        path = gguf_vocabulary(
            tmp_path / "m.gguf", "llama", tokens, [2, 1, 1, 1, 1, 1], scores=[0.0, -9.0, -9.0, -9.0, ab, bc],
            unknown_token_id=0, add_space_prefix=False,
        )  # fmt: skip
        tokenizer = Tokenizer(build_gguf_tokenizer(GGUFFile(path).metadata))
        assert [tokenizer.id_to_token(i) for i in tokenizer.encode("abc")] == expected


@pytest.mark.parametrize(
    ("write", "error", "message"),
    [
        (
            lambda p: gguf_vocabulary(p, "wordpiece", ["a"], [1]),
            ConfigError,
            "'wordpiece'.*known: llama, gpt2",
        ),
        (lambda p: byte_level_gguf(p, "martian"), ConfigError, "tokenizer.ggml.pre 'martian'"),
        (
            lambda p: gguf_vocabulary(p, "gpt2", ["a", "b", "ab"], [1, 1, 1]),
            ModelLoadError,
            "tokenizer.ggml.merges",
        ),
        (
            lambda p: gguf_vocabulary(p, "gpt2", ["a", "b"], [1, 1], merges=["a c"]),
            ModelLoadError,
            "merges of the GGUF file does not fit",
        ),
        (lambda p: gguf_vocabulary(p, "llama", ["a"], [1]), ModelLoadError, "no tokenizer.ggml.scores"),
        (lambda p: gguf_vocabulary(p, "llama", ["a"], [1, 1]), ModelLoadError, "2 entries for 1 tokens"),
    ],
)
def test_gguf_vocabularies_that_are_refused(tmp_path, write, error, message):
    with pytest.raises(error, match=message):
        build_gguf_tokenizer(GGUFFile(write(tmp_path / "m.gguf")).metadata)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "atom" / "tokenizers"


def test_conversion_is_kept_and_used(tmp_path, cache, monkeypatch):
    metadata = GGUFFile(sentencepiece_gguf(tmp_path / "m.gguf")).metadata
    first = load_gguf_tokenizer(metadata)
    (kept,) = cache.iterdir()
    assert kept.suffix == ".npy"
    assert cache.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(gguf_tokenizer, "recover_merges", lambda *_: pytest.fail("recovered again"))
    again = load_gguf_tokenizer(GGUFFile(tmp_path / "m.gguf").metadata)
    assert again.to_str() == first.to_str()


def test_another_vocabulary_has_another_place(tmp_path, cache):
    load_gguf_tokenizer(GGUFFile(sentencepiece_gguf(tmp_path / "a.gguf")).metadata)
    load_gguf_tokenizer(GGUFFile(sentencepiece_gguf(tmp_path / "b.gguf", add_bos_token=False)).metadata)
    assert len(list(cache.iterdir())) == 2


def test_damaged_cache_is_converted_again(tmp_path, cache):
    metadata = GGUFFile(sentencepiece_gguf(tmp_path / "m.gguf")).metadata
    load_gguf_tokenizer(metadata)
    (kept,) = cache.iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(whole[: len(whole) // 2])
    assert load_gguf_tokenizer(metadata).encode("the").ids
    assert kept.read_bytes() == whole


def test_cache_that_others_can_write_is_not_used(tmp_path, cache, caplog):
    metadata = GGUFFile(sentencepiece_gguf(tmp_path / "m.gguf")).metadata
    cache.mkdir(parents=True)
    os.chmod(cache, 0o777)
    assert load_gguf_tokenizer(metadata).encode("the").ids
    assert list(cache.iterdir()) == []
    assert "can be written by others (mode 777)" in caplog.text
    with pytest.raises(ConfigError, match="make it 0700"):
        private_cache_folder("tokenizers")


def test_cache_folder_behind_a_link_is_not_used(tmp_path, cache):
    cache.parent.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    cache.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="a link"):
        private_cache_folder("tokenizers")
