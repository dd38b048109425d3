"""Faster implementations for the CPU, made of torch's own vectorised operations."""

from atom.kernels.cpu import attention, elementwise, linear

__all__ = ["attention", "elementwise", "linear"]
