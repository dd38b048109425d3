"""Text to token ids and back. No torch; transformers only for models without a ``tokenizer.json``."""

import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atom.errors import ConfigError, ModelLoadError, RequestError
from atom.model_loader.gguf_tokenizer import load_gguf_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from atom.model_loader.model_files import ModelFiles
    from atom.model_loader.tokenize_cache import TokenizeCache

# Fields of tokenizer_config.json that name one special token.
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's tokenizer. All methods may be called from several threads.

    Attributes:
        backend: the ``tokenizers.Tokenizer`` behind it.
        bos_token, eos_token: their text, None where the model has none.
        bos_id: id of ``bos_token``, or None.
        eos_ids: ids that end an answer: the tokenizer's first, then those of the generation settings.
        special_ids: ids whose text an answer does not show.
        vocab_size: ids from here on mean nothing and are never sampled, although the model's head may have
            rows for them.
        chat_template: Jinja text, or None for a model that has none.
        cache: what remembers long texts that were encoded before; None where nothing does.
    """

    def __init__(
        self,
        backend: "Backend",
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        eos_ids: list[int] | None = None,
        chat_template: str | None = None,
    ):
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.bos_id: int | None = backend.token_to_id(bos_token) if bos_token else None
        own_eos = backend.token_to_id(eos_token) if eos_token else None
        self.eos_ids: list[int] = list(
            dict.fromkeys(([] if own_eos is None else [own_eos]) + list(eos_ids or []))
        )
        self.chat_template = chat_template
        self.cache: TokenizeCache | None = None
        added = backend.get_added_tokens_decoder()
        self._added_texts = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size: int = _vocab_size(backend)

    @classmethod
    def from_files(cls, files: "ModelFiles") -> "Tokenizer":
        """The tokenizer of a model, as ``transformers`` would set it up.

        What is put around a text is what ``tokenizer.json`` says; ``add_bos_token`` of the older settings
        counts only where that file is missing.

        Raises:
            ModelLoadError: the folder has no tokenizer, or a damaged one.
            ConfigError: it needs transformers, which is not installed.
        """
        if files.kind == "gguf":
            return cls._from_gguf(files)
        settings = files.tokenizer_config
        path = files.path / "tokenizer.json"
        backend = _read_backend(path) if path.is_file() else _convert_with_transformers(files.path)
        named = {name: _text_of(settings.get(name)) for name in _NAMED_TOKENS}
        _add_missing_tokens(backend, settings, named)
        return cls(
            backend,
            bos_token=named["bos_token"] or _token_of(backend, files.hf_config.get("bos_token_id")),
            eos_token=named["eos_token"],
            eos_ids=_eos_ids(files),
            chat_template=files.chat_template,
        )

    @classmethod
    def _from_gguf(cls, files: "ModelFiles") -> "Tokenizer":
        backend = load_gguf_tokenizer(files.gguf_metadata)
        return cls(
            backend,
            bos_token=_token_of(backend, files.gguf_metadata.get("tokenizer.ggml.bos_token_id")),
            eos_token=_token_of(backend, files.gguf_metadata.get("tokenizer.ggml.eos_token_id")),
            eos_ids=_eos_ids(files),
            chat_template=files.chat_template,
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``; other threads run meanwhile.

        ``add_special_tokens`` lets the model's own template put BOS (and what else it says) around it;
        special tokens written in the text are recognised either way.

        Raises:
            RequestError: the text holds half a surrogate pair, which is no text.
        """
        if self.cache is not None and len(text) >= self.cache.min_chars:
            return self.cache.encode(text, add_special_tokens)
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Ids of every text, in parallel. Raises as :meth:`encode`."""
        # NOTE: `encode` of the library holds the GIL for its whole time; the batch functions release it.
        try:
            encodings = self.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except TypeError:
            for text in texts:
                _check_unicode(text)
            raise
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; bytes that are no UTF-8 become U+FFFD, ids without a token nothing."""
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of an id (``▁the``, ``Ġthe``, ``<0x0A>``); None for no token."""
        return self.backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for in the middle of a text; empty for no token."""
        if token_id in self._added_texts:
            return self._added_texts[token_id].encode()
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._has_byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        for pattern, content in self._replacements:
            token = token.replace(pattern, content)
        if self._byte_of is None:
            return token.encode()
        try:
            return bytes(self._byte_of[character] for character in token)
        except KeyError:  # a token that was added without being marked so
            return token.encode()

    @cached_property
    def _decoder_steps(self) -> list[dict[str, Any]]:
        if self.backend.decoder is None:
            return []
        decoder = json.loads(self.backend.decoder.__getstate__())
        return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]

    @cached_property
    def _has_byte_fallback(self) -> bool:
        return any(step["type"] == "ByteFallback" for step in self._decoder_steps)

    @cached_property
    def _replacements(self) -> list[tuple[str, str]]:
        pairs = []
        for step in self._decoder_steps:
            if step["type"] == "Replace" and "String" in step["pattern"]:
                pairs.append((step["pattern"]["String"], step["content"]))
            elif step["type"] == "Metaspace":
                pairs.append((step["replacement"], " "))
        return pairs

    @cached_property
    def _byte_of(self) -> dict[str, int] | None:
        """Character -> byte of byte-level vocabularies; None for others."""
        if not any(step["type"] == "ByteLevel" for step in self._decoder_steps):
            return None
        return {character: byte for byte, character in enumerate(byte_characters())}


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's convention):
    the byte's own where Latin-1 can print it, else the next from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(moved)) for byte in range(256)]


