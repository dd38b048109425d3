"""Products, arg-max and rows of weights in GGUF blocks, against the blocks widened to fp32.

The weights' values are exact; activations are rounded to int8 with a scale for every 32, so a product of group g is
off by at most amax(x_g) / 254 * sum |w_g|.
"""

import ctypes
import re
import shutil
import subprocess

import pytest
import torch

from atom.errors import ConfigError
from atom.kernels.cpu.native.gguf import BLOCK_TYPES, BlockPanels, join_blocks
from atom.kernels.cpu.native.library import native_library
from atom.kernels.cpu.native.weights import gather_rows, linear, linear_argmax, linear_experts
from atom.model_loader.gguf_dequant import FAST_TYPES
from atom.platforms.cpu import cpu_facts
from atom.quantization.kernels import GroupedInt8Linear

pytestmark = pytest.mark.skipif(native_library() is None, reason="no compiler here")

K = 768  # three blocks of 256
# Where the fp16 factors of a block lie, and how large to make them.
HALVES = {
    "Q4_0": {0: 0.02},
    "Q5_0": {0: 0.01},
    "Q8_0": {0: 0.001},
    "Q4_K": {0: 1e-3, 2: 8e-3},
    "Q5_K": {0: 1e-3, 2: 16e-3},
    "Q6_K": {208: 2.5e-4},
}
KINDS = sorted(BLOCK_TYPES)


def random_blocks(name: str, num_rows: int, k: int = K, seed: int = 0) -> torch.Tensor:
    """Blocks ``[num_rows, row bytes]`` of random bytes with factors of a size that weights have."""
    kind = BLOCK_TYPES[name]
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows * k // kind.block_elements, kind.block_bytes)
    blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    for at, size in HALVES[name].items():
        factors = (torch.rand(len(blocks), generator=generator) + 0.1) * size
        blocks[:, at : at + 2] = factors.half().view(torch.uint8).view(-1, 2)
    return blocks.view(num_rows, -1)


def widened(name: str, blocks: torch.Tensor) -> torch.Tensor:
    return FAST_TYPES[name](blocks.view(-1, BLOCK_TYPES[name].block_bytes)).view(len(blocks), -1)


def packed(name: str, blocks: torch.Tensor, epilogue: str = "store"):
    kind = BLOCK_TYPES[name]
    k = blocks.shape[1] // kind.block_bytes * kind.block_elements
    panels = BlockPanels(kind, len(blocks), k, epilogue)
    for start in range(0, len(blocks), 128):
        panels.put(start, blocks[start : start + 128])
    return panels.packed()


def rounding_bound(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    largest = x.abs().view(len(x), -1, 32).amax(-1)
    sums = weight.abs().view(len(weight), -1, 32).sum(-1)
    return largest @ sums.T / 254 * 1.01 + 1e-4


@pytest.fixture(params=["avx512_vnni", "avx2", "plain"])
def instruction_set(request):
    select = native_library().function("atom_gguf_select", [ctypes.c_char_p], ctypes.c_int)
    if select(request.param.encode()) != 0:
        pytest.skip(f"no {request.param} here")
    yield request.param
    assert select(None) == 0


@pytest.mark.parametrize("name", KINDS)
def test_products_stay_within_the_rounding_of_activations(name, instruction_set):
    blocks = random_blocks(name, 200)
    weight, reference = packed(name, blocks), widened(name, blocks)
    x = torch.randn(23, K, generator=torch.Generator().manual_seed(1))
    first = linear(x[:1], weight)
    for num_rows in (1, 2, 7, 23):
        part = x[:num_rows]
        y = linear(part, weight)
        assert ((y - part @ reference.T).abs() <= rounding_bound(part, reference)).all()
        assert torch.equal(y[:1], first)  # a row's bits do not depend on its neighbours


@pytest.mark.parametrize("name", KINDS)
def test_rows_are_the_blocks_exactly(name):
    blocks = random_blocks(name, 200)
    ids = torch.tensor([0, 63, 64, 199, 7, 200, -1])
    rows = gather_rows(ids, packed(name, blocks), scale=2.0)
    assert torch.equal(rows[:5], 2.0 * widened(name, blocks)[ids[:5]])
    assert not rows[5:].any()


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "Q6_K"])
def test_argmax_is_that_of_the_product(name, instruction_set):
    weight = packed(name, random_blocks(name, 1000))
    for num_rows in (1, 40):
        x = torch.randn(num_rows, K, generator=torch.Generator().manual_seed(num_rows))
        logits = linear(x, weight)[:, :900]
        ids, values = linear_argmax(x, weight, 900)
        assert torch.equal(ids, logits.argmax(-1))
        assert torch.equal(values, logits.amax(-1))


def test_ties_go_to_the_lowest_id():
    blocks = random_blocks("Q8_0", 1).repeat(300, 1)
    ids, _ = linear_argmax(torch.randn(3, K), packed("Q8_0", blocks), 300)
    assert ids.tolist() == [0, 0, 0]


