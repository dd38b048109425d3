"""Custom ops of the library ``aiter``: opaque to the compiler, one kernel for CPU and CUDA, ROCm included.

An op that is also a *split op* (``mark_spliting_op``) is where piecewise compilation cuts the graph.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.library import Library, infer_schema

NAMESPACE = "aiter"
aiter_lib = Library(NAMESPACE, "FRAGMENT")


def direct_register_custom_op(
    op_name: str,
    op_func: Callable[..., Any],
    mutates_args: Iterable[str] = (),
    fake_impl: Callable[..., Any] | None = None,
    target_lib: Library | None = None,
    dispatch_key: str = "CUDA",
    tags: Sequence[torch.Tag] = (),
) -> None:
    """Register ``op_func`` as ``torch.ops.aiter.<op_name>``; nothing happens when the op exists already.

    Calls go from the dispatcher straight to ``op_func``, which costs 1 us where ``torch.library.custom_op``
    costs 8.

    Args:
        op_func: annotated; its schema is read from the annotations. It returns nothing, a tensor, a number or
            a tuple of tensors, and never one of its inputs.
        mutates_args: names of the tensor arguments that it writes to.
        fake_impl: the same signature; makes outputs of the right shape without computing. Needed unless the
            op returns nothing.
        target_lib: the library to add to; default ``aiter_lib``.
        dispatch_key: the device's key. The CPU's is registered as well.

    Raises:
        ValueError: the annotations make no schema, or an op that returns something has no ``fake_impl``.
    """
    library = target_lib or aiter_lib
    if hasattr(getattr(torch.ops, library.ns), op_name):
        return
    schema = infer_schema(op_func, mutates_args=tuple(mutates_args))
    if fake_impl is None:
        if not schema.endswith("-> ()"):
            raise ValueError(f"op {library.ns}::{op_name} returns something and needs a fake_impl, got None")
        fake_impl = _returns_nothing
    library.define(op_name + schema, tags=tuple(tags))
    for key in sorted({dispatch_key, "CPU"}):
        library.impl(op_name, op_func, dispatch_key=key)
    torch.library.register_fake(f"{library.ns}::{op_name}", fake_impl, lib=library)


def _returns_nothing(*args: Any, **kwargs: Any) -> None:
    """Shape function of an op that only writes to its arguments."""


def mark_spliting_op(
    is_custom: bool = False,
    gen_fake: Callable[..., Any] | None = None,
    mutates_args: Iterable[str] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: piecewise compilation cuts the graph at calls of this op.

    Args:
        is_custom: register the function under its own name with ``direct_register_custom_op``, and give back
            the op. Otherwise the function or op itself is marked; a plain function must be one that Dynamo
            keeps whole (``torch.compiler.allow_in_graph``).
        gen_fake: the ``fake_impl`` of the op.
        mutates_args: names of the arguments that it writes to.
    """

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        target = function
        if is_custom:
            direct_register_custom_op(function.__name__, function, mutates_args, gen_fake)
            target = getattr(torch.ops.aiter, function.__name__)
        target.spliting_op = True
        return target

    return mark


def is_spliting_op(target: Any, names: Iterable[str] = ()) -> bool:
    """Whether the target of a graph node is marked, or an op that ``names`` lists as ``namespace.op``."""
    packet = getattr(target, "overloadpacket", target)  # a node's target may be one overload of the op
    if getattr(packet, "spliting_op", False) or getattr(target, "spliting_op", False):
        return True
    return isinstance(packet, torch._ops.OpOverloadPacket) and str(packet) in names  # namespace.op
