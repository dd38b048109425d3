"""The tokenizer inside a GGUF file as a ``tokenizers.Tokenizer``. No torch, no transformers.

SentencePiece vocabularies (``tokenizer.ggml.model`` = ``llama``) carry a score a token and no merges; the
merges are recovered from the vocabulary, which takes seconds for 262k tokens, so they are kept in the cache
folder. Byte-level vocabularies (``gpt2``) carry their merges.
"""

import hashlib
import io
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from atom.errors import ConfigError, ModelLoadError
from atom.model_loader.gguf_file import StringArray
from atom.utils.cache_folder import private_cache_folder, write_aside

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

Merges = Sequence[tuple[str, str]]  # in the order in which they are tried
RecoverFn = Callable[[Sequence[str], Mapping[str, int], np.ndarray], Merges]  # see recover_merges

CACHE_VERSION = 2  # grows when what is kept changes
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # tokenizer.ggml.token_type
_SPACE = "\u2581"

# How a byte-level vocabulary splits text before it merges; the patterns its models were trained with.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLIT_LLAMA3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
)
_SPLIT_QWEN2 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
)
_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)
_SPLIT_TEKKEN = _CASED_WORDS % ("", "") + rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
_SPLIT_GPT4O = (
    _CASED_WORDS % (_CONTRACTIONS + "?", _CONTRACTIONS + "?")
    + rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)
_SPLIT_GPT2 = None  # built into tokenizers' ByteLevel

# tokenizer.ggml.pre -> (split, whole words that are tokens skip the merges, BOS is added if no key says so)
PRE_TOKENIZERS: dict[str, tuple[str | None, bool, bool]] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), (_SPLIT_LLAMA3, True, True)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), (_SPLIT_LLAMA3, False, False)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), (_SPLIT_QWEN2, False, False)),
    "tekken": (_SPLIT_TEKKEN, True, True),
    **dict.fromkeys(("gpt-4o", "llama4"), (_SPLIT_GPT4O, False, False)),
    **dict.fromkeys(("gpt-2", "phi-2", "default"), (_SPLIT_GPT2, False, False)),
}


class PairsOfTokens(Sequence[tuple[str, str]]):
    """Merges that are put together while they are walked through: a list of half a million takes 45 MB.

    Args:
        pairs: ids of the two tokens ``[num_merges, 2]``, integers. Raises ValueError, IndexError if they are not.
    """

    _CHUNK = 8192

    def __init__(self, tokens: Sequence[str], pairs: np.ndarray):
        if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.dtype.kind != "i":
            raise ValueError(f"expected pairs of ids, found {pairs.dtype} {list(pairs.shape)}")
        if pairs.size and not 0 <= int(pairs.min()) <= int(pairs.max()) < len(tokens):
            raise IndexError(f"an id is beyond {len(tokens)} tokens")
        self._tokens, self._pairs = tokens, pairs

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: Any) -> Any:
        left, right = self._pairs[index].tolist()
        return self._tokens[left], self._tokens[right]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        text = self._tokens.__getitem__
        for start in range(0, len(self._pairs), self._CHUNK):
            left, right = self._pairs[start : start + self._CHUNK].T.tolist()
            yield from zip(map(text, left), map(text, right), strict=True)


def load_gguf_tokenizer(metadata: Mapping[str, Any]) -> "Tokenizer":
    """The tokenizer of a file, with merges from the cache where they have been recovered before.

    Raises:
        ConfigError: a kind of tokenizer that we do not know.
        ModelLoadError: the file lacks a part of it.
    """
    if metadata.get("tokenizer.ggml.model") != "llama":
        return build_gguf_tokenizer(metadata)
    try:
        path = private_cache_folder("tokenizers") / f"{_digest(metadata)}.npy"
    except ConfigError as error:
        logger.warning("The recovered merges are not kept: %s", error)
        return build_gguf_tokenizer(metadata)
    return build_gguf_tokenizer(metadata, partial(_kept_merges, path))


def _kept_merges(path: Path, tokens: Sequence[str], vocab: Mapping[str, int], scores: np.ndarray) -> Merges:
    """As :func:`recover_merges`, from ``path`` (pairs of ids) if they are there, else kept there."""
    if path.is_file():
        try:
            return PairsOfTokens(tokens, np.load(path, allow_pickle=False))
        except (OSError, ValueError, EOFError, IndexError, TypeError) as error:
            logger.warning("Recovering the merges again, %s is damaged: %s", path, error)
    merges = recover_merges(tokens, vocab, scores)
    pairs = np.array([(vocab[left], vocab[right]) for left, right in merges], np.int32).reshape(-1, 2)
    _keep(pairs, path)
    return merges


def _keep(pairs: np.ndarray, path: Path) -> None:
    content = io.BytesIO()
    np.save(content, pairs)
    try:
        write_aside(path, content.getvalue())
    except OSError as error:  # a full disk costs the next start two seconds, nothing more
        logger.warning("The recovered merges are not kept: %s", error)


def _digest(metadata: Mapping[str, Any]) -> str:
    """A hash of everything the conversion reads."""
    digest = hashlib.blake2b(f"v{CACHE_VERSION}".encode(), digest_size=20)
    for key in sorted(metadata):
        if key.startswith("tokenizer.ggml.") or key == "general.architecture":
            value = metadata[key]
            digest.update(f"\0{key}\0".encode())
            if isinstance(value, StringArray):
                digest.update(value.raw())
            else:
                digest.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
    return digest.hexdigest()


