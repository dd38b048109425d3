"""The fused kernels of a decode step against their plain twins; under the interpreter where there is no device."""

import pytest
import torch

from atom.kernels.reference import decode as reference
from atom.kernels.triton import fused_attention_launch
from atom.kernels.triton.decode_choices import (
    BATCHES,
    LINEAR_CHOICES,
    MAX_TOKENS,
    NEED_GLUON,
    Choice,
    LinearShape,
    candidates,
    default_choice,
    fits,
    fits_ring,
    fits_tile,
    serves,
    token_class,
)
from atom.kernels.triton.decode_linear import DecodeLinear, HeadBuffers, LinearArguments, Scaled, head
from atom.kernels.triton.decode_parts import ACTIVATIONS, LOWEST, compact
from atom.kernels.triton.decode_step import Embedding, choose, embed, final_norm, prepare_decode
from atom.kernels.triton.fused_attention_launch import (
    AttentionLayer,
    DecodeAttention,
    StepTables,
    WarpShape,
)
from atom.kernels.triton.step_inputs import take_decode
from tests.helpers.decode_case import BOUND, DEVICE, HALF, Case, close, error, random
from tests.helpers.interpreted_gluon import use_gluon_kernels, use_tile_kernel

LOWEST_KEY = LOWEST.value


def linear(columns, rows, activation, dtype, has_norm, has_bias):
    weight_rows = 2 * rows if activation else rows
    return LinearArguments(
        random(weight_rows, columns, dtype=dtype, scale=columns**-0.5),
        norm=1 + random(columns, scale=0.2) if has_norm else None,
        eps=1e-5,
        bias=random(weight_rows, dtype=dtype) if has_bias else None,
        activation=ACTIVATIONS[activation] if activation else 0,
    )


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["fp32", "half"])
@pytest.mark.parametrize(
    ("num_tokens", "choice"),
    [
        (1, Choice("gemv", (4, 4))),
        (1, Choice("gemv", (8, 2))),
        (3, Choice("rows", (16, 4))),
        (3, Choice("loop", (64, 64, 1, 3, 0))),
        (19, Choice("loop", (64, 32, 2, 3, 0))),
        (5, Choice("loop", (64, 32, 4, 3, 0))),
    ],
    ids=lambda value: f"{value.kernel}{value.blocks}" if isinstance(value, Choice) else f"{value} tokens",
)
@pytest.mark.parametrize(
    ("rows", "activation", "has_norm", "has_bias", "has_residual"),
    [
        (96, None, True, True, False),  # rows are no multiple of a tile
        (64, None, False, False, True),
        (72, "silu", True, False, False),
        (64, "gelu_tanh", False, True, False),
    ],
)
def test_linear_equals_its_twin(
    dtype, num_tokens, choice, rows, activation, has_norm, has_bias, has_residual
):
    torch.manual_seed(rows + num_tokens)
    layer = linear(128, rows, activation, dtype, has_norm, has_bias)
    x = random(num_tokens, 128, dtype=dtype)
    residual = random(num_tokens, rows, dtype=dtype) if has_residual else None
    wanted = reference.fused_linear(
        x, layer.weight, norm=layer.norm, eps=1e-5, bias=layer.bias, activation=activation, residual=residual
    )
    run = DecodeLinear(x.device)
    run.reserve([layer.shape])
    run._workspace.partial = torch.full((65 * 32 * 4 * 8,), float("nan"), device=DEVICE)
    run._workspace.arrivals = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    out = torch.full_like(wanted, float("nan"))
    if residual is not None:
        out.copy_(residual)
        residual = out  # in place, as the residual stream is
    run(x, layer, out, residual, choice=choice)
    assert close(out, wanted)
    assert not run._workspace.arrivals.any(), "the next launch counts from zero"


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["fp32", "half"])
@pytest.mark.parametrize(
    ("producer", "consumer"),
    [
        (Choice("loop", (64, 32, 2, 3, 0)), Choice("rows", (16, 4))),
        (Choice("rows", (16, 4)), Choice("loop", (64, 64, 2, 3, 0))),
    ],
    ids=["split, rows", "rows, split"],
)
def test_a_norm_may_be_half_done_by_the_launch_before_it(producer, consumer, dtype):
    torch.manual_seed(7)
    before = linear(64, 128, None, dtype, False, False)
    layer = linear(128, 72, "silu", dtype, True, False)
    x, residual = random(5, 64, dtype=dtype), random(5, 128, dtype=dtype)
    run = DecodeLinear(x.device)
    run.reserve([before.shape, layer.shape])
    run._workspace.partial = torch.full((65 * 32 * 4 * 8,), float("nan"), device=DEVICE)
    run._workspace.arrivals = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    run._workspace.shares.fill_(float("nan"))
    stream, next_x = residual.clone(), torch.full_like(residual, float("nan"))
    scaled = run(x, before, stream, stream, choice=producer, next_norm=layer.norm, next_x=next_x)
    out, usual = (torch.empty(5, 72, dtype=dtype, device=DEVICE) for _ in range(2))
    run(stream, layer, out, choice=consumer, scaled=scaled)
    assert close(stream, reference.fused_linear(x, before.weight, residual=residual))
    wanted = reference.fused_linear(stream, layer.weight, norm=layer.norm, eps=1e-5, activation="silu")
    assert close(out, wanted)
    run(stream, layer, usual, choice=consumer)
    assert error(out, usual) < BOUND[dtype]


