"""A step as one native call: the same answers as the modules give, whatever the step is made of."""

import numpy as np
import pytest
import torch

from atom.config import Config
from atom.kernels.cpu.native.library import native_library
from atom.model_ops.fused_cpu import fuse_on_cpu
from atom.models.base import CausalLM
from atom.sampling_params import SamplingParams
from atom.utils.forward_context import HeadWork
from tests.helpers.core_driver import CoreDriver
from tests.helpers.tiny_model import FAMILIES, VOCAB_SIZE, make_tiny_model
from tests.models.harness import PagedRunner, load_model

pytestmark = pytest.mark.skipif(native_library() is None, reason="needs the native library")
GREEDY = SamplingParams(temperature=0.0, max_tokens=10)
IDS = [(7 * i * i + 13 * i) % 250 + 1 for i in range(80)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    tied = {"tie_word_embeddings": True}
    made = {
        family: make_tiny_model(root / family, family, **(tied if family in ("qwen3", "gemma3") else {}))
        for family in FAMILIES
    }
    biases = {"mlp_bias": True, "attention_bias": True, "intermediate_size": 160}  # panels that are not full
    return made | {"biased llama": make_tiny_model(root / "biased", "llama", **biases)}


def fuse(model: CausalLM) -> None:
    model.fused, reason = fuse_on_cpu(model.dense_decoder())
    assert reason is None


def steps(model: CausalLM) -> torch.Tensor:
    """Logits of a prefill, a chunk after a chunk, a mixed step, decodes, and an uneven verify step."""
    runner = PagedRunner(model)
    results = [
        runner.step(prefill={"a": IDS[:40], "b": IDS[:5]}),
        runner.step(prefill={"b": IDS[5:30], "c": IDS[3:20]}, decode={"a": IDS[40:41]}),
        runner.step(decode={"a": IDS[41:42], "b": IDS[30:31], "c": IDS[20:21]}),
        runner.step(decode={"a": IDS[42:45], "b": IDS[31:32], "c": IDS[21:23]}),
    ]
    return torch.cat([logits for result in results for logits in result.values()])


@pytest.mark.parametrize("family", [*FAMILIES, "biased llama"])
def test_fp32_logits_equal_the_modules(folders, family):
    model = load_model(folders[family], torch.float32)
    wanted = steps(model)
    fuse(model)
    found = steps(model)
    assert (found - wanted).norm() / wanted.norm() < 5e-6
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_bf16_is_as_close_to_fp32_as_the_modules_are(folders, family):
    exact = steps(load_model(folders[family], torch.float32))
    model = load_model(folders[family], torch.bfloat16)
    modules = (steps(model) - exact).norm()
    fuse(model)
    assert (steps(model) - exact).norm() < 1.05 * modules


def work(rows, is_argmax=True, keeps_hidden=False, num_valid_ids=VOCAB_SIZE):
    return HeadWork(np.array(rows), num_valid_ids, is_argmax, keeps_hidden)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("keeps_hidden", [False, True])
def test_the_head_computes_the_rows_that_sample_and_no_others(folders, family, keeps_hidden):
    model = load_model(folders[family], torch.float32)
    batch = {"prefill": {"a": IDS[:20], "b": IDS[5:12], "c": IDS[:3]}}
    wanted = torch.cat(list(PagedRunner(model).step(**batch).values()))[[19, 29]]
    fuse(model)
    best = work([19, 29], keeps_hidden=keeps_hidden)
    found = PagedRunner(model).step(**batch, head=best)
    if keeps_hidden:
        torch.testing.assert_close(torch.cat(list(found.values()))[[19, 29]], wanted, rtol=1e-4, atol=1e-4)
    assert best.is_done and best.logits is None
    assert best.best_ids.tolist() == wanted.argmax(-1).tolist()
    assert best.is_finite.all()
    few = work([19, 29], num_valid_ids=40, keeps_hidden=keeps_hidden)
    PagedRunner(model).step(**batch, head=few)
    assert few.best_ids.tolist() == wanted[:, :40].argmax(-1).tolist()
    logits = work([19, 29], is_argmax=False, keeps_hidden=keeps_hidden)
    PagedRunner(model).step(**batch, head=logits)
    assert logits.best_ids is None
    torch.testing.assert_close(logits.logits, wanted, rtol=1e-4, atol=1e-4)
    nothing = work([], keeps_hidden=keeps_hidden)
    PagedRunner(model).step(**batch, head=nothing)
    assert nothing.is_done and nothing.logits is None and nothing.best_ids is None


def test_a_row_that_is_not_finite_is_seen_and_yields_an_id(folders):
    model = load_model(folders["llama"], torch.float32)
    model.model.norm.weight.fill_(float("nan"))
    fuse(model)
    head = work([2])
    PagedRunner(model).step(prefill={"a": IDS[:3]}, head=head)
    assert not head.is_finite.any()
    assert 0 <= head.best_ids[0] < VOCAB_SIZE


def test_soft_capped_logits(folders):
    model = load_model(folders["gemma3"], torch.float32)
    model.logits_soft_cap = 2.0
    wanted = PagedRunner(model).step(prefill={"a": IDS[:9]})["a"][-1:]
    fuse(model)
    head = work([8], is_argmax=False)
    PagedRunner(model).step(prefill={"a": IDS[:9]}, head=head)
    assert float(head.logits.abs().max()) < 2.0
    torch.testing.assert_close(head.logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("head_dtype", ["auto", "int8"])
def test_a_tied_embedding_is_read_from_the_packed_head(folders, head_dtype):
    model = load_model(folders["gemma3"], torch.float32, lm_head_dtype=head_dtype)
    assert model.model.embed_tokens.weight is None
    assert model.model.embed_tokens.packed is model.lm_head.packed
    modules = steps(model)
    fuse(model)
    fused = steps(model)
    # Activations are rounded to 8 bits: a hair decides to which side.
    assert (fused - modules).norm() / modules.norm() < (2e-2 if head_dtype == "int8" else 5e-6)


# -- in the engine


def run(folder, prompts, params=GREEDY, **fields) -> CoreDriver:
    fields = {"kv_cache_memory": 2**24, "max_num_batched_tokens": 32, "max_num_seqs": 5} | fields
    driver = CoreDriver(
        Config.build(str(folder), device="cpu", dtype="float32", prefix_hash_seed=1, **fields)
    )
    for request, ids in prompts.items():
        driver.add({request: ids}, params[request] if isinstance(params, dict) else params)
    driver.run()
    driver.check_idle()
    return driver


PROMPTS = {i: IDS[3 * i : 12 * i + 8] for i in range(5)}


@pytest.fixture
def modules_only(monkeypatch):
    """Models built from now on are not fused."""
    return lambda: monkeypatch.setenv("ATOM_FUSED_DECODE", "0")


@pytest.mark.parametrize("loop", ["plain", "overlapped"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_equals_the_modules(folders, family, loop, modules_only):
    fused = run(folders[family], PROMPTS, loop=loop)
    assert fused.core.worker.model.fused is not None
    modules_only()
    modules = run(folders[family], PROMPTS)
    assert modules.core.worker.model.fused is None
    assert fused.tokens == modules.tokens


def test_preempted_and_cached_text_equals_roomy_and_cold(folders):
    long = SamplingParams(temperature=0.0, max_tokens=30)
    roomy = run(folders["gemma3"], PROMPTS, long)
    small = {"num_kvcache_blocks": 7, "max_model_len": 96, "max_num_batched_tokens": 256}
    tight = run(folders["gemma3"], PROMPTS, long, **small)
    assert tight.core.scheduler.stats()["preemptions"] > 0
    assert tight.tokens == roomy.tokens
    again = {i + 10: ids for i, ids in PROMPTS.items()}
    roomy.add(again, long)
    roomy.run()
    assert roomy.core.scheduler.stats()["prefix_hit_tokens"] > 0
    assert [roomy.tokens[i + 10] for i in PROMPTS] == [roomy.tokens[i] for i in PROMPTS]


def test_sampling_beyond_arg_max_equals_the_modules(folders, modules_only):
    params = {
        0: GREEDY,
        1: SamplingParams(temperature=0.9, seed=5, top_p=0.9, max_tokens=10),
        2: SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2, max_tokens=10),
        3: SamplingParams(temperature=0.0, repetition_penalty=1.3, logit_bias={7: 3.0}, max_tokens=10),
        4: SamplingParams(temperature=0.0, bad_words=["a"], max_tokens=10),
    }
    fused = run(folders["qwen3"], PROMPTS, params)
    modules_only()
    modules = run(folders["qwen3"], PROMPTS, params)
    assert fused.tokens == modules.tokens


def test_a_decode_step_is_one_native_call(folders, monkeypatch):
    driver = CoreDriver(
        Config.build(str(folders["gemma3"]), device="cpu", dtype="bfloat16", kv_cache_memory=2**24)
    )
    driver.add(PROMPTS, GREEDY)
    driver.core.step()
    calls = []
    call = native_library().call
    monkeypatch.setattr(native_library(), "call", lambda name, *rest: (calls.append(name), call(name, *rest)))
    for number in range(1, 4):
        driver.core.step()
        assert calls == ["atom_program_step"] * number


@pytest.mark.parametrize("reason", ["switch", "dump", "marks"])
def test_what_needs_the_modules_gets_them(folders, reason, tmp_path, monkeypatch):
    fields = {}
    if reason == "dump":
        monkeypatch.setenv("ATOM_FWD_DUMP_DIR", str(tmp_path))
    elif reason == "marks":
        fields = {"mark_trace": True, "torch_profiler_dir": str(tmp_path)}
    else:
        monkeypatch.setenv("ATOM_FUSED_DECODE", "0")
    driver = run(folders["llama"], {0: IDS[:4]}, SamplingParams(temperature=0.0, max_tokens=2), **fields)
    assert driver.core.worker.model.fused is None
