"""Weights of a checkpoint into the parameters of a model.

What a model offers (``atom/models``):

``map_checkpoint_name(name) -> (parameter name, shard id | None) | None``
    Where a tensor of the Hugging Face layout goes; None: it belongs to nothing that this model (or this
    rank) has, and that is fine.
``gguf_tensor_name(name) -> Hugging Face name | None``, ``convert_gguf(hf_name, tensor) -> tensor`` and
``gguf_row_order(hf_name) -> row numbers | None``
    The same model as llama.cpp names and stores it.
``parameter.block_weight``
    Takes a GGUF file's blocks in place of the parameter, once they are announced (``gguf_blocks``).
``parameter.weight_loader(parameter, tensor, shard_id)`` and ``parameter.expected_shards``
    Copies a tensor, or this rank's part of it, into the parameter; absent: a plain copy of one tensor.
``after_load()``
    Packs and converts once everything is there.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from atom.errors import ModelLoadError
from atom.model_loader.checkpoint import DTYPE_SIZES, TensorInfo
from atom.model_loader.dummy import load_dummy
from atom.model_loader.gguf_blocks import announce_blocks, load_blocks
from atom.model_loader.gguf_dequant import QuantisedRows, check_type
from atom.model_loader.lazy_tensor import LazyTensor, RowSource
from atom.model_loader.model_files import ModelFiles
from atom.model_loader.prefetch import prefetch
from atom.model_loader.weight_file import StoredRows, WeightFile, open_weight_file
from atom.model_ops.weights import announced_blocks, finish_loading
from atom.utils import envs

__all__ = ["announce_blocks", "load_dummy", "load_weights"]

ReportFn = Callable[[str, float], None]
ShardId = Any
_LISTED = 5  # problems of a kind that a message lists


@dataclass(slots=True)
class _Assignment:
    """One tensor of the checkpoint and the place it goes to."""

    info: TensorInfo
    checkpoint_name: str  # in the Hugging Face layout
    parameter_name: str
    parameter: nn.Parameter
    shard_id: ShardId


@torch.no_grad()
def load_weights(model: nn.Module, files: ModelFiles, *, report: ReportFn | None = None) -> None:
    """Stream every tensor of ``files`` into ``model`` and run its ``after_load``.

    Args:
        model: the contract at the top of this module; parameters are allocated, in their final dtype.
        report: called with ("weights", fraction of bytes done) now and then, in this thread.

    Raises:
        ModelLoadError: tensors are missing, unknown, truncated or of the wrong shape. Names, counts and
            files of the first few are listed. The model is then unusable.
    """
    assignments = _assign(model, files)
    problems = _stream(model, files, assignments, report)
    if problems:
        raise ModelLoadError(_listing(f"tensors of {files.path} do not fit the model", problems))
    finish_loading(model)


def _stream(
    model: nn.Module, files: ModelFiles, assignments: list[_Assignment], report: ReportFn | None
) -> list[str]:
    """Copy every tensor to its place; the result tells which did not fit."""
    paths = sorted({item.info.file for item in assignments})
    opened = {path: open_weight_file(path, not envs.ATOM_DISABLE_MMAP) for path in paths}
    num_threads = max(1, min(envs.ATOM_LOADER_NUM_THREADS, torch.get_num_threads()))
    total = sum(item.info.num_bytes for item in assignments) or 1
    done = 0
    problems: list[str] = []
    with prefetch(paths), ThreadPoolExecutor(num_threads, "atom-load") as pool:
        for item in assignments:
            info, file = item.info, opened[item.info.file]
            try:
                blocks = announced_blocks(item.parameter)
                if blocks is not None:
                    load_blocks(blocks, file, info, item.shard_id, model.gguf_row_order(item.checkpoint_name))
                else:
                    tensor = _tensor(file, info, pool)
                    if files.kind == "gguf":
                        tensor = model.convert_gguf(item.checkpoint_name, tensor)
                    _put(item, tensor)
            except torch.OutOfMemoryError:  # a RuntimeError, but no misfit
                raise
            except (RuntimeError, ValueError, IndexError, ModelLoadError) as error:
                problems.append(_shape_problem(item, error))
            file.release(info.offset, info.num_bytes)
            done += info.num_bytes
            if report is not None:
                report("weights", done / total)
    return problems


def _assign(model: nn.Module, files: ModelFiles) -> list[_Assignment]:
    """Decide where every tensor goes, in file order, before any weight is read."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    arrived: dict[int, set[ShardId]] = {id(parameter): set() for parameter in parameters.values()}
    assignments: list[_Assignment] = []
    unknown: list[str] = []
    for info in sorted(files.tensors.values(), key=lambda info: (info.file, info.offset)):
        name = model.gguf_tensor_name(info.name) if files.kind == "gguf" else info.name
        place = model.map_checkpoint_name(name) if name is not None else None
        if place is None:
            continue
        parameter_name, shard_id = place
        parameter = parameters.get(parameter_name)
        expected = _expected_shards(parameter) if parameter is not None else ()
        if parameter is None or shard_id not in expected:
            where = parameter_name if shard_id is None else f"{parameter_name} shard {shard_id!r}"
            unknown.append(f"{info.name} ({info.file.name}, shape {list(info.shape)}) -> {where}")
            continue
        if info.dtype not in DTYPE_SIZES:
            check_type(info)
        arrived[id(parameter)].add(shard_id)
        assignments.append(_Assignment(info, name, parameter_name, parameter, shard_id))
    missing = []
    for name, parameter in model.named_parameters():
        for shard_id in _expected_shards(parameter):
            if shard_id not in arrived[id(parameter)]:
                shard = "" if shard_id is None else f" shard {shard_id!r}"
                missing.append(f"{name}{shard} (parameter shape {list(parameter.shape)})")
    messages = []
    if missing:
        messages.append(_listing(f"{files.path} lacks tensors of this model", missing))
    if unknown:
        messages.append(_listing(f"{files.path} has tensors that this model does not know", unknown))
    if messages:
        raise ModelLoadError("; ".join(messages))
    return assignments


def _expected_shards(parameter: nn.Parameter) -> Sequence[ShardId]:
    return getattr(parameter, "expected_shards", (None,))


def _put(item: _Assignment, tensor: torch.Tensor) -> None:
    loader = getattr(item.parameter, "weight_loader", None)
    if loader is not None:
        loader(item.parameter, tensor, item.shard_id)
    elif tensor.shape != item.parameter.shape:
        raise ValueError(f"expected {list(item.parameter.shape)}, found {list(tensor.shape)}")
    else:
        item.parameter.data.copy_(tensor)


def _shape_problem(item: _Assignment, error: Exception) -> str:
    shard = "" if item.shard_id is None else f" shard {item.shard_id!r}"
    reason = str(error).splitlines()[0] if str(error) else repr(error)
    return (
        f"{item.info.name} in {item.info.file.name}: found shape {list(item.info.shape)}, expected what fills "
        f"{item.parameter_name}{shard} of shape {list(item.parameter.shape)} ({reason})"
    )


def _listing(what: str, problems: list[str]) -> str:
    more = f" and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
    return f"{what} ({len(problems)}): {'; '.join(problems[:_LISTED])}{more}"


def _tensor(file: WeightFile, info: TensorInfo, pool: ThreadPoolExecutor) -> torch.Tensor:
    source: RowSource
    if info.dtype in DTYPE_SIZES:
        source = StoredRows(file, info)
    else:
        source = QuantisedRows(file, info)
        if not source.is_fast:
            source.map_chunks = pool.map  # numpy uses one core
    return LazyTensor(source) if info.shape else source.read_rows(0, 1).view(())
