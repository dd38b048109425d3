"""Find a model and say what it is: the one place that reads a model folder. No torch, no transformers.

Files are data here. Nothing of a model folder is imported or executed, with or without
``--trust-remote-code``: that flag only lets other parts of ATOM hand the folder to ``transformers``.
"""

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from atom.errors import ConfigError, ModelLoadError
from atom.model_loader.checkpoint import TensorInfo
from atom.model_loader.gguf_config import gguf_config
from atom.model_loader.gguf_file import open_gguf, split_paths
from atom.model_loader.hf_config import HFConfig, read_json_object
from atom.model_loader.safetensors_file import read_folder
from atom.model_loader.tokenizer import Tokenizer

DEMO_WORD = "demo"
# What is fetched from a hub: weights and settings, never code or pickles; no copies in subfolders.
HUB_ALLOW = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
HUB_IGNORE = ["*/*", "consolidated*"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class ModelFiles:
    """A resolved model. Properties read their file on first use and keep the result.

    Attributes:
        name: what the user wrote.
        path: the folder, or the ``.gguf`` file.
        kind: ``safetensors`` (a Hugging Face folder) or ``gguf``.
    """

    def __init__(self, name: str, path: Path, hf_overrides: Mapping[str, Any] | None = None):
        self.name = name
        self.path = path
        self.kind = "gguf" if path.suffix == ".gguf" else "safetensors"
        self._hf_overrides = dict(hf_overrides or {})

    @classmethod
    def resolve(
        cls,
        model: str,
        *,
        hf_overrides: Mapping[str, Any] | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> "ModelFiles":
        """Find ``model``.

        Args:
            model: a folder with safetensors or one GGUF file, a ``.gguf`` file, the word ``demo``, or a hub id
                (``owner/name``), which is downloaded or taken from the local hub cache.
            hf_overrides: configuration fields to replace, key by key.
            revision: branch, tag or commit of a hub id.
            trust_remote_code: accepted because every door offers it; nothing here executes code either way.

        Raises:
            ConfigError: ``model`` names nothing that exists; the message lists what was tried.
            ModelLoadError: the folder is no model.
        """
        return cls(model, _find(str(model), revision), hf_overrides)

    @cached_property
    def hf_config(self) -> HFConfig:
        """The model's configuration with overrides applied."""
        if self.kind == "gguf":
            return gguf_config(self.gguf_metadata, self.tensors, self._hf_overrides)
        return HFConfig.from_file(self.path / "config.json", self._hf_overrides)

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor of the checkpoint by its own name, from the headers; sizes have been checked."""
        return self._gguf[1] if self.kind == "gguf" else read_folder(self.path)

    @property
    def gguf_metadata(self) -> dict[str, Any]:
        """The key-value part of a GGUF file; empty for a folder."""
        return self._gguf[0] if self.kind == "gguf" else {}

    @cached_property
    def _gguf(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        return open_gguf(self.path)

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """``generation_config.json``; ``eos_token_id`` may be one id or a list. Empty without the file.

        A GGUF file gives its end-of-text and, where a chat model has one, end-of-turn token.
        """
        if self.kind == "gguf":
            keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
            ids = {int(self.gguf_metadata[key]): None for key in keys if key in self.gguf_metadata}
            return {"eos_token_id": list(ids)} if ids else {}
        return self._optional_json("generation_config.json")

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        """``tokenizer_config.json``, empty without the file or for GGUF."""
        return {} if self.kind == "gguf" else self._optional_json("tokenizer_config.json")

    @cached_property
    def chat_template(self) -> str | None:
        """The model's own Jinja chat template, or None: a base model has none."""
        if self.kind == "gguf":
            return self.gguf_metadata.get("tokenizer.chat_template")
        jinja = self.path / "chat_template.jinja"
        if jinja.is_file():
            return jinja.read_text(encoding="utf-8")
        for content in (self._optional_json("chat_template.json"), self.tokenizer_config):
            template = content.get("chat_template")
            if isinstance(template, list):  # several named ones
                named = {entry.get("name"): entry.get("template") for entry in template}
                template = named.get("default")
            if isinstance(template, str):
                return template
        return None

    def load_tokenizer(self) -> Tokenizer:
        """The model's tokenizer, read anew."""
        return Tokenizer.from_files(self)

    def weight_bytes(self, dtype: str | None = None) -> int:
        """Bytes of the weights once loaded as ``dtype`` (torch's name; None: the checkpoint's), from headers."""
        dtype = dtype or self.hf_config.get("dtype") or "bfloat16"
        is_tied = bool(self.hf_config.get("tie_word_embeddings"))
        return sum(
            info.num_bytes_as(dtype)
            for name, info in self.tensors.items()
            if not (is_tied and name.endswith("lm_head.weight"))
        )

    def _optional_json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        return read_json_object(path) if path.is_file() else {}

    def __repr__(self) -> str:
        return f"ModelFiles({self.name!r}, kind={self.kind!r}, path={str(self.path)!r})"


def _find(model: str, revision: str | None) -> Path:
    path = Path(model).expanduser()
    if model == DEMO_WORD:
        from atom.model_loader.demo import assemble_demo_model

        return assemble_demo_model()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(
                f"model: {path} is a file but not a .gguf file; give a folder, a .gguf file or a hub id"
            )
        return path
    if path.is_dir():
        return _find_in_folder(path)
    if _HUB_ID.fullmatch(model) and not model.endswith(".gguf"):
        return _fetch(model, revision)
    raise ConfigError(f"model: no folder or .gguf file {path}, and {model!r} is no hub id (owner/name)")


def _find_in_folder(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    gguf_files = sorted(folder.glob("*.gguf"))
    if gguf_files and gguf_files == split_paths(gguf_files[0]):
        return gguf_files[0]
    if gguf_files:
        names = ", ".join(file.name for file in gguf_files[:5])
        raise ModelLoadError(f"{folder} holds {len(gguf_files)} GGUF files ({names}); name the one to load")
    raise ModelLoadError(f"{folder} is not a model folder: it has neither a config.json nor a .gguf file")


def _fetch(model: str, revision: str | None) -> Path:
    """Download a hub model, or take it from the local cache when there is no network."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ConfigError(
            f"model: {model!r} is no local folder, and huggingface_hub is not installed to look for it on the hub"
        ) from error
    try:
        found = snapshot_download(
            model, revision=revision, allow_patterns=HUB_ALLOW, ignore_patterns=HUB_IGNORE
        )
    except Exception as error:  # the hub library raises a dozen kinds, all of which mean: not there
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"model: {model!r} is no local folder or .gguf file, is not in the local hub cache, and the hub did "
            f"not give it: {type(error).__name__}: {reason}"
        ) from error
    return _find_in_folder(Path(found))
