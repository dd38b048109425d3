"""Weights in the panels that the native products read, and those products on torch tensors.

A panel is 64 rows of the weight ``[n, k]``, interleaved so that one vector holds 16 rows (``src/atom.h`` has the
layouts). Quantisation, row by row:

    int8, int8_a8   scale = max |w| / 127; q = round(w / scale)
    int4            for each 32 of k: a bf16 scale d; q = round(w / d) + 8 in 0..15; of six scales near the extreme
                    value / -8 the one with the smallest squared error

``int8`` rounds activations to 16 bits with one scale a row, ``int8_a8`` to 8; ``int4`` to 8 bits with a scale for every
32. ``bf16`` and ``fp32`` use activations as they are (bf16 rounds them where the processor multiplies bf16 fast).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field, replace

import torch

from atom.errors import ConfigError
from atom.kernels.cpu.native.library import NativeLibrary, native_library, pointer

PANEL = 64
GROUP = 32  # k is a multiple of it, in every format
MAX_K = 65536

FORMATS = {"bf16": 0, "int8": 1, "int8_a8": 2, "int4": 3, "fp32": 4}  # what pack() makes
ALL_FORMATS = FORMATS | {"q4_0": 8, "q8_0": 9, "q4_k": 10, "q6_k": 11, "q5_0": 12, "q5_k": 13, "parts": 14}
EPILOGUES = {"store": 0, "add": 1, "silu_mul": 2, "gelu_tanh_mul": 3}
_GATED = ("silu_mul", "gelu_tanh_mul")
_BITS = {"bf16": 16, "int8": 8, "int8_a8": 8, "fp32": 32}
_SCRATCH = 4 << 20  # ATOM_SCRATCH
_ALONE_BELOW = 1 << 17  # multiply-adds: less work than waking the other threads


class AtomWeight(ctypes.Structure):
    """``atom_weight`` of atom.h."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("format", "epilogue", "n", "k")),
        *((name, ctypes.c_void_p) for name in ("data", "scales", "sums", "bias")),
    ]


class _LinearArgs(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "x", "y")),
        *((name, ctypes.c_int64) for name in ("ldx", "ldy", "m")),
        *((name, ctypes.c_int32) for name in ("x_is_bf16", "y_is_bf16")),
    ]


class _ArgmaxArgs(ctypes.Structure):
    _fields_ = [
        ("product", _LinearArgs),
        ("n_valid", ctypes.c_int64),
        ("ids", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
    ]


class _GatherArgs(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "ids", "y")),
        *((name, ctypes.c_int64) for name in ("m", "ldy")),
        ("scale", ctypes.c_float),
    ]


class _ExpertsArgs(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("experts", "order", "offsets", "x", "y")),
        *((name, ctypes.c_int64) for name in ("num_experts", "top_k", "ldx", "ldy")),
    ]


class _PackArgs(ctypes.Structure):
    _fields_ = [
        ("weight", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("ld", "n", "k")),
        *((name, ctypes.c_int32) for name in ("is_bf16", "is_gated", "format", "unused")),
        *((name, ctypes.c_void_p) for name in ("data", "scales", "sums")),
    ]


