"""The tokenization cache gives the encoder's own ids, encodes little, keeps its budget, and knows when not to work."""

import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from atom.errors import RequestError
from atom.model_loader import tokenize_cache
from atom.model_loader.tokenize_cache import (
    TokenizeCache,
    enable_tokenize_cache,
    longest_match_pattern,
    why_inexact,
)
from atom.model_loader.tokenizer import Tokenizer

CORPUS = [
    "The cat sat on the mat, then the other cat came.",
    "naïve Ærø 中文 12345 \n\n  x = y;  ",
    "a b " * 9,
]
SPECIAL = ["<s>", "</s>", "<|user|>", "<|end|>", "<|end|>of", "<|"]  # one inside another


def add_tokens(backend: Backend) -> Backend:
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    backend.add_tokens([AddedToken("\n", normalized=False), AddedToken("\n\n\n", normalized=False)])
    backend.add_tokens([AddedToken("<Tool>", normalized=True, lstrip=True, single_word=True)])
    return backend


def trained(model, trainer, normalizer=None, pre_tokenizer=None) -> Backend:
    backend = Backend(model)
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    backend.train_from_iterator(CORPUS, trainer)
    return add_tokens(backend)


def byte_level() -> Backend:
    """As Qwen and Llama 3 have it."""
    pattern = Regex(r"\p{N}{1,3}|[^\s\p{L}\p{N}]?\p{L}+|\s*[\r\n]+|\s+(?!\S)|\s+|[^\s\p{L}\p{N}]+")
    backend = trained(
        models.BPE(),
        trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()),
        normalizers.NFC(),
        pre_tokenizers.Sequence(
            [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        ),
    )
    start = [("<s>", backend.token_to_id("<s>"))]
    template = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=start)
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return backend


def whole_text_bpe() -> Backend:
    """As Gemma has it: no pre-tokenizer, spaces written as ▁."""
    return trained(
        models.BPE(unk_token="<unk>"),
        trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"]),
        normalizers.Replace(" ", "▁"),
    )


def old_llama() -> Backend:
    """A space is put before every piece."""
    return trained(
        models.BPE(unk_token="<unk>"),
        trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"]),
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    )


def bert() -> Backend:
    backend = trained(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[CLS]", "[SEP]"]),
        normalizers.BertNormalizer(lowercase=True),
        pre_tokenizers.BertPreTokenizer(),
    )
    marks = [(text, backend.token_to_id(text)) for text in ("[CLS]", "[SEP]")]
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=marks
    )
    return backend


def unigram() -> Backend:
    return trained(
        models.Unigram(),
        trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>", special_tokens=["<unk>"]),
        normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()]),
        pre_tokenizers.Metaspace(prepend_scheme="always"),
    )


KINDS = {f.__name__: f for f in (byte_level, whole_text_bpe, old_llama, bert, unigram)}
TOKENIZERS = {name: Tokenizer(make()) for name, make in KINDS.items()}

PIECES = [
    *SPECIAL,
    "\n",
    "\n\n",
    "<Tool>",
    " <tool> ",
    " ",
    "  ",
    "The cat",
    "mat",
    "Ærø",
    "é",
    "中",
    "x=1;",
    "A",
    "<",
    "|",
]
PIECES += ["end|>", "e\u0301", "the quick brown cat" * 3]
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=6), max_size=25).map("".join)


def small_cache(tokenizer: Tokenizer, max_bytes: int = 1 << 20, checks: int = 0, **options) -> TokenizeCache:
    """A cache for texts of any length that trusts itself from the start."""
    wrapping = tokenize_cache._find_wrapping(tokenizer)
    cache = TokenizeCache(tokenizer, max_bytes, wrapping, **{"min_chars": 0, "block_chars": 4} | options)
    cache._checks_left = {False: checks, True: checks}
    return cache


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_ids_are_those_of_the_plain_encoder(name, data):
    tokenizer = TOKENIZERS[name]
    assert why_inexact(tokenizer.backend) is None
    cache = small_cache(tokenizer, max_bytes=data.draw(st.sampled_from([1, 3000, 1 << 20])))
    earlier = [""]
    for _ in range(data.draw(st.integers(1, 6))):
        base = data.draw(st.sampled_from(earlier))
        text = base[: data.draw(st.integers(0, len(base)))] + data.draw(texts)
        adds = data.draw(st.booleans())
        assert cache.encode(text, adds) == tokenizer.encode_batch([text], adds)[0]
        cache.check_integrity()
        earlier.append(text)


