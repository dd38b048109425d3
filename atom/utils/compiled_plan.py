"""Plans: how the pieces of a compiled call fit together, kept so that a later start need not trace the model.

A plan is data: where each input of the traced graph comes from, which artifact or op takes which values, and which
values are returned. Its key covers the configuration, the compiler, the arguments and everything that the module
holds (:mod:`atom.utils.call_description`); the plan itself lists every source file that the trace may have read
(:mod:`atom.utils.plan_store`). A graph that does not fit these forms has no plan and is traced by each start.
"""

import dis
import functools
import operator
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from atom.utils.call_description import PLAIN

_STEP = re.compile(r"\.([A-Za-z_]\w*)|\['([^'\\]*)'\]|\[\"([^\"\\]*)\"\]|\[(\d+)\]")
_ARGUMENT = re.compile(r"L\['(\w+)'\](?:\.size\(\)\[(\d+)\])?")
_OP = re.compile(r"\w+\.\w+(?:\.\w+)?")
# What Dynamo's code calls besides the graph: sizes of arguments, and marks for its profiler.
_DYNAMO_CALLS = {"call_size", "record_pregraph_bytecode_enter", "record_pregraph_bytecode_exit", "size"}


class Unplannable(Exception):
    """The call does not fit the forms of a plan, or a stored plan is not to be used."""


