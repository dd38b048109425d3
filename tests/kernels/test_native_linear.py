"""The native products against torch in fp32, and what they promise: bits, ties, tight loops."""

import re
import shutil
import subprocess

import pytest
import torch

from atom.errors import ConfigError
from atom.kernels.cpu.native import library as native
from atom.kernels.cpu.native.build import Target, build_library
from atom.kernels.cpu.native.linear import NativeLinear
from atom.kernels.cpu.native.weights import (
    EPILOGUES,
    FORMATS,
    gather_rows,
    linear,
    linear_argmax,
    linear_experts,
    pack,
)
from atom.kernels.registry import select_kernel
from atom.platforms.cpu import cpu_facts

pytestmark = pytest.mark.skipif(native.native_library() is None, reason="no compiler, no native kernels")

# Norm of the error over the norm of the result, against fp32 products with the unpacked weight: the activations are as
# they are, rounded to 16 bits, to 8 with a scale a row, to 8 with a scale for every 32.
ERRORS = {"fp32": 2e-6, "bf16": 2e-6, "int8": 1e-4, "int8_a8": 1.5e-2, "int4": 1e-2}
if cpu_facts().has_fast_bf16:
    ERRORS["bf16"] = 4e-3  # activations are rounded to bf16
# The same for the packed weight against the given one.
WEIGHT_ERRORS = {"fp32": 0, "bf16": 2e-3, "int8": 1e-2, "int8_a8": 1e-2, "int4": 0.085}
NUM_ROWS = (1, 2, 3, 4, 5, 6, 7, 13, 14, 15, 16, 25, 61, 300)


def relative(found, wanted):
    return ((found.float() - wanted).norm() / wanted.norm()).item()


def reference(x, unpacked, bias, epilogue, out):
    y = x.float() @ unpacked.T + bias
    if epilogue == "add":
        return out.float() + y
    gate, up = y.chunk(2, -1)
    if epilogue == "silu_mul":
        return torch.nn.functional.silu(gate) * up
    if epilogue == "gelu_tanh_mul":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    return y


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("format", FORMATS)
def test_every_format_and_epilogue(format, epilogue):
    n, k = 180, 1312  # neither whole panels nor a whole number of blocks
    weight, bias = torch.randn(n, k) / k**0.5, torch.randn(n)
    packed = pack(weight, format, gate_up=epilogue.endswith("_mul"), epilogue=epilogue, bias=bias)
    unpacked = packed.unpack()
    assert unpacked.shape == weight.shape
    assert relative(unpacked, weight) <= WEIGHT_ERRORS[format]
    for m in NUM_ROWS:
        x = torch.randn(m, k)
        out = torch.randn(m, packed.out_features) if epilogue == "add" else None
        wanted = reference(x, unpacked, bias, epilogue, out)
        found = linear(x, packed, out)
        assert relative(found, wanted) < ERRORS[format], m


@pytest.mark.parametrize("format", FORMATS)
def test_bf16_rows_in_and_out(format):
    packed = pack(torch.randn(70, 96).bfloat16(), format)
    x = torch.randn(5, 200).bfloat16()[:, 64:160]  # rows further apart than they are long
    wanted = x.float() @ packed.unpack().T
    found = linear(x, packed)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, linear(x.float(), packed).bfloat16())
    assert relative(found, wanted) < ERRORS[format] + 3e-3


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_has_the_same_bits_in_any_batch(format):
    packed = pack(torch.randn(200, 2080), format)
    x = torch.randn(max(NUM_ROWS), 2080) * torch.logspace(-3, 3, max(NUM_ROWS))[:, None]
    whole = linear(x, packed)
    for m in NUM_ROWS:
        assert torch.equal(linear(x[-m:], packed), whole[-m:]), m


def test_a_row_with_an_outlier_and_a_row_of_zeros():
    packed = pack(torch.randn(64, 640), "int8")
    x = torch.randn(3, 640)
    x[:, 5] = 300.0  # as models have them
    assert relative(linear(x, packed), x @ packed.unpack().T) < 640**0.5 * 2**-16  # bf16 rows: 1e-3
    zeros = linear(torch.zeros(2, 640), packed)
    assert torch.equal(zeros, torch.zeros(2, 64))


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_not_finite_stays_in_its_row(format):
    packed = pack(torch.randn(64, 96), format)
    x = torch.randn(6, 96)
    clean = linear(x, packed)
    x[2, 7] = float("nan")
    found = linear(x, packed)
    assert found[2].isnan().all()
    keep = [0, 1, 3, 4, 5]
    assert torch.equal(found[keep], clean[keep])


