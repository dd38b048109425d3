"""The CPU benchmark's arithmetic on made-up measurements, and its parts on tiny inputs."""

import json

import pytest

from atom.benchmarks import cpu_suite
from atom.benchmarks.child import ChildError, parse_result, run_child
from atom.benchmarks.cpu_peer import (
    SANITY_IDS,
    WORKLOADS,
    Measurement,
    PromptMaker,
    measure,
    peak_rss_of_tree,
)
from atom.benchmarks.cpu_report import (
    ATOM,
    ATOM_INT8,
    FIGURES,
    TARGETS,
    TRANSFORMERS,
    Contender,
    ModelSize,
    Record,
    Target,
    bandwidth_shares,
    format_table,
    limits_line,
    matmul_shares,
    ratios,
    summary,
)
from atom.benchmarks.demo_export import DemoFolder
from atom.benchmarks.machine_limits import MachineLimits, measure_limits

SIZE = ModelSize(num_block_params=100, num_head_params=150)
CONTENDERS = cpu_suite.CONTENDERS["bfloat16"]
LIMITS = MachineLimits(read_bandwidth=50_000, matmul_bf16=1e6, matmul_fp32=2e6)


def record(contender: str, round_: int, decode: float, **figures) -> Record:
    figures = {"start_to_first_token_s": 2.0, "peak_rss_bytes": 1_000_000_000, **figures}
    measurement = Measurement(sanity_ids=[1, 2], decode_tok_s=decode, **figures)
    return Record(contender, round_, measurement, LIMITS, others=0.0)


# The machine is twice as fast in round 1: ratios must not see it.
RECORDS = [
    record(TRANSFORMERS, 0, 20.0, prefill_512_tok_s=1000.0),
    record(ATOM, 0, 30.0, prefill_512_tok_s=1200.0),
    record(ATOM, 1, 60.0, prefill_512_tok_s=2400.0),
    record(TRANSFORMERS, 1, 40.0, prefill_512_tok_s=2000.0),
    record(TRANSFORMERS, 2, 20.0, prefill_512_tok_s=1000.0),
    record(ATOM, 2, 32.0, prefill_512_tok_s=1500.0, peak_rss_bytes=1_700_000_000),
]


def test_ratios_are_formed_inside_a_round():
    assert ratios(RECORDS, ATOM, TRANSFORMERS, "decode_tok_s") == [1.5, 1.5, 1.6]
    assert ratios(RECORDS[:3], ATOM, TRANSFORMERS, "decode_tok_s") == [1.5]  # round 1 lacks the reference


def test_a_figure_that_was_not_measured_has_no_ratio():
    assert ratios(RECORDS, ATOM, TRANSFORMERS, "concurrent_tok_s") == []
    assert Target("concurrent_tok_s", ATOM, 1.5, TRANSFORMERS).judge(RECORDS) is None


def test_decode_reads_an_int8_head_as_one_byte_an_element():
    bf16, int8 = Contender("a", "atom", "bfloat16"), Contender("b", "atom", "bfloat16", "int8")
    assert SIZE.decode_bytes(bf16) == 2 * 250
    assert SIZE.decode_bytes(int8) == 2 * 100 + 150
    assert SIZE.decode_bytes(Contender("c", "atom", "float32")) == 4 * 250


def test_shares_use_the_limits_of_the_same_record():
    shares = bandwidth_shares(RECORDS, CONTENDERS[0], SIZE)
    assert shares == [pytest.approx(0.2), pytest.approx(0.4), pytest.approx(0.2)]


def test_bf16_products_are_compared_with_the_faster_dtype_and_fp32_ones_with_fp32():
    fast_bf16 = [record(ATOM, 0, 30.0, prefill_512_tok_s=1200.0)]
    fast_bf16[0].limits = MachineLimits(read_bandwidth=1.0, matmul_bf16=4e6, matmul_fp32=2e6)
    fp32 = Contender(ATOM, "atom", "float32")
    assert matmul_shares(RECORDS[:2], CONTENDERS[1], "prefill_512_tok_s", SIZE) == [pytest.approx(0.12)]
    assert matmul_shares(fast_bf16, CONTENDERS[1], "prefill_512_tok_s", SIZE) == [pytest.approx(0.06)]
    assert matmul_shares(fast_bf16, fp32, "prefill_512_tok_s", SIZE) == [pytest.approx(0.12)]