class Inputs:
    """Where a call of ``module`` has the values that a plan takes from outside.

    Args:
        sources: of the graph's inputs, see :func:`parse_source`.
        call: arguments by position and by name; later calls give the same ones alike.
        names: the parameters of ``forward`` after ``self``.

    Raises:
        Unplannable: the module or the call lacks one.
    """

    def __init__(
        self, sources: list[list[Any]], module: nn.Module, call: tuple[tuple, dict], names: list[str]
    ):
        args, kwargs = call
        self.num_held = sum(source[0] == "held" for source in sources)
        found = [_holder(module, path) for kind, path, *_ in sources if kind == "held"]
        self._holders, self._keys = [holder for holder, _ in found], [key for _, key in found]
        wanted = {source[1] for source in sources if source[0] != "held"}
        if not wanted <= {*names[: len(args)], *kwargs}:
            raise Unplannable("an argument that the graph takes has its default value")
        self.given = sorted(wanted, key=names.index)
        self._takes_all = not kwargs and self.given == names[: len(args)]
        self._places: list[Any] = [i if i < len(args) else names[i] for i in map(names.index, self.given)]

    def held(self) -> list[torch.Tensor]:
        """The module's tensors, in the order of the sources."""
        return list(map(operator.getitem, self._holders, self._keys))

    def bind(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` of the held and given values as one of ``(module, *args, **kwargs)``.

        What the module holds is looked up at each call: a weight may be replaced.
        """
        holders, keys, places = self._holders, self._keys, self._places
        getitem = operator.getitem

        def call(_: nn.Module, *args: Any) -> Any:
            return function(*map(getitem, holders, keys), *args)

        def call_with_some(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            given = [kwargs[place] if isinstance(place, str) else args[place] for place in places]
            return function(*map(getitem, holders, keys), *given)

        return call if self._takes_all else call_with_some


def _holder(module: nn.Module, path: list[list[Any]]) -> tuple[Any, Any]:
    """The dictionary or list that holds what ``path`` leads to, and its key: what is put there later counts."""
    value: Any = module
    for kind, key in path:
        container = vars(value) if kind == "attr" else value
        if not isinstance(container, (dict, list, tuple)):
            raise Unplannable(f"{type(container).__name__} cannot hold a tensor of a plan")
        try:
            value = container[key]
        except (KeyError, IndexError, TypeError) as error:
            raise Unplannable(f"the module has nothing at {key!r}") from error
    if not isinstance(value, torch.Tensor):
        raise Unplannable(f"the module holds no tensor at {path[-1][1]!r}")
    return container, key


def parse_source(name: str) -> list[Any]:
    """Dynamo's name of an input: ``["arg", name]``, ``["size", name, dimension]`` or ``["held", path]``.

    Raises:
        Unplannable: it is of another form.
    """
    match = _ARGUMENT.fullmatch(name)
    if match and match[1] != "self":
        return ["arg", match[1]] if match[2] is None else ["size", match[1], int(match[2])]
    rest = name.removeprefix("L['self']")
    path, at = [], 0
    while rest != name and at < len(rest):
        step = _STEP.match(rest, at)
        if step is None:
            break
        attribute, single, double, index = step.groups()
        if attribute is not None:
            path.append(["attr", attribute])
        else:
            key = int(index) if index is not None else single if single is not None else double
            path.append(["key", key])
        at = step.end()
    if not path or at < len(rest):
        raise Unplannable(f"input {name} is neither an argument, a size nor a tensor of the module")
    return ["held", path]


def check_bytecode(code: types.CodeType, sources: Iterable[list[Any]]) -> None:
    """Raise Unplannable if Dynamo's code does more than fetch inputs, call the graph and return its outputs."""
    allowed = {key for source in sources if source[0] == "held" for kind, key in source[1] if kind == "attr"}
    allowed |= _DYNAMO_CALLS
    for step in dis.get_instructions(code):
        name, value = step.opname, str(step.argval)
        if name.startswith(("STORE_", "DELETE_", "IMPORT_")) and not name.startswith(
            ("STORE_FAST", "DELETE_FAST")
        ):
            raise Unplannable(f"the call has a side effect ({name} {value})")
        if name == "LOAD_GLOBAL" and not value.startswith(("__compiled_fn", "__import_torch")):
            raise Unplannable(f"the call uses the global {value}")
        if name in ("LOAD_ATTR", "LOAD_METHOD") and value not in allowed:
            raise Unplannable(f"the call uses the attribute {value}")


def check_writes(graph: fx.Graph) -> None:
    """Raise Unplannable if an op of ``graph`` writes to an input: it could not be run twice for comparison."""
    values = [node.meta.get("example_value") for node in graph.nodes if node.op == "placeholder"]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    storages = {tensor.untyped_storage()._cdata for tensor in tensors}
    for node in graph.nodes:
        packet = getattr(node.target, "overloadpacket", node.target)
        if node.op != "call_function" or not isinstance(packet, torch._ops.OpOverloadPacket):
            continue
        overload = node.target if packet is not node.target else getattr(packet, packet.overloads()[0])
        for i, argument in enumerate(overload._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            written = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            value = written.meta.get("example_value") if isinstance(written, fx.Node) else None
            if not isinstance(value, torch.Tensor) or value.untyped_storage()._cdata in storages:
                raise Unplannable(f"{packet} writes to an input")


class Stitching:
    """The stitched graph as steps over numbered values; inputs come first, then each step's result.

    Args:
        pieces: name of a compiled part -> index of its artifact.
        parts: all parts by name.
    """

    def __init__(self, graph: fx.Graph, parts: Mapping[str, fx.GraphModule], pieces: Mapping[str, int]):
        self.sources: list[list[Any]] = []
        self.steps: list[list[Any]] = []
        self._values: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            if node.op == "placeholder":
                self.sources.append(_source_of(node))
                self._values[node] = {"v": len(self.sources) - 1}
        for node in graph.nodes:
            if node.op == "call_module" and node.target in pieces:
                value = self._add("piece", pieces[node.target], self._arguments(node))
                if not isinstance(parts[node.target].graph.output_node().args[0], (tuple, list)):
                    value = self._add("item", 0, [value])
                self._values[node] = value
            elif node.op == "call_module":
                self._inline(node, parts[node.target].graph)
            elif node.op == "output":
                (outputs,) = node.args
                self.outputs = [self._ref(item) for item in outputs]
            elif node.op != "placeholder":
                self._function(node)

    def _inline(self, call: fx.Node, graph: fx.Graph) -> None:
        given = iter(call.args)
        for node in graph.nodes:
            if node.op == "placeholder":
                self._values[node] = self._ref(next(given))
            elif node.op == "output":
                (result,) = node.args
                many = isinstance(result, (tuple, list))
                self._values[call] = [self._ref(r) for r in result] if many else self._ref(result)
            else:
                self._function(node)

    def _function(self, node: fx.Node) -> None:
        packet = getattr(node.target, "overloadpacket", node.target)
        if node.op == "call_function" and node.target is operator.getitem and isinstance(node.args[1], int):
            value = self._values[node.args[0]]
            index = node.args[1]
            self._values[node] = (
                value[index] if isinstance(value, list) else self._add("item", index, [value])
            )
        elif node.op == "call_function" and isinstance(packet, torch._ops.OpOverloadPacket):
            self._values[node] = self._add("op", str(node.target), self._arguments(node))
        else:
            raise Unplannable(f"{node.op} {node.target} is no form of a plan")

    def _add(self, *step: Any) -> dict[str, int]:
        self.steps.append(list(step))
        return {"v": len(self.sources) + len(self.steps) - 1}

    def _arguments(self, node: fx.Node) -> list[Any]:
        if node.kwargs:
            raise Unplannable(f"{node.target} has arguments by name")
        return [self._ref(argument) for argument in node.args]

    def _ref(self, value: Any) -> dict[str, Any]:
        if isinstance(value, fx.Node):
            found = self._values[value]
            if not isinstance(found, list):
                return found
        elif isinstance(value, PLAIN):
            return {"c": value}
        raise Unplannable(f"{value!r} is no argument of a plan")


def _source_of(node: fx.Node) -> list[Any]:
    source = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", None)
    name = name() if callable(name) else name  # a method before torch 2.10
    if not isinstance(name, str):
        raise Unplannable(f"the source of input {node.name} is unknown")
    return parse_source(name)


def build(
    plan: dict[str, Any], inputs: Inputs, artifacts: Sequence[Callable[..., Any]]
) -> Callable[..., Any]:
    """The function of the values of ``inputs`` that runs ``plan``: straight-line code, which torch.fx writes."""
    graph = fx.Graph()
    held = iter([graph.placeholder(f"held_{i}") for i in range(inputs.num_held)])
    given = {name: graph.placeholder(f"given_{name}") for name in inputs.given}
    values: list[fx.Node] = []
    for source in plan["inputs"]:
        if source[0] == "held":
            values.append(next(held))
        elif source[0] == "arg":
            values.append(given[source[1]])
        else:
            values.append(graph.call_method("size", (given[source[1]], source[2])))
    pieces = [_piece(artifact) for artifact in artifacts]
    for kind, what, references in plan["steps"]:
        arguments = tuple(values[r["v"]] if "v" in r else r["c"] for r in references)
        if kind == "item":
            values.append(graph.call_function(operator.getitem, (*arguments, what)))
        else:
            values.append(graph.call_function(pieces[what] if kind == "piece" else _op(what), arguments))
    results = [values[r["v"]] if "v" in r else r["c"] for r in plan["result"]["values"]]
    form = plan["result"]["form"]
    graph.output(results[0] if form == "tensor" else tuple(results) if form == "tuple" else results)
    return fx.GraphModule(nn.Module(), graph).forward


def _piece(artifact: Any) -> Callable[..., Any]:
    run = getattr(artifact, "_compiled_fn", artifact)  # a call less

    def piece(*args: Any) -> Any:
        return run(*args)

    return piece


def _op(name: str) -> Any:
    if not _OP.fullmatch(name):
        raise Unplannable(f"{name!r} is no op")
    op = functools.reduce(getattr, name.split("."), torch.ops)
    if not isinstance(op, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        raise Unplannable(f"{name!r} is no op")
    return op


def is_same(first: Any, second: Any) -> bool:
    """Whether two results are equal bit for bit."""
    if isinstance(first, (tuple, list)):
        return type(first) is type(second) and all(map(is_same, first, second))
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return False
    if first.shape != second.shape or first.dtype != second.dtype or first.device != second.device:
        return False
    bits = [x.detach().contiguous().flatten().view(torch.uint8) for x in (first, second)]
    return first.stride() == second.stride() and torch.equal(*bits)


def result_of(result: Any, outputs: Sequence[Any], references: list[Any]) -> dict[str, Any]:
    """Which of the graph's ``outputs`` the call returns, and how. Raises Unplannable for another result."""
    form = {torch.Tensor: "tensor", tuple: "tuple", list: "list"}.get(type(result))
    items = [result] if form == "tensor" else result
    at = {id(output): i for i, output in enumerate(outputs)}
    if form is None or not all(isinstance(item, torch.Tensor) and id(item) in at for item in items):
        raise Unplannable(f"the result, a {type(result).__name__}, is not made of the graph's outputs alone")
    return {"form": form, "values": [references[at[id(item)]] for item in items]}
