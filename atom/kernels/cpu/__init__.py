"""Faster implementations for the CPU, made of torch's own vectorised operations."""

from atom.kernels.cpu import attention, elementwise, linear
from atom.kernels.cpu.native import linear as native_linear

__all__ = ["attention", "elementwise", "linear", "native_linear"]
