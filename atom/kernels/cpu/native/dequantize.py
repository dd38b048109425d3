"""GGUF blocks to fp32 or bf16 on all threads, with the bits of ``model_loader.gguf_dequant``."""

from __future__ import annotations

import ctypes

import torch

from atom.kernels.cpu.native.library import native_library

TYPES = {"Q4_0": 2, "Q5_0": 6, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14}


class _Arguments(ctypes.Structure):
    _fields_ = [
        ("blocks", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("num_blocks", ctypes.c_int64),
        ("type", ctypes.c_int32),
        ("out_is_bf16", ctypes.c_int32),
    ]


def dequantize(blocks: torch.Tensor, type_name: str, out: torch.Tensor) -> bool:
    """Widen ``blocks [num_blocks, block bytes]`` uint8 into ``out``, any shape of as many values.

    Returns False, with ``out`` as it was, where there is no native form: another type, another dtype or layout of
    ``out``, or no library.
    """
    library = native_library()
    fits = out.dtype in (torch.float32, torch.bfloat16) and out.device.type == "cpu" and out.is_contiguous()
    if library is None or type_name not in TYPES or not fits:
        return False
    arguments = _Arguments(
        blocks.data_ptr(), out.data_ptr(), len(blocks), TYPES[type_name], out.dtype is torch.bfloat16
    )
    library.call("atom_dequantize", arguments)
    return True
