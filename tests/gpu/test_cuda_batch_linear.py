"""Products of 65 to 512 tokens on sm_90 against fp32, on fresh random data in bf16."""

import time

import pytest
import torch

from atom.kernels.reference.decode import fused_linear
from atom.kernels.reference.linear import ReferenceLinear
from atom.kernels.reference.norm import rms_norm
from atom.kernels.triton import batch_linear as batch
from atom.kernels.triton.batch_linear import BatchShape, launch
from atom.kernels.triton.decode_choices import Choice, padded
from atom.kernels.triton.decode_linear import DecodeLinear, LinearArguments, Scaled
from atom.kernels.triton.decode_parts import ACTIVATIONS
from atom.kernels.triton.gated_linear import gated_linear
from atom.platforms import get_platform

MAX_ERROR = 5e-3  # ||found - wanted|| / ||wanted||
BLOCKS = [(64, 2, 256, 4), (128, 2, 128, 4), (64, 2, 128, 6), (64, 1, 128, 8), (64, 2, 64, 8)]
CASES = [  # tokens, rows of the weight, columns
    (65, 2048, 1024),
    (77, 1024, 512),
    (200, 6144, 1024),
    (256, 4096, 4096),
    (300, 1024, 3072),
    (512, 4096, 1024),
]

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_sm_90():
    platform = get_platform()
    if platform.name != "cuda" or platform.architecture() != "sm_90":
        pytest.skip("compiled for sm_90 alone")
    torch.manual_seed(time.time_ns() % 2**31)


def case(num_tokens, rows, columns):
    x = torch.randn(num_tokens, columns, device="cuda").bfloat16()
    return x, (2 * torch.randn(rows, columns, device="cuda") / columns**0.5).bfloat16()


def error_of(found, wanted):
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
def test_products_are_right_and_repeat_bit_for_bit(blocks, activation):
    """Few programs with many tiles, and many that share one."""
    for num_tokens, rows, columns in CASES:
        x, weight = case(num_tokens, rows, columns)
        wanted = fused_linear(x, weight, activation=activation)
        code = ACTIVATIONS.get(activation, 0)
        for programs in (132, 128, 61, 8):
            shape = BatchShape(*blocks, programs)
            for _ in range(2):
                whole = torch.full(
                    (num_tokens + 512, wanted.shape[1]), float("nan"), device="cuda"
                ).bfloat16()
                found = whole[256 : 256 + num_tokens]
                launch(shape, x, weight, found, code)
                assert error_of(found, wanted) < MAX_ERROR, (num_tokens, rows, columns, programs)
                assert whole[:256].isnan().all() and whole[256 + num_tokens :].isnan().all()
                again = torch.empty_like(found)
                launch(shape, x, weight, again, code)
                assert torch.equal(found, again)
    assert not batch._workspace(x.device)[1].any()


@pytest.mark.parametrize("num_tokens", [65, 96, 128, 200, 256])
@pytest.mark.parametrize("blocks", [(64, 2, 128, 6), (64, 1, 128, 8)], ids=str)
@pytest.mark.parametrize(
    "parts",
    [
        ("norm", "bias"),
        ("norm", "silu"),
        ("norm", "bias", "gelu_tanh"),
        ("residual",),
        ("residual", "next"),
        ("bias", "next"),
        ("norm", "bias", "residual"),
        ("bias", "residual", "next"),
    ],
    ids="+".join,
)
def test_what_stands_around_products_of_decode_steps(parts, blocks, num_tokens):
    """Rows that are no multiple of a tile, few and many shares, in place as the residual stream is."""
    activation = next((name for name in ACTIVATIONS if name in parts), None)
    has_norm, has_next, wide = "norm" in parts, "next" in parts, padded(num_tokens)
    for rows, columns, programs, num_shares in ((2064, 1024, 128, 3), (1024, 512, 61, 70), (200, 192, 8, 1)):
        x, weight = case(num_tokens, rows * (1 + bool(activation)), columns)
        norm, next_norm = (1 + torch.randn(n, device="cuda").bfloat16() / 4 for n in (columns, rows))
        bias = torch.randn(len(weight), device="cuda").bfloat16() if "bias" in parts else None
        residual = torch.randn(num_tokens, rows, device="cuda").bfloat16() if "residual" in parts else None
        code = ACTIVATIONS.get(activation, 0)
        layer = LinearArguments(weight, norm if has_norm else None, 1e-5, bias, code)
        wanted = fused_linear(
            x.float(), weight, norm=layer.norm, eps=1e-5, bias=bias, activation=activation, residual=residual
        )
        room = torch.full((256, columns), float("nan"), device="cuda").bfloat16()
        given = room[:num_tokens]
        given.copy_(x.float() * norm.float() if has_norm else x)
        squares = torch.rand(num_shares, wide, device="cuda")
        squares[:, :num_tokens] *= x.float().square().sum(1) / squares[:, :num_tokens].sum(0)
        run = DecodeLinear(x.device, has_gluon=True, uses_pdl=True)
        space = run._workspace
        space.partial = torch.empty(132 * batch.SUMS, device="cuda")
        space.arrivals = torch.zeros(264, dtype=torch.int32, device="cuda")
        space.shares = torch.empty(128 * 256, device="cuda")
        options = {"scaled": Scaled(given, num_shares)} if has_norm else {}
        found = []
        for _ in range(2):
            space.partial.fill_(float("nan"))
            space.shares.fill_(float("nan"))
            space.shares[: squares.numel()] = squares.view(-1)
            out = torch.full((num_tokens, rows), float("nan"), device="cuda").bfloat16()
            if residual is not None:
                out.copy_(residual)
            next_x = torch.full_like(out, float("nan"))
            if has_next:
                options |= {"next_norm": next_norm, "next_x": next_x}
            # A launch whose end the next one's beginning meets.
            launch(BatchShape(*blocks, 128), given, weight[:rows], torch.empty_like(out))
            left = run(
                given, layer, out, None if residual is None else out,
                choice=Choice("batch", (*blocks, programs)), **options,
            )  # fmt: skip
            assert error_of(out, wanted) < MAX_ERROR, (rows, columns)
            assert not space.arrivals.any()
            found.append([out])
            if has_next:
                assert error_of(next_x, out.float() * next_norm.float()) < MAX_ERROR
                sums = space.shares[: left.num_shares * wide].view(-1, wide)[:, :num_tokens]
                assert error_of(sums.sum(0), out.float().square().sum(1)) < 1e-5
                found[-1] += [next_x, sums.clone()]
        assert all(torch.equal(*both) for both in zip(*found, strict=True)), "the same bits again"


