"""The demo model's weights as a Hugging Face folder, for engines that do not read GGUF as ATOM does.

    python -m atom.benchmarks.demo_export --dtype bfloat16

Done once per dtype, in the folder ``bench`` of the cache. A fresh export is checked: ATOM's own model,
loaded from the folder, must hold the very bits that it holds when loaded from the GGUF file.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from atom.benchmarks.child import print_result, run_child
from atom.errors import ModelLoadError
from atom.model_loader.model_files import ModelFiles
from atom.utils.cache_folder import private_cache_folder

if TYPE_CHECKING:
    import torch
    from torch import nn

_FORMAT = 1  # raised when a folder of an older version must not be used any more
_STAMP = "source.json"  # written last: a folder that has it is complete
_EMBEDDING = "model.embed_tokens.weight"


class DemoFolder(msgspec.Struct):
    """An exported model: where it lies, and the elements of its blocks and of its (tied) output head."""

    folder: str
    num_block_params: int
    num_head_params: int


def export_demo_model(dtype: str, num_threads: int) -> DemoFolder:
    """Export in a process of its own, so that this one stays small. Raises ChildError."""
    return run_child("atom.benchmarks.demo_export", ["--dtype", dtype], DemoFolder, num_threads)


def export(dtype: str) -> DemoFolder:
    """The folder of the demo model in ``dtype`` (torch's name), made and checked if it is not there yet.

    Raises:
        ModelLoadError: the folder's weights differ from the GGUF file's.
    """
    files = ModelFiles.resolve("demo")
    folder = private_cache_folder("bench") / f"{files.path.stem}-{dtype}"
    stamp = _stamp(files.path)
    if not _is_current(folder, stamp):
        print(f"exporting {files.path.name} to {folder}", file=sys.stderr)
        fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            write_folder(files, dtype, fresh)
            check_same_weights(files, ModelFiles.resolve(str(fresh)), dtype)
            (fresh / _STAMP).write_text(json.dumps(stamp))
            shutil.rmtree(folder, ignore_errors=True)
            fresh.rename(folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    sizes = {name: info.numel for name, info in ModelFiles.resolve(str(folder)).tensors.items()}
    head = sizes[_EMBEDDING]
    return DemoFolder(str(folder), sum(sizes.values()) - head, head)


def write_folder(files: ModelFiles, dtype: str, folder: Path) -> None:
    """Write ``config.json`` and ``model.safetensors`` with every tensor of ``files`` in ``dtype``."""
    from safetensors.torch import save_file

    tensors = {name: parameter.data for name, parameter in _plain_model(files, dtype).named_parameters()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config = files.hf_config.to_dict() | {"dtype": dtype, "torch_dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def check_same_weights(left: ModelFiles, right: ModelFiles, dtype: str) -> None:
    """Load ATOM's model from both and compare every parameter, bit for bit. Raises ModelLoadError."""
    expected, found = _atom_parameters(left, dtype), _atom_parameters(right, dtype)
    differing = sorted(expected.keys() ^ found.keys())
    differing += [
        name for name in expected.keys() & found.keys() if not _is_equal(expected[name], found[name])
    ]
    if differing:
        shown = ", ".join(differing[:5])
        raise ModelLoadError(
            f"{len(differing)} of {len(expected)} parameters of {right.path} differ: {shown}"
        )


def _is_equal(left: "torch.Tensor", right: "torch.Tensor") -> bool:
    return left.dtype == right.dtype and left.equal(right)


def _atom_parameters(files: ModelFiles, dtype: str) -> "dict[str, torch.Tensor]":
    from atom.model_loader.loader import load_weights
    from atom.models.registry import get_model_class

    with _default_dtype(dtype):
        model = get_model_class(files.hf_config.architectures)(files.hf_config)
    load_weights(model, files)
    return dict(model.state_dict())


def _plain_model(files: ModelFiles, dtype: str) -> "nn.Module":
    """A module whose parameters are the checkpoint's tensors under their Hugging Face names, loaded."""
    import torch
    from torch import nn

    from atom.model_loader.gguf_names import hf_name
    from atom.model_loader.loader import load_weights

    class PlainModel(nn.Module):
        def map_checkpoint_name(self, name: str) -> tuple[str, None]:
            return name, None

    root = PlainModel()
    for info in files.tensors.values():
        name = hf_name(info.name, files.hf_config.model_type)
        if name is None:
            continue
        *path, leaf = name.split(".")
        parent: nn.Module = root
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        empty = torch.empty(info.shape, dtype=getattr(torch, dtype))
        parent.register_parameter(leaf, nn.Parameter(empty, requires_grad=False))
    load_weights(root, files)
    return root


@contextmanager
def _default_dtype(dtype: str) -> Iterator[None]:
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _stamp(source: Path) -> dict[str, int | str]:
    facts = source.stat()
    return {"format": _FORMAT, "name": source.name, "bytes": facts.st_size, "mtime_ns": facts.st_mtime_ns}


def _is_current(folder: Path, stamp: dict[str, int | str]) -> bool:
    try:
        return json.loads((folder / _STAMP).read_text()) == stamp
    except (OSError, ValueError):
        return False


def main(argv: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    print_result(export(parser.parse_args(argv).dtype))
    return 0


if __name__ == "__main__":
    sys.exit(main())