@given(
    st.lists(st.text("ab<|", min_size=1, max_size=4), min_size=1, max_size=12), st.text("ab<|", max_size=40)
)
def test_the_pattern_finds_the_longest_token_at_each_place(tokens, text):
    pattern = longest_match_pattern(tokens)
    at, expected = 0, []
    while at < len(text):
        fitting = [token for token in tokens if text.startswith(token, at)]
        if fitting:
            expected.append((at, max(fitting, key=len)))
        at += len(max(fitting, key=len)) if fitting else 1
    assert [(match.start(), match.group()) for match in pattern.finditer(text)] == expected


class Counting(Tokenizer):
    """Counts the characters that it encodes."""

    num_chars = 0

    def encode_batch(self, texts, add_special_tokens=True):
        self.num_chars += sum(map(len, texts))
        return super().encode_batch(texts, add_special_tokens)


def conversation(num_turns: int, seed: int = 0) -> list[str]:
    """Every prompt of a conversation: each is the one before and more."""
    rng, text, prompts = random.Random(seed), "<s>", []
    for turn in range(num_turns):
        words = " ".join(rng.choice(["cat", "mat", "naïve", "中文", "the"]) for _ in range(40))
        text += f"<|user|>{turn} {words}<|end|>"
        prompts.append(text + "answer:")
    return prompts


def test_the_next_turn_encodes_only_what_is_new():
    tokenizer = Counting(byte_level())
    cache = small_cache(tokenizer)
    for prompt in conversation(20):
        before = tokenizer.num_chars
        ids = cache.encode(prompt, False)
        encoded = tokenizer.num_chars - before
        assert ids == TOKENIZERS["byte_level"].encode_batch([prompt], False)[0]
        assert encoded < 500, "a turn has fewer characters than that"
    before = tokenizer.num_chars
    cache.encode(conversation(20)[-1], False)
    assert tokenizer.num_chars == before  # nothing is new
    shuffled = conversation(20)[-1].split("<|end|>")
    cache.encode("<|end|>".join(reversed(shuffled)), False)  # no start in common, the same segments
    assert tokenizer.num_chars - before < 50


def test_one_conversation_keeps_one_prompt():
    cache = small_cache(TOKENIZERS["byte_level"])
    for prompt in conversation(20):
        cache.encode(prompt, False)
    kept = [key for key in cache._entries if not isinstance(key, str)]
    assert len(kept) == 1 and len(kept[0].text) > 0.9 * len(conversation(20)[-1])


def test_the_oldest_goes_first_and_the_budget_holds():
    tokenizer = Counting(byte_level())
    cache = small_cache(tokenizer, max_bytes=30_000)
    for seed in range(30):
        cache.encode(conversation(5, seed)[-1], False)
        cache.check_integrity()
    assert 10_000 < cache.num_bytes <= 30_000
    before = tokenizer.num_chars
    cache.encode(conversation(5, 29)[-1], False)
    assert tokenizer.num_chars == before
    cache.encode(conversation(5, 0)[-1], False)
    assert tokenizer.num_chars - before > 500


