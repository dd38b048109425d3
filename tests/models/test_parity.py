"""Every family against transformers on tiny random weights: logits of whole and chunked prefill and of decode."""

import pytest
import torch
import transformers

from tests.models.harness import PagedRunner, load_model

VOCAB = 99
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = 10
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
GEMMA = {
    "head_dim": 32,
    "num_hidden_layers": 7,
    "num_key_value_heads": 1,
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 48,
}

# name -> (family, configuration)
CASES = {
    "llama": ("Llama", {}),
    "llama_mha_bias_head_dim": (
        "Llama",
        {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True, "head_dim": 24},
    ),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "llama3_rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama_linear_rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "llama_dynamic_rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "llama_yarn": ("Llama", {"rope_parameters": YARN}),
    "llama_yarn_mscale": (
        "Llama",
        {
            "rope_parameters": YARN
            | {"mscale": 0.9, "mscale_all_dim": 0.7, "beta_fast": 16, "truncate": False}
        },
    ),
    "mistral_full": ("Mistral", {"sliding_window": None}),
    "mistral_window": ("Mistral", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3_bias_yarn": ("Qwen3", {"head_dim": 16, "attention_bias": True, "rope_parameters": YARN}),
    "gemma3": ("Gemma3", GEMMA),
    "gemma3_rope_scaled_soft_cap": (
        "Gemma3",
        GEMMA
        | {
            "num_key_value_heads": 2,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100000.0},
            },
        },
    ),
}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """A saved checkpoint with an HF model of it: (folder, model in fp32)."""
    family, changes = CASES[request.param]
    name = "Gemma3Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{name}Config")(**(BASE | changes), attn_implementation="eager")
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():  # spread what initialisation leaves at 0 or 1, and make scores worth a softmax
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif "_proj" in key:
                parameter.mul_(6.0)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return folder, model


def ids_of(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


@torch.inference_mode()
def expected(model, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0].float()


def assert_close(found: torch.Tensor, wanted: torch.Tensor, bound: float = 1e-4) -> None:
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max().item() <= bound


def test_fp32_logits_match_transformers(case):
    folder, reference = case
    runner = PagedRunner(load_model(folder, torch.float32))
    ids = {name: ids_of(i, n) for i, (name, n) in enumerate({"whole": 41, "chunks": 43, "steps": 30}.items())}
    wanted = {name: expected(reference, tokens) for name, tokens in ids.items()}

    # Whole prefill beside the first chunk of another prompt and the first token of a third.
    out = runner.step(prefill={"whole": ids["whole"], "chunks": ids["chunks"][:9], "steps": ids["steps"][:1]})
    assert_close(out["whole"], wanted["whole"])
    assert_close(out["chunks"], wanted["chunks"][:9])
    # Chunks that cross pages and the window, beside decode of a sequence of another length.
    for start, stop in ((9, 12), (12, 13), (13, 36), (36, 43)):
        step = runner.lens["steps"]
        out = runner.step(
            prefill={"chunks": ids["chunks"][start:stop]}, decode={"steps": ids["steps"][step : step + 1]}
        )
        assert_close(out["chunks"], wanted["chunks"][start:stop])
        assert_close(out["steps"], wanted["steps"][step : step + 1])
    # Token by token, alone.
    for position in range(runner.lens["steps"], 30):
        out = runner.step(decode={"steps": ids["steps"][position : position + 1]})
        assert_close(out["steps"], wanted["steps"][position : position + 1])


def test_decode_batch_of_mixed_lengths(case):
    folder, reference = case
    runner = PagedRunner(load_model(folder, torch.float32))
    lengths = {"a": 1, "b": 3, "c": 8, "d": 17, "e": 40, "f": 60}
    ids = {name: ids_of(50 + i, n + 6) for i, (name, n) in enumerate(lengths.items())}
    wanted = {name: expected(reference, tokens) for name, tokens in ids.items()}
    runner.step(prefill={name: ids[name][:n] for name, n in lengths.items()})
    for step in range(4):
        out = runner.step(decode={name: [ids[name][n + step]] for name, n in lengths.items()})
        for name, n in lengths.items():
            assert_close(out[name], wanted[name][n + step : n + step + 1])
    # A verify step of two tokens each, and an uneven one.
    out = runner.step(decode={name: ids[name][n + 4 : n + 6] for name, n in lengths.items()})
    for name, n in lengths.items():
        assert_close(out[name], wanted[name][n + 4 : n + 6])


def test_uneven_verify_step(case):
    folder, reference = case
    runner = PagedRunner(load_model(folder, torch.float32))
    ids = {"a": ids_of(1, 30), "b": ids_of(2, 30)}
    wanted = {name: expected(reference, tokens) for name, tokens in ids.items()}
    runner.step(prefill={"a": ids["a"][:5], "b": ids["b"][:23]})
    out = runner.step(decode={"a": ids["a"][5:9], "b": ids["b"][23:25]})
    assert_close(out["a"], wanted["a"][5:9])
    assert_close(out["b"], wanted["b"][23:25])


def test_bf16_is_as_close_to_fp32_as_transformers_in_bf16(case):
    folder, reference = case
    ids = ids_of(3, 41)
    exact = expected(reference, ids)
    theirs = expected(type(reference).from_pretrained(folder, dtype=torch.bfloat16).eval(), ids)
    runner = PagedRunner(load_model(folder, torch.bfloat16))
    ours = [runner.step(prefill={"s": ids[:33]})["s"]]
    ours += [runner.step(decode={"s": ids[i : i + 1]})["s"] for i in range(33, 41)]
    their_error = (theirs - exact).pow(2).mean().sqrt()
    our_error = (torch.cat(ours) - exact).pow(2).mean().sqrt()
    assert our_error <= 1.25 * their_error + 1e-3
