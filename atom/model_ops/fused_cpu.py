"""A dense decoder on the CPU as one native call a step: embedding, layers, head, arg-max.

Activations are fp32 rows from the embedding to the logits, whatever the weights' format, so a step is at least as
close to exact arithmetic as the modules are. The weights are those that the modules packed: one copy in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from atom.kernels.cpu.native.arguments import AttentionArguments, NormArguments, RopeArguments
from atom.kernels.cpu.native.library import NativeLibrary, native_library, pointer
from atom.kernels.cpu.native.program import Program, ProgramStep, StepGroup
from atom.kernels.cpu.native.weights import PackedWeight
from atom.model_ops.dense_decoder import DenseDecoder, DenseLayer, FusedDecoder
from atom.utils.forward_context import ForwardContext, HeadWork, get_forward_context

if TYPE_CHECKING:
    from atom.config_parts import KVCacheTensor
    from atom.model_ops.attention import Attention
    from atom.model_ops.attentions.backend import AttentionSpec
    from atom.model_ops.embedding import ParallelLMHead
    from atom.model_ops.layernorm import RMSNorm
    from atom.model_ops.linear import LinearBase
    from atom.model_ops.rotary_embedding import RotaryEmbedding

_CACHE_DTYPES = (torch.bfloat16, torch.float32)
_HEAD_DIM_STEP, _MAX_HEAD_DIM = 16, 512  # of the native attention
_MIN_TOKENS = 16  # that a program is built for


def fuse_on_cpu(
    decoder: DenseDecoder | None, *, is_uniform: bool = False
) -> tuple[CpuFusedDecoder | None, str | None]:
    """The loaded decoder as a native program, or None and the reason.

    With ``is_uniform`` a token's bits depend on its sequence alone: neither on what else is in the step nor on how
    the sequence was cut into steps.
    """
    library = native_library()
    reason = "there are no native kernels" if library is None else _why_not(decoder)
    return (CpuFusedDecoder(decoder, library, is_uniform), None) if reason is None else (None, reason)


def _why_not(decoder: DenseDecoder | None) -> str | None:
    if decoder is None:
        return "the model's layers are not dense"
    if decoder.head.tp.world_size > 1:
        return "the model is split over several ranks"
    linears = [m for layer in decoder.layers for m in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    packed = [m.packed for m in linears] + [decoder.embedding.packed, decoder.head.packed]
    if not all(isinstance(weight, PackedWeight) for weight in packed):
        return "a weight is packed for another kernel"
    if not all(layer.gate_up.is_activated for layer in decoder.layers):
        return "an activation has no native form"
    if not all(_is_native_attention(layer.attention.backend.spec) for layer in decoder.layers):
        return "the native attention does not take its heads"
    return None


def _is_native_attention(spec: AttentionSpec) -> bool:
    return (
        spec.dtype in _CACHE_DTYPES and spec.head_dim % _HEAD_DIM_STEP == 0 and spec.head_dim <= _MAX_HEAD_DIM
    )


class CpuFusedDecoder(FusedDecoder):
    """Runs every step but those of token graphs, which record the modules.

    The hidden states that it returns lie in a buffer of its own and die at the next step.
    """

    takes_prefill = True

    def __init__(self, decoder: DenseDecoder, library: NativeLibrary, is_uniform: bool = False):
        self._decoder = decoder
        self._library = library
        self._is_uniform = is_uniform
        # A cache group is what shares a window, see CausalLM.cache_groups; one layer's name stands for it.
        windows: dict[int | None, str] = {}
        for layer in decoder.layers:
            windows.setdefault(layer.attention.sliding_window, layer.attention.layer_name)
        self._group_of_window = {window: index for index, window in enumerate(windows)}
        self._group_layers = list(windows.values())
        self._program: Program | None = None
        self._caches: Mapping[str, KVCacheTensor] | None = None  # that the program was built for
        self._groups = (StepGroup * len(windows))()
        self._step = ProgramStep(groups=self._groups)
        self._logits = np.empty((0, 0), np.float32)
        self._best = np.empty(0, np.float32)  # values of the best ids

    def takes(self, context: ForwardContext, num_tokens: int) -> bool:
        metadata = context.attn_metadata.get(self._group_layers[0])
        return (
            context.tr_graph is None
            and num_tokens > 0
            and metadata is not None
            and metadata.table_rows is None
        )

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See ``FusedDecoder``; does the forward context's head work too."""
        context = get_forward_context()
        num_tokens = len(input_ids)
        program = self._program_for(num_tokens, context.kv_cache_data)
        step = self._step
        step.num_tokens = num_tokens
        step.ids, step.positions = input_ids.data_ptr(), positions.data_ptr()
        for group, layer_name in zip(self._groups, self._group_layers, strict=True):
            metadata = context.attn_metadata[layer_name]
            group.block_tables = metadata.block_tables.data_ptr()
            group.table_stride = metadata.block_tables.stride(0)
            group.slots = metadata.slot_mapping.data_ptr()
        step.num_seqs = metadata.num_seqs
        step.cu_seqlens_q, step.context_lens = (
            metadata.cu_seqlens_q.data_ptr(),
            metadata.context_lens.data_ptr(),
        )
        head = context.head
        self._begin_head(head)
        program.run(step)
        if head is not None and head.best_ids is not None:
            head.is_finite = torch.from_numpy(np.isfinite(self._best))
        elif head is not None and head.logits is not None:
            self._cap(head.logits)
        return torch.from_numpy(program.hidden[:num_tokens])

    # -- the head

    def _begin_head(self, head: HeadWork | None) -> None:
        step = self._step
        step.num_rows, step.keeps_all = 0, 1
        step.rows = step.best_ids = step.best = step.logits = None
        if head is None:
            return
        rows = head.rows
        step.rows, step.num_rows, step.keeps_all = rows.ctypes.data, len(rows), head.keeps_hidden
        head.is_done = True
        if not len(rows):
            return
        if head.is_argmax and not self._needs_capped_best:
            ids, self._best = np.empty(len(rows), np.int64), np.empty(len(rows), np.float32)
            head.best_ids = torch.from_numpy(ids)
            step.best_ids, step.best = ids.ctypes.data, self._best.ctypes.data
            step.num_valid = head.num_valid_ids
            return
        if len(self._logits) < len(rows):  # kept: fresh pages for 16 rows of 262,144 would cost 2 ms a step
            self._logits = np.empty((len(rows), self._decoder.head.packed.n), np.float32)
        step.logits, step.ld_logits = self._logits.ctypes.data, self._logits.shape[1]
        vocab_size = self._decoder.head.num_embeddings
        head.logits = torch.from_numpy(self._logits[: len(rows), :vocab_size])

    @property
    def _needs_capped_best(self) -> bool:
        """Whether the best id is one of capped logits, which may be equal where the logits are not.

        A row beside one that is sampled at random has those; where steps must agree, all rows do.
        """
        return self._is_uniform and self._decoder.logits_soft_cap is not None

    def _cap(self, logits: torch.Tensor) -> None:
        cap = self._decoder.logits_soft_cap
        if cap is not None:
            # PyTorch computes the ends of its vector loops otherwise, and where they are depends on the number of rows.
            for rows in logits.split(1) if self._is_uniform else (logits,):
                rows.div_(cap).tanh_().mul_(cap)

    # -- the program

    def _program_for(self, num_tokens: int, caches: Mapping[str, KVCacheTensor]) -> Program:
        program = self._program
        if program is None or program.max_tokens < num_tokens or self._caches is not caches:
            size = max(_MIN_TOKENS, num_tokens, program.max_tokens if program is not None else 0)
            program = self._program = self._build(size, caches)
            self._caches = caches
        return program

    def _build(self, max_tokens: int, caches: Mapping[str, KVCacheTensor]) -> Program:
        decoder = self._decoder
        first = decoder.layers[0]
        size = first.qkv.in_features
        program = Program(
            self._library,
            size,
            max_tokens,
            decoder.embedding.packed,
            decoder.embed_scale,
            _weight(decoder.head),
        )
        rotations = {}
        for layer in decoder.layers:
            if id(layer.rope) not in rotations:
                rotations[id(layer.rope)] = _add_rotation(program, layer.rope)
        normed, delta = program.hidden, program.buffer(size)
        attended = program.buffer(max(layer.output.in_features for layer in decoder.layers))
        # Queries, keys and values are gone when the gated activations come.
        widths = [max(layer.qkv.out_features, layer.down.in_features) for layer in decoder.layers]
        qkv = gated = program.buffer(max(widths))
        # The norm of what the last block left in delta, which is added by the next norm.
        pending: RMSNorm | None = None
        has_delta = False

        def norm(module: RMSNorm, out: np.ndarray) -> None:
            args = NormArguments(
                residual=program.x.ctypes.data,
                delta=delta.ctypes.data if has_delta else None,
                delta_norm=pointer(pending.weight) if pending is not None else None,
                weight=pointer(module.weight),
                out=out.ctypes.data,
                size=size,
                eps=module.eps,
            )
            program.norm(args)

        def add(linear: LinearBase, x: np.ndarray, post_norm: RMSNorm | None) -> None:
            """Residual += post_norm(linear(x)), at once or with the next norm."""
            nonlocal pending, has_delta
            pending, has_delta = post_norm, post_norm is not None
            weight = _weight(linear, "store" if has_delta else "add")
            program.linear(weight, x, delta if has_delta else program.x)

        for index, layer in enumerate(decoder.layers):
            group = self._group_of_window[layer.attention.sliding_window]
            cache = caches[layer.attention.layer_name]
            norm(layer.input_norm, normed)
            program.linear(_weight(layer.qkv), normed, qkv)
            program.rope(_rope_args(layer, qkv, cache), group, rotations[id(layer.rope)])
            attention = _attention_args(layer.attention, qkv, attended, cache)
            attention.is_uniform = self._is_uniform
            program.attention(attention, group)
            if index == len(decoder.layers) - 1:
                program.keep_rows(attended, program.x)
            add(layer.output, attended, layer.post_attention_norm)
            norm(layer.mlp_norm, normed)
            program.linear(_weight(layer.gate_up), normed, gated)
            add(layer.down, gated, layer.post_mlp_norm)
        norm(decoder.final_norm, program.hidden)
        for owner in (delta, qkv, attended, decoder, caches):
            program.keep(owner)
        return program


