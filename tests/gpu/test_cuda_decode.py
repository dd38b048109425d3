"""Fused decode steps on a CUDA device: every kernel at real shapes against fp32, recorded steps, whole answers."""

import pytest
import torch

from atom.benchmarks.decode_launches import SHAPES
from atom.benchmarks.decode_tune import Layers, choices_of
from atom.benchmarks.decode_variants import check_attention
from atom.config import Config
from atom.kernels.reference import decode as reference
from atom.kernels.triton.decode_linear import DecodeLinear, HeadBuffers, LinearArguments, head
from atom.kernels.triton.decode_parts import LOWEST
from atom.kernels.triton.decode_step import choose
from atom.kernels.triton.fused_attention_launch import (
    AttentionLayer,
    DecodeAttention,
    GroupedShape,
    StepTables,
    column_shape,
    grouped_shape,
)
from atom.model_ops.fused_cuda import FusedCudaDecoder
from atom.sampling_params import SamplingParams
from tests.helpers.core_driver import CoreDriver
from tests.helpers.decode_case import Case
from tests.helpers.tiny_model import make_tiny_model

pytestmark = pytest.mark.gpu

HALF = torch.bfloat16
BOUND = 1e-2  # of bf16 against fp32, as a share of the norm
LAYERS_SIZE = 440 << 20  # weights of two layers of the largest model
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def random(*shape, scale=1.0):
    return (torch.randn(shape, device="cuda") * scale).to(HALF)


def error(found, wanted):
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize("num_tokens", [1, 2, 8, 16, 17, 32, 64])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_linears_of_real_shapes(shape, num_tokens):
    run = DecodeLinear(torch.device("cuda"), has_gluon=IS_HOPPER, uses_pdl=IS_HOPPER)
    portable = DecodeLinear(torch.device("cuda"))
    for name, (rows, columns, has_norm, activation) in shape.linears.items():
        weight = random(rows, columns, scale=columns**-0.5)
        norm = 1 + random(columns, scale=0.1) if has_norm else None
        layer = LinearArguments(weight, norm, 1e-6, None, activation)
        x = random(num_tokens, columns, scale=3.0)
        residual = None if has_norm else random(num_tokens, rows)
        act = "silu" if activation else None
        wide = reference.fused_linear(
            x.float(), weight, norm=norm, eps=1e-6, activation=act, residual=residual
        )
        for kind in (run, portable):
            kind.reserve([layer.shape])
            out = torch.full_like(wide, float("nan"), dtype=HALF)
            for _ in range(3):  # arrivals are left as they were found
                kind(x, layer, out, residual)
                assert error(out, wide) < BOUND, f"{name} {kind.choice(layer.shape, num_tokens)}"


