"""Which layer of a model a module or parameter belongs to, and which modules a dump asks for."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from atom.errors import ConfigError
from atom.utils import envs

_LISTED = 12  # class names that a message lists


@dataclass(frozen=True)
class Block:
    """A module to dump. ``label`` tells it from the others of its layer."""

    module: nn.Module
    name: str  # its path in the model
    layer: int
    label: str


def layer_of_name(name: str) -> int | None:
    """The layer in a path such as ``model.layers.3.mlp``: its first number; None without one."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


def find_blocks(model: nn.Module) -> list[Block]:
    """The modules that ``ATOM_FWD_DUMP_BLOCK_CLASS`` and ``ATOM_FWD_DUMP_LAYERS`` ask for, in the model's order.

    Without the former, and where the model has no ``Block``, they are its decoder layers.
    Raises ConfigError when the model has no such class or layer.
    """
    classes = envs.ATOM_FWD_DUMP_BLOCK_CLASS
    names = {type(module).__name__ for module in model.modules()}
    if not names & set(classes) and not envs.is_set("ATOM_FWD_DUMP_BLOCK_CLASS"):
        classes = _decoder_classes(model)
    for wanted in classes:
        if wanted not in names:
            raise ConfigError(
                f"environment variable ATOM_FWD_DUMP_BLOCK_CLASS must name module classes of "
                f"{type(model).__name__}, got {wanted!r}; those inside its layers: {_inner_classes(model)}"
            )
    found = _blocks_of(model, classes)
    check_layers("ATOM_FWD_DUMP_LAYERS", envs.ATOM_FWD_DUMP_LAYERS, {block.layer for block in found})
    wanted_layers = set(envs.ATOM_FWD_DUMP_LAYERS) or {block.layer for block in found}
    return [block for block in found if block.layer in wanted_layers]


def check_layers(variable: str, asked: Collection[int], present: Collection[int]) -> None:
    """Raises ConfigError for the first layer in ``asked`` that is not ``present``."""
    for layer in asked:
        if layer not in present:
            known = f"{min(present)} to {max(present)}" if present else "none"
            raise ConfigError(
                f"environment variable {variable} must name layers of the model ({known}), got {layer}"
            )


def _blocks_of(model: nn.Module, classes: Collection[str]) -> list[Block]:
    attribute = envs.ATOM_FWD_DUMP_LAYER_ATTR
    modules = dict(model.named_modules())
    found = []
    for name, module in modules.items():
        if type(module).__name__ in classes:
            layer = _layer_of_module(name, modules, attribute)
            if layer is not None:
                found.append((name, module, layer))
    if not found:
        raise ConfigError(
            f"environment variable ATOM_FWD_DUMP_BLOCK_CLASS must name modules of a layer, got "
            f"{','.join(classes)}: neither an attribute {attribute!r} nor a name tells their layer"
        )
    counts = Counter((layer, type(module).__name__) for _, module, layer in found)
    blocks = []
    for name, module, layer in found:
        label = type(module).__name__
        if counts[layer, label] > 1:
            label += "." + name.rpartition(".")[2]
        blocks.append(Block(module, name, layer, label))
    return _with_unique_labels(blocks)


def _with_unique_labels(blocks: list[Block]) -> list[Block]:
    """Where the last part of the names is the same too, the whole name tells two modules apart."""
    counts = Counter((block.layer, block.label) for block in blocks)
    return [
        (
            block
            if counts[block.layer, block.label] == 1
            else Block(block.module, block.name, block.layer, f"{type(block.module).__name__}.{block.name}")
        )
        for block in blocks
    ]


def _layer_of_module(name: str, modules: dict[str, nn.Module], attribute: str) -> int | None:
    """By the attribute of the module or of the nearest one around it, else by the name."""
    path = name
    while True:
        value = getattr(modules[path], attribute, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if not path:
            return layer_of_name(name)
        path = path.rpartition(".")[0]


def _decoder_classes(model: nn.Module) -> tuple[str, ...]:
    """Class names of the entries of the model's longest list of modules."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    layers = max(lists, key=len, default=())
    if not len(layers):
        raise ConfigError(
            f"environment variable ATOM_FWD_DUMP_BLOCK_CLASS must be set: {type(model).__name__} has no list of layers"
        )
    return tuple(sorted({type(layer).__name__ for layer in layers}))


def _inner_classes(model: nn.Module) -> str:
    names = {
        type(module).__name__ for name, module in model.named_modules() if layer_of_name(name) is not None
    }
    listed = sorted(names)
    return ", ".join(listed[:_LISTED]) + (" ..." if len(listed) > _LISTED else "")
