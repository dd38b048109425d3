"""Plain PyTorch implementations of every operation: the oracle that faster ones are compared with.

They compute in fp32, take any shape and run on any device. Speed is not their concern.
"""

from atom.kernels.reference import activation, attention, fp8, kv_cache, linear, norm, rotary, sampling

__all__ = ["activation", "attention", "fp8", "kv_cache", "linear", "norm", "rotary", "sampling"]
