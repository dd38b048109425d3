"""A fused decode step says what the modules say: each family, in batches, with and without a row table."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from atom.config import Config
from atom.config_parts import OnlineQuantConfig
from atom.kernels.registry import override_kernel
from atom.model_engine.model_runner import ModelRunner
from atom.model_engine.runner.fused_steps import buffer_bytes
from atom.model_loader.model_files import ModelFiles
from atom.model_ops import fused_cuda
from atom.model_ops.fused_cuda import FusedCudaDecoder, fused_cuda_decoder, why_not
from atom.model_ops.online_quant import apply_online_quant
from atom.model_ops.outbox import Outbox
from atom.models.registry import get_model_class
from atom.platforms import get_platform
from atom.platforms.cuda import CudaPlatform
from atom.sampling_params import SamplingParams
from atom.utils.forward_context import Context, ForwardContext, HeadWork
from tests.helpers.core_driver import CoreDriver
from tests.helpers.tiny_model import make_tiny_model
from tests.models.harness import PagedRunner, load_model

CPU = get_platform("cpu")
PROMPTS = {"a": list(range(3, 30)), "b": [7], "c": list(range(90, 101))}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    families = ("llama", "qwen2", "qwen3", "mistral", "gemma3")
    return {family: make_tiny_model(root / family, family) for family in families}


def plain_model(folder, dtype=torch.float32):
    with override_kernel("linear", "reference"):
        return load_model(folder, dtype)


def model_without_memory(folder, dtype=torch.float32):
    """As memory is planned with."""
    config = ModelFiles.resolve(str(folder)).hf_config
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"), override_kernel("linear", "reference"):
            return get_model_class(config.architectures)(config)
    finally:
        torch.set_default_dtype(before)


def decode(model, steps, is_fused):
    """Logits of ``steps`` decode steps behind the same prompts, each fed the best id of the one before."""
    model.fused = None
    if is_fused:
        model.fused, reason = fused_cuda_decoder(model.dense_decoder(), CPU, max_tokens=8)
        assert reason is None
    runner = PagedRunner(model, block_size=16)
    logits = runner.step(PROMPTS)
    found = []
    for _ in range(steps):
        ids = {name: [int(rows[-1].argmax())] for name, rows in logits.items()}
        logits = runner.step(decode=ids)
        found.append(torch.cat(list(logits.values())))
        if is_fused:
            fused = model.fused
            n = len(ids)
            assert torch.equal(fused.token_ids[:n], found[-1].argmax(-1)) and fused.is_finite[:n].all()
            assert torch.allclose(fused.logits[:n], found[-1], atol=1e-4), "logits of the head"
    return torch.stack(found)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral"])
def test_fused_steps_equal_the_modules(folders, family):
    model = plain_model(folders[family])
    wanted, found = (decode(model, 2, is_fused) for is_fused in (False, True))
    assert (found - wanted).abs().max() < 2e-4 * wanted.abs().max()
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))


def test_a_step_of_one_sequence(folders):
    model = plain_model(folders["qwen3"])
    steps = []
    for is_fused in (False, True):
        model.fused = fused_cuda_decoder(model.dense_decoder(), CPU, max_tokens=8)[0] if is_fused else None
        runner = PagedRunner(model, block_size=16)
        runner.step({"a": PROMPTS["a"]})
        steps.append(torch.cat([runner.step(decode={"a": [i]})["a"] for i in (5, 250)]))
    assert (steps[0] - steps[1]).abs().max() < 2e-4 * steps[0].abs().max()


def test_a_fused_layer_is_five_launches(folders, monkeypatch):
    model = plain_model(folders["llama"])
    model.fused, _ = fused_cuda_decoder(model.dense_decoder(), CPU, max_tokens=8)
    launches = []
    for name in ("_linear", "_attention"):
        own = getattr(model.fused, name)
        monkeypatch.setattr(
            model.fused, name, lambda *a, own=own, name=name, **k: (launches.append(name), own(*a, **k))
        )
    runner = PagedRunner(model, block_size=16)
    runner.step({"a": [1, 2]})
    assert launches == [], "a prefill runs through the modules"
    runner.step(decode={"a": [3]})
    assert launches == ["_linear", "_attention", "_linear", "_linear", "_linear"] * 2


def test_a_launch_that_prepares_a_step_embeds_it(folders, monkeypatch):
    model = plain_model(folders["qwen3"])
    embedded, logits = [], []
    own_embed = fused_cuda.embed
    monkeypatch.setattr(fused_cuda, "embed", lambda *a: (embedded.append(a[0]), own_embed(*a)))
    for is_prepared in (False, True):
        model.fused, _ = fused_cuda_decoder(model.dense_decoder(), CPU, max_tokens=8)
        own_forward = model.fused.forward

        def forward(ids, positions, own=own_forward, fused=model.fused):
            packed = torch.cat((torch.arange(len(ids)), torch.ones(len(ids)))).int()
            tables = torch.zeros(1, len(ids), 9, dtype=torch.int32)
            inputs = fused.prepare(packed, positions.int(), ids, tables, len(ids), 99, 16, False)
            assert torch.equal(inputs[1], ids) and torch.equal(inputs[2], positions)
            return own(inputs[1], positions)

        if is_prepared:
            monkeypatch.setattr(model.fused, "forward", forward)
        runner = PagedRunner(model, block_size=16)
        runner.step(PROMPTS)
        logits.append(torch.cat(list(runner.step(decode={"a": [5], "b": [6], "c": [7]}).values())))
    assert torch.equal(*logits)
    assert len(embedded) == 1, "the step that was not prepared"


def test_a_step_leaves_its_ids_in_host_memory(folders):
    model = plain_model(folders["qwen3"])
    model.fused, _ = fused_cuda_decoder(model.dense_decoder(), CPU, max_tokens=8)
    assert model.fused.outbox is None, "they are there already"
    model.fused.outbox = outbox = Outbox(8, torch.device("cpu"))
    runner = PagedRunner(model, block_size=16)
    runner.step(PROMPTS)
    for count in (1, 2):
        ids = runner.step(decode={"a": [5], "c": [7]})
        best = [int(rows[-1].argmax()) for rows in ids.values()]
        number, host_ids, flags = outbox.tensors
        assert number.item() == count and host_ids[count, :3].tolist() == [count, *best]
        assert flags[count].tolist() == [True] * 2 + [False] * 6
    head = HeadWork(np.arange(2), 0, True, False)
    model.fused.finish(head, model.fused.hidden[:2])
    assert head.is_done and head.letter is None, "the step was no replay, so it is not counted"


@pytest.mark.parametrize(("max_tokens", "has_gluon"), [(8, False), (64, True), (100, True), (4096, True)])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_what_it_will_allocate_is_known_before_weights_are_read(folders, family, max_tokens, has_gluon):
    options = {"max_tokens": max_tokens, "has_gluon": has_gluon}
    fused = FusedCudaDecoder(plain_model(folders[family]).dense_decoder(), **options)
    rooms = {key: value for key, value in vars(fused).items() if isinstance(value, torch.Tensor)}
    assert rooms.pop("_table").numel() and rooms.pop("_flags").nbytes == 8
    rooms |= {name: getattr(fused._linear._workspace, name) for name in ("partial", "arrivals", "shares")}
    rooms |= {
        name: value for name, value in vars(fused._attention).items() if isinstance(value, torch.Tensor)
    }
    wanted = sum(room.nbytes for room in rooms.values())
    decoder = model_without_memory(folders[family]).dense_decoder()
    assert decoder.head.packed is None
    assert FusedCudaDecoder.num_bytes(decoder, **options) == wanted


def test_memory_is_planned_with_what_a_fused_decoder_will_allocate(folders, monkeypatch):
    monkeypatch.setattr(CudaPlatform, "architecture", lambda self: "sm_90")
    monkeypatch.setattr(CudaPlatform, "describe", lambda self: {"architecture": "sm_90"})
    config, platform = Config("m", max_num_seqs=512), CudaPlatform()
    model = model_without_memory(folders["llama"], torch.bfloat16)
    wanted = FusedCudaDecoder.num_bytes(model.dense_decoder(), max_tokens=512, has_gluon=True)
    assert buffer_bytes(config, platform, model) == wanted > 1 << 20
    assert buffer_bytes(config, CPU, model) == buffer_bytes(config, platform, None) == 0
    assert buffer_bytes(config, platform, model_without_memory(folders["llama"])) == 0, "its dtype is another"
    apply_online_quant(model, OnlineQuantConfig(global_quant_config="ptpc_fp8"))
    assert buffer_bytes(config, platform, model) == 0, "fp8 layers run as modules"
    model = model_without_memory(folders["llama"], torch.bfloat16)
    monkeypatch.setenv("ATOM_FUSED_DECODE", "0")
    assert buffer_bytes(config, platform, model) == 0


def test_what_is_not_fused_says_why(folders):
    assert why_not(None, CPU) == "its layers are not dense"
    gemma = plain_model(folders["gemma3"])
    assert "norms behind" in why_not(gemma.dense_decoder(), CPU)
    llama = plain_model(folders["llama"])
    assert why_not(llama.dense_decoder(), CPU) is None
    assert "not bfloat16" in why_not(llama.dense_decoder(), CudaPlatform())


@pytest.mark.parametrize(
    ("level", "reason"), [(0, "--mark-trace labels modules"), (3, "its dtype is torch.float32, not bfloat16")]
)
def test_modules_that_are_to_be_marked_run_where_nothing_is_compiled(folders, caplog, level, reason):
    config = Config("m", mark_trace=True, compilation_config={"level": level})
    tables = SimpleNamespace(computed=None, last_token=None)
    runner = SimpleNamespace(
        model=plain_model(folders["llama"]), hf_config=SimpleNamespace(num_hidden_layers=2), config=config,
        platform=CudaPlatform(), _forward=SimpleNamespace(tables=tables),
    )  # fmt: skip
    with caplog.at_level("INFO"):
        assert ModelRunner._fused_decoder(runner) is None
    assert f"steps run module by module: {reason}" in caplog.text


def test_steps_that_are_not_pure_decodes_are_left_alone(folders):
    model = plain_model(folders["llama"])
    fused, _ = fused_cuda_decoder(model.dense_decoder(), CPU, max_tokens=4)
    assert fused.max_tokens == 4
    assert not fused.takes(ForwardContext(context=Context()), 1), "outside of any step"
    runner = PagedRunner(model, block_size=16)
    name = next(iter(model.attention_layers()))
    for num_prefill, lens, takes in (
        (1, [3], False),
        (0, [1, 1], True),
        (0, [2, 1], False),
        (0, [1] * 5, False),
    ):
        chunks = [(str(i), [1] * n) for i, n in enumerate(lens)]
        for key, ids in chunks:
            runner._extend(key, len(ids))
        context = ForwardContext(attn_metadata={name: runner._metadata(0, chunks, num_prefill)})
        assert fused.takes(context, sum(lens)) == takes
        context.tr_graph = "replay"
        assert not fused.takes(context, sum(lens))


def test_steps_of_many_sequences_are_taken_where_kernels_serve_all_their_products(folders, monkeypatch):
    decoder = plain_model(folders["llama"]).dense_decoder()
    assert fused_cuda_decoder(decoder, CPU, max_tokens=256)[0].max_tokens == 64, "portable kernels"
    fused = FusedCudaDecoder(decoder, max_tokens=100, has_gluon=True)
    assert fused.max_tokens == 100 and len(fused._x) == len(fused._gated) == 128
    assert len(fused.logits) == len(fused.hidden) == 64 and len(fused.many_hidden) == 100
    assert FusedCudaDecoder(decoder, max_tokens=4096, has_gluon=True).max_tokens == 512
    for hidden, is_done in ((fused.many_hidden[:70], False), (fused.hidden[:7], True)):
        head = HeadWork(np.arange(len(hidden)), 0, True, False)
        fused.finish(head, hidden)
        assert head.is_done == is_done, "the head of many sequences is left to the model"
    first = fused._embedding(65).half_norm
    assert first[0] is fused._layers[0].qkv.norm and fused._embedding(64).half_norm is None
    monkeypatch.setattr(fused_cuda, "serves", lambda shape, n, has_gluon: shape.K != 128)
    assert FusedCudaDecoder(decoder, max_tokens=100, has_gluon=True).max_tokens == 64


def test_the_engine_says_the_same_with_fused_decoding(folders, monkeypatch):
    """Greedy requests beside one that is sampled, whose steps need logits: whole answers."""
    greedy = SamplingParams(temperature=0.0, max_tokens=5)
    chance = SamplingParams(temperature=0.8, seed=3, max_tokens=2)
    answers, wanted = [], []
    for is_fused in (False, True):
        monkeypatch.setattr(
            "atom.model_engine.model_runner.ModelRunner._fused_decoder",
            lambda self: _fused_on_cpu(self, wanted) if is_fused else None,  # noqa: B023
        )
        with override_kernel("linear", "reference"):
            config = Config.build(
                str(folders["qwen3"]), device="cpu", dtype="float32", loop="overlapped", kv_cache_memory=2**22,
                max_num_seqs=4, compilation_config={"level": 0}, enforce_eager=True,
            )  # fmt: skip
            driver = CoreDriver(config)
        driver.add({1: [5, 6, 7], 2: list(range(40, 61))}, greedy)
        driver.add({3: [9, 8]}, chance)
        driver.run()
        driver.check_idle()
        answers.append(driver.tokens)
    assert answers[0] == answers[1]
    assert {True, False} <= set(wanted), "steps with logits and steps without"


def _fused_on_cpu(runner, wanted):
    fused = FusedCudaDecoder(runner.model.dense_decoder(), max_tokens=4)
    own = fused.want_logits
    fused.want_logits = lambda wants: (wanted.append(wants), own(wants))
    return fused
