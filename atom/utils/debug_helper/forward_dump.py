"""What a model's blocks put out, saved to files by forward hooks (``ATOM_FWD_DUMP_DIR``)."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atom.utils import envs
from atom.utils.debug_helper.files import DumpName, make_folder, save
from atom.utils.debug_helper.layers import Block, find_blocks
from atom.utils.forward_context import get_forward_context
from atom.utils.logging import init_logger

logger = init_logger(__name__)

MAX_CALLS = 1000  # of a block: the number in a file's name has three digits


def needs_eager() -> str | None:
    """Why every step has to run eagerly and uncompiled here; None where it need not."""
    if envs.ATOM_FWD_DUMP_DIR:
        return "ATOM_FWD_DUMP_DIR is set, and hooks fire neither in recorded graphs nor in compiled code"
    return None


def install_block_forward_hooks(
    model: nn.Module, rank: int = 0, *, is_eager: bool = True
) -> "ForwardDump | None":
    """Dump what the environment asks for from now on; None where it asks for nothing.

    Args:
        is_eager: whether the model will run as Python calls; otherwise nothing is installed and a warning says why.

    Raises:
        ConfigError: a class, a layer or the folder of ``ATOM_FWD_DUMP_*`` does not fit.
    """
    if not envs.ATOM_FWD_DUMP_DIR:
        return None
    if not is_eager:
        logger.warning("no forward dump: %s; run with --enforce-eager", needs_eager())
        return None
    folder = make_folder(envs.ATOM_FWD_DUMP_DIR, "ATOM_FWD_DUMP_DIR")
    dump = ForwardDump(folder, find_blocks(model), rank, one_shot=envs.ATOM_FWD_DUMP_ONE_SHOT)
    logger.info("hidden states of %d modules go to %s", dump.num_active, folder)
    return dump


class ForwardDump:
    """Hooks on ``blocks``; each call of a block becomes a file, until one is enough or ``MAX_CALLS`` are.

    A file holds ``hidden_states`` and facts: ``layer``, ``class``, ``module``, ``rank``, ``call`` (of this block),
    ``order`` (among all files) and ``query_lens`` (tokens of each sequence in the step). Tensors of any structure but
    one alone are listed in ``outputs`` instead.

    A rehearsal is no call: its kernels may not have run, and how many there are differs between devices.

    Args:
        one_shot: dump the first call of each block and take its hook off.
    """

    def __init__(self, folder: Path, blocks: Iterable[Block], rank: int, *, one_shot: bool):
        self._folder = folder
        self._rank = rank
        self._one_shot = one_shot
        self._num_files = 0
        self._num_calls: dict[str, int] = {}
        self._hooks = {
            block.name: block.module.register_forward_hook(partial(self._save, block)) for block in blocks
        }

    @property
    def num_active(self) -> int:
        """Blocks that still have their hook."""
        return len(self._hooks)

    def remove(self) -> None:
        """Take every hook off."""
        for name in list(self._hooks):
            self._take_off(name)

    def _take_off(self, name: str) -> None:
        self._hooks.pop(name).remove()

    def _save(self, block: Block, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or get_forward_context().is_rehearsal or _is_recording_graph(output):
            return
        call = self._num_calls.get(block.name, 0)
        self._num_calls[block.name] = call + 1
        name = DumpName(block.layer, block.label, self._rank, None if self._one_shot else call)
        content = _states(output) | {
            "layer": block.layer,
            "class": type(module).__name__,
            "module": block.name,
            "rank": self._rank,
            "call": call,
            "order": self._num_files,
            "query_lens": _query_lens(),
        }
        self._num_files += 1
        try:
            save(self._folder / name.file_name, content)
        except OSError as error:  # a full disk must not end a serving process
            logger.error("the forward dump ends here: %s", error)
            self.remove()
            return
        if self._one_shot:
            self._take_off(block.name)
        elif call + 1 == MAX_CALLS:
            logger.warning("%s: %d calls are dumped, no more of them will be", block.name, MAX_CALLS)
            self._take_off(block.name)


def _states(output: Any) -> dict[str, Any]:
    if isinstance(output, torch.Tensor):
        return {"hidden_states": _to_host(output)}
    return {"outputs": _only_tensors(output)}


def _only_tensors(value: Any) -> Any:
    """``value`` with its tensors on the host; what is neither tensor nor container becomes None."""
    if isinstance(value, torch.Tensor):
        return _to_host(value)
    if isinstance(value, dict):
        return {str(key): _only_tensors(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_only_tensors(item) for item in value]
    return None


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of its own: a view would be saved with all of its storage."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _query_lens() -> list[int]:
    """Tokens of each sequence in the running step; empty outside of one."""
    metadata = next(iter(get_forward_context().attn_metadata.values()), None)
    return [] if metadata is None else list(metadata.query_lens_host)


def _is_recording_graph(output: Any) -> bool:
    first = output[0] if isinstance(output, tuple) and output else output
    is_on_cuda = isinstance(first, torch.Tensor) and first.is_cuda
    return is_on_cuda and torch.cuda.is_current_stream_capturing()