@pytest.mark.skipif(not IS_HOPPER, reason="rings and tiles are compiled for sm_90")
@pytest.mark.parametrize("kernel", ["ring", "tile"])
@pytest.mark.parametrize("num_tokens", [8, 27, 64])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_kernels_for_sm_90_at_real_shapes(shape, num_tokens, kernel):
    """The least and the most that a program asks for before it waits, without and with splits over K."""
    layers = Layers(shape, num_tokens, torch.device("cuda"), random(LAYERS_SIZE, scale=0.01))
    for part in shape.linears:
        tried = [c for c in choices_of(shape, part, num_tokens) if c.kernel == kernel]
        assert tried, f"{part} has no {kernel} for {num_tokens} tokens"
        tried.sort(
            key=lambda choice: (choice.blocks[2], choice.blocks[0] * choice.blocks[1] * choice.blocks[3])
        )
        for choice in {tried[0], tried[len(tried) // 2], tried[-1]}:
            assert layers.check(part, choice) == "", f"{part} {choice}"


@pytest.mark.parametrize("num_tokens", [8, 32])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_norms_half_done_by_the_launch_before(shape, num_tokens):
    run = DecodeLinear(torch.device("cuda"), has_gluon=IS_HOPPER, uses_pdl=IS_HOPPER)
    for before, after in (("o", "gate_up"), ("down", "qkv")):
        rows, columns, _, _ = shape.linears[before]
        producer = LinearArguments(random(rows, columns, scale=columns**-0.5))
        rows, columns, _, activation = shape.linears[after]
        norm = 1 + random(columns, scale=0.1)
        consumer = LinearArguments(random(rows, columns, scale=columns**-0.5), norm, 1e-6, None, activation)
        run.reserve([producer.shape, consumer.shape])
        x, residual = random(num_tokens, producer.shape.K), random(num_tokens, columns)
        stream, next_x = residual.clone(), torch.full_like(residual, float("nan"))
        out = torch.full((num_tokens, consumer.shape.N), float("nan"), dtype=HALF, device="cuda")
        scaled = run(x, producer, stream, stream, next_norm=norm, next_x=next_x)
        run(stream, consumer, out, scaled=scaled)
        assert error(stream, reference.fused_linear(x.float(), producer.weight, residual=residual)) < BOUND
        act = "silu" if activation else None
        wide = reference.fused_linear(stream.float(), consumer.weight, norm=norm, eps=1e-6, activation=act)
        assert error(out, wide) < BOUND, f"{before} -> {after}"


@pytest.mark.skipif(not IS_HOPPER, reason="products of more than 64 tokens are compiled for sm_90")
@pytest.mark.parametrize("num_tokens", [65, 96, 128, 200, 256])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_products_of_many_tokens_at_real_shapes(shape, num_tokens):
    layers = Layers(shape, num_tokens, torch.device("cuda"), random(LAYERS_SIZE, scale=0.01))
    for part in shape.linears:
        choice = choices_of(shape, part, num_tokens)[0]
        assert choice.kernel == "batch" and layers.check(part, choice) == "", f"{part} {choice}"


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_attention_of_very_few_sequences(shape):
    """Contexts from 1 to 2,000, each kernel that serves them, and on sm_90 two with other parts, warps and tiles.

    A variant takes seconds to compile; ``decode_chain --variants`` checks all of them.
    """
    layer = shape.attention_layer()
    variants = [{"column": column_shape(layer)}]
    if IS_HOPPER:
        others = GroupedShape(4, 8, 2, 144), GroupedShape(8, 4, 5, 255)
        variants += [{"grouped": one} for one in (grouped_shape(layer), *others)]
    for variant in variants:
        for batch in (1, 2):
            assert check_attention(shape, batch, **variant) < BOUND, f"{variant} of {batch}"


@pytest.mark.parametrize("has_gluon", [False, True], ids=["portable", "sm_90"])
@pytest.mark.parametrize("batch", [1, 3, 8, 64, 256])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_attention_of_real_shapes(shape, batch, has_gluon):
    if has_gluon and not IS_HOPPER:
        pytest.skip("compiled for sm_90 alone")
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    for longest in (300, 2500):
        lens = [longest - 37 * i if longest > 37 * i else 5 for i in range(batch)]
        columns = -(-longest // 16)
        pages = torch.randperm(batch * columns, device="cuda").int() + 1
        tables = pages.view(batch, columns)
        keys, values = (random(batch * columns + 1, kv_heads, 16, dim) for _ in range(2))
        slots = torch.tensor(
            [int(t[(n - 1) // 16]) * 16 + (n - 1) % 16 for t, n in zip(tables.tolist(), lens, strict=True)],
            device="cuda",
        )
        angle = torch.randn(batch, dim // 2, device="cuda")
        cos = torch.cat((angle.cos(), angle.cos()), -1).to(HALF)
        sin = torch.cat((-angle.sin(), angle.sin()), -1).to(HALF)
        norm = 1 + random(heads + kv_heads, dim, scale=0.1) if shape.has_qk_norm else None
        qkv = random(batch, (heads + 2 * kv_heads) * dim)
        own_keys, own_values = keys.clone(), values.clone()
        wanted = reference.fused_attention(
            qkv.float(), keys, values, tables, lens, slots, cos, sin, num_heads=heads, scale=dim**-0.5,
            qk_norm=norm, eps=1e-6,
        )  # fmt: skip
        layer = AttentionLayer(heads, kv_heads, dim, dim**-0.5, dim, 0, qk_norm=norm, eps=1e-6)
        run = DecodeAttention(torch.device("cuda"), [layer], 256, IS_HOPPER, has_gluon)
        step = StepTables(
            tables,
            None,
            torch.tensor(lens, dtype=torch.int32, device="cuda"),
            slots,
            cos[:, None],
            sin[:, None],
        )
        out = torch.full_like(wanted, float("nan"), dtype=HALF)
        for _ in range(3):
            run(qkv, layer, own_keys, own_values, step, out)
            assert error(out, wanted) < BOUND
        assert error(own_keys, keys) < 1e-3 and torch.equal(own_values, values)


@pytest.mark.parametrize(
    ("batch", "fields"),
    [(65, {"sinks": True}), (100, {"window": 300}), (256, {}), (256, {"soft_cap": 20.0}), (320, {})],
    ids=lambda value: next(iter(value), "plain") if isinstance(value, dict) else value,
)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_attention_of_many_sequences(shape, batch, fields):
    """Contexts from 0 to 2,000 in no order, and the same bits each time."""
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    lens = [0, 1, 2, *torch.randint(1, 2001, (batch - 3,)).tolist()]
    case = Case(lens, HALF, heads=heads, kv_heads=kv_heads, dim=dim, rotary=dim)
    fields = dict(fields)
    if "sinks" in fields:
        fields["sinks"] = torch.linspace(-1.0, 6.0, heads, device="cuda")
    if shape.has_qk_norm:
        fields["qk_norm"] = 1 + random(heads + kv_heads, dim, scale=0.1)
    launch = {"has_gluon": IS_HOPPER, "uses_pdl": IS_HOPPER}
    case.check(launch=launch, repeats=5, **fields)


@pytest.mark.parametrize("has_gluon", [False, True], ids=["portable", "sm_90"])
@pytest.mark.parametrize("lens", [[700], [1500, 3], [1500, 700, 300, 1, 0, 64, 65, 400]], ids=len)
def test_attention_finds_the_best_score_however_low_all_are(lens, has_gluon):
    """Of few sequences, their keys shared or not, and of a batch."""
    if has_gluon and not IS_HOPPER:
        pytest.skip("compiled for sm_90 alone")
    shape = SHAPES[1]
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    case = Case(lens, HALF, heads=heads, kv_heads=kv_heads, dim=dim, rotary=dim).lower_scores()
    launch = {"has_gluon": has_gluon, "uses_pdl": IS_HOPPER}
    case.check(launch=launch)
    for splits in (1, 4):
        case.check(launch=launch, splits=splits)


@pytest.mark.parametrize("num_tokens", [1, 8, 40])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_heads_of_real_shapes(shape, num_tokens):
    hidden, vocab = shape.hidden_size, shape.vocab_size
    weight, x = random(vocab, hidden, scale=hidden**-0.5), random(num_tokens, hidden)
    norm = 1 + random(hidden, scale=0.1)
    logits, _ = reference.greedy_head(x, weight, norm, 1e-6, vocab)
    buffers = HeadBuffers(
        torch.empty_like(x),
        torch.empty(num_tokens, vocab, dtype=HALF, device="cuda"),
        torch.full((num_tokens,), LOWEST.value, device="cuda"),
        torch.tensor([1, vocab - 100], dtype=torch.int32, device="cuda"),
    )
    head(x, LinearArguments(weight, norm, 1e-6), buffers, uses_pdl=IS_HOPPER)
    ids = torch.empty(num_tokens, dtype=torch.int64, device="cuda")
    finite = torch.empty(num_tokens, dtype=torch.bool, device="cuda")
    choose(buffers.keys, ids, finite)
    assert error(buffers.logits, logits) < BOUND
    assert torch.equal(ids, buffers.logits[:, : vocab - 100].argmax(-1)) and finite.all()


def answers_of(folder, prompts, sizes, max_tokens=(24,), logprobs=None):
    """Of greedy requests with decode graphs of ``sizes`` sequences: the driver when it has run.

    ``max_tokens``: as many groups of requests, each of which ends together.
    """
    config = Config.build(
        str(folder), device="cuda", dtype="bfloat16", max_num_batched_tokens=256, max_num_seqs=sizes[-1],
        kv_cache_memory=2**24, prefix_hash_seed=1,
        compilation_config={"level": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": sizes},
    )  # fmt: skip
    driver = CoreDriver(config)
    for number, most in enumerate(max_tokens):
        group = {i: ids for i, ids in prompts.items() if i % len(max_tokens) == number}
        driver.add(group, SamplingParams(temperature=0.0, max_tokens=most, logprobs=logprobs))
    driver.run()
    driver.check_idle()
    return driver


def check_alike(found):
    """In bf16 two ways differ by rounding: ids are alike until two candidates are as close as that."""
    num_alike = 0
    for seq_id, theirs in found[1].tokens.items():
        ours = found[0].tokens[seq_id]
        logs = [
            [entry for event in driver.events[seq_id] for entry in event.logprobs or []] for driver in found
        ]
        for step, (left, right) in enumerate(zip(*logs, strict=True)):
            assert abs(left.logprob - right.logprob) < 0.15, f"{seq_id} at {step}"
            if ours[step] != theirs[step]:
                break
            num_alike += 1
    return num_alike / sum(map(len, found[1].tokens.values()))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("num_prompts", [1, 5])
def test_answers_equal_those_of_the_modules(family, num_prompts, tmp_path, monkeypatch):
    folder = make_tiny_model(tmp_path / family, family)
    prompts = {i: [(i * 37 + j * 11) % 250 + 1 for j in range(6 + 17 * i)] for i in range(1, 1 + num_prompts)}
    found = []
    for switch in ("1", "0"):
        monkeypatch.setenv("ATOM_FUSED_DECODE", switch)
        answers = {}
        for logprobs in (None, 1):
            driver = answers[logprobs] = answers_of(folder, prompts, (1, 4, 8), logprobs=logprobs)
            assert (driver.core.worker.model.fused is not None) == (switch == "1")
        plain, logged = answers[None], answers[1]
        assert plain.tokens == logged.tokens, "an answer does not depend on whether somebody reads logits"
        found.append(logged)
    check_alike(found)


@pytest.mark.skipif(not IS_HOPPER, reason="steps of more than 64 sequences are fused on sm_90")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("num_prompts", [96, 256])
def test_answers_of_many_sequences_equal_those_of_the_modules(family, num_prompts, tmp_path, monkeypatch):
    """They end by quarters: steps of several buckets, without a head in the graph and with one."""
    folder = make_tiny_model(tmp_path / family, family)
    prompts = {i: [(i * 37 + j * 11) % 250 + 1 for j in range(3 + i % 29)] for i in range(num_prompts)}
    found, taken, own = [], [], FusedCudaDecoder.forward

    def forward(self, ids, positions):
        taken.append(len(ids))
        return own(self, ids, positions)

    monkeypatch.setattr(FusedCudaDecoder, "forward", forward)
    for switch in ("1", "0"):
        monkeypatch.setenv("ATOM_FUSED_DECODE", switch)
        taken.clear()
        sizes = (1, 8, 24, 64, 72, 128, 256)
        for logprobs in (None, 1):
            found.append(answers_of(folder, prompts, sizes, (6, 12, 18, 24), logprobs))
        assert set(taken) == (set(sizes) if switch == "1" else set())
    assert found[0].tokens == found[1].tokens, "an answer does not depend on whether somebody reads logits"
    assert all(len(tokens) == 6 + i % 4 * 6 for i, tokens in found[0].tokens.items())
    assert check_alike(found[1::2]) > 0.5
