"""Headers of GGUF files: metadata and where the tensors lie. No torch, no weights.

The ``gguf`` package's reader turns every vocabulary entry into numpy views, which takes seconds for 262k
tokens; here arrays of strings are skipped over (tens of milliseconds) and decoded when somebody asks.
Layout: GGUF specification, versions 2 and 3, little-endian.
"""

import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from atom.errors import ModelLoadError
from atom.model_loader.checkpoint import TensorInfo

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
_FIRST_READ = 8 << 20  # holds the whole header of most models

# Value types of the metadata by their number in the file.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_STRUCTS = {kind: struct.Struct("<" + code) for kind, code in _SCALARS.items()}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_NUMPY = {kind: np.dtype("bool" if code == "?" else "<" + code) for kind, code in _SCALARS.items()}

# Types that torch stores as they are; every other one keeps GGUF's name and is a block format.
_PLAIN_TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
}
_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf")


class StringArray(Sequence[str]):
    """An array of strings, decoded as a whole at the first look into it."""

    def __init__(self, buffer: bytes, start: int, end: int, count: int):
        self._buffer, self._start, self._end, self._count = buffer, start, end, count
        self._strings: list[str] | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self.tolist()[index]

    def tolist(self) -> list[str]:
        if self._strings is None:
            self._strings = list(self._decode())
        return self._strings

    def raw(self) -> bytes:
        """The stored bytes, lengths and texts."""
        return self._buffer[self._start : self._end]

    def _decode(self) -> Iterator[str]:
        buffer, position = self._buffer, self._start
        for _ in range(self._count):
            start = position + 8
            position = start + _U64.unpack_from(buffer, position)[0]
            yield buffer[start:position].decode("utf-8", errors="replace")


class _OutOfBytes(Exception):
    """The header goes on beyond the bytes read so far."""