@pytest.mark.parametrize(("rows", "columns"), batch.GATED_PRODUCTS)
def test_gated_layers_of_models(rows, columns):
    for num_tokens in (64, 97, 128, 144, 230, 256, 490, 512, 513):
        x, weight = case(num_tokens, rows, columns)
        found = gated_linear(x, weight, "silu")
        assert error_of(found, fused_linear(x, weight, activation="silu")) < MAX_ERROR, num_tokens


def test_sums_in_place_are_right_and_survive_graphs_and_compilation():
    """Of layers behind attention and MLP; two sums and a norm between them, as a layer has."""
    kernel = ReferenceLinear()
    for num_tokens, (rows, columns) in ((97, (1024, 2048)), (250, (4096, 4096)), (2048, (2048, 8192))):
        x, weight = case(num_tokens, rows, columns)
        start = torch.randn(num_tokens, rows, device="cuda").bfloat16()
        once = fused_linear(x, weight, residual=start)
        wanted = fused_linear(x, weight, residual=once)
        total = start.clone()
        assert kernel.add_to(total, x, weight, None) is total
        assert error_of(total, once) < MAX_ERROR
        ones = torch.ones(rows, device="cuda")

        def layer(total, x, weight, ones=ones):
            total = kernel.add_to(total, x, weight, None)
            normed = rms_norm(total, ones, 1e-6)
            return kernel.add_to(total, x, weight, None), normed

        compiled = torch.compile(layer, fullgraph=True, dynamic=True)
        for run in (layer, compiled):
            total = start.clone()
            found, normed = run(total, x, weight)
            assert found.data_ptr() == total.data_ptr()
            assert error_of(found, wanted) < MAX_ERROR
            assert error_of(normed, rms_norm(once, ones, 1e-6)) < MAX_ERROR
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run(total, x, weight)
            for _ in range(2):
                total.copy_(start)
                graph.replay()
                assert error_of(total, wanted) < MAX_ERROR


def test_a_row_does_not_depend_on_the_others_of_its_class():
    x, weight = case(256, 4096, 4096)
    shape = BatchShape(64, 2, 256, 4, 128)
    whole, part = (
        torch.empty(256, 4096, device="cuda").bfloat16(),
        torch.empty(140, 4096, device="cuda").bfloat16(),
    )
    launch(shape, x, weight, whole)
    launch(shape, x[100:240], weight, part)
    assert torch.equal(part, whole[100:240])


def test_views_in_compiled_code_and_in_graphs(monkeypatch):
    """Rows of x apart, any number of tokens, replayed with other values."""
    shape = BatchShape(64, 2, 256, 4, 128)
    monkeypatch.setattr(batch, "GATED_PRODUCTS", {(4096, 1024): dict.fromkeys((96, 200, 256, 512), shape)})
    wide, weight = torch.randn(600, 2048, device="cuda").bfloat16(), case(1, 4096, 1024)[1]
    batch.reserve(weight)

    def product(x):
        return torch.ops.aiter.gated_linear(x, weight, "silu") + 1

    compiled = torch.compile(product, fullgraph=True, dynamic=True)

    def is_right(found, x):
        return error_of(found, fused_linear(x, weight, activation="silu") + 1) < MAX_ERROR

    for num_tokens in (40, 90, 256, 599):
        x = wide[:num_tokens, :1024]
        assert is_right(compiled(x), x)
    x = wide[:200, :1024]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = product(x)
    for _ in range(3):
        wide.normal_()
        graph.replay()
        assert is_right(found, x)