@pytest.mark.parametrize(("epilogue", "activation"), [("silu_mul", "silu"), ("gelu_tanh_mul", "gelu")])
def test_gated_epilogue_equals_its_halves(epilogue, activation):
    halves = [random_blocks("Q5_0", 160, seed=seed) for seed in (1, 2)]
    kind = BLOCK_TYPES["Q5_0"]
    panels = BlockPanels(kind, 320, K, epilogue)
    for index, half in enumerate(halves):
        for start in range(0, 160, 64):
            panels.put(index * 160 + start, half[start : start + 64])
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(3)) * 0.1
    gate, up = (linear(x, packed("Q5_0", half)) for half in halves)
    if activation == "silu":
        expected = torch.nn.functional.silu(gate) * up
    else:
        expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(linear(x, panels.packed()), expected, rtol=2e-5, atol=2e-5)


def test_parts_of_several_types_lie_side_by_side():
    parts = [
        packed(name, random_blocks(name, rows)) for name, rows in (("Q5_0", 128), ("Q4_K", 70), ("Q8_0", 64))
    ]
    joined = join_blocks(parts)
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(4))
    expected = torch.cat([linear(x, part) for part in parts], dim=1)
    assert torch.equal(linear(x, joined), expected)
    bias = torch.arange(262.0)
    assert torch.equal(linear(x, joined.with_bias(bias)), expected + bias)
    added = linear(x, joined.with_epilogue("add"), out=torch.ones(3, 262))
    assert torch.equal(added, expected + 1)
    assert joined.num_bytes == sum(part.num_bytes for part in parts)


def test_parts_of_one_type_become_one_weight():
    parts = [packed("Q8_0", random_blocks("Q8_0", rows, seed=rows)) for rows in (128, 64)]
    joined = join_blocks(parts)
    assert joined.format == "q8_0" and not joined.parts
    x = torch.randn(2, K)
    assert torch.equal(linear(x, joined), torch.cat([linear(x, part) for part in parts], dim=1))


def test_bf16_rows_in_and_out():
    weight = packed("Q6_K", random_blocks("Q6_K", 100))
    x = torch.randn(20, K).bfloat16()
    assert torch.equal(linear(x, weight), linear(x.float(), weight).bfloat16())


def test_experts_take_their_own_rows():
    blocks = [random_blocks("Q4_0", 96, seed=seed) for seed in range(3)]
    experts = [packed("Q4_0", each) for each in blocks]
    x = torch.randn(4, K)
    order, offsets = torch.tensor([0, 5, 2, 3, 7, 1, 4, 6]), torch.tensor([0, 2, 2, 8])
    y = linear_experts(x, experts, order, offsets, 2)
    for slot, row in enumerate(order.tolist()):
        expert = experts[0 if slot < 2 else 2]
        assert torch.equal(y[row], linear(x[row // 2 : row // 2 + 1], expert)[0])


@pytest.mark.parametrize("num_rows", [320, 200])
def test_grouped_int8_weights_are_these_blocks_too(num_rows):
    kernel = GroupedInt8Linear()
    weight = torch.randn(num_rows, K, generator=torch.Generator().manual_seed(5)) * 0.05
    packed_weight = kernel.pack(weight)
    assert packed_weight.num_bytes == kernel.num_bytes(num_rows, K, torch.float32)
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(6))
    y = kernel(x, packed_weight, None)
    torch.testing.assert_close(y, x @ weight.T, rtol=0, atol=0.08)
    gated = kernel(x, kernel.pack_gated(weight, "silu"), None)
    gate, up = y.chunk(2, dim=1)
    torch.testing.assert_close(gated, torch.nn.functional.silu(gate) * up, rtol=2e-5, atol=2e-5)


def test_non_finite_activations_are_not_hidden():
    weight = packed("Q8_0", random_blocks("Q8_0", 64))
    x = torch.zeros(2, K)
    x[0, 5] = torch.nan
    y = linear(x, weight)
    assert y[0].isnan().all() and not y[1].any()


def test_the_products_do_not_spill():
    if shutil.which("objdump") is None or "avx512_vnni" not in cpu_facts().flags:
        pytest.skip("needs objdump and AVX-512 with VNNI")
    command = ["objdump", "-d", "--no-show-raw-insn", str(native_library().path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    functions = dict(
        re.findall(r"^[0-9a-f]+ <(gguf_(?:one|times)_\w+)[^>]*>:\n(.*?)(?:\n\n|\Z)", text, re.M | re.S)
    )
    assert {"gguf_one_q8_0", "gguf_one_q4_k", "gguf_one_q6_k", "gguf_times_6"} <= set(functions)
    for name, body in functions.items():
        assert not re.findall(r"\(%r[sb]p.*zmm|zmm.*\(%r[sb]p", body), name


def test_bad_sizes_are_named():
    with pytest.raises(ConfigError, match="in_features must be a multiple of 256 for Q4_K, got 640"):
        BlockPanels(BLOCK_TYPES["Q4_K"], 64, 640)
    panels = BlockPanels(BLOCK_TYPES["Q8_0"], 64, K)
    with pytest.raises(ConfigError, match="rows 32 to 96 of 816 bytes do not fit 64 rows of 816 bytes"):
        panels.put(32, random_blocks("Q8_0", 64))