def test_bf16_and_fp32_panels_hold_the_weight_itself():
    weight = torch.randn(130, 64)
    assert torch.equal(pack(weight, "fp32").unpack(), weight)
    assert torch.equal(pack(weight.bfloat16(), "bf16").unpack(), weight.bfloat16().float())
    assert torch.equal(pack(weight, "bf16").unpack(), weight.bfloat16().float())
    assert torch.equal(pack(weight.t().contiguous().t(), "fp32", gate_up=True).unpack(), weight)


def test_quantisation_formulas():
    weight = torch.randn(64, 64) * torch.logspace(-3, 2, 64)[:, None]
    weight[3] = 0
    packed = pack(weight, "int8_a8")
    scale = weight.abs().amax(1) / 127
    torch.testing.assert_close(packed.scales, scale)
    assert bool(((packed.unpack() - weight).abs() <= scale[:, None] * 0.5001).all())
    int4 = pack(weight, "int4").unpack().view(64, 2, 32)
    groups = weight.view(64, 2, 32)
    symmetric = groups.abs().amax(-1, keepdim=True) / 7
    naive = (groups / symmetric.clamp(min=1e-12)).round() * symmetric
    assert ((int4 - groups) ** 2).sum() < ((naive - groups) ** 2).sum()
    assert packed.num_bytes == 64 * 64 + 64 * 8


@pytest.mark.parametrize("format", FORMATS)
def test_gathered_rows(format):
    packed = pack(torch.randn(150, 160), format)
    ids = torch.tensor([149, 0, 64, 63, 7, 7])
    torch.testing.assert_close(gather_rows(ids, packed, 2.5), packed.unpack()[ids] * 2.5)
    assert torch.equal(gather_rows(torch.tensor([-1, 150]), packed), torch.zeros(2, 160))


@pytest.mark.parametrize("m", [1, 6, 40])
@pytest.mark.parametrize("format", FORMATS)
def test_argmax_is_that_of_the_products(format, m):
    packed = pack(torch.randn(1000, 64), format)
    x = torch.randn(m, 64)
    logits = linear(x, packed)
    for n_valid in (1000, 613):
        ids, values = linear_argmax(x, packed, n_valid)
        assert torch.equal(ids, logits[:, :n_valid].argmax(-1))
        assert torch.equal(values, logits[:, :n_valid].amax(-1))


@pytest.mark.parametrize("m", [1, 20])
def test_argmax_takes_the_lowest_id_on_ties(m):
    weight = torch.zeros(900, 32)
    weight[[70, 71, 320, 899]] = 1
    ids, values = linear_argmax(torch.ones(m, 32), pack(weight, "bf16"), 900)
    assert ids.tolist() == [70] * m and values.tolist() == [32] * m
    ids, _ = linear_argmax(torch.ones(m, 32), pack(weight, "bf16"), 70)
    assert ids.tolist() == [0] * m