@dataclass
class PackedWeight:
    """A weight ``[n, k]`` in panels, with the tensors that it owns and the structure that C reads.

    ``struct`` points into the tensors: it is valid as long as this object lives.
    """

    format: str
    epilogue: str
    n: int
    k: int
    data: torch.Tensor  # uint8
    scales: torch.Tensor | None = None  # fp32, in the order of the packed columns
    sums: torch.Tensor | None = None  # int32
    bias: torch.Tensor | None = None  # fp32
    struct: AtomWeight = field(init=False)
    _biased: tuple[torch.Tensor, int, PackedWeight] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.struct = AtomWeight(
            ALL_FORMATS[self.format],
            EPILOGUES[self.epilogue],
            self.n,
            self.k,
            *map(pointer, (self.data, self.scales, self.sums, self.bias)),
        )

    @property
    def is_gated(self) -> bool:
        return self.epilogue in _GATED

    @property
    def out_features(self) -> int:
        return self.n // 2 if self.is_gated else self.n

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in (self.data, self.scales, self.sums, self.bias) if t is not None)

    def with_epilogue(self, epilogue: str) -> PackedWeight:
        """The same panels with another epilogue. Raises ConfigError where they do not allow it."""
        if (epilogue in _GATED) != self.is_gated:
            raise ConfigError(f"epilogue {epilogue!r} does not go with the panels of {self.epilogue!r}")
        return replace(self, epilogue=epilogue)

    def with_bias(self, bias: torch.Tensor) -> PackedWeight:
        """The same panels with another ``bias [n]``; made again when that tensor was written to since."""
        if self._biased is None or self._biased[0] is not bias or self._biased[1] != bias._version:
            packed = _packed_order(bias.detach().float(), self.n, self.is_gated)
            self._biased = (bias, bias._version, replace(self, bias=packed))
        return self._biased[2]

    def unpack(self) -> torch.Tensor:
        """The weight ``[n, k]`` that the products use, in fp32."""
        num_panels = self.data.numel() // _panel_bytes(self.format, self.k)
        panels = self.data.view(num_panels, -1)
        if self.format == "int4":
            groups = panels.view(num_panels, self.k // GROUP, 128 + 1024)
            scales = groups[..., :128].contiguous().view(torch.bfloat16).float()  # [panels, groups, 64]
            nibbles = groups[..., 128:].reshape(num_panels, -1, 4, PANEL, 4).permute(0, 3, 1, 2, 4)
            nibbles = nibbles.reshape(num_panels, PANEL, -1, 16)
            values = torch.cat((nibbles & 15, nibbles >> 4), -1).float() - 8
            rows = (values * scales.transpose(1, 2)[..., None]).reshape(num_panels * PANEL, self.k)
        else:
            dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}.get(self.format, torch.int8)
            values = panels.view(dtype).view(num_panels, -1, PANEL, 4 // dtype.itemsize)
            rows = values.permute(0, 2, 1, 3).reshape(num_panels * PANEL, self.k).float()
            if self.scales is not None:
                rows = rows * self.scales[:, None]
        if not self.is_gated:
            return rows[: self.n]
        parts = rows.view(-1, 2, PANEL, self.k).transpose(0, 1).reshape(2, -1, self.k)
        return parts[:, : self.n // 2].reshape(self.n, self.k)


def pack(
    weight: torch.Tensor,
    format: str,
    *,
    gate_up: bool = False,
    epilogue: str | None = None,
    bias: torch.Tensor | None = None,
    in_place: bool = False,
) -> PackedWeight:
    """``weight [n, k]`` fp32 or bf16 in panels; ``bias [n]``.

    Args:
        in_place: overwrite ``weight`` where its rows and its panels take the same place: no second copy.
        gate_up: rows are ``[gate | up]``, and the product is ``silu(gate) * up`` unless ``epilogue`` says otherwise.
        epilogue: of :data:`EPILOGUES`; ``store`` by default.

    Raises:
        ConfigError: an unknown format or epilogue, a shape or dtype that the panels do not take, or no native
            library on this machine.
    """
    epilogue = epilogue or ("silu_mul" if gate_up else "store")
    if format not in FORMATS:
        raise ConfigError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    if epilogue not in EPILOGUES:
        raise ConfigError(f"epilogue must be one of {', '.join(EPILOGUES)}, got {epilogue!r}")
    if gate_up != (epilogue in _GATED):
        raise ConfigError(f"epilogue {epilogue!r} and gate_up={gate_up} do not go together")
    if weight.dtype not in (torch.float32, torch.bfloat16) or weight.device.type != "cpu":
        raise ConfigError(f"weight must be fp32 or bf16 on the CPU, got {weight.dtype} on {weight.device}")
    n, k = weight.shape
    if k % GROUP or not 0 < k <= MAX_K:
        raise ConfigError(f"in_features must be a multiple of {GROUP} up to {MAX_K}, got {k}")
    if n < 1 or (gate_up and n % 2):
        raise ConfigError(f"out_features must be positive, and even with gate_up, got {n}")
    weight = weight.detach()
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    num_panels = 2 * -(-(n // 2) // PANEL) if gate_up else -(-n // PANEL)
    if in_place and not gate_up and _can_pack_in_place(weight, format):
        data = weight.view(torch.uint8).view(-1)
    else:
        data = torch.empty(num_panels * _panel_bytes(format, k), dtype=torch.uint8)
    is_int8 = format in ("int8", "int8_a8")
    scales = torch.empty(num_panels * PANEL) if is_int8 else None
    sums = torch.empty(num_panels * PANEL, dtype=torch.int32) if is_int8 else None
    args = _PackArgs(
        weight.data_ptr(),
        weight.stride(0),
        n,
        k,
        weight.dtype is torch.bfloat16,
        gate_up,
        FORMATS[format],
        0,
        *map(pointer, (data, scales, sums)),
    )
    _library().call("atom_pack_weight", args)
    packed_bias = None if bias is None else _packed_order(bias.detach().float(), n, gate_up)
    return PackedWeight(format, epilogue, n, k, data, scales, sums, packed_bias)


def _can_pack_in_place(weight: torch.Tensor, format: str) -> bool:
    is_same = {torch.bfloat16: "bf16", torch.float32: "fp32"}[weight.dtype] == format
    is_whole = len(weight) % PANEL == 0 and weight.is_contiguous()
    return is_same and is_whole and _panel_bytes(format, weight.shape[1]) <= _SCRATCH


def num_packed_bytes(format: str, n: int, k: int) -> int:
    """Bytes of a weight ``[n, k]`` without gate, in panels."""
    num_panels = -(-n // PANEL)
    scales_and_sums = 8 * PANEL if format in ("int8", "int8_a8") else 0
    return num_panels * (_panel_bytes(format, k) + scales_and_sums)


def linear(x: torch.Tensor, weight: PackedWeight, out: torch.Tensor | None = None) -> torch.Tensor:
    """``x [m, k]`` times the weight, with its epilogue: ``[m, out_features]`` in x's dtype, or in ``out``.

    With the epilogue ``add`` the product is added to ``out``, which must be given.
    """
    x = _rows(x, weight.k, "x")
    if out is None:
        if weight.epilogue == "add":
            raise ConfigError("epilogue 'add' adds to out, which is missing")
        out = torch.empty(x.shape[0], weight.out_features, dtype=x.dtype)
    elif out.shape != (x.shape[0], weight.out_features) or out.stride(1) != 1:
        raise ConfigError(f"out must be [{x.shape[0]}, {weight.out_features}], got {list(out.shape)}")
    args = _linear_args(x, weight, out)
    _library().call("atom_linear_run", args, alone=x.shape[0] * weight.n * weight.k < _ALONE_BELOW)
    return out


def linear_argmax(x: torch.Tensor, weight: PackedWeight, n_valid: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``(ids [m] int64, values [m] fp32)`` of the largest product below column ``n_valid``, the lowest on ties."""
    x = _rows(x, weight.k, "x")
    if weight.is_gated or not 0 < n_valid <= weight.n:
        raise ConfigError(f"n_valid must be 1 to {weight.n} of a weight without gate, got {n_valid}")
    ids, values = torch.empty(x.shape[0], dtype=torch.int64), torch.empty(x.shape[0])
    args = _ArgmaxArgs(_linear_args(x, weight, None), n_valid, ids.data_ptr(), values.data_ptr())
    _library().call("atom_linear_argmax_run", args)
    return ids, values


def gather_rows(ids: torch.Tensor, weight: PackedWeight, scale: float = 1.0) -> torch.Tensor:
    """``scale * W[ids]``, ``[m, k]`` fp32; an id that is no row gives zeros."""
    if weight.is_gated:
        raise ConfigError("rows of a gate_up weight cannot be gathered")
    ids = ids.to(torch.int64).contiguous()
    out = torch.empty(len(ids), weight.k)
    args = _GatherArgs(
        ctypes.addressof(weight.struct), ids.data_ptr(), out.data_ptr(), len(ids), weight.k, scale
    )
    _library().call("atom_gather_run", args, alone=len(ids) * weight.k < _ALONE_BELOW // 8)
    return out


def linear_experts(
    x: torch.Tensor,
    experts: list[PackedWeight],
    order: torch.Tensor,
    offsets: torch.Tensor,
    top_k: int,
) -> torch.Tensor:
    """Row ``order[i]`` of the result is ``x[order[i] // top_k]`` times the expert of slot ``i``.

    Args:
        x: ``[num_tokens, k]`` fp32.
        order: int32, each row of the result once, sorted by expert.
        offsets: ``[num_experts + 1]`` int32; expert e has the slots ``offsets[e]`` to ``offsets[e + 1]``.
    """
    x = _rows(x, experts[0].k, "x")
    if x.dtype is not torch.float32:
        raise ConfigError(f"x must be fp32, got {x.dtype}")
    if len(offsets) != len(experts) + 1:
        raise ConfigError(f"offsets must have {len(experts) + 1} entries, got {len(offsets)}")
    out = torch.empty(len(order), experts[0].out_features)
    structs = (AtomWeight * len(experts))(*(expert.struct for expert in experts))
    order, offsets = order.to(torch.int32).contiguous(), offsets.to(torch.int32).contiguous()
    args = _ExpertsArgs(
        ctypes.addressof(structs),
        *map(pointer, (order, offsets, x, out)),
        len(experts),
        top_k,
        x.stride(0),
        out.stride(0),
    )
    _library().call("atom_linear_experts_run", args)
    return out


def _library() -> NativeLibrary:
    library = native_library()
    if library is None:
        raise ConfigError("the native CPU kernels are not available here (see the log)")
    return library


def _panel_bytes(format: str, k: int) -> int:
    return k // GROUP * (128 + 1024) if format == "int4" else k * PANEL * _BITS[format] // 8


def _packed_order(values: torch.Tensor, n: int, is_gated: bool) -> torch.Tensor:
    """``values [n]`` in the order of the packed columns, zeros in the padding."""
    parts = values.reshape(2 if is_gated else 1, -1)
    num_panels = -(-parts.shape[1] // PANEL)
    padded = values.new_zeros(len(parts), num_panels * PANEL)
    padded[:, : parts.shape[1]] = parts
    return padded.view(len(parts), num_panels, PANEL).transpose(0, 1).reshape(-1).contiguous()


def _rows(x: torch.Tensor, k: int, name: str) -> torch.Tensor:
    if x.dim() != 2 or x.shape[1] != k or x.dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(f"{name} must be [m, {k}] fp32 or bf16, got {list(x.shape)} {x.dtype}")
    return x if x.stride(1) == 1 else x.contiguous()


def _linear_args(x: torch.Tensor, weight: PackedWeight, out: torch.Tensor | None) -> _LinearArgs:
    return _LinearArgs(
        ctypes.addressof(weight.struct),
        x.data_ptr(),
        pointer(out),
        x.stride(0),
        0 if out is None else out.stride(0),
        x.shape[0],
        x.dtype is torch.bfloat16,
        out is not None and out.dtype is torch.bfloat16,
    )
