"""The name that ATOM's pages give to :mod:`atom.utils.compiler_interface`."""

from atom.utils.compiler_interface import *  # noqa: F403