def _read_backend(path: Path) -> "Backend":
    from tokenizers import Tokenizer as Backend

    try:
        return Backend.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"{path} is not a tokenizer: {error}") from error


def _convert_with_transformers(folder: Path) -> "Backend":
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(
            f"{folder} has no tokenizer.json, and transformers, which could convert its tokenizer, is not installed"
        ) from error
    try:
        converted = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # dozens of kinds
        raise ModelLoadError(
            f"{folder} has no tokenizer.json, and transformers reads no tokenizer: {error}"
        ) from error
    backend = getattr(converted, "backend_tokenizer", None)
    if backend is None:
        raise ModelLoadError(
            f"{folder} has no tokenizer.json, and its {type(converted).__name__} has no fast form"
        )
    return backend


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text is not valid Unicode: a lone surrogate at character {error.start}"
        ) from error


def _text_of(token: Any) -> str | None:
    """A token of tokenizer_config.json is a text, or a dict with ``content``."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _add_missing_tokens(backend: "Backend", settings: dict[str, Any], named: dict[str, str | None]) -> None:
    """Tokens that tokenizer_config.json declares and tokenizer.json does not mark as added."""
    from tokenizers import AddedToken

    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    declared = settings.get("added_tokens_decoder") or {}
    for _, fields in sorted(declared.items(), key=lambda item: int(item[0])):
        if fields["content"] not in known:
            flags = {
                key: bool(fields.get(key))
                for key in ("lstrip", "rstrip", "single_word", "normalized", "special")
            }
            backend.add_tokens([AddedToken(fields["content"], **flags)])
            known.add(fields["content"])
    special = [text for text in named.values() if text] + [
        text for text in map(_text_of, settings.get("additional_special_tokens") or []) if text
    ]
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in special if t not in known]
    )


def _token_of(backend: "Backend", token_id: Any) -> str | None:
    return backend.id_to_token(token_id) if isinstance(token_id, int) else None


def _eos_ids(files: "ModelFiles") -> list[int]:
    """End ids of the generation settings, or of the configuration where those say nothing."""
    ids = files.generation_config.get("eos_token_id")
    if ids is None:
        ids = files.hf_config.get("eos_token_id")
    return [] if ids is None else [int(i) for i in (ids if isinstance(ids, list) else [ids])]


def _vocab_size(backend: "Backend") -> int:
    """One more than the largest id."""
    size = backend.get_vocab_size(with_added_tokens=True)
    if size and backend.id_to_token(size - 1) is not None and backend.id_to_token(size) is None:
        return size
    return max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1  # the ids have holes