def build_gguf_tokenizer(metadata: Mapping[str, Any], recover: RecoverFn | None = None) -> "Tokenizer":
    """See :func:`load_gguf_tokenizer`; ``recover`` is called in place of :func:`recover_merges`."""
    kind = metadata.get("tokenizer.ggml.model")
    stored = _required(metadata, "tokens")
    tokens = stored.tolist() if isinstance(stored, StringArray) else list(stored)
    types = np.asarray(metadata.get("tokenizer.ggml.token_type", np.ones(len(tokens))))
    if len(types) != len(tokens):
        raise ModelLoadError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    # Rows that pad the vocabulary up to the model's are no tokens.
    used = np.flatnonzero(types != _UNUSED)
    tokens = tokens[: int(used[-1]) + 1 if used.size else 0]
    if kind == "llama":
        tokenizer = _sentencepiece(metadata, tokens, recover or recover_merges)
    elif kind == "gpt2":
        tokenizer = _byte_level(metadata, tokens, types)
    else:
        raise ConfigError(
            f"tokenizer.ggml.model {kind!r} of the GGUF file is not supported; known: llama, gpt2"
        )
    _add_special(tokenizer, tokens, types)
    _add_template(tokenizer, metadata, tokens)
    return tokenizer


def _required(metadata: Mapping[str, Any], key: str) -> Any:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        raise ModelLoadError(f"the GGUF file has no tokenizer.ggml.{key}")
    return value


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], recover: RecoverFn) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    is_gemma = str(metadata.get("general.architecture", "")).startswith("gemma")
    if is_gemma:
        # Runs of spaces are stored as such, while text reaches the model with its spaces replaced; and the
        # order of the vocabulary, not the score, is the order of its merges.
        tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
        scores = -np.arange(len(tokens), dtype=np.float64)
    else:
        scores = np.asarray(_required(metadata, "scores"), dtype=np.float64)[: len(tokens)]
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab,
            recover(tokens, vocab, scores),
            unk_token=tokens[unknown] if unknown is not None and unknown < len(tokens) else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", not is_gemma):
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False)
        steps.append(decoders.Strip(" ", left=1))
    else:
        tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def recover_merges(tokens: Sequence[str], vocab: Mapping[str, int], scores: np.ndarray) -> Merges:
    """Every way to put a token together from two others, best score first.

    Equal scores (all the ways to one token) rank the longer left part first.
    """
    find = vocab.get
    pairs: list[tuple[str, str]] = []
    ranks: list[int] = []
    for index, token in enumerate(tokens):
        for cut in range(len(token) - 1, 0, -1):
            left = token[:cut]
            if find(left) is not None:
                right = token[cut:]
                if find(right) is not None:
                    pairs.append((left, right))
                    ranks.append(index)
    score = scores[ranks] if ranks else np.empty(0)
    left_lengths = np.fromiter((len(left) for left, _ in pairs), np.int64, len(pairs))
    right_lengths = np.fromiter((len(right) for _, right in pairs), np.int64, len(pairs))
    return [pairs[index] for index in np.lexsort((-right_lengths, -left_lengths, -score))]


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], types: np.ndarray) -> "Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise ConfigError(
            f"tokenizer.ggml.pre {pre!r} of the GGUF file is not supported; known: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    split, ignore_merges, _ = PRE_TOKENIZERS[pre]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", ())]
    if not merges and any(
        len(tokens[index]) > 1 for index in np.flatnonzero(types[: len(tokens)] == _NORMAL)
    ):
        raise ModelLoadError(
            "the GGUF file has no tokenizer.ggml.merges, but tokens that only merges can make"
        )
    vocab = {token: index for index, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab, merges, fuse_unk=False, ignore_merges=ignore_merges)
    except Exception as error:  # the library raises bare Exception: a merge of unknown tokens
        raise ModelLoadError(
            f"tokenizer.ggml.merges of the GGUF file does not fit its tokens: {error}"
        ) from error
    tokenizer = Tokenizer(model)
    bytes_of_text = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    if split is not None:
        bytes_of_text = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(split), "isolated"), bytes_of_text]
        )
    tokenizer.pre_tokenizer = bytes_of_text
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _add_special(tokenizer: "Tokenizer", tokens: list[str], types: np.ndarray) -> None:
    """Control and user-defined tokens are found whole in the text; control tokens are not shown."""
    from tokenizers import AddedToken

    def of_type(kind: int) -> list[str]:
        return [tokens[index] for index in np.flatnonzero(types[: len(tokens)] == kind)]

    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in of_type(_CONTROL)])
    shown = [token for token in of_type(_USER_DEFINED) if tokenizer.token_to_id(token) is not None]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in shown])


def _add_template(tokenizer: "Tokenizer", metadata: Mapping[str, Any], tokens: list[str]) -> None:
    """Put BOS before and EOS after a text where the file, or llama.cpp's default for its kind, says so."""
    if metadata["tokenizer.ggml.model"] == "llama":
        default_bos = True
    else:
        default_bos = PRE_TOKENIZERS[metadata.get("tokenizer.ggml.pre", "default")][2]
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    eos = metadata.get("tokenizer.ggml.eos_token_id")
    _set_template(
        tokenizer,
        bos=(
            tokens[bos]
            if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", default_bos)
            else None
        ),
        eos=tokens[eos] if eos is not None and metadata.get("tokenizer.ggml.add_eos_token", False) else None,
    )


def _set_template(tokenizer: "Tokenizer", bos: str | None, eos: str | None) -> None:
    """Make the tokenizer add these tokens around a text; None adds nothing."""
    from tokenizers import processors

    before, after = ([f"{token}:0"] if token else [] for token in (bos, eos))
    single = [*before, "$A:0", *after]
    second = [f"{bos}:1"] if bos else []
    pair = [*single, *second, "$B:1", *([f"{eos}:1"] if eos else [])]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        pair=pair,
        special_tokens=[
            (token, tokenizer.token_to_id(token)) for token in dict.fromkeys((bos, eos)) if token
        ],
    )
