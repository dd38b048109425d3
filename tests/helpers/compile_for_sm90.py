"""Compiles every Triton kernel for sm_90 in a process that is not under the interpreter; prints what it found."""

import json
import sys

import torch
import triton
from triton.compiler import ASTSource

from atom.kernels.triton import (
    decode_attention,
    elementwise,
    kv_cache,
    rotary_cache,
    sampling,
    sampling_filter,
    step_inputs,
    varlen_attention,
)
from tests.helpers.sm90_code import TARGET, resources

D = sys.argv[1]
HALF, I32, I64, F32 = "*" + D, "i32", "i64", "fp32"
ATTENTION = dict(
    HAS_SINKS=False,
    HAS_SOFT_CAP=False,
    HAS_SCALES=False,
    HAS_ROWS=True,
    KV_HEADS=8,
    PAGE=16,
    DIM=128,
    DIM_PAD=128,
    WINDOW=0,
    GROUP=4,
    sinks=None,
    k_scale=None,
    v_scale=None,
)
decode_types = dict(
    q=HALF,
    keys=HALF,
    values=HALF,
    tables="*i32",
    rows="*i64",
    context_lens="*i32",
    output=HALF,
    partial="*fp32",
    arrivals="*i32",
    scale=F32,
    soft_cap=F32,
    q_token=I32,
    q_head=I32,
    table_stride=I32,
)
varlen_types = dict(
    q=HALF,
    k=HALF,
    v=HALF,
    keys=HALF,
    values=HALF,
    tables="*i32",
    rows="*i64",
    tiles="*i32",
    output=HALF,
    scale=F32,
    soft_cap=F32,
    num_tokens=I32,
    q_token=I32,
    q_head=I32,
    k_token=I32,
    k_head=I32,
    v_token=I32,
    v_head=I32,
    table_stride=I32,
)

# By parameter, of every sampling kernel.
sampling_types = dict(
    logits=HALF,
    row_stride=I32,
    num_ids=I32,
    num_spans=I32,
    num_words=I32,
    ids="*i64",
    is_finite="*i1",
    spans="*i32",
    bits="*i32",
    bounds="*i64",
    totals="*fp64",
    top_k="*i32",
    context_lens="*i32",
    computed="*i32",
    **dict.fromkeys(("temperature", "largest", "sums", "top_p", "min_p"), "*fp32"),
    **dict.fromkeys(("seeds", "positions", "rows", "last_token"), "*i64"),
)


def sampler(kernel, num_warps=4, **constants):
    """A sampling kernel of a vocabulary of 151,936."""
    types = {n: t for n, t in sampling_types.items() if n in kernel.arg_names}
    sizes = dict(
        SPANS_PAD=1024, SPAN=256, SPANS=16, ROWS=sampling_filter.ROWS, SHIFT=16 if D == "bf16" else 0
    )
    sizes = {n: v for n, v in sizes.items() if n in kernel.arg_names}
    return kernel, types, sizes | constants, dict(num_warps=num_warps)


def varlen(dim, group=4, fp8=False, **changes):
    """The kernel that layers of such heads get."""
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[D]
    shape = varlen_attention.tile_shape(dtype, dim, group, True)
    types = dict(varlen_types)
    if shape.uses_descriptors:
        types["k"] = types["v"] = f"tensordesc<{D}[{shape.keys}, {dim}]>"
    constants = dict(
        ATTENTION,
        DIM=dim,
        DIM_PAD=dim,
        GROUP=group,
        DESCRIPTORS=shape.uses_descriptors,
        ROWS=shape.rows,
        TOKENS=shape.tokens(group),
        TILE_K=shape.keys,
        PAGED_K=min(shape.keys, varlen_attention.MAX_PAGED_KEYS),
    )
    if fp8:
        types |= dict(keys="*fp8e4nv", values="*fp8e4nv", k_scale="*fp32", v_scale="*fp32")
        constants |= dict(HAS_SCALES=True)
        del constants["k_scale"], constants["v_scale"]
    options = dict(num_warps=shape.num_warps, num_stages=shape.num_stages)
    return varlen_attention._varlen, types, constants | changes, options


def decode(num_seqs, dim=128, group=4, fp8=False, **changes):
    """The kernel that such layers get at so many sequences."""
    constants = dict(ATTENTION, DIM=dim, DIM_PAD=dim, GROUP=group) | changes
    shape = decode_attention.decode_shape(num_seqs, constants["KV_HEADS"], dim * {"bf16": 2, "fp32": 4}[D])
    types = dict(decode_types)
    if shape.splits == 1:
        constants |= dict(partial=None, arrivals=None)
    if fp8:
        types |= dict(keys="*fp8e4nv", values="*fp8e4nv", k_scale="*fp32", v_scale="*fp32")
        constants |= dict(HAS_SCALES=True)
        del constants["k_scale"], constants["v_scale"]
    if constants["HAS_SINKS"]:
        types |= dict(sinks="*fp32")
        del constants["sinks"]
    types = {n: t for n, t in types.items() if n not in constants}
    members = triton.next_power_of_2(group)
    constants |= dict(
        GROUP_PAD=max(16, members),
        MEMBERS=members,
        TILE=shape.keys,
        SPLITS=shape.splits,
        AHEAD=decode_attention.shares_ahead(members * dim, shape.splits),
    )
    options = dict(num_warps=shape.num_warps, num_stages=shape.num_stages)
    return decode_attention._decode, types, constants, options


