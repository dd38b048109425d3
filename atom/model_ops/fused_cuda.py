"""Decode steps of dense models as five launches a layer, on devices that run Triton.

    RMSNorm + QKV | q/k norm, rotation, cache write, attention | output + residual
    RMSNorm + gate/up + activation | down + residual

around them the embedding with the step's rotations, and the head with its arg-max. Each launch but the first (with
several tokens the first two) starts while the one before it ends (dependent launch); the kernels keep the order of
reads that this asks for. Everything lies at fixed addresses and no launch depends on host data, so a recorded graph can
hold a step; its last kernel writes the ids into host memory itself (``outbox``).

Steps of more than ``MAX_TOKENS`` sequences, on sm_90 alone, end with the final norm: their head is a product for the
usual way, and what is sampled is sampled from its logits.
"""

from __future__ import annotations

import math

import torch

from atom.kernels.triton.decode_choices import BATCH_CLASSES, MAX_TOKENS, LinearShape, padded, serves
from atom.kernels.triton.decode_linear import DecodeLinear, HeadBuffers, LinearArguments, Scaled, head
from atom.kernels.triton.decode_parts import ACTIVATIONS, compact
from atom.kernels.triton.decode_step import Embedding, choose, embed, final_norm, prepare_decode
from atom.kernels.triton.decode_table import load_table
from atom.kernels.triton.fused_attention_launch import AttentionLayer, DecodeAttention, StepTables
from atom.model_ops.dense_decoder import DenseDecoder, DenseLayer, FusedDecoder
from atom.model_ops.layernorm import RMSNorm
from atom.model_ops.linear import LinearBase
from atom.model_ops.outbox import Outbox
from atom.model_ops.rotary_embedding import RotaryEmbedding
from atom.platforms import Platform
from atom.utils.forward_context import ForwardContext, HeadWork, get_forward_context

Advance = tuple[torch.Tensor, torch.Tensor]  # of the device tables: computed, last_token


def why_not(decoder: DenseDecoder | None, platform: Platform) -> str | None:
    """Why this model's decode steps run through its modules on ``platform``; None where they can be fused."""
    if decoder is None:
        return "its layers are not dense"
    head_, first = decoder.head, decoder.layers[0]
    if head_.tp.world_size > 1:
        return "it is split over several ranks"
    # Nothing is packed yet where memory is planned, before weights are read.
    is_plain = head_.packed is None or isinstance(head_.packed, torch.Tensor) and head_.packed.dim() == 2
    if not is_plain or head_.bias is not None or decoder.logits_soft_cap is not None:
        return "its head has packed weights, a bias or a soft cap"
    if decoder.embedding.weight is None:
        return "its embedding is packed for another kernel"
    if first.attention.backend.spec.dtype is not torch.bfloat16 and platform.name != "cpu":
        return f"its dtype is {first.attention.backend.spec.dtype}, not bfloat16"
    hidden_size = decoder.embedding.weight.shape[1]
    for layer in decoder.layers:
        attention = layer.attention
        if layer.post_attention_norm is not None or layer.post_mlp_norm is not None:
            return "it has norms behind attention or MLP"
        if layer.activation not in ACTIVATIONS:
            return f"activation {layer.activation} has no fused form"
        dim = attention.head_dim
        if dim & (dim - 1) or not 16 <= dim <= 256:
            return f"head_dim {dim} is no power of two from 16 to 256"
        if layer.output.bias is not None and layer.output.bias.dtype is not layer.output.weight.dtype:
            return "a bias has another dtype than its weight"
        for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
            weight = _weight(linear)
            if weight is None:
                return "a weight is packed for another kernel"
            if weight.shape[1] % 16:
                return f"a layer has {weight.shape[1]} input features, no multiple of 16"
    return None if hidden_size % 16 == 0 else f"hidden_size {hidden_size} is no multiple of 16"