@pytest.mark.parametrize("num_tokens", [65, 96, 128, 129, 256, 257, 512])
def test_shapes_of_models_have_a_choice_of_many_tokens_on_sm_90(num_tokens):
    for n, k, has_activation in LINEAR_CHOICES:
        shape = LinearShape(n, k, int(has_activation))
        choice = default_choice(shape, num_tokens, True)
        assert choice.kernel == "batch" and serves(shape, num_tokens, True)
        assert choice == default_choice(shape, token_class(num_tokens), True)
        assert fits(choice, shape, token_class(num_tokens)) and not fits(choice, shape, MAX_TOKENS)
        assert not serves(shape, num_tokens, False)
        with pytest.raises(ValueError, match=f"no kernel of decode steps serves .* and {num_tokens} tokens"):
            default_choice(shape, num_tokens, False)
    assert {key[:3] for key in BATCHES} == set(LINEAR_CHOICES)


def test_what_serves_many_tokens_follows_a_rule():
    for n, k, activation, is_served in (
        (64, 64, 0, True),
        (1000, 1920, 0, True),
        (8960, 1536, 1, True),
        (50000, 8192, 0, True),
        (1000, 1000, 0, False),  # columns are brought by 64
        (1004, 1024, 0, False),  # rows of results begin at multiples of 16 bytes
    ):
        shape = LinearShape(n, k, activation)
        for num_tokens in (65, 128, 256, 512):
            assert serves(shape, num_tokens, True) == is_served, shape
            if is_served:
                *_, tokens, _, programs = default_choice(shape, num_tokens, True).blocks
                assert -(-num_tokens // tokens) <= programs <= 132
        assert serves(shape, 64, True) and not serves(shape, 513, True)


@pytest.mark.parametrize("num_tokens", [128, 256])
def test_what_is_tried_of_many_tokens_covers_its_shape(num_tokens):
    for n, k, has_activation in LINEAR_CHOICES:
        shape = LinearShape(n, k, int(has_activation))
        tried = list(candidates(shape, num_tokens, True))
        assert len(tried) == len(set(tried)) >= 3
        assert all(fits(choice, shape, num_tokens) for choice in tried)


def test_a_norm_of_many_tokens_must_be_half_done():
    layer = linear(64, 64, None, HALF, True, False)
    run = DecodeLinear(layer.weight.device, has_gluon=True)
    x = random(65, 64, dtype=HALF)
    with pytest.raises(ValueError, match="the norm of 65 tokens is not half done"):
        run(x, layer, torch.empty_like(x))


@pytest.mark.parametrize("num_tokens", [1, 2, 16, 17, 32, 33, 64])
def test_a_choice_depends_on_the_class_of_tokens_alone(num_tokens):
    for n, k, has_activation in LINEAR_CHOICES:
        shape = LinearShape(n, k, int(has_activation))
        for has_gluon in (False, True):
            choice = default_choice(shape, num_tokens, has_gluon)
            assert choice == default_choice(shape, token_class(num_tokens), has_gluon)
            assert has_gluon or choice.kernel not in NEED_GLUON


def test_every_ring_that_is_tried_covers_its_shape():
    for n, k, has_activation in LINEAR_CHOICES:
        shape = LinearShape(n, k, int(has_activation))
        for num_tokens in (8, 32, 64):
            tried = [
                choice.blocks for choice in candidates(shape, num_tokens, True) if choice.kernel == "ring"
            ]
            assert tried and len(tried) == len(set(tried))
            for rows, width, split, stages, slices, warps in tried:
                assert shape.weight_rows % rows == 0 and k % (split * width) == 0
                assert stages <= k // split // width and stages * rows * width * 2 <= 220_000
                assert width // slices >= 64 and warps in (slices, 2 * slices)
            assert not fits_ring(shape, (48, 512, 1, 2, 4, 4), num_tokens), "48 rows are no power of two"
            assert not fits_ring(shape, (16, 128, 1, 2, 4, 4), num_tokens), "32 columns a warp"


def test_every_tile_that_is_tried_covers_its_shape():
    for n, k, has_activation in LINEAR_CHOICES:
        shape = LinearShape(n, k, int(has_activation))
        tried = [choice.blocks for choice in candidates(shape, MAX_TOKENS, True) if choice.kernel == "tile"]
        assert tried and len(tried) == len(set(tried)) and all(fits_tile(shape, blocks) for blocks in tried)
        assert not fits_tile(shape, (48, 128, 1, 2, 2, 0)), "48 rows are no power of two"
        assert not fits_tile(shape, (64, 128, 1, 4, 2 * k // 128, 0)), "more stages than steps"
        assert not fits_tile(shape, (64, 128, 1, 1, 2, 0)), "a stage that is asked for before it is free"
        assert not fits_tile(shape, (128, 128, 1, 7, 2, 0)), "224 KB of weights and 32 KB of tokens"
        assert not fits_tile(shape, (64, 128, 2, 2, 2, 1), 32), "a cluster of parts of tiles"


@pytest.mark.parametrize(
    ("num_tokens", "blocks", "activation", "around"),
    [
        (5, (16, 64, 1, 2, 4, 0), None, {"bias", "residual"}),  # weights go round, tokens are all there
        (
            19,
            (16, 64, 2, 2, 2, 0),
            None,
            {"residual", "next"},
        ),  # all asked for before the first product, two splits
        (64, (32, 64, 1, 4, 2, 0), "silu", {"scaled", "bias"}),  # tokens go round
        (33, (32, 64, 2, 2, 2, 0), "gelu_tanh", {"scaled"}),  # two splits of gate and up
        (40, (32, 128, 1, 2, 2, 0), "silu", set()),
        (64, (32, 64, 2, 2, 2, 1), "silu", {"scaled", "bias"}),  # a cluster
        (40, (64, 64, 4, 1, 1, 1), None, {"next", "residual"}),
        (17, (64, 64, 4, 1, 1, 0), None, {"next", "bias", "residual"}),
    ],
)
def test_tiles_equal_their_twin(num_tokens, blocks, activation, around, tmp_path, monkeypatch):
    use_tile_kernel(monkeypatch, tmp_path)
    torch.manual_seed(num_tokens)
    layer = linear(256, 64, activation, HALF, "scaled" in around, "bias" in around)
    assert fits_tile(layer.shape, blocks)
    x = random(num_tokens, 256, dtype=HALF)
    residual = random(num_tokens, 64, dtype=HALF) if "residual" in around else None
    wanted = reference.fused_linear(
        x, layer.weight, norm=layer.norm, eps=1e-5, bias=layer.bias, activation=activation, residual=residual
    )
    run = DecodeLinear(x.device, table={(layer.shape, token_class(num_tokens)): Choice("tile", blocks)})
    run.reserve([layer.shape])
    shares, padded = run._workspace.shares, max(16, token_class(num_tokens))
    shares.resize_(80 * padded).fill_(float("nan"))
    options = {}
    if "scaled" in around:
        given = torch.rand(70, padded, device=DEVICE)  # more than are read at once
        given[:, :num_tokens] *= x.float().square().sum(1) / given[:, :num_tokens].sum(0)
        shares[: given.numel()] = given.view(-1)
        options = {"scaled": Scaled((x.float() * layer.norm.float()).to(HALF), 70)}
    next_norm, next_x = 1 + random(64, scale=0.2).to(HALF), torch.full_like(wanted, float("nan"))
    if "next" in around:
        options |= {"next_norm": next_norm, "next_x": next_x}
    for _ in range(2):
        out = torch.full_like(wanted, float("nan"))
        left = run(x, layer, out, residual, **options)
        assert close(out, wanted)
        assert not run._workspace.arrivals.any(), "the next launch counts from zero"
    if left is not None:
        assert close(next_x, (out.float() * next_norm.float()).to(HALF))
        sums = shares[: left.num_shares * padded].view(-1, padded).sum(0)[:num_tokens]
        assert torch.allclose(sums, out.float().square().sum(1), rtol=1e-3)


def test_a_norm_that_no_launch_did_half_of_is_taken_by_another_kernel(tmp_path, monkeypatch):
    use_tile_kernel(monkeypatch, tmp_path)
    layer, x = linear(256, 64, "silu", HALF, True, False), random(20, 256, dtype=HALF)
    run = DecodeLinear(x.device, table={(layer.shape, 32): Choice("tile", (32, 64, 1, 4, 4, 0))})
    run.reserve([layer.shape])
    out = torch.empty(20, 64, dtype=HALF, device=DEVICE)
    run(x, layer, out)
    assert close(out, reference.fused_linear(x, layer.weight, norm=layer.norm, eps=1e-5, activation="silu"))


def test_a_launch_between_two_norms_is_refused():
    layer, x = linear(256, 64, None, HALF, True, False), random(20, 256, dtype=HALF)
    with pytest.raises(ValueError, match=r"^scaled \(32 shares .* and next_norm"):
        DecodeLinear(x.device)(x, layer, x, scaled=Scaled(x, 32), next_norm=x[0], next_x=x)


def test_a_row_does_not_depend_on_its_company():
    layer = linear(128, 96, "silu", HALF, True, False)
    x = random(40, 128, dtype=HALF)
    run = DecodeLinear(x.device)
    run.reserve([layer.shape])
    whole, part = (torch.empty(n, 96, dtype=HALF, device=DEVICE) for n in (40, 20))
    run(x, layer, whole)
    run(x[:20].contiguous(), layer, part)
    assert torch.equal(whole[:20], part)


def test_norm_weights_are_narrowed_only_where_nothing_is_lost():
    exact = torch.randn(64).to(HALF).float()
    assert compact(exact, HALF).dtype == HALF
    assert compact(exact + 2**-20, HALF).dtype == torch.float32


LENS = [1, 17, 0, 200, 64, 65]


@pytest.mark.parametrize("splits", [None, 1, 4], ids=["columns", "one split", "four splits"])
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["fp32", "half"])
def test_attention_equals_its_twin(splits, dtype):
    torch.manual_seed(1)
    Case(LENS, dtype).check(splits=splits)
    Case([70, 3], dtype, rotary=8).check(splits=splits, rows=False)


@pytest.mark.parametrize("splits", [None, 2])
@pytest.mark.parametrize(
    "fields",
    [
        {"window": 40},
        {"soft_cap": 2.0},
        {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
        {"qk_norm": torch.linspace(0.5, 1.5, 6 * 16).view(6, 16)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_attention_has_what_families_need(splits, fields):
    torch.manual_seed(2)
    fields = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in fields.items()}
    Case(LENS, torch.float32).check(splits=splits, **fields)


@pytest.mark.parametrize("splits", [None, 2])
def test_attention_reads_a_scaled_cache(splits):
    torch.manual_seed(3)
    scales = tuple(torch.tensor([s], device=DEVICE) for s in (0.25, 2.0))
    Case(LENS, torch.float32).check(splits=splits, scales=scales)


@pytest.mark.parametrize("splits", [None, 2])
def test_an_fp8_cache_holds_its_largest_number_instead_of_nan(splits):
    torch.manual_seed(8)
    scales = tuple(torch.tensor([s], device=DEVICE) for s in (0.02, 0.01))
    case = Case(LENS, torch.float32, cache_dtype=torch.float8_e4m3fn)
    case.qkv[::2] *= 20
    # The interpreter does not round to fp8 exactly.
    case.check(splits=splits, scales=scales, bound=2e-2)
    case.qkv[0] *= 1e30
    for _ in range(2):  # with scores far below and far above all others
        case.check(splits=splits, scales=scales, bound=2e-2)
        heads, _, dim = case.shape
        case.qkv[0, : heads * dim] *= -1


@pytest.mark.parametrize("splits", [None, 1, 4], ids=["columns", "one split", "four splits"])
def test_the_best_score_is_found_however_low_all_are(splits, monkeypatch):
    torch.manual_seed(9)
    Case(LENS, torch.float32).lower_scores().check(splits=splits)
    monkeypatch.setattr("atom.kernels.triton.fused_attention_launch.LONG", 100)
    Case([200, 64], torch.float32).lower_scores().check(splits=splits, window=150)


@pytest.fixture
def has_gluon(tmp_path, monkeypatch):
    use_gluon_kernels(monkeypatch, tmp_path)


WARP_SHAPES = [
    WarpShape(1, 16, 2, 2, 0),
    WarpShape(3, 16, 1, 3, 0),
    WarpShape(2, 16, 4, 1, 128),
    WarpShape(2, 32, 1, 2, 0),
]


@pytest.mark.parametrize("shape", WARP_SHAPES, ids=str)
def test_attention_of_warps_equals_its_twin(shape, has_gluon):
    torch.manual_seed(6)
    Case(LENS, HALF).check(launch={"batch_shape": shape})
    Case([70, 3], HALF, rotary=8).check(launch={"batch_shape": shape}, rows=False)
    norm = torch.linspace(0.5, 1.5, 6 * 16, device=DEVICE).view(6, 16)
    Case([130, 33], HALF).check(launch={"batch_shape": shape}, window=40, qk_norm=norm)


@pytest.mark.parametrize("heads", [2, 6, 16, 18])
def test_attention_of_warps_takes_groups_of_any_size(heads, has_gluon):
    torch.manual_seed(7)
    sinks = torch.linspace(-1.0, 2.0, heads, device=DEVICE)
    Case([50, 0, 1], HALF, heads=heads).check(
        launch={"batch_shape": WARP_SHAPES[0]}, sinks=sinks, soft_cap=2.0
    )


def test_attention_of_warps_finds_the_best_score_however_low_all_are(has_gluon):
    for shape in WARP_SHAPES[:2]:
        Case(LENS, HALF).lower_scores().check(launch={"batch_shape": shape})


def test_attention_of_warps_stores_zero_for_what_is_not_finite(has_gluon):
    case = Case([20, 20], HALF)
    case.qkv[0, -1] = float("nan")
    case.check(launch={"batch_shape": WARP_SHAPES[1]})


def test_a_scaled_cache_of_a_batch_is_read_by_the_portable_kernel():
    torch.manual_seed(8)
    scales = tuple(torch.tensor([s], device=DEVICE) for s in (0.25, 2.0))
    Case([40, 9], torch.float32).check(launch={"batch_shape": WARP_SHAPES[0]}, scales=scales)


def test_splits_that_there_is_no_room_for_are_refused():
    layer = AttentionLayer(4, 2, 16, 0.25, 16, 0)
    run = DecodeAttention(torch.device("cpu"), [layer], 300, batch_shape=WarpShape(4, 16, 4, 2, 0))
    tables = torch.zeros(300, 2, dtype=torch.int32)
    cos = torch.ones(300, 1, 16)
    step = StepTables(tables, None, tables[:, 0], tables[:, 0], cos, cos)
    cache, qkv = torch.zeros(4, 2, 16, 16), torch.zeros(300, 8 * 16)
    with pytest.raises(ValueError, match="300 sequences of 2 kv heads in 4 splits are 2400 programs"):
        run(qkv, layer, cache, cache, step, torch.zeros(300, 64))


@pytest.mark.parametrize("num_seqs", [1, 8, 32, 64, 65, 256])
@pytest.mark.parametrize("has_gluon_", [True, False])
def test_shapes_of_batches_have_room_for_their_partial_results(num_seqs, has_gluon_):
    for heads, dim in ((8, 128), (2, 64), (1, 256), (32, 128)):
        layer = AttentionLayer(heads, heads, dim, 1.0, dim, 0)
        shape = fused_attention_launch.batch_shape(layer, num_seqs, has_gluon_)
        assert shape.splits == 1 or heads * num_seqs * shape.splits <= fused_attention_launch.MAX_PROGRAMS


def test_long_contexts_of_few_sequences_are_split_over_keys(monkeypatch):
    torch.manual_seed(4)
    monkeypatch.setattr("atom.kernels.triton.fused_attention_launch.LONG", 100)
    Case([200, 64], torch.float32).check(sinks=torch.zeros(4, device=DEVICE))
    Case([300], torch.float32).check(window=150)


def test_a_value_that_is_not_finite_is_stored_as_zero():
    case = Case([20, 20], torch.float32)
    case.qkv[0, -1] = float("nan")
    case.check()
    case.check(splits=2)


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_the_head_chooses_as_argmax_does(num_tokens):
    torch.manual_seed(5)
    x = random(num_tokens, 64, dtype=HALF)
    weight = random(330, 64, dtype=HALF, scale=0.2)
    weight[7] = weight[310] = 3 * x[0]  # a tie: the lowest id; one of the two is no valid id
    layer = LinearArguments(weight, 1 + random(64, scale=0.1), 1e-6)
    logits, best = reference.greedy_head(x, weight, layer.norm, 1e-6, 300)
    for wants_logits in (0, 1):
        buffers = HeadBuffers(
            torch.empty_like(x),
            torch.full((num_tokens, 330), -1.0, dtype=HALF, device=DEVICE),
            torch.full((num_tokens,), LOWEST_KEY, device=DEVICE),
            torch.tensor([wants_logits, 300], dtype=torch.int32, device=DEVICE),
        )
        head(x, layer, buffers, num_programs=8)
        ids, is_finite = torch.full_like(best, -1), torch.zeros(num_tokens, dtype=torch.bool, device=DEVICE)
        choose(buffers.keys, ids, is_finite)
        assert ids.tolist() == best.tolist() and is_finite.all()
        normed = reference.fused_linear(x, torch.eye(64, device=DEVICE), norm=layer.norm, eps=1e-6)
        assert close(buffers.hidden, normed)
        assert close(buffers.logits, logits) if wants_logits else (buffers.logits == -1.0).all()


@pytest.mark.parametrize(
    ("low", "is_finite"), [(-60000.0, True), (float("nan"), False), (float("-inf"), False)]
)
def test_keys_keep_order_and_finiteness(low, is_finite):
    x = torch.zeros(1, 16, dtype=HALF, device=DEVICE)
    x[0, 0] = 1.0
    weight = torch.zeros(20, 16, dtype=HALF, device=DEVICE)
    weight[:, 0] = low if low == low else -1.0
    if low != low:
        weight[5, 0] = low
    norm = torch.ones(16, device=DEVICE) / 4  # cancels the norm of a unit vector
    buffers = HeadBuffers(
        torch.empty_like(x),
        torch.empty(1, 20, dtype=HALF, device=DEVICE),
        torch.full((1,), LOWEST_KEY, device=DEVICE),
        torch.tensor([0, 20], dtype=torch.int32, device=DEVICE),
    )
    head(x, LinearArguments(weight, norm, 0.0), buffers)
    ids, finite = torch.full((1,), -1, device=DEVICE), torch.zeros(1, dtype=torch.bool, device=DEVICE)
    choose(buffers.keys, ids, finite)
    assert finite.item() == is_finite
    assert ids.item() == (5 if low != low else 0)


def test_choosing_moves_the_tables_on():
    keys = torch.tensor([(0x3F800000 << 32) | (0x7FFFFFFF - 5), (0x3F800000 << 32) | (0x7FFFFFFF - 9)])
    tables = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    computed, last_token = (t.to(DEVICE) for t in tables)
    rows, lens = torch.tensor([2, 0]).to(DEVICE), torch.tensor([11, 12], dtype=torch.int32).to(DEVICE)
    ids = torch.empty(2, dtype=torch.int64, device=DEVICE)
    finite = torch.empty(2, dtype=torch.bool, device=DEVICE)
    choose(keys.to(DEVICE), ids, finite, (rows, lens, computed, last_token))
    assert ids.tolist() == [5, 9] and finite.all()
    assert computed.tolist() == [12, 0, 11, 0] and last_token.tolist() == [9, 0, 5, 0]


def test_choosing_leaves_the_ids_in_host_memory():
    keys = torch.tensor([(0x3F800000 << 32) | (0x7FFFFFFF - 5), (0x7F800000 << 32) | (0x7FFFFFFF - 9)])
    is_pinned = DEVICE != "cpu"
    number = torch.tensor([6], device=DEVICE)
    host_ids = torch.zeros(3, 5, dtype=torch.int64, pin_memory=is_pinned)
    host_flags = torch.zeros(3, 4, dtype=torch.bool, pin_memory=is_pinned)
    ids, finite = torch.empty(2, dtype=torch.int64, device=DEVICE), torch.empty(
        2, dtype=torch.bool, device=DEVICE
    )
    for count in (7, 8, 9, 10):
        choose(keys.to(DEVICE), ids, finite, outbox=(number, host_ids, host_flags))
        assert number.item() == count  # waits
        assert host_ids[count % 3].tolist() == [count, 5, 9, 0, 0]
        assert host_flags[count % 3].tolist() == [True, False, False, False]
    assert host_ids[:, 0].tolist() == [9, 10, 8]


@pytest.mark.parametrize("n", [1, 5, 300])
def test_a_decode_step_is_read_from_the_hosts_memory(n):
    groups, columns, rows = 3, 7, 301
    counts = [0, 4, 2] if n > 1 else [1, 0, 1]
    tables = torch.zeros(groups, rows, columns, dtype=torch.int32, device=DEVICE)
    wanted = tables.cpu()
    order = torch.randperm(rows)
    patches = [[int(order[i]), i % columns, 100 + i] for i in range(sum(counts))]
    numbers = iter(patches)
    for group, count in enumerate(counts):
        for _ in range(count):
            row, column, block = next(numbers)
            wanted[group, row, column] = block
    header = [0, 3 * n + 2 + groups + 3 * sum(counts), *counts]
    values = [*range(n), *([1] * n), *([99] * n), *header, *(v for patch in patches for v in patch)]
    host = torch.tensor(values, dtype=torch.int32)
    host = host.pin_memory() if DEVICE != "cpu" else host
    packed = torch.full((len(values),), -1, dtype=torch.int32, device=DEVICE)
    take_decode(host, packed, tables, n, sum(counts))
    assert torch.equal(packed[: 2 * n].cpu(), host[: 2 * n]) and (packed[2 * n :] == -1).all()
    assert torch.equal(tables.cpu(), wanted)


def test_embedding_rotations_and_final_norm():
    table = random(50, 48, dtype=HALF)
    ids, positions = torch.tensor([3, 49], device=DEVICE), torch.tensor([0, 70001], device=DEVICE)
    inv_freq = torch.rand(2, 16, device=DEVICE)
    sign, factor = random(2, 16), torch.tensor([1.0, 1.5], device=DEVICE)
    x, out = (torch.empty(2, 48, dtype=HALF, device=DEVICE) for _ in range(2))
    cos, sin = (torch.empty(2, 2, 16, dtype=HALF, device=DEVICE) for _ in range(2))
    keys = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    norm, squares = random(48), torch.zeros(9, device=DEVICE)
    next_x = torch.empty_like(x)
    embedding = Embedding(table, (inv_freq, sign, factor), x, cos, sin, keys, 6.5)
    embed(ids, positions, embedding)
    assert torch.equal(x, table[ids] * 6.5)
    embed(ids, positions, embedding._replace(half_norm=(norm, next_x, squares)))
    assert torch.equal(x, table[ids] * 6.5) and torch.equal(next_x, (x.float() * norm).to(HALF))
    assert torch.allclose(squares[:2], x.float().square().sum(1)) and not squares[2:].any()
    angle = positions[:, None, None].float() * inv_freq
    assert torch.allclose(cos.float(), angle.cos() * factor[:, None], atol=1e-2)
    assert torch.allclose(sin.float(), angle.sin() * sign, atol=2e-2)
    assert keys.tolist() == [LOWEST_KEY] * 2
    final_norm(x, norm, out, 1e-6)
    assert close(out, reference.fused_linear(x, torch.eye(48, device=DEVICE), norm=norm, eps=1e-6))


def test_prepared_inputs_of_padded_rows():
    tables = torch.arange(2 * 5 * 4, dtype=torch.int32, device=DEVICE).view(2, 5, 4)
    computed = torch.tensor([9, 0, 14, 3, 6], dtype=torch.int32, device=DEVICE)
    last_token = torch.tensor([10, 11, 12, 13, 14], device=DEVICE)
    packed = torch.tensor([2, 0, 4, 1, 1, 1, 99], dtype=torch.int32, device=DEVICE)
    rows, ids, positions, cu, lens, slots = prepare_decode(
        packed, computed, last_token, tables, 3, 4, 4, True
    )
    assert rows.tolist() == [2, 0, 4] and ids.tolist() == [12, 10, 14]
    assert positions.tolist() == [14, 9, 0] and lens.tolist() == [15, 10, 0]
    assert cu.tolist() == [0, 1, 2, 3]
    assert slots.tolist() == [[11 * 4 + 2, 2 * 4 + 1, -1], [31 * 4 + 2, 22 * 4 + 1, -1]]


@pytest.mark.parametrize("is_padded", [True, False])
def test_a_launch_that_prepares_may_embed_too(is_padded):
    tables = torch.arange(2 * 5 * 4, dtype=torch.int32, device=DEVICE).view(2, 5, 4)
    computed = torch.tensor([9, 0, 14, 3, 6], dtype=torch.int32, device=DEVICE)
    last_token = torch.tensor([10, 11, 12, 13, 14], device=DEVICE)
    packed = torch.tensor([2, 0, 4, 1, 1, 1, 99], dtype=torch.int32, device=DEVICE)
    given = packed, computed, last_token, tables, 3, 4, 4, is_padded
    rope = torch.rand(2, 16, device=DEVICE), random(2, 16), torch.tensor([1.0, 1.5], device=DEVICE)
    table = random(50, 48, dtype=HALF)
    for norm in (None, random(48)):
        rooms, halves = [], []
        for _ in range(2):
            x, angles = torch.empty(3, 48, dtype=HALF, device=DEVICE), torch.empty(2, 3, 2, 16, device=DEVICE)
            rooms.append((x, *angles.unbind(), torch.zeros(3, dtype=torch.int64, device=DEVICE)))
            halves.append((torch.zeros_like(x), torch.zeros(3, device=DEVICE)))
        begin, embedding = (
            Embedding(table, rope, *room, 2.0, None if norm is None else (norm, *half))
            for room, half in zip(rooms, halves, strict=True)
        )
        apart, together = prepare_decode(*given), prepare_decode(*given, begin)
        embed(apart[1], apart[2], embedding)
        for found, wanted in zip(
            (*together, *rooms[0], *halves[0]), (*apart, *rooms[1], *halves[1]), strict=True
        ):
            assert found.dtype == wanted.dtype and torch.equal(found, wanted)
        assert halves[0][1].all() == (norm is not None)