class GGUFFile:
    """The header of one file.

    Attributes:
        metadata: key -> scalar, str, numpy array, :class:`StringArray` or (nested) list. 32-bit floats are
            the shortest decimal that reads back as the same float, so 1e-6 is 1e-6.
        tensors: name -> where it lies; shapes in row-major order, the contiguous dimension last.

    Raises:
        ModelLoadError: foreign, truncated or contradictory file, or a tensor type that is not known.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with open(path, "rb") as file:
                self._file_size = path.stat().st_size
                buffer = b""
                while True:
                    buffer += file.read(max(_FIRST_READ, 3 * len(buffer)))
                    try:
                        self._parse(buffer)
                        return
                    except (_OutOfBytes, struct.error):
                        if len(buffer) >= self._file_size:
                            raise ModelLoadError(
                                f"{path} is truncated: its header goes on after the file's {self._file_size} bytes"
                            ) from None
        except OSError as error:
            raise ModelLoadError(f"cannot read {path}: {error.strerror or error}") from error

    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def _parse(self, buffer: bytes) -> None:
        self._buffer, self._position = buffer, 8
        self._check_magic(buffer)
        num_tensors, num_pairs = self._take(_U64), self._take(_U64)
        # The smallest entry of either table takes more than 12 bytes: counts beyond that are nonsense.
        if (num_tensors + num_pairs) * 12 > self._file_size:
            raise ModelLoadError(
                f"{self.path} is damaged: it claims {num_tensors} tensors and {num_pairs} keys"
            )
        self.metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._take_string()
            self.metadata[key] = self._take_value(self._take(_U32))
        entries = [self._take_tensor_entry() for _ in range(num_tensors)]
        alignment = int(self.metadata.get("general.alignment", DEFAULT_ALIGNMENT))
        if alignment < 1:
            raise ModelLoadError(f"{self.path}: general.alignment is {alignment}")
        data_start = -(-self._position // alignment) * alignment
        self.tensors: dict[str, TensorInfo] = {}
        for name, shape, type_number, offset in entries:
            if name in self.tensors:
                raise ModelLoadError(f"{self.path} holds tensor {name!r} twice")
            self.tensors[name] = self._tensor_info(name, shape, type_number, data_start + offset)
        self._buffer = b""

    def _check_magic(self, buffer: bytes) -> None:
        if buffer[:4] != MAGIC:
            raise ModelLoadError(f"{self.path} is not a GGUF file: it starts with {buffer[:4]!r}")
        version = _U32.unpack_from(buffer, 4)[0]
        if version not in VERSIONS:
            hint = " (big-endian?)" if version & 0xFFFF == 0 else ""
            raise ModelLoadError(f"{self.path} has GGUF version {version}{hint}; versions 2 and 3 are read")

    def _take(self, kind: struct.Struct) -> Any:
        value = kind.unpack_from(self._buffer, self._position)[0]
        self._position += kind.size
        return value

    def _advance(self, num_bytes: int) -> int:
        """Step over ``num_bytes`` and return where they start."""
        start = self._position
        if start + num_bytes > len(self._buffer):
            raise _OutOfBytes
        self._position = start + num_bytes
        return start

    def _take_string(self) -> str:
        length = self._take(_U64)
        start = self._advance(length)
        return self._buffer[start : start + length].decode("utf-8", errors="replace")

    def _take_value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._take_string()
        if kind == _ARRAY and depth < 4:
            return self._take_array(depth)
        if kind not in _STRUCTS:
            raise ModelLoadError(
                f"{self.path} is damaged: metadata value type {kind} at byte {self._position}"
            )
        value = self._take(_STRUCTS[kind])
        return float(str(np.float32(value))) if _SCALARS[kind] == "f" else value

    def _take_array(self, depth: int) -> Any:
        kind, count = self._take(_U32), self._take(_U64)
        if kind == _STRING:
            start = self._position
            self._skip_strings(count)
            return StringArray(self._buffer, start, self._position, count)
        if kind in _NUMPY:
            start = self._advance(count * _NUMPY[kind].itemsize)
            return np.frombuffer(self._buffer, _NUMPY[kind], count, start)
        return [self._take_value(kind, depth + 1) for _ in range(count)]

    def _skip_strings(self, count: int) -> None:
        buffer, position, unpack = self._buffer, self._position, _U64.unpack_from
        size = len(buffer)
        for _ in range(count):
            position += 8 + unpack(buffer, position)[0]
            if position > size:
                raise _OutOfBytes
        self._position = position

    def _take_tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self._take_string(), self._take(_U32)
        if num_dims > 4:
            raise ModelLoadError(
                f"{self.path} is damaged: tensor {name!r} has {num_dims} dimensions, 4 at most"
            )
        shape = tuple(self._take(_U64) for _ in range(num_dims))[::-1]
        return name, shape, self._take(_U32), self._take(_U64)

    def _tensor_info(self, name: str, shape: tuple[int, ...], type_number: int, offset: int) -> TensorInfo:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            kind = GGMLQuantizationType(type_number)
            block_size, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise ModelLoadError(
                f"{self.path}: tensor {name!r} has type {type_number}, which the installed gguf package does not know"
            ) from None
        info = TensorInfo(name, self.path, _PLAIN_TYPES.get(kind.name, kind.name), shape, offset, 0)
        if block_size > 1 and (not shape or shape[-1] % block_size):
            raise ModelLoadError(
                f"{self.path}: tensor {name!r} has rows of {shape[-1] if shape else 0} elements, "
                f"{kind.name} needs a multiple of {block_size}"
            )
        num_bytes = info.numel // block_size * block_bytes
        if offset + num_bytes > self._file_size:
            raise ModelLoadError(
                f"{self.path} is truncated: tensor {name!r} ends at byte {offset + num_bytes}, the file has "
                f"{self._file_size}"
            )
        return TensorInfo(name, self.path, info.dtype, shape, offset, num_bytes)


def split_paths(path: Path) -> list[Path]:
    """All files of a model split as ``name-00001-of-00003.gguf``; just ``path`` if it is whole.

    Raises:
        ModelLoadError: a part is missing.
    """
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    parts = [
        path.with_name(f"{match['stem']}-{index:05d}-of-{count:05d}.gguf") for index in range(1, count + 1)
    ]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelLoadError(
            f"{len(missing)} of {count} parts of {path} are missing: {', '.join(missing[:5])}"
        )
    return parts


def open_gguf(path: Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """Metadata of the first part, and the tensors of all parts."""
    files = [GGUFFile(part) for part in split_paths(path)]
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in file.tensors.items():
            if name in tensors:
                raise ModelLoadError(
                    f"tensor {name!r} is in {tensors[name].file.name} and in {file.path.name}"
                )
            tensors[name] = info
    return files[0].metadata, tensors