def test_targets_bound_from_the_right_side():
    assert Target("decode_tok_s", ATOM, 1.5, TRANSFORMERS).judge(RECORDS) == (1.5, True)
    assert Target("decode_tok_s", ATOM, 1.51, TRANSFORMERS).judge(RECORDS) == (1.5, False)
    assert Target("peak_rss_bytes", ATOM, 1.6e9).judge(RECORDS) == (1e9, True)  # the median of three
    assert Target("start_to_first_token_s", ATOM, 1.9).judge(RECORDS) == (2.0, False)


def test_every_target_names_a_contender_of_the_suite():
    names = {contender.name for contender in CONTENDERS}
    assert {name for target in TARGETS for name in (target.contender, target.reference) if name} == names


def test_table_shows_medians_ranges_ratios_and_verdicts():
    table = format_table(RECORDS, CONTENDERS, SIZE)
    decode = next(line for line in table.splitlines() if line.startswith("decode, batch 1"))
    assert "20.0 [20.0-40.0]" in decode and "32.0 [30.0-60.0] 1.50x" in decode
    assert "ok      decode, batch 1, atom bf16 >= 1.15 x transformers bf16: 1.5" in table
    assert "MISSED  prefill 512, atom bf16 >= 1.3 x transformers bf16: 1.2" in table
    assert "ok      peak RSS, atom bf16 <= 1600 MB: 1000" in table
    assert "reads 0 [0-0] GB/s, bf16 products" in limits_line(RECORDS)


def test_summary_is_json_and_leaves_out_targets_without_a_value():
    facts = json.loads(json.dumps(summary(RECORDS, CONTENDERS, SIZE)))
    assert facts["contenders"][ATOM]["decode_tok_s"] == {"median": 32.0, "min": 30.0, "max": 60.0}
    assert facts["contenders"][ATOM_INT8]["decode_tok_s"] is None
    assert facts["ratios"][ATOM]["prefill_512_tok_s"] == 1.2
    assert {target["field"] for target in facts["targets"]} == {
        "decode_tok_s",
        "prefill_512_tok_s",
        "start_to_first_token_s",
        "peak_rss_bytes",
    }


class FakeGenerator:
    """Echoes; ``short`` leaves out the last token of every answer."""

    def __init__(self, short: bool = False):
        self.short = short
        self.prompts: list[tuple[int, ...]] = []

    def generate(self, prompts, num_tokens):
        self.prompts += [tuple(prompt) for prompt in prompts]
        return [[7] * (num_tokens - self.short) for _ in prompts]

    def close(self):
        pass


def test_measure_fills_every_figure_and_never_repeats_a_prompt():
    generator = FakeGenerator()
    result = measure(generator, launched_at=0.0)
    assert all(getattr(result, figure.field) is not None for figure in FIGURES)
    drawn = [prompt for prompt in generator.prompts if list(prompt) != SANITY_IDS]
    assert len(set(drawn)) == len(drawn)
    lengths = [len(prompt) for prompt in drawn]
    assert lengths.count(512) == lengths.count(2048) == 2 and lengths.count(128) == 3 + 3 * 16
    assert result.peak_rss_bytes > 10_000_000


def test_start_only_generates_for_the_short_prompt_alone():
    generator = FakeGenerator()
    result = measure(generator, launched_at=0.0, workloads=())
    assert set(generator.prompts) == {tuple(SANITY_IDS)}
    assert result.decode_tok_s is None and result.start_to_first_token_s > 0


def test_an_answer_that_is_too_short_is_no_measurement():
    with pytest.raises(RuntimeError, match="asked for 1 answers of 1 tokens, got lengths \\[0\\]"):
        measure(FakeGenerator(short=True), launched_at=0.0)


def test_prompts_start_with_bos_and_are_reproducible():
    first, second = PromptMaker(), PromptMaker()
    prompts = [first.make(5), first.make(5)]
    assert prompts == [second.make(5), second.make(5)] and prompts[0] != prompts[1]
    assert all(len(prompt) == 5 and prompt[0] == 2 and min(prompt[1:]) >= 2000 for prompt in prompts)


