"""A decoder as a list of native operations, run a step at a time by one call: the Python side of ``program.c``.

``Program`` is told the operations in order; each works on buffers that were sized for a number of tokens. A
``ProgramStep`` is what one step brings along: ids, positions, tables, and which rows it wants to know.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from typing import Any

import numpy as np

from atom.kernels.cpu.native.arguments import AttentionArguments, NormArguments, RopeArguments
from atom.kernels.cpu.native.library import NativeLibrary
from atom.kernels.cpu.native.weights import AtomWeight, PackedWeight

_NORM, _LINEAR, _ROPE, _ATTENTION, _KEEP_ROWS = range(5)


class _Linear(ctypes.Structure):
    _fields_ = [
        ("weight", POINTER(AtomWeight)),
        ("x", c_void_p),
        ("ldx", c_int64),
        ("y", c_void_p),
        ("ldy", c_int64),
    ]


class _KeepRows(ctypes.Structure):
    _fields_ = [("a", c_void_p), ("b", c_void_p), ("size_a", c_int64), ("size_b", c_int64)]


class _AnyOp(ctypes.Union):
    _fields_ = [
        ("norm", NormArguments),
        ("linear", _Linear),
        ("rope", RopeArguments),
        ("attention", AttentionArguments),
        ("keep_rows", _KeepRows),
    ]


class _Op(ctypes.Structure):
    _fields_ = [
        ("kind", c_int32),
        ("group", c_int32),
        ("rotation", c_int32),
        ("reserved", c_int32),
        ("u", _AnyOp),
    ]


class _Rotation(ctypes.Structure):
    _fields_ = [
        ("inv_freq", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("half", c_int32),
        ("factor", c_float),
    ]


class _Program(ctypes.Structure):
    _fields_ = [
        ("ops", POINTER(_Op)),
        ("num_ops", c_int64),
        ("rotations", POINTER(_Rotation)),
        ("num_rotations", c_int64),
        ("embedding", POINTER(AtomWeight)),
        ("head", POINTER(AtomWeight)),
        ("x", c_void_p),
        ("hidden", c_void_p),
        ("picked", c_void_p),
        ("size", c_int64),
        ("embed_scale", c_float),
    ]


class StepGroup(ctypes.Structure):
    """A cache group's tables ``[num_seqs, stride]`` int32 and slots ``[num_tokens]`` int64, by address."""

    _fields_ = [("block_tables", c_void_p), ("table_stride", c_int64), ("slots", c_void_p)]


class ProgramStep(ctypes.Structure):
    """One step; see ``atom_step`` in ``program.c``. Whoever fills it in keeps the arrays alive."""

    _fields_ = [
        ("num_tokens", c_int64),
        ("num_seqs", c_int64),
        ("ids", c_void_p),
        ("positions", c_void_p),
        ("cu_seqlens_q", c_void_p),
        ("context_lens", c_void_p),
        ("groups", POINTER(StepGroup)),
        ("rows", c_void_p),
        ("num_rows", c_int64),
        ("keeps_all", c_int64),
        ("best_ids", c_void_p),
        ("best", c_void_p),
        ("num_valid", c_int64),
        ("logits", c_void_p),
        ("ld_logits", c_int64),
    ]


class _Call(ctypes.Structure):
    _fields_ = [("program", POINTER(_Program)), ("step", POINTER(ProgramStep))]


class Program:
    """Operations in the order of their execution, and the buffers that they share.

    Args:
        size: of a hidden state.
        max_tokens: of a step.
        embedding: where a step's first hidden states come from, times ``embed_scale``; ``head``: where they go.
            Weights and arrays that are handed over are kept alive here.
    """

    def __init__(
        self,
        library: NativeLibrary,
        size: int,
        max_tokens: int,
        embedding: PackedWeight,
        embed_scale: float,
        head: PackedWeight,
    ):
        self.size = size
        self.max_tokens = max_tokens
        self._library = library
        self._ops: list[_Op] = []
        self._rotations: list[_Rotation] = []
        self._kept: list[Any] = [embedding, head]
        self.x = self.buffer(size)  # the residual
        self.hidden = self.buffer(size)
        picked = self.buffer(size)
        self._program = _Program(
            embedding=ctypes.pointer(embedding.struct),
            head=ctypes.pointer(head.struct),
            x=self.x.ctypes.data,
            hidden=self.hidden.ctypes.data,
            picked=picked.ctypes.data,
            size=size,
            embed_scale=embed_scale,
        )
        self._kept.append(picked)
        self._call: _Call | None = None

    def buffer(self, width: int) -> np.ndarray:
        """``[max_tokens, width]`` fp32, of undefined content; memory is taken when it is first written."""
        return np.empty((self.max_tokens, width), np.float32)

    def keep(self, owner: Any) -> Any:
        """Keep ``owner`` of something handed over by address as long as this program."""
        self._kept.append(owner)
        return owner

    def rotation(self, inv_freq: np.ndarray, factor: float) -> int:
        """The number of a rotation by ``inv_freq [rotary_dim / 2]`` fp32, for :meth:`rope`."""
        half = len(inv_freq)
        cos, sin = self.buffer(half), self.buffer(half)
        self._kept += [inv_freq, cos, sin]
        pointers = (array.ctypes.data for array in (inv_freq, cos, sin))
        self._rotations.append(_Rotation(*pointers, half, factor))
        return len(self._rotations) - 1

    def norm(self, args: NormArguments) -> None:
        self._add(_NORM, norm=args)

    def linear(self, weight: PackedWeight, x: np.ndarray, y: np.ndarray) -> None:
        """``y = epilogue(x W^T)``; buffers may be wider than the weight."""
        self._kept += [weight, x, y]
        op = _Linear(ctypes.pointer(weight.struct), x.ctypes.data, x.shape[1], y.ctypes.data, y.shape[1])
        self._add(_LINEAR, linear=op)

    def rope(self, args: RopeArguments, group: int, rotation: int) -> None:
        """Rotate, and write the cache of ``group``; without ``cos``, ``sin``, ``slots`` and ``m``."""
        self._add(_ROPE, group, rotation, rope=args)

    def attention(self, args: AttentionArguments, group: int) -> None:
        """Attend to the cache of ``group``; without tables, lengths and counts."""
        self._add(_ATTENTION, group, attention=args)

    def keep_rows(self, a: np.ndarray, b: np.ndarray) -> None:
        """From here on only the rows that sample matter; they move to the front of two buffers."""
        self._kept += [a, b]
        self._add(_KEEP_ROWS, keep_rows=_KeepRows(a.ctypes.data, b.ctypes.data, a.shape[1], b.shape[1]))

    def _add(self, kind: int, group: int = 0, rotation: int = 0, **args: ctypes.Structure) -> None:
        self._ops.append(_Op(kind, group, rotation, 0, _AnyOp(**args)))

    def run(self, step: ProgramStep) -> None:
        """Run one step of at most ``max_tokens``."""
        if self._call is None:
            self._finish()
        self._call.step = ctypes.pointer(step)
        self._library.call("atom_program_step", self._call)

    def _finish(self) -> None:
        ops = (_Op * len(self._ops))(*self._ops)
        rotations = (_Rotation * max(1, len(self._rotations)))(*self._rotations)
        self._kept += [ops, rotations]
        self._program.ops, self._program.num_ops = ops, len(self._ops)
        self._program.rotations, self._program.num_rotations = rotations, len(self._rotations)
        self._call = _Call(ctypes.pointer(self._program), None)
