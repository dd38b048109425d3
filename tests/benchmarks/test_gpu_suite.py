"""The GPU suite's definitions, bounds and table, and one run of it on a tiny model without a GPU."""

import json

import pytest

from atom.benchmarks import gpu_suite
from atom.benchmarks.gpu_roofline import H200, H200_FP8, ModelShape
from atom.benchmarks.gpu_workloads import (
    FOLDER,
    Figures,
    Workload,
    load_workloads,
    read_model_config,
    run_workload,
)
from tests.helpers.tiny_model import make_tiny_model

DECODE = Workload("decode_b2", "decode", 4, 3, 2, 0.0, 1, 2, "all")


class Recorder:
    """An engine that answers at once and remembers what it was asked."""

    def __init__(self, missing=0, device_s=None):
        self.calls = []
        self.missing = missing
        self.device_s = device_s  # of a token
        self.busy_s = 0.0

    def device_seconds(self):
        return None if self.device_s is None else self.busy_s

    def generate(self, prompts, output_len, temperature):
        self.calls.append((prompts, output_len, temperature))
        self.busy_s += output_len * (self.device_s or 0.0)
        return [[7] * (output_len - self.missing) for _ in prompts]


def config_of(model):
    return read_model_config(FOLDER / "models" / model)


@pytest.mark.parametrize(
    "model, kind, batch, prompt, output, milliseconds",
    [
        # What the peers' own program prints for them.
        ("qwen3-0.6b", "decode", 1, 128, 256, 0.275),
        ("qwen3-0.6b", "decode", 32, 128, 256, 0.481),
        ("qwen3-0.6b", "prefill", 16, 1024, 1, 21.7),
        ("llama-3.1-8b", "prefill", 1, 8192, 1, 175.1),
        ("llama-3.1-8b", "throughput", 256, 1024, 512, 11630),
        ("qwen3-30b-a3b", "decode", 8, 128, 256, 5.869),
        ("qwen3-30b-a3b", "throughput", 64, 1024, 512, 8290),
    ],
)
def test_bounds_are_those_of_the_peers(model, kind, batch, prompt, output, milliseconds):
    bound = ModelShape(config_of(model)).bound_s(kind, batch, prompt, output, H200)
    assert bound * 1e3 == pytest.approx(milliseconds, rel=3e-3)


def test_a_decode_step_is_the_difference_of_two_runs():
    engine = Recorder()
    figures = run_workload(engine, DECODE, 2048, seed=0)
    assert [call[1] for call in engine.calls] == [3, 1] * 3
    assert len(figures.samples_s) == len(figures.first_token_s) == 2
    pairs = list(zip(figures.samples_s, figures.first_token_s, strict=True))
    assert figures.value == pytest.approx(sum((a - b) / 2 for a, b in pairs) / 2 * 1e3)
    prompts = [call[0] for call in engine.calls]
    assert prompts[0] == prompts[1] != prompts[2]
    assert all(10 <= token < 1048 for prompt in prompts[0] for token in prompt)


def test_a_gap_is_what_the_device_does_not_take_of_a_step():
    figures = run_workload(Recorder(device_s=2.0), DECODE, 2048, seed=0)
    assert figures.gap_s == pytest.approx(figures.seconds - 2.0)
    assert run_workload(Recorder(), DECODE, 2048, seed=0).gap_s is None
    figures = Figures("decode_b1", "decode", 128, 256, 1, 0.0, seconds=0.5e-3, gap_s=8e-6)
    assert gpu_suite.device_facts(config_of("qwen3-0.6b"), figures) == "gap 8.0 us, 1.6%"


def test_a_prefill_is_printed_with_its_share_of_the_matmul_peak():
    config = config_of("llama-3.1-8b")
    bound = ModelShape(config).bound_s("prefill", 16, 1024, 1, H200)
    figures = Figures("prefill_16x1024", "prefill", 1024, 1, 16, 0.0, value=2e3 * bound, seconds=2 * bound)
    assert gpu_suite.row("llama-3.1-8b", config, figures).endswith("| 376 TFLOP/s, 50% of peak |")


