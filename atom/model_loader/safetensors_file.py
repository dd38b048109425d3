"""Headers of safetensors checkpoints: one file, or shards named by an index. No torch, no weights.

Every size is checked against the file's before a byte of weights is mapped: reading a mapped page that a
truncated file does not have would kill the process.
"""

import json
import os
import struct
from math import prod
from pathlib import Path

from atom.errors import ModelLoadError
from atom.model_loader.checkpoint import DTYPE_SIZES, TensorInfo
from atom.model_loader.hf_config import read_json_object

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit

_TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one file.

    Raises:
        ModelLoadError: the file is absent, foreign or truncated, or its header contradicts itself.
    """
    try:
        with open(path, "rb") as file:
            file_size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            header_size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= header_size <= MAX_HEADER_BYTES:
                raise ModelLoadError(f"{path} is not a safetensors file: its header size reads {header_size}")
            if 8 + header_size > file_size:
                raise ModelLoadError(
                    f"{path} is truncated: its header ends at byte {8 + header_size}, the file has {file_size}"
                )
            text = file.read(header_size)
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        header = json.loads(text)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        tensors = {name: _tensor_info(path, name, entry, 8 + header_size) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{path} is not a safetensors file: bad header ({error!r})") from error
    end = max((info.offset + info.num_bytes for info in tensors.values()), default=8 + header_size)
    if end != file_size:
        problem = "is truncated" if file_size < end else "has bytes that no tensor owns"
        raise ModelLoadError(f"{path} {problem}: its tensors end at byte {end}, the file has {file_size}")
    return tensors


def _tensor_info(path: Path, name: str, entry: dict, data_start: int) -> TensorInfo:
    if entry["dtype"] not in _TORCH_NAMES:
        raise ModelLoadError(f"{path}: tensor {name!r} has the unknown dtype {entry['dtype']!r}")
    dtype = _TORCH_NAMES[entry["dtype"]]
    shape = tuple(int(size) for size in entry["shape"])
    begin, end = entry["data_offsets"]
    expected = prod(shape) * DTYPE_SIZES[dtype]
    if min(shape, default=0) < 0 or begin < 0 or end - begin != expected:
        raise ModelLoadError(
            f"{path}: tensor {name!r} of shape {list(shape)} and dtype {dtype} needs {expected} bytes, "
            f"its offsets are {begin}..{end}"
        )
    return TensorInfo(name, path, dtype, shape, data_start + begin, expected)


def read_folder(folder: Path) -> dict[str, TensorInfo]:
    """The tensors of a folder: as its index says, else ``model.safetensors``, else all ``*.safetensors``.

    Raises:
        ModelLoadError: no weights, a file of the index is missing, a file does not hold a tensor that the
            index places there, or two files hold the same tensor.
    """
    if (folder / INDEX_NAME).is_file():
        return _read_indexed(folder)
    single = folder / SINGLE_NAME
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(f"no weights in {folder}: {_what_is_there(folder)}")
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in read_header(file).items():
            if name in tensors:
                raise ModelLoadError(
                    f"tensor {name!r} is in {tensors[name].file.name} and in {file.name} of {folder}, "
                    f"and no {INDEX_NAME} says which counts"
                )
            tensors[name] = info
    return tensors


def _read_indexed(folder: Path) -> dict[str, TensorInfo]:
    index = folder / INDEX_NAME
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index} has no weight_map")
    file_names = sorted({str(name) for name in weight_map.values()})
    outside = [name for name in file_names if Path(name).name != name]
    if outside:
        raise ModelLoadError(f"{index} names files outside of its folder: {outside[:3]}")
    missing = [name for name in file_names if not (folder / name).is_file()]
    if missing:
        raise ModelLoadError(
            f"{len(missing)} of {len(file_names)} weight files of {index} are missing: {', '.join(missing[:5])}"
        )
    headers = {name: read_header(folder / name) for name in file_names}
    absent = [name for name, file in weight_map.items() if name not in headers[file]]
    if absent:
        raise ModelLoadError(
            f"{index} places {len(absent)} tensors in files that do not hold them, first "
            f"{absent[0]!r} in {weight_map[absent[0]]}"
        )
    return {name: headers[file][name] for name, file in weight_map.items()}


def _what_is_there(folder: Path) -> str:
    """A hint for the error: pickled weights are common and never read."""
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
    if pickled:
        return f"only pickled files ({', '.join(pickled[:3])}), which are never read; convert to safetensors"
    return f"expected {SINGLE_NAME}, {INDEX_NAME} or one .gguf file"