@pytest.mark.parametrize("format", FORMATS)
def test_experts(format):
    num_experts, top_k, tokens, k = 6, 2, 37, 96
    experts = [pack(torch.randn(140, k), format, gate_up=True) for _ in range(num_experts)]
    x = torch.randn(tokens, k)
    chosen = torch.rand(tokens, num_experts - 1).topk(top_k).indices  # the last expert has no rows
    chosen[chosen == 2] = 5
    chosen[chosen == 5] = 4  # nor have experts 2 and 5
    order = chosen.flatten().argsort(stable=True)
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32)
    offsets[1:] = torch.bincount(chosen.flatten(), minlength=num_experts).cumsum(0)
    found = linear_experts(x, experts, order, offsets, top_k)
    for slot, expert in enumerate(chosen.flatten().tolist()):
        assert torch.equal(found[slot], linear(x[slot // top_k, None], experts[expert])[0])


def test_no_rows_and_many_rows():
    packed = pack(torch.randn(64, 32), "bf16")
    assert linear(torch.empty(0, 32), packed).shape == (0, 64)
    x = torch.randn(5000, 32)  # more than are laid out at a time
    assert relative(linear(x, packed), x @ packed.unpack().T) < ERRORS["bf16"]


def test_one_and_three_threads_give_the_same_bits():
    library = native.native_library()
    before = library.num_threads
    packed = pack(torch.randn(300, 640), "bf16")
    x = torch.randn(40, 640)
    results = []
    try:
        for num_threads in (1, 3):
            library.set_threads(num_threads)
            results.append((linear(x, packed), *linear_argmax(x, packed, 300)))
    finally:
        library.set_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_is_the_cpu_s_linear(dtype):
    kernel = select_kernel("linear", device=torch.device("cpu"), dtype=dtype, in_features=64, out_features=10)
    assert isinstance(kernel, NativeLinear)
    weight, bias = torch.randn(10, 64).to(dtype), torch.randn(10).to(dtype)
    packed = kernel.pack(weight)
    x = torch.randn(2, 3, 64).to(dtype)
    bound = 1e-2 if dtype is torch.bfloat16 else 1e-5
    for _ in range(2):
        wanted = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
        torch.testing.assert_close(kernel(x, packed, bias).float(), wanted, rtol=bound, atol=bound * 8)
        bias.mul_(2)  # a bias that changes is seen
    odd = select_kernel("linear", device=torch.device("cpu"), dtype=dtype, in_features=40, out_features=10)
    assert not isinstance(odd, NativeLinear)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((8, 40), {}, "in_features must be a multiple of 32 up to 65536, got 40"),
        ((7, 32), {"gate_up": True}, "out_features must be positive, and even with gate_up, got 7"),
        ((8, 32), {"format": "int3"}, "format must be one of bf16, int8, int8_a8, int4, fp32, got 'int3'"),
        ((8, 32), {"epilogue": "silu_mul"}, "epilogue 'silu_mul' and gate_up=False do not go together"),
    ],
)
def test_bad_weights_are_named(shape, options, message):
    options = {"format": "bf16"} | options
    with pytest.raises(ConfigError, match=re.escape(message)):
        pack(torch.randn(*shape), options.pop("format"), **options)


def test_the_tiles_do_not_spill():
    """No vector register goes through the stack in a tile's loops: that halves their speed."""
    if shutil.which("objdump") is None or "avx512f" not in cpu_facts().flags:
        pytest.skip("needs objdump and AVX-512")
    text = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(native.native_library().path)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    functions = re.findall(
        r"^[0-9a-f]+ <((?:f32|wide|u8|bf16|int4)_\d+)>:\n(.*?)(?:\n\n|\Z)", text, re.M | re.S
    )
    names = {name for name, _ in functions}
    assert {"f32_14", "wide_12", "u8_14", "int4_6"} <= names
    spills = {name: len(re.findall(r"\(%r[sb]p.*zmm|zmm.*\(%r[sb]p", body)) for name, body in functions}
    assert not {name: count for name, count in spills.items() if count}


@pytest.mark.parametrize("tier", ["baseline", "avx2", "avx512 with fast bf16"])
def test_other_processors_kernels(tier, monkeypatch):
    facts = cpu_facts()
    needed = "avx512_bf16" if tier.startswith("avx512") else "avx2"
    if needed not in facts.flags:
        pytest.skip(f"this processor has no {needed}")
    target = Target.of(facts, tier.split()[0])
    is_fast = tier.startswith("avx512")
    if is_fast:
        target = Target(target.tier, (*target.flags, "-DATOM_FAST_BF16=1"), target.optional_flags)
    other = native.NativeLibrary(build_library(target), 2)
    weight, x = torch.randn(150, 352), torch.randn(40, 352)
    expected = {name: linear(x, pack(weight, name)) for name in FORMATS}
    monkeypatch.setattr("atom.kernels.cpu.native.weights._library", lambda: other)
    for name in FORMATS:
        packed = pack(weight, name)
        whole = linear(x, packed)
        bound = 4e-3 if is_fast and name == "bf16" else ERRORS[name]
        assert relative(whole, x @ packed.unpack().T) < bound, name
        for m in (1, 3, 17):
            assert torch.equal(linear(x[:m], packed), whole[:m]), (name, m)
        if name in ("int8", "int8_a8"):
            assert relative(whole, expected[name]) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_weight_is_packed_where_it_lies(dtype):
    format = "bf16" if dtype is torch.bfloat16 else "fp32"
    for n in (64, 640, 600):  # the last one has a panel that is not full
        weight = torch.randn(n, 96).to(dtype)
        wanted = pack(weight, format)
        address = weight.data_ptr()
        found = pack(weight, format, in_place=True)
        assert torch.equal(found.data, wanted.data)
        assert (found.data.data_ptr() == address) == (n % 64 == 0)