def test_a_model_in_fp8_is_measured_against_its_own_bound():
    config = config_of("llama-3.1-8b")
    wide, narrow = ModelShape(config), ModelShape(config, layer_bytes=1)
    assert narrow.weight_bytes(1) - 2 * narrow.head == (wide.weight_bytes(1) - 2 * wide.head) / 2
    bound = narrow.bound_s("prefill", 16, 1024, 1, H200_FP8)
    figures = Figures("prefill_16x1024", "prefill", 1024, 1, 16, 0.0, value=2e3 * bound, seconds=2 * bound)
    line = gpu_suite.row("llama-3.1-8b", config, figures, is_fp8=True)
    assert "| 50% |" in line and line.endswith("50% of peak |")


def test_answers_of_another_length_are_no_result():
    with pytest.raises(RuntimeError, match="wanted 2 answers of 3 tokens, got"):
        run_workload(Recorder(missing=1), DECODE, 2048, seed=0)


@pytest.mark.parametrize(
    "milliseconds, reached", [(2.0, "behind vLLM"), (1.0, "vLLM"), (0.75, "first"), (0.4, "final")]
)
def test_the_table_says_how_far_a_figure_gets(milliseconds, reached):
    figures = Figures("decode_b1", "decode", 128, 256, 1, 0.0, value=milliseconds, seconds=milliseconds / 1e3)
    line = gpu_suite.row("qwen3-0.6b", config_of("qwen3-0.6b"), figures)
    assert line.endswith(f"| {reached} |  |")
    assert line.count("|") == gpu_suite.HEADER.splitlines()[0].count("|")
    assert f"| {0.2754 / milliseconds:.0%} |" in line


def test_every_workload_of_the_dense_models_has_a_peer():
    spec, _ = load_workloads()
    peers = gpu_suite.peer_figures()
    for model in gpu_suite.DENSE_MODELS:
        assert {w.id for w in spec.of_model(model)} == set(peers[model])


def test_a_file_that_is_no_workload_file_is_named(tmp_path):
    path = tmp_path / "other.json"
    path.write_text('{"seed": 0}')
    with pytest.raises(ValueError, match="other.json is no workload file"):
        load_workloads(path)


@pytest.mark.parametrize("in_process", [False, True])
def test_runs_a_model_and_keeps_results_as_they_come(in_process, tmp_path, capsys):
    make_tiny_model(tmp_path / "tiny", "llama")
    config = json.loads((tmp_path / "tiny" / "config.json").read_text())
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(config | {"vocab_size": 2048}))
    names = (
        "id",
        "kind",
        "prompt_len",
        "output_len",
        "concurrency",
        "temperature",
        "warmup",
        "repeats",
        "models",
    )
    rows = [
        ("decode_b1", "decode", 8, 4, 1, 0.0, 0, 1, "all"),
        ("tput_c64", "throughput", 8, 4, 3, 1.0, 0, 1, ["tiny"]),
        ("too_long", "prefill", 4000, 1, 1, 0.0, 0, 1, "all"),
        ("of_another", "prefill", 8, 1, 1, 0.0, 0, 1, ["other"]),
    ]
    spec = {"dtype": "float32", "max_model_len": 128, "seed": 0, "models": {"tiny": "tiny"}}
    spec["workloads"] = [dict(zip(names, values, strict=True)) for values in rows]
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    out = tmp_path / "out.json"
    command = ["--workloads", str(tmp_path / "spec.json"), "--device", "cpu", "--json", str(out)]
    if in_process:
        command.append("--in-process")
    assert gpu_suite.main(command) == 1  # one failed
    (entry,) = json.loads(out.read_text())["models"]
    assert [result["id"] for result in entry["results"]] == ["decode_b1", "tput_c64", "too_long"]
    assert entry["results"][0]["value"] > 0 and "4000" in entry["results"][2]["error"]
    assert entry["engine"]["device"] == "cpu" and entry["engine"]["settings"]["load_dummy"] == "xavier"
    assert entry["engine"]["settings"]["in_process"] is in_process
    assert capsys.readouterr().out.count("| tiny |") == 3