def fused_cuda_decoder(
    decoder: DenseDecoder | None, platform: Platform, *, max_tokens: int, advance: Advance | None = None
) -> tuple[FusedCudaDecoder | None, str | None]:
    """The fused decoder of a loaded model with what ``platform`` allows, or None and the reason."""
    reason = why_not(decoder, platform)
    if reason is not None:
        return None, reason
    is_hopper, architecture = _device_of(platform)
    fused = FusedCudaDecoder(
        decoder,
        max_tokens=max_tokens,
        has_gluon=is_hopper,
        uses_pdl=is_hopper,
        architecture=architecture,
        advance=advance,
    )
    return fused, None


def planned_bytes(decoder: DenseDecoder | None, platform: Platform, *, max_tokens: int) -> int:
    """What :func:`fused_cuda_decoder` will allocate for a model, its weights read or not; 0 where it makes none."""
    if why_not(decoder, platform) is not None:
        return 0
    has_gluon, architecture = _device_of(platform)
    return FusedCudaDecoder.num_bytes(
        decoder, max_tokens=max_tokens, has_gluon=has_gluon, architecture=architecture
    )


def _device_of(platform: Platform) -> tuple[bool, str]:
    """Whether kernels for sm_90 run there, and the architecture's name."""
    architecture = platform.describe().get("architecture", "")
    return platform.name == "cuda" and architecture == "sm_90", architecture


def _weight(linear: LinearBase) -> torch.Tensor | None:
    """The plain weight ``[N, K]`` of a layer, where it has one and will keep it."""
    if linear.weight is not None and linear.kernel.makes_copy:
        return None
    packed = linear.packed if linear.weight is None else linear.weight
    is_plain = isinstance(packed, torch.Tensor) and packed.dim() == 2 and packed.is_contiguous()
    return packed.detach() if is_plain and packed.is_floating_point() else None


def _linear(
    linear: LinearBase, dtype: torch.dtype, norm: RMSNorm | None = None, activation: int = 0
) -> LinearArguments:
    return LinearArguments(
        _weight(linear),
        None if norm is None else compact(norm.weight.detach(), dtype),
        0.0 if norm is None else norm.eps,
        None if linear.bias is None else linear.bias.detach(),
        activation,
    )


def _linear_shapes(decoder: DenseDecoder) -> list[LinearShape]:
    """Every shape of the layers' products once."""
    shapes = {}
    for layer in decoder.layers:
        act = ACTIVATIONS[layer.activation]
        for linear, activation in ((layer.qkv, 0), (layer.output, 0), (layer.gate_up, act), (layer.down, 0)):
            shapes[LinearArguments(_weight(linear), activation=activation).shape] = None
    return list(shapes)


def _most_tokens(shapes: list[LinearShape], max_tokens: int, has_gluon: bool) -> int:
    """Up to ``max_tokens`` that kernels serve."""
    max_tokens = min(max_tokens, BATCH_CLASSES[-1])
    return max_tokens if all(serves(shape, max_tokens, has_gluon) for shape in shapes) else MAX_TOKENS