def test_peak_rss_counts_children(tmp_path):
    import subprocess
    import sys

    alone = peak_rss_of_tree()
    code = "data = b'x' * 50_000_000; print(len(data), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        with_child = peak_rss_of_tree()
        child.communicate(b"\n")
    assert with_child - alone > 50_000_000


def test_limits_are_sane():
    limits = measure_limits(num_threads=2, read_bytes=8 << 20, matmul_size=128)
    assert 1e9 < limits.read_bandwidth < 5e12
    assert 1e8 < limits.matmul_bf16 < 1e14 and 1e8 < limits.matmul_fp32 < 1e14


def test_results_travel_as_one_marked_line():
    line = 'noise\nRESULT {"read_bandwidth":1.0,"matmul_bf16":2.0,"matmul_fp32":3.0}\nmore noise'
    assert parse_result(line, MachineLimits) == MachineLimits(1.0, 2.0, 3.0)
    assert parse_result("noise", MachineLimits) is None
    with pytest.raises(ChildError, match="not a MachineLimits"):
        parse_result('RESULT {"read_bandwidth":"fast"}', MachineLimits)


def test_a_failing_child_is_reported_with_its_words():
    with pytest.raises(ChildError, match="invalid choice: 'nobody'"):
        run_child("atom.benchmarks.cpu_peer", ["nobody"], Measurement, num_threads=1)


def test_json_is_the_last_line_and_order_turns(monkeypatch, capsys):
    order = []

    def fake_measure(contender, model, num_threads, start_only=False):
        if not start_only:
            order.append(contender.name)
        return measure(FakeGenerator(), launched_at=0.0, workloads=() if start_only else WORKLOADS)

    monkeypatch.setattr(cpu_suite, "measure_contender", fake_measure)
    monkeypatch.setattr(cpu_suite, "export_demo_model", lambda dtype, threads: DemoFolder("x", 100, 150))
    monkeypatch.setattr(cpu_suite, "run_child", lambda *args: LIMITS)
    monkeypatch.setattr(cpu_suite, "wait_until_idle", lambda: None)
    monkeypatch.setattr(cpu_suite, "NOISY_SHARE", 2.0)
    monkeypatch.setattr(cpu_suite, "decode_text", lambda ids: "text")
    assert cpu_suite.main(["--json", "--rounds", "2"]) == 0
    assert order == [TRANSFORMERS, ATOM, ATOM_INT8, ATOM, ATOM_INT8, TRANSFORMERS]
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["dtype"] == "bfloat16" and result["rounds"] == 2 and len(result["records"]) == 6
    assert {"machine", "contenders", "ratios", "shares", "targets"} <= result.keys()
    assert [entry["bound"] for entry in result["targets"]] == [target.bound for target in TARGETS]
    first = result["records"][0]
    assert first["contender"] == TRANSFORMERS and first["limits"]["read_bandwidth"] == 50_000
    assert first["measurement"]["decode_tok_s"] != 0


def test_a_disturbed_run_is_repeated_and_the_quietest_kept(monkeypatch):
    idle_at = iter([(0, 0), (20, 100), (0, 0), (90, 100), (0, 0), (99, 100)])
    monkeypatch.setattr(cpu_suite, "cpu_ticks", lambda: next(idle_at))
    monkeypatch.setattr(cpu_suite, "own_ticks", lambda: 0)
    monkeypatch.setattr(cpu_suite, "wait_until_idle", lambda: None)
    monkeypatch.setattr(cpu_suite, "run_child", lambda *args: LIMITS)
    monkeypatch.setattr(cpu_suite, "measure_contender", lambda *args: RECORDS[0].measurement)
    kept = cpu_suite.run_contender(CONTENDERS[0], 4, DemoFolder("x", 100, 150), num_threads=2)
    assert kept.round == 4 and kept.others == pytest.approx(0.01)


def test_rounds_must_be_positive(capsys):
    with pytest.raises(SystemExit):
        cpu_suite.main(["--rounds", "0"])
    assert "--rounds must be at least 1, got 0" in capsys.readouterr().err
