"""Incremental detokenization against the tokenizer's own decode, for every kind of decoder we know."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from atom.model_engine.detokenizer import (
    ByteFallbackDetokenizer,
    ByteLevelDetokenizer,
    DetokenizerFactory,
    WindowDetokenizer,
)

WORDS = [
    "▁",
    "▁▁",
    "▁Hello",
    "▁wor",
    "ld",
    "lo",
    "a",
    "é",
    "中",
    "文",
    "▁中",
    "😀",
    ".",
    "\n",
    "�",
    "<0x",
    "41>",
]


def sentencepiece_tokenizer(strip: bool) -> Tokenizer:
    """Byte fallback as gemma (``strip=False``) and llama 2 (``strip=True``) have it."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for word in WORDS:
        vocab[word] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool▁call>")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def byte_level_tokenizer() -> Tokenizer:
    """Byte-level BPE as GPT-2, Llama 3 and Qwen have it: all bytes and some longer runs, cut anywhere."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    for piece in ["Ġ", "Ċ"]:
        assert piece in vocab
    for piece in ["Ġa", "Ġthe", "ðŁ", "ĺĢ", "ðŁĺ", "ä¸", "Ń", "æĸ", "é", "ï¿½", "ï¿"]:
        vocab.setdefault(piece, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool>"), AddedToken("中文")])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TOKENIZERS = {
    "gemma-like": (sentencepiece_tokenizer(strip=False), ByteFallbackDetokenizer),
    "llama-like": (sentencepiece_tokenizer(strip=True), ByteFallbackDetokenizer),
    "byte-level": (byte_level_tokenizer(), ByteLevelDetokenizer),
}
FACTORIES = {name: DetokenizerFactory(tokenizer) for name, (tokenizer, _) in TOKENIZERS.items()}


class DecodeOnly:
    """Hides everything of a tokenizer but ``decode``, as an unknown kind of tokenizer."""

    def __init__(self, inner: Tokenizer):
        self._inner_tokenizer = inner
        self.num_decoded = 0

    def decode(self, ids, skip_special_tokens=True):
        self.num_decoded += len(ids)
        return self._inner_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)


def stream(detokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    edges = sorted({0, len(ids), *(min(cut, len(ids)) for cut in cuts)})
    deltas = [detokenizer.update(ids[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    return [*deltas, detokenizer.update([], finished=True)]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_known_decoders_are_turned_into_pieces(name):
    tokenizer, kind = TOKENIZERS[name]
    assert type(FACTORIES[name].create()) is kind
    assert type(DetokenizerFactory(DecodeOnly(tokenizer)).create()) is WindowDetokenizer


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_ids_in_any_deltas_join_to_the_decode(name, data):
    tokenizer, _ = TOKENIZERS[name]
    size = tokenizer.get_vocab_size()
    common = st.integers(max(0, size - 24), size - 1)  # whole words and added tokens, else bytes dominate
    ids = data.draw(st.lists(st.integers(0, size + 1) | common, max_size=40))
    cuts = data.draw(st.lists(st.integers(0, 40), max_size=10))
    skip = data.draw(st.booleans())
    deltas = stream(FACTORIES[name].create(skip_special_tokens=skip), ids, cuts)
    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60), data=st.data())
def test_T7_text_of_any_script_streams_unharmed(kind, text, data):
    tokenizer, _ = TOKENIZERS[kind]
    if kind == "byte-level":
        ids = tokenizer.encode(text).ids
    else:  # words where the vocabulary has them, bytes elsewhere
        ids = []
        for char in text.replace(" ", "▁"):
            whole = tokenizer.token_to_id(char)
            ids += [whole] if whole is not None else [3 + byte for byte in char.encode()]
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=8))
    window = DetokenizerFactory(DecodeOnly(tokenizer)).create()
    for detokenizer in (FACTORIES[kind].create(), window):
        deltas = stream(detokenizer, ids, cuts)
        assert "".join(deltas) == tokenizer.decode(ids)
        if "\ufffd" not in text:
            assert not any("\ufffd" in delta for delta in deltas)


def test_T7_a_long_delta_may_end_inside_a_character():
    tokenizer, _ = TOKENIZERS["byte-level"]
    text = "0000" + "\U00010000" * 26 + "\U0001d499"
    ids = tokenizer.encode(text).ids
    assert len(ids) > 100
    for cut in range(len(ids) - 4, len(ids)):
        deltas = stream(DetokenizerFactory(DecodeOnly(tokenizer)).create(), ids, [cut])
        assert "".join(deltas) == text and not any("\ufffd" in delta for delta in deltas)


def test_T7_interleaved_answers_do_not_mix():
    tokenizer, _ = TOKENIZERS["byte-level"]
    texts = ["Dobrý večer, Šárko 😀", "日本語のテキスト", "plain", "🏳️‍🌈🏳️‍🌈"]
    ids = [tokenizer.encode(text).ids for text in texts]
    detokenizers = [FACTORIES["byte-level"].create() for _ in texts]
    out = [""] * len(texts)
    for step in range(max(map(len, ids))):
        for i, detokenizer in enumerate(detokenizers):
            out[i] += detokenizer.update(ids[i][step : step + 1])
    assert out == texts


@pytest.mark.parametrize("kind", ["gemma-like", "byte-level"])
def test_T6_answer_cut_inside_a_character_ends_in_replacement_marks(kind):
    tokenizer, _ = TOKENIZERS[kind]
    byte = tokenizer.token_to_id
    lead = byte("ðŁĺ") if kind == "byte-level" else byte("<0xF0>")
    ids = [byte("a"), lead]
    for detokenizer in (FACTORIES[kind].create(), DetokenizerFactory(DecodeOnly(tokenizer)).create()):
        assert detokenizer.update(ids) in ("a", "")
        rest = detokenizer.update([], finished=True)
        assert rest.endswith("\ufffd")
        rest.encode("utf-8")  # always encodable: no lone surrogate reaches JSON


def test_an_emoji_of_byte_tokens_appears_whole():
    tokenizer, _ = TOKENIZERS["gemma-like"]
    detokenizer = FACTORIES["gemma-like"].create()
    ids = [3 + byte for byte in "😀".encode()]
    assert [detokenizer.update([i]) for i in ids] == ["", "", "", ""]
    assert detokenizer.update([tokenizer.token_to_id("a")]) == "😀a"


def test_leading_space_is_stripped_once_and_only_at_the_start():
    tokenizer, _ = TOKENIZERS["llama-like"]
    ids = [1, *(tokenizer.token_to_id(word) for word in ["▁", "▁Hello", "▁", "▁", "▁wor", "ld"]), 2]
    ids += [tokenizer.token_to_id("▁Hello")]
    for factory in (FACTORIES["llama-like"], DetokenizerFactory(DecodeOnly(tokenizer))):
        detokenizer = factory.create()
        text = "".join(detokenizer.update([i]) for i in ids) + detokenizer.update([], finished=True)
        assert text == tokenizer.decode(ids) == " Hello   world Hello"


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_window_decodes_a_bounded_number_of_ids_a_token(kind):
    tokenizer, _ = TOKENIZERS[kind]
    rng = random.Random(7)
    size = tokenizer.get_vocab_size()
    for ids in (
        [rng.randrange(size) for _ in range(3000)],
        [tokenizer.token_to_id("a")] * 3000,
        [200] * 3000,
    ):
        only = DecodeOnly(tokenizer)
        detokenizer = DetokenizerFactory(only).create()
        for i in ids:
            detokenizer.update([i])
        assert only.num_decoded < 110 * len(ids)


def test_window_equals_decode_on_words():
    """Without byte tokens the window is exact also for decoders that it knows nothing of."""
    vocab = {"[UNK]": 0} | {w: i + 1 for i, w in enumerate(["▁the", "▁cat", "s", "▁", "é", "▁中", "文", "."])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["[UNK]"])
    tokenizer.decoder = decoders.Metaspace()
    factory = DetokenizerFactory(tokenizer)
    assert type(factory.create()) is WindowDetokenizer
    rng = random.Random(3)
    for _ in range(200):
        ids = [rng.randrange(len(vocab)) for _ in range(rng.randrange(80))]
        cuts = [rng.randrange(81) for _ in range(40)]
        assert "".join(stream(factory.create(), ids, cuts)) == tokenizer.decode(ids)


def test_pieces_that_differ_from_decode_are_not_used(caplog):
    class Tidy:
        """A tokenizer whose decode changes the text afterwards."""

        def __init__(self, backend):
            self.backend = backend

        def decode(self, ids, skip_special_tokens=True):
            return self.backend.decode(ids, skip_special_tokens=skip_special_tokens).replace("a", "b")

    factory = DetokenizerFactory(Tidy(TOKENIZERS["gemma-like"][0]))
    with caplog.at_level("WARNING"):
        assert type(factory.create()) is WindowDetokenizer
    assert "pieces differ" in caplog.text


def factory_with(monkeypatch, tokenizer, every: int = 1000, mode: str = "auto") -> DetokenizerFactory:
    monkeypatch.setenv("ATOM_DETOKENIZER_DELTA_REUSE", mode)
    monkeypatch.setenv("ATOM_DETOKENIZER_AUDIT_EVERY", str(every))
    return DetokenizerFactory(tokenizer)


class Turncoat:
    """A tokenizer whose decode becomes another one after a while."""

    def __init__(self, backend: Tokenizer):
        self.backend = backend
        self.is_changed = False

    def decode(self, ids, skip_special_tokens=True):
        text = self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text.replace("a", "b") if self.is_changed else text


def test_reuse_off_decodes_windows_and_on_skips_the_probe(monkeypatch, caplog):
    tokenizer, kind = TOKENIZERS["byte-level"]
    changed = Turncoat(tokenizer)
    changed.is_changed = True
    assert type(factory_with(monkeypatch, tokenizer, mode="OFF").create()) is WindowDetokenizer
    assert type(factory_with(monkeypatch, changed, mode="auto").create()) is WindowDetokenizer
    assert type(factory_with(monkeypatch, changed, mode="on").create()) is kind
    assert type(factory_with(monkeypatch, tokenizer, mode="sometimes").create()) is WindowDetokenizer
    assert type(factory_with(monkeypatch, DecodeOnly(tokenizer), mode="on").create()) is WindowDetokenizer
    assert "has no fixed pieces" in caplog.text


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_an_audit_of_every_update_finds_nothing(name, data):
    tokenizer, kind = TOKENIZERS[name]
    with pytest.MonkeyPatch.context() as patch:
        factory = factory_with(patch, tokenizer, every=1)
    size = tokenizer.get_vocab_size()
    common = st.integers(max(0, size - 24), size - 1)
    ids = data.draw(st.lists(st.integers(0, size + 1) | common, max_size=60))
    ids = ids * data.draw(st.sampled_from([1, 9]))  # long enough to forget the first
    step = data.draw(st.integers(1, 7))
    detokenizer = factory.create()
    deltas = [detokenizer.update(ids[at : at + step]) for at in range(0, len(ids), step)]
    assert "".join(deltas) + detokenizer.update([], finished=True) == tokenizer.decode(ids)
    assert type(factory.create()) is kind, "the audit failed"


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("num_before", [1, 5, 400])
def test_a_failed_audit_answers_from_the_decode_from_then_on(monkeypatch, caplog, name, num_before):
    tokenizer, kind = TOKENIZERS[name]
    changing = Turncoat(tokenizer)
    factory = factory_with(monkeypatch, changing, every=2 * num_before + 2)
    a = tokenizer.token_to_id("a")
    audited, bystander = factory.create(), factory.create()
    for _ in range(num_before):
        assert audited.update([a]) == bystander.update([a]) == "a"
    changing.is_changed = True
    assert bystander.update([a]) == "a"  # not audited: nobody has noticed
    assert audited.update([a]) == "b"
    assert bystander.update([a, a]) == "bb" and audited.update([a], finished=True) == "b"
    assert type(factory.create()) is type(factory.create(skip_special_tokens=False)) is WindowDetokenizer
    assert [r.levelname for r in caplog.records].count("ERROR") == 1


def test_an_audit_comes_after_so_many_updates_of_all_answers(monkeypatch):
    tokenizer, _ = TOKENIZERS["byte-level"]
    changing = Turncoat(tokenizer)
    num_decodes = []
    decode = changing.decode
    changing.decode = lambda *args, **kwargs: num_decodes.append(1) or decode(*args, **kwargs)
    factory = factory_with(monkeypatch, changing, every=10, mode="on")
    answers = [factory.create() for _ in range(3)]
    for step in range(1, 31):
        answers[step % 3].update([65])
        assert len(num_decodes) == step // 10


def test_an_audit_starts_over_text_that_the_decoder_would_strip(monkeypatch):
    """Skipped ids alone before a space: a decode that starts there loses the space, the answer must not."""
    tokenizer, kind = TOKENIZERS["llama-like"]
    factory = factory_with(monkeypatch, tokenizer, every=1, mode="on")
    detokenizer = factory.create()
    hello = tokenizer.token_to_id("▁Hello")
    ids = [hello, *[1] * 200, hello, *[1] * 40, hello]
    text = "".join(detokenizer.update([i]) for i in ids)
    assert text == tokenizer.decode(ids) == "Hello Hello Hello"
    assert type(factory.create()) is kind


@pytest.mark.real_model
def test_demo_tokenizer_streams_what_it_decodes():
    from atom.errors import ConfigError
    from atom.model_loader.demo import assemble_demo_model
    from atom.model_loader.model_files import ModelFiles

    try:
        tokenizer = ModelFiles.resolve(str(assemble_demo_model())).load_tokenizer()
    except ConfigError as error:
        pytest.skip(str(error))
    factory = DetokenizerFactory(tokenizer)
    assert type(factory.create()) is ByteFallbackDetokenizer
    text = "Dobrý večer 😀 日本語のテキスト\n\n\t  𒀀𒁀 ☃️ fi <start_of_turn> naïve" * 3
    rng = random.Random(0)
    special_and_bytes = range(600)
    samples = [tokenizer.encode(text, add_special_tokens=True)]
    for _ in range(300):
        sources = [range(tokenizer.vocab_size + 3), special_and_bytes]
        samples.append([rng.choice(rng.choice(sources)) for _ in range(rng.randrange(40))])
    for ids in samples:
        cuts = [rng.randrange(len(ids) + 1) for _ in range(5)]
        assert "".join(stream(factory.create(), ids, cuts)) == tokenizer.decode(ids)
    assert tokenizer.decode(samples[0]).replace("<start_of_turn>", "") == text.replace("<start_of_turn>", "")