def _weight(linear: LinearBase | ParallelLMHead, epilogue: str | None = None) -> PackedWeight:
    """The layer's packed weight with its bias."""
    packed = linear.packed if epilogue is None else linear.packed.with_epilogue(epilogue)
    return packed if linear.bias is None else packed.with_bias(linear.bias)


def _add_rotation(program: Program, rope: RotaryEmbedding) -> int:
    inv_freq = rope.inv_freq[: len(rope.inv_freq) // 2].contiguous().numpy()
    return program.rotation(inv_freq, rope.attention_factor)


def _rope_args(layer: DenseLayer, qkv: np.ndarray, cache: KVCacheTensor) -> RopeArguments:
    attention, qk_norm = layer.attention, layer.qk_norm
    return RopeArguments(
        qkv=qkv.ctypes.data,
        ld=qkv.shape[1],
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        rotary_dim=len(layer.rope.inv_freq),
        qk_weight=pointer(qk_norm.weight) if qk_norm is not None else None,
        eps=qk_norm.eps if qk_norm is not None else 0.0,
        keys=pointer(cache.k_cache),
        values=pointer(cache.v_cache),
        cache_is_bf16=cache.k_cache.dtype is torch.bfloat16,
        block_size=cache.k_cache.shape[2],
    )


def _attention_args(
    attention: Attention, qkv: np.ndarray, out: np.ndarray, cache: KVCacheTensor
) -> AttentionArguments:
    spec = attention.backend.spec
    return AttentionArguments(
        q=qkv.ctypes.data,
        ldq=qkv.shape[1],
        out=out.ctypes.data,
        ldo=out.shape[1],
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=cache.k_cache.shape[2],
        cache_is_bf16=cache.k_cache.dtype is torch.bfloat16,
        scale=spec.scale,
        soft_cap=spec.soft_cap or 0.0,
        window=spec.window or 0,
        sinks=pointer(attention.backend.sinks),
        keys=pointer(cache.k_cache),
        values=pointer(cache.v_cache),
    )
