"""The argument structures of ``src/atom.h``, field by field, and the enumerations beside them."""

import ctypes

_Pointer, _Int, _Long, _Float = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float

STORE, ADD, SILU_MUL, GELU_TANH_MUL = range(4)  # enum atom_epilogue


class NormArguments(ctypes.Structure):
    _fields_ = [
        ("residual", _Pointer),
        ("delta", _Pointer),
        ("delta_norm", _Pointer),
        ("weight", _Pointer),
        ("out", _Pointer),
        ("m", _Long),
        ("size", _Long),
        ("eps", _Float),
    ]


class RopeArguments(ctypes.Structure):
    _fields_ = [
        ("qkv", _Pointer),
        ("ld", _Long),
        ("num_heads", _Int),
        ("num_kv_heads", _Int),
        ("head_dim", _Int),
        ("rotary_dim", _Int),
        ("qk_weight", _Pointer),
        ("eps", _Float),
        ("cos", _Pointer),
        ("sin", _Pointer),
        ("keys", _Pointer),
        ("values", _Pointer),
        ("cache_is_bf16", _Int),
        ("block_size", _Int),
        ("slots", _Pointer),
        ("m", _Long),
    ]


class RotationArguments(ctypes.Structure):
    _fields_ = [
        ("positions", _Pointer),
        ("m", _Long),
        ("inv_freq", _Pointer),
        ("half", _Int),
        ("factor", _Float),
        ("cos", _Pointer),
        ("sin", _Pointer),
    ]


class GatedArguments(ctypes.Structure):
    _fields_ = [
        ("x", _Pointer),
        ("ldx", _Long),
        ("y", _Pointer),
        ("ldy", _Long),
        ("m", _Long),
        ("n", _Long),
        ("activation", _Int),
    ]


class AttentionArguments(ctypes.Structure):
    _fields_ = [
        ("q", _Pointer),
        ("ldq", _Long),
        ("out", _Pointer),
        ("ldo", _Long),
        ("num_heads", _Int),
        ("num_kv_heads", _Int),
        ("head_dim", _Int),
        ("block_size", _Int),
        ("cache_is_bf16", _Int),
        ("scale", _Float),
        ("soft_cap", _Float),
        ("window", _Int),
        ("sinks", _Pointer),
        ("keys", _Pointer),
        ("values", _Pointer),
        ("block_tables", _Pointer),
        ("table_stride", _Long),
        ("cu_seqlens_q", _Pointer),
        ("context_lens", _Pointer),
        ("num_seqs", _Long),
        ("num_tokens", _Long),
        ("is_uniform", _Int),
    ]


class ArgmaxArguments(ctypes.Structure):
    _fields_ = [
        ("x", _Pointer),
        ("ldx", _Long),
        ("m", _Long),
        ("n", _Long),
        ("ids", _Pointer),
        ("values", _Pointer),
    ]


class ChooseArguments(ctypes.Structure):
    _fields_ = [
        ("x", _Pointer),
        ("ldx", _Long),
        ("m", _Long),
        ("n", _Long),
        ("best", _Pointer),
        ("temperature", _Pointer),
        ("top_p", _Pointer),
        ("min_p", _Pointer),
        ("uniforms", _Pointer),
        ("top_k", _Pointer),
        ("ids", _Pointer),
    ]