def _rooms(decoder: DenseDecoder, max_tokens: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What steps of up to ``max_tokens`` write, beside what products and attention keep: shapes and dtypes."""
    (_, hidden_size), dtype = decoder.embedding.weight.shape, decoder.embedding.weight.dtype
    first, vocab = decoder.layers[0], decoder.head.num_embeddings
    few = min(max_tokens, MAX_TOKENS)
    whole = padded(max_tokens)  # products read whole tiles of tokens
    angles = max_tokens, *_rope_shape([layer.rope for layer in decoder.layers])
    return {
        "x": ((whole, hidden_size), dtype),
        "scaled": ((whole, hidden_size), dtype),
        "qkv": ((max_tokens, len(_weight(first.qkv))), dtype),
        "attended": ((whole, _weight(first.output).shape[1]), dtype),
        "gated": ((whole, _weight(first.down).shape[1]), dtype),
        "cos": (angles, dtype),
        "sin": (angles, dtype),
        "hidden": ((few, hidden_size), dtype),
        "logits": ((few, vocab), dtype),
        "many_hidden": ((max_tokens if max_tokens > few else 0, hidden_size), dtype),
        "keys": ((max_tokens,), torch.int64),
        "token_ids": ((few,), torch.int64),
        "is_finite": ((few,), torch.bool),
    }


class _Layer:
    """One layer's launches: tensors and constants."""

    def __init__(self, layer: DenseLayer, ropes: list[RotaryEmbedding], dtype: torch.dtype):
        attention, spec = layer.attention, layer.attention.backend.spec
        self.name = attention.layer_name
        self.qkv = _linear(layer.qkv, dtype, layer.input_norm)
        self.output = _linear(layer.output, dtype)
        self.gate_up = _linear(layer.gate_up, dtype, layer.mlp_norm, ACTIVATIONS[layer.activation])
        self.down = _linear(layer.down, dtype)
        norm = layer.qk_norm
        sinks = attention.backend.sinks
        self.attention = AttentionLayer(
            attention.num_heads,
            attention.num_kv_heads,
            attention.head_dim,
            spec.scale,
            len(layer.rope.inv_freq),
            ropes.index(layer.rope),
            attention.sliding_window,
            spec.soft_cap,
            None if norm is None else compact(norm.weight.detach(), dtype),
            0.0 if norm is None else norm.eps,
            None if sinks is None else sinks.detach(),
        )


class FusedCudaDecoder(FusedDecoder):
    """Runs steps that decode one token of each of up to ``max_tokens`` sequences.

    Build it once the weights are loaded. ``hidden``, ``logits``, ``token_ids`` and ``is_finite`` hold the last
    step's results; where it had more than ``MAX_TOKENS`` sequences, ``many_hidden`` its hidden states.

    Args:
        decoder: what ``why_not`` has nothing against.
        has_gluon: whether kernels for sm_90 run there; ``uses_pdl`` alike, dependent launch.
        architecture: under which name blocks measured on this machine are kept; empty: use none.
        advance: ``computed`` and ``last_token`` of the device tables, which a step then moves on itself.
    """

    def __init__(
        self,
        decoder: DenseDecoder,
        *,
        max_tokens: int = MAX_TOKENS,
        has_gluon: bool = False,
        uses_pdl: bool = False,
        architecture: str = "",
        advance: Advance | None = None,
    ):
        self._uses_pdl = uses_pdl
        self._table = decoder.embedding.weight.detach()
        self._embed_scale = decoder.embed_scale
        device, dtype = self._table.device, self._table.dtype
        ropes = list(dict.fromkeys(layer.rope for layer in decoder.layers))
        self._ropes = _rope_tables(ropes)
        self._layers = [_Layer(layer, ropes, dtype) for layer in decoder.layers]
        weight = decoder.head.packed
        norm = decoder.final_norm
        self._head = LinearArguments(weight.detach(), compact(norm.weight.detach(), dtype), norm.eps)
        table = load_table(architecture) if architecture else {}
        self._linear = DecodeLinear(device, has_gluon=has_gluon, uses_pdl=uses_pdl, table=table)
        shapes = _linear_shapes(decoder)
        self.max_tokens = max_tokens = _most_tokens(shapes, max_tokens, has_gluon)
        self._linear.reserve(shapes, max_tokens)
        attention = [layer.attention for layer in self._layers]
        self._attention = DecodeAttention(device, attention, max_tokens, uses_pdl, has_gluon)

        rooms = {
            name: torch.zeros(shape, dtype=kind, device=device)
            for name, (shape, kind) in _rooms(decoder, max_tokens).items()
        }
        self._x, self._scaled, self._qkv = rooms["x"], rooms["scaled"], rooms["qkv"]
        self._attended, self._gated = rooms["attended"], rooms["gated"]
        self._cos, self._sin, self._keys = rooms["cos"], rooms["sin"], rooms["keys"]
        self.hidden, self.logits, self.many_hidden = rooms["hidden"], rooms["logits"], rooms["many_hidden"]
        self.token_ids, self.is_finite = rooms["token_ids"], rooms["is_finite"]
        few, vocab = len(self.hidden), len(weight)
        self.outbox = None if device.type == "cpu" else Outbox(few, device)
        self._views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of both, by number of tokens
        self._is_on_host = device.type == "cpu"
        self._flags = torch.tensor([1, vocab], dtype=torch.int32).to(device)
        self._wants_logits, self._num_valid_ids = True, vocab
        self._advance = advance
        self._is_advanced = False
        self._embedded: torch.Tensor | None = None  # ids of the step under way that prepare embedded

    @staticmethod
    def num_bytes(
        decoder: DenseDecoder,
        *,
        max_tokens: int = MAX_TOKENS,
        has_gluon: bool = False,
        architecture: str = "",
    ) -> int:
        """Bytes that one of these takes on its device beside the weights, which need not be read yet.

        Narrowed norms, rotations' frequencies and other small tensors are left out.
        """
        nowhere, shapes = torch.device("meta"), _linear_shapes(decoder)
        max_tokens = _most_tokens(shapes, max_tokens, has_gluon)
        table = load_table(architecture) if architecture else {}
        linear = DecodeLinear(nowhere, has_gluon=has_gluon, table=table)
        linear.reserve(shapes, max_tokens)
        layers = [
            AttentionLayer(a.num_heads, a.num_kv_heads, a.head_dim, 1.0, a.head_dim, 0)
            for a in (layer.attention for layer in decoder.layers)
        ]
        attention = DecodeAttention(nowhere, layers, max_tokens, has_gluon=has_gluon)
        rooms = sum(math.prod(shape) * kind.itemsize for shape, kind in _rooms(decoder, max_tokens).values())
        return rooms + linear.num_bytes + attention.num_bytes

    def begin(self, head: HeadWork) -> None:
        if self.outbox is not None:
            self.outbox.begin()
        self.want_logits(not head.is_argmax)
        if head.num_valid_ids != self._num_valid_ids:
            self._num_valid_ids = head.num_valid_ids
            self._flags[1].fill_(head.num_valid_ids)

    def want_logits(self, wants: bool) -> None:
        """Whether the steps to come write logits."""
        if wants != self._wants_logits:
            self._wants_logits = wants
            self._flags[0].fill_(int(wants))

    def finish(self, head: HeadWork, hidden: torch.Tensor) -> None:
        # Hidden states of the modules, or of a step that left its head to them, are none of ours.
        if hidden.data_ptr() != self.hidden.data_ptr():
            return
        n = len(hidden)
        head.is_done = True
        letter = None if self.outbox is None else self.outbox.take(n)
        if self._wants_logits:
            head.logits = self.logits[:n]
            return
        if n not in self._views:
            self._views[n] = self.token_ids[:n], self.is_finite[:n]
        head.best_ids, head.is_finite = self._views[n]
        if self._is_on_host:  # nothing copies them on their way to the host
            head.best_ids, head.is_finite = head.best_ids.clone(), head.is_finite.clone()
        head.letter = letter
        head.is_advanced = self._is_advanced

    def prepare(
        self,
        packed: torch.Tensor,
        computed: torch.Tensor,
        last_token: torch.Tensor,
        tables: torch.Tensor,
        n: int,
        *options: int | bool,
    ) -> tuple[torch.Tensor, ...]:
        """As ``prepare_decode``; the launch embeds the step's tokens too, which :meth:`forward` then need not do."""
        embedding = self._embedding(n) if n <= self.max_tokens else None
        inputs = prepare_decode(packed, computed, last_token, tables, n, *options, embedding, self._uses_pdl)
        self._embedded = None if embedding is None else inputs[1]
        return inputs

    def _embedding(self, n: int) -> Embedding:
        rooms = (self._x[:n], self._cos[:n], self._sin[:n], self._keys[:n])
        half_norm = None
        if n > MAX_TOKENS:
            half_norm = (self._layers[0].qkv.norm, self._scaled[:n], self._linear.shares)
        return Embedding(self._table, self._ropes, *rooms, self._embed_scale, half_norm)

    def takes(self, context: ForwardContext, num_tokens: int) -> bool:
        metadata = context.attn_metadata.get(self._layers[0].name)
        return (
            metadata is not None
            and context.tr_graph is None
            and context.spec_decode_metadata is None
            and metadata.num_prefill_seqs == 0
            and 0 < num_tokens <= self.max_tokens
            and num_tokens == metadata.num_seqs
        )

    @torch.inference_mode()
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        context = get_forward_context()
        n = len(input_ids)
        x, qkv, attended, gated = self._x[:n], self._qkv[:n], self._attended[:n], self._gated[:n]
        cos, sin, keys = self._cos[:n], self._sin[:n], self._keys[:n]
        linear, is_many = self._linear, n > MAX_TOKENS
        # Of many tokens the last launch has the form of those before it; nothing reads what it leaves.
        following = [layer.qkv.norm for layer in self._layers[1:]] + [self._head.norm if is_many else None]
        next_x = self._scaled[:n]
        scaled = Scaled(next_x, 1) if is_many else None
        if self._embedded is not input_ids:
            embed(input_ids, positions, self._embedding(n))
        self._embedded = None
        for index, layer in enumerate(self._layers):
            metadata = context.attn_metadata[layer.name]
            cache = context.kv_cache_data[layer.name]
            step = StepTables(
                metadata.block_tables,
                metadata.table_rows,
                metadata.context_lens,
                metadata.slot_mapping,
                cos,
                sin,
            )
            # NOTE: what came before the first one is complete when a kernel behind it starts: lengths, tables and
            # rotations may be read before a wait.
            linear(x, layer.qkv, qkv, is_first=index == 0, scaled=scaled)
            self._attention(qkv, layer.attention, cache.k_cache, cache.v_cache, step, attended)
            # Of several tokens, the launch before a norm does its share of it.
            norms = (layer.gate_up.norm, following[index]) if n > 1 else (None, None)
            scaled = linear(attended, layer.output, x, x, next_norm=norms[0], next_x=next_x)
            linear(x, layer.gate_up, gated, scaled=scaled)
            scaled = linear(gated, layer.down, x, x, next_norm=norms[1], next_x=next_x)
        if is_many:
            hidden = self.many_hidden[:n]
            final_norm(x, self._head.norm, hidden, self._head.eps, self._uses_pdl)
            return hidden
        hidden = self.hidden[:n]
        head(x, self._head, HeadBuffers(hidden, self.logits[:n], keys, self._flags), uses_pdl=self._uses_pdl)
        advance = None  # without rows of the tables, whoever gathered them moves on
        metadata = context.attn_metadata[self._layers[0].name]
        if self._advance is not None and metadata.table_rows is not None:
            advance = (metadata.table_rows, metadata.context_lens, *self._advance)
        self._is_advanced = advance is not None
        outbox = None
        if self.outbox is not None:
            self.outbox.forget()  # this is no replay: nobody counts it
            outbox = self.outbox.tensors
        choose(keys, self.token_ids[:n], self.is_finite[:n], advance, self._uses_pdl, outbox)
        return hidden


def _rope_shape(ropes: list[RotaryEmbedding]) -> tuple[int, int]:
    """How many different ones there are, and the largest's dimensions, padded to a power of two."""
    size = max(len(rope.inv_freq) for rope in ropes)
    return len(set(ropes)), 1 << (size - 1).bit_length()


def _rope_tables(ropes: list[RotaryEmbedding]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inverse frequencies and factors of sin ``[ropes, dim]``, padded, and factors of cos ``[ropes]``."""
    shape = _rope_shape(ropes)
    frequencies, signs = torch.zeros(shape), torch.zeros(shape)
    for i, rope in enumerate(ropes):
        frequencies[i, : len(rope.inv_freq)] = rope.inv_freq
        signs[i, : len(rope.inv_freq)] = rope.sign
    factors = torch.tensor([rope.attention_factor for rope in ropes])
    return tuple(t.to(ropes[0].inv_freq.device) for t in (frequencies, signs, factors))