CASES = {
    "write_kv": (
        kv_cache._write_kv,
        dict(
            k=HALF,
            v=HALF,
            keys=HALF,
            values=HALF,
            slots="*i64",
            k_token=I32,
            k_head=I32,
            v_token=I32,
            v_head=I32,
        ),
        dict(NUM_HEADS=8, PAGE=16, DIM=128, HEADS_PAD=8, DIM_PAD=128),
        dict(num_warps=4),
    ),
    "decode": decode(16),
    "decode_many": decode(256),
    "varlen": varlen(128),
    "varlen_64": varlen(64),
    "plan": (
        varlen_attention._plan,
        dict(cu_seqlens_q="*i32", context_lens="*i32", tiles="*i32", num_seqs=I32, bound=I32),
        dict(TILE=32, LANES=varlen_attention.PLAN_LANES, SEQS=varlen_attention.PLAN_SEQS, WIDE=256),
        dict(num_warps=8),
    ),
    "rotate_and_write": (
        rotary_cache._rotate_and_write,
        dict(
            qkv=HALF,
            cos=HALF,
            sin=HALF,
            weight="*fp32",
            keys=HALF,
            values=HALF,
            slots="*i64",
            eps=F32,
            num_tokens=I32,
            qkv_token=I32,
        ),
        dict(
            key_factor=None,
            value_factor=None,
            HAS_NORM=True,
            HAS_FACTORS=False,
            NUM_HEADS=16,
            KV_HEADS=8,
            PAGE=16,
            DIM=128,
            HALF_PAD=64,
            HEADS=rotary_cache.HEADS_PER_PROGRAM,
            TOKENS=4,
        ),
        dict(num_warps=4),
    ),
    "rms_norm": (
        elementwise._rms_norm,
        dict(x=HALF, weight="*fp32", output=HALF, eps=F32, x_token=I32, x_head=I32),
        dict(IS_PER_HEAD=False, HEADS=1, SIZE=4096, SIZE_PAD=4096),
        dict(num_warps=4),
    ),
    "silu_and_mul": (
        elementwise._gate,
        dict(gate_up=HALF, output=HALF, row_token=I32),
        dict(ACTIVATION=1, SIZE=14336, COLUMNS=elementwise.GATE_COLUMNS),
        dict(num_warps=4),
    ),
}
CASES |= {
    "measure_spans": sampler(sampling._measure_spans, HAS_RANDOM=True),
    "pick": sampler(sampling._pick, HAS_RANDOM=True, ADVANCES=True),
    "mask": sampler(sampling._mask, BLOCK=4096),
    "narrow": sampler(sampling_filter._narrow),
    "pick_kept": sampler(sampling_filter._pick_kept, sampling_filter._NUM_WARPS, ADVANCES=True),
}
if D == "bf16":
    CASES["decode_gemma"] = decode(1, 256, KV_HEADS=1, WINDOW=512, HAS_SOFT_CAP=True)
    CASES["decode_sinks"] = decode(1, 64, 8, HAS_SINKS=True, WINDOW=128)
    CASES["decode_fp8"] = decode(8, fp8=True)
    CASES["decode_mqa"] = decode(8, 64, 71, KV_HEADS=1)
    CASES["varlen_gemma"] = varlen(256, KV_HEADS=1, WINDOW=512)
    CASES["varlen_fp8"] = varlen(128, fp8=True)
    tables = dict(packed="*i32", tables="*i32", n=I32, group_stride=I32, table_stride=I32)
    CASES["patch_tables"] = (
        step_inputs._patch_tables,
        tables,
        dict(GROUPS=2, WIDTH=step_inputs.PATCHES),
        dict(num_warps=4),
    )
    CASES["prepare_tokens"] = (
        step_inputs._prepare_tokens,
        tables
        | dict.fromkeys(("computed", "cu_seqlens", "context_lens"), "*i32")
        | dict.fromkeys(("last_token", "rows", "input_ids", "positions", "slots"), "*i64")
        | dict.fromkeys(("num_tokens", "slot_stride", "trash_row"), I32),
        dict(
            GROUPS=2,
            PAGE=16,
            BLOCK=step_inputs.TOKENS,
            WIDTH=step_inputs.SEQS,
            PATCH_WIDTH=step_inputs.PATCHES,
        ),
        dict(num_warps=4),
    )
found = {}
for name, (kernel, types, constants, options) in CASES.items():
    names = kernel.arg_names
    signature = {n: types.get(n, "constexpr") for n in names}
    values = {(names.index(n),): value for n, value in constants.items()}
    aligned = {
        (names.index(n),): [["tt.divisibility", 16]]
        for n, t in types.items()
        if t.startswith("*") or n.endswith(("_token", "_head", "row_stride", "num_spans"))
    }
    source = ASTSource(kernel, signature, values, aligned)
    compiled = triton.compile(source, target=TARGET, options=options)
    found[name] = {
        **resources(compiled),
        "specialised": [
            p.name
            for p in kernel.params
            if p.name.startswith("num_") and p.name != "num_spans" and not p.do_not_specialize
        ],
    }
print(json.dumps(found))
