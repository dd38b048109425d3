"""Products of 65 to 512 tokens on sm_90 against fp32, on fresh random data in bf16."""

import time

import pytest
import torch

from atom.kernels.reference.decode import fused_linear
from atom.kernels.reference.linear import ReferenceLinear
from atom.kernels.reference.norm import rms_norm
from atom.kernels.triton import batch_linear as batch
from atom.kernels.triton.batch_linear import BatchShape, launch
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
        for programs in (132, 128, 61, 8):
            shape = BatchShape(*blocks, programs)
            for _ in range(2):
                whole = torch.full(
                    (num_tokens + 512, wanted.shape[1]), float("nan"), device="cuda"
                ).bfloat16()
                found = whole[256 : 256 + num_tokens]
                launch(shape, x, weight, found, activation)
                assert error_of(found, wanted) < MAX_ERROR, (num_tokens, rows, columns, programs)
                assert whole[:256].isnan().all() and whole[256 + num_tokens :].isnan().all()
                again = torch.empty_like(found)
                launch(shape, x, weight, again, activation)
                assert torch.equal(found, again)
    assert not batch._workspace(x.device)[1].any()


@pytest.mark.parametrize(("rows", "columns", "is_gated"), batch.MEASURED)
def test_layers_of_models(rows, columns, is_gated):
    for num_tokens in (64, 97, 128, 144, 230, 256, 490, 512, 513):
        x, weight = case(num_tokens, rows, columns)
        if is_gated:
            found, activation = gated_linear(x, weight, "silu"), "silu"
        else:
            found, activation = batch.batch_linear(x, weight), None
        assert error_of(found, fused_linear(x, weight, activation=activation)) < MAX_ERROR, num_tokens


@pytest.mark.parametrize("kernel", [ReferenceLinear(), batch.BatchLinear()], ids=["blas", "batch"])
def test_sums_in_place_are_right_and_survive_graphs_and_compilation(kernel):
    """Of layers behind attention and MLP; two sums and a norm between them, as a layer has."""
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
    choices = dict.fromkeys((96, 200, 256, 512), shape)
    measured = {(4096, 1024, False): choices, (4096, 1024, True): choices}
    monkeypatch.setattr(batch, "MEASURED", measured)
    wide, weight = torch.randn(600, 2048, device="cuda").bfloat16(), case(1, 4096, 1024)[1]
    batch.reserve(weight)

    def product(x):
        return (
            torch.ops.aiter.batch_linear(x, weight),
            torch.ops.aiter.gated_linear(x, weight, "silu") + 1,
        )

    compiled = torch.compile(product, fullgraph=True, dynamic=True)

    def is_right(found, x):
        wanted = fused_linear(x, weight), fused_linear(x, weight, activation="silu") + 1
        return all(error_of(*both) < MAX_ERROR for both in zip(found, wanted, strict=True))

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
