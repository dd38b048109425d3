"""What every room may use. Importing this package imports no torch."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "mark_spliting_op":  # its module imports torch
        from atom.utils.custom_register import mark_spliting_op

        return mark_spliting_op
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