def test_several_threads_share_a_cache():
    tokenizer = TOKENIZERS["byte_level"]
    cache = small_cache(tokenizer, max_bytes=40_000)
    wrong = []

    def work(seed: int) -> None:
        for prompt in conversation(12, seed):
            if cache.encode(prompt, True) != tokenizer.encode_batch([prompt])[0]:
                wrong.append(prompt)

    threads = [threading.Thread(target=work, args=(i % 3,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    cache.check_integrity()


def test_a_difference_in_the_first_prompts_turns_it_off(caplog):
    tokenizer = Tokenizer(byte_level())
    cache = small_cache(tokenizer, checks=2)
    cache._tokens["<|user|>"] += 1  # as if the tokenizer knew better than its description
    plain = TOKENIZERS["byte_level"].encode_batch(["a<|user|>b"])[0]
    assert cache.encode("a<|user|>b", True) == plain
    assert not cache.is_on and "ids differ" in caplog.text
    assert cache.encode("a<|user|>b", True) == plain
    assert cache.num_bytes == 0


def test_both_ways_are_checked_at_first():
    tokenizer = Counting(byte_level())
    cache = small_cache(tokenizer, checks=2)
    for prompt in conversation(10):
        cache.encode(prompt, False)
    assert cache._checks_left == {False: 1, True: 0} and cache.is_on


def test_only_long_texts_ask_the_cache_and_zero_is_off():
    tokenizer = Counting(byte_level())
    enable_tokenize_cache(tokenizer, 0)
    assert tokenizer.cache is None
    enable_tokenize_cache(tokenizer, 1)
    assert tokenizer.cache.min_chars == 100_000
    short, long = "<|user|>cat " * 8000, "<|user|>cat " * 8500
    tokenizer.encode(short)
    assert tokenizer.cache.num_bytes == 0
    assert tokenizer.encode(long) == TOKENIZERS["byte_level"].encode(long)
    assert 0 < tokenizer.cache.num_bytes <= 1 << 20
    enable_tokenize_cache(object(), 1)  # a tokenizer of another kind is left alone


def test_half_a_surrogate_pair_is_told_with_its_place():
    cache = small_cache(TOKENIZERS["byte_level"])
    with pytest.raises(RequestError, match="lone surrogate at character 12"):
        cache.encode("abc<|user|>d\ud800", False)


def with_token(**flags) -> Backend:
    backend = byte_level()
    backend.add_tokens([AddedToken("<odd>", normalized=False, **flags)])
    return backend


def with_step(**steps) -> Backend:
    backend = byte_level()
    for name, step in steps.items():
        setattr(backend, name, step)
    return backend


class Reversing:
    def normalize(self, text):
        text.map(lambda char: char)


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        (Backend(models.BPE()), "no added tokens"),
        (with_token(rstrip=True), "depends on what stands beside"),
        (with_token(single_word=True), "depends on what stands beside"),
        (with_step(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first")), "start of a text"),
        (with_step(pre_tokenizer=pre_tokenizers.FixedLength(3)), "FixedLength is not known"),
        (with_step(normalizer=normalizers.Normalizer.custom(Reversing())), "cannot be inspected"),
        (with_step(encode_special_tokens=True), "special tokens as text"),
        (with_step(model=models.BPE(dropout=0.1)), "random"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tokenizers_for_which_it_is_not_exact_are_refused(backend, reason, caplog):
    assert reason in why_inexact(backend)
    tokenizer = Tokenizer(backend)
    with caplog.at_level("INFO"):
        enable_tokenize_cache(tokenizer, 1)
    assert tokenizer.cache is None and reason in caplog.text


@pytest.mark.real_model
def test_the_demo_tokenizer_is_served_exactly():
    from atom.errors import ConfigError
    from atom.model_loader.demo import assemble_demo_model
    from atom.model_loader.model_files import ModelFiles

    try:
        tokenizer = ModelFiles.resolve(str(assemble_demo_model())).load_tokenizer()
    except ConfigError as error:
        pytest.skip(str(error))
    cache = small_cache(tokenizer, block_chars=64)
    rng = random.Random(0)
    pieces = [
        "<start_of_turn>user\n",
        "<end_of_turn>\n",
        "\n",
        "\n\n\n",
        "  ",
        " the cat",
        "naïve 中文",
        "<b>x</b>",
        "\t\t",
    ]
    text = ""
    for _ in range(60):
        text = text[: len(text) - rng.choice([0, 0, 1, 7, 300])]
        text += "".join(rng.choice(pieces) for _ in range(30))
        adds = rng.random() < 0.5
        assert cache.encode(text, adds) == tokenizer.encode_batch([text], adds)[0]
    cache.check_integrity()
