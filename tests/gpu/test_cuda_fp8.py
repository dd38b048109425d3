"""fp8 on a CUDA device: products at serving shapes against fp32 on fresh random data, and engines that round."""

import time

import pytest
import torch

from atom.kernels.reference import fp8
from atom.kernels.triton import fp8_linear, fp8_rows
from atom.model_ops.linear import LinearBase
from atom.sampling_params import SamplingParams
from tests.helpers.core_driver import run_to_the_end
from tests.helpers.tiny_model import make_tiny_model

needs_fp8 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs sm_89"
)
pytestmark = [pytest.mark.gpu, needs_fp8]

SHAPES = {"0.6B qkv": (4096, 1024), "1B down": (2048, 8192), "8B out": (4096, 4096), "odd": (2064, 1040)}
FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")
PTPC = {"global_quant_config": "ptpc_fp8"}
PROMPTS = {i: [(i * 37 + j * 11) % 250 + 1 for j in range(5 + 31 * i)] for i in range(1, 5)}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=20, ignore_eos=True)


@pytest.fixture(autouse=True)
def fresh_numbers():
    torch.manual_seed(time.time_ns() % 2**31)


def normal(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def error(found, wanted):
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_tokens", [1, 8, 17, 33, 64, 65, 128, 129, 700, 4096])
def test_products(shape, num_tokens):
    rows, columns = SHAPES[shape]
    linear = fp8_linear.TritonFp8Linear()
    packed = linear.pack(normal(rows, columns))
    x, bias, total = normal(num_tokens, columns), normal(rows), 10 * normal(num_tokens, rows)
    wanted = fp8.Fp8Linear()(x, packed, None).float()
    assert error(linear(x, packed, None), wanted) < 4e-3
    assert error(linear(fp8_rows.quantise_fp8(x), packed, bias), wanted + bias.float()) < 4e-3
    summed = total.clone()
    assert linear.add_to(summed, x, packed, None) is summed
    assert error(summed, total.float() + wanted) < 4e-3


@pytest.mark.parametrize("size", [1024, 4096, 14336])
@pytest.mark.parametrize("num_tokens", [1, 37, 2048])
def test_rows(size, num_tokens):
    x, weight = normal(num_tokens, size), torch.randn(size, device="cuda")
    gate_up = normal(num_tokens, 2 * size)
    for found, wanted in (
        (fp8_rows.quantise_fp8(x), fp8.quantise_fp8(x)),
        (fp8_rows.rms_norm_fp8(x, weight, 1e-6), fp8.rms_norm_fp8(x, weight, 1e-6)),
        (fp8_rows.silu_and_mul_fp8(gate_up), fp8.silu_and_mul_fp8(gate_up)),
        (fp8_rows.gelu_tanh_and_mul_fp8(gate_up), fp8.gelu_tanh_and_mul_fp8(gate_up)),
    ):
        torch.testing.assert_close(found.scales, wanted.scales, rtol=1e-5, atol=0)
        assert error(found.values, wanted.values) < 2e-3  # few are rounded to the other side


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {family: make_tiny_model(root / family, family) for family in FAMILIES}


def first_scores(folder, device, level, mode, **fields):
    """The engine, in bf16, and of each prompt's first token the best ids' log-probabilities."""
    compilation = {"level": level, "cudagraph_mode": mode, "cudagraph_capture_sizes": (1, 2, 4)}
    compilation["cache_dir"] = str(folder / "compiled")
    fields = {"dtype": "bfloat16", "max_num_batched_tokens": 96, "max_num_seqs": 4, **fields}
    driver = run_to_the_end(folder, PROMPTS, GREEDY, device=device, compilation_config=compilation, **fields)
    assert all(len(driver.tokens[i]) == GREEDY.max_tokens for i in PROMPTS)
    firsts = {i: next(s for e in driver.events[i] for s in e.logprobs or ()) for i in PROMPTS}
    return driver, {i: dict(zip(s.top_ids, s.top_logprobs, strict=True)) for i, s in firsts.items()}


def assert_alike(found, wanted):
    """Most of the best 20 ids of 256 are the same, with scores as close as rounding 4 bits leaves them."""
    for i in PROMPTS:
        both = found[i].keys() & wanted[i].keys()
        assert len(both) >= 14, (i, len(both))
        assert sum(abs(found[i][t] - wanted[i][t]) for t in both) / len(both) < 0.15, i


@pytest.mark.parametrize("family", FAMILIES)
def test_engines_round_alike(folders, family, monkeypatch):
    """Whatever the level and the graphs, an engine computes what the reference computes on the CPU."""
    monkeypatch.setenv("ATOM_TOKEN_GRAPH_SIZES", "64")
    _, wanted = first_scores(folders[family], "cpu", 0, "NONE", online_quant_config=PTPC)
    for level, mode in ((0, "NONE"), (0, "FULL"), (3, "FULL"), (3, "NONE")):
        driver, found = first_scores(folders[family], "cuda", level, mode, online_quant_config=PTPC)
        layers = [m for m in driver.core.worker.model.modules() if isinstance(m, LinearBase)]
        assert {type(layer.kernel) for layer in layers} == {fp8_linear.TritonFp8Linear}
        assert_alike(found, wanted)


def test_switches_only_move_the_rounding(folders, monkeypatch):
    _, wanted = first_scores(folders["llama"], "cuda", 3, "FULL", online_quant_config=PTPC)
    monkeypatch.setenv("ATOM_LLAMA_ENABLE_AITER_TRITON_FUSED_RMSNORM_QUANT", "0")
    monkeypatch.setenv("ATOM_LLAMA_ENABLE_AITER_TRITON_FUSED_SILU_MUL_QUANT", "0")
    _, found = first_scores(folders["llama"], "cuda", 3, "FULL", online_quant_config=PTPC)
    assert_alike(found, wanted)


@pytest.mark.parametrize("num_tokens", [1, 48, 100])
def test_a_chain_of_dependent_launches_is_that_of_separate_ones(num_tokens):
    """Passes that start while the one before ends, many times over: nothing is read too early."""
    linear, size, inner = fp8_linear.TritonFp8Linear(), 1024, 3072
    up, down = linear.pack(normal(2 * inner, size) / 32), linear.pack(normal(size, inner) / 55)
    weight, x = torch.rand(size, device="cuda") + 0.5, normal(num_tokens, size)
    found = torch.empty_like(x)

    def chain(after_each=lambda: None):
        found.copy_(x)
        for _ in range(6):
            rows = fp8_rows.rms_norm_fp8(found, weight, 1e-6)
            after_each()
            gate_up = linear(rows, up, None)
            after_each()
            rows = fp8_rows.silu_and_mul_fp8(gate_up)
            after_each()
            linear.add_to(found, rows, down, None)
            after_each()

    chain(torch.cuda.synchronize)
    wanted, graph = found.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(20):
        found.zero_()
        graph.replay()
        assert torch.equal(found, wanted)


def test_a_row_does_not_depend_on_its_company():
    linear, x = fp8_linear.TritonFp8Linear(), normal(64, 2048)
    packed = linear.pack(normal(3072, 2048))
    whole = linear(x, packed, None)
    for num_tokens in (1, 7, 33):
        assert torch.equal(linear(x[:num_tokens], packed, None), whole[:num_tokens])
