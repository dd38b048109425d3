"""The comparison with other engines on made-up records, a fake server and a fake installer; no engine runs."""

import json
import sys
from xml.etree import ElementTree

import pytest

from atom.benchmarks import cpu_suite
from atom.benchmarks.child import ChildError
from atom.benchmarks.cpu_peer import Measurement
from atom.benchmarks.cpu_peers import http_load, installers, rounds, suite
from atom.benchmarks.cpu_peers.chart import draw
from atom.benchmarks.cpu_peers.http_load import ATOM_DIALECT, LLAMA_DIALECT, measure_server
from atom.benchmarks.cpu_peers.report import (
    WeightSizes,
    best_by_round,
    decode_shares,
    format_report,
    judge,
    measured_variants,
    prefill_shares,
    ratios,
    summary,
)
from atom.benchmarks.cpu_peers.rounds import PeerRecord, Plan, RoundRunner, available, failure_reason
from atom.benchmarks.cpu_peers.variants import BY_NAME, TARGETS, VARIANTS, PeerTarget
from atom.benchmarks.cpu_peers.workspace import PeerUnavailable, Workspace, last_line
from atom.benchmarks.machine_limits import MachineLimits
from atom.errors import ConfigError

SIZES = WeightSizes(num_block_params=100, num_head_params=200, file_bytes=250)
LIMITS = MachineLimits(read_bandwidth=30_000.0, matmul_bf16=1e6, matmul_fp32=2e6, matmul_int8=8e6)


def record(variant: str, number: int, decode: float, **figures) -> PeerRecord:
    figures = {"start_to_first_token_s": 1.0, "peak_rss_bytes": 10**9, "decode_tok_s": decode, **figures}
    return PeerRecord(variant, number, Measurement(sanity_ids=[1], **figures), LIMITS, 0.0, "text")


# Round 1 runs on a machine of half the speed: ratios must not see it.
RECORDS = [
    record("ATOM bf16", 0, 50.0, prefill_512_tok_s=2000.0, serving_rss_bytes=1_000_000_000),
    record("llama.cpp BF16", 0, 40.0),
    record("vLLM bf16", 0, 30.0),
    record("ATOM bf16", 1, 25.0, prefill_512_tok_s=1000.0),
    record("llama.cpp BF16", 1, 15.0),
    record("vLLM bf16", 1, 20.0),
    record("OpenVINO int8", 2, 60.0, prefill_512_tok_s=4000.0),
]


def test_ratios_are_formed_with_the_best_of_the_same_round():
    references = ("llama.cpp BF16", "vLLM bf16")
    assert best_by_round(RECORDS, references, "decode_tok_s") == {0: 40.0, 1: 20.0}
    assert ratios(RECORDS, ("ATOM bf16",), references, "decode_tok_s") == [1.25, 1.25]
    assert best_by_round(RECORDS, ("ATOM bf16",), "serving_rss_bytes") == {0: 1e9}


def test_a_target_is_judged_by_its_ratio_or_its_value():
    ratio = judge(PeerTarget("decode_tok_s", ("ATOM bf16",), 1.25, ("llama.cpp BF16", "vLLM bf16")), RECORDS)
    assert ratio["ok"] and ratio["value"] == 1.25 and ratio["shown"] == "1.25x"
    memory = judge(PeerTarget("serving_rss_bytes", ("ATOM bf16",), 0.9e9), RECORDS)
    assert not memory["ok"] and memory["shown"] == "1000"
    assert judge(PeerTarget("http_tok_s", ("ATOM bf16",), 2.0, ("llama.cpp Q4_0",)), RECORDS) is None


def test_shares_count_the_bits_of_a_variants_weights():
    assert SIZES.decode_bytes(BY_NAME["ATOM bf16"]) == 600
    assert SIZES.decode_bytes(BY_NAME["ATOM bf16, int8 head"]) == 400
    assert SIZES.decode_bytes(BY_NAME["llama.cpp Q4_0"]) == pytest.approx(300 * 4.5 / 8)
    assert SIZES.decode_bytes(BY_NAME["llama.cpp Q4_K_M"]) == 250
    assert decode_shares(RECORDS, BY_NAME["ATOM bf16"], SIZES) == [1.0, 0.5]
    field = "prefill_512_tok_s"
    assert prefill_shares(RECORDS, BY_NAME["ATOM bf16"], field, SIZES) == [0.2, 0.1]  # fp32 is the faster
    assert prefill_shares(RECORDS, BY_NAME["OpenVINO int8"], field, SIZES) == [0.1]


def test_the_report_names_everything_that_was_measured():
    variants = measured_variants(RECORDS)
    assert [variant.name for variant in variants][0] == "ATOM bf16" and len(variants) == 4
    text = format_report(RECORDS, variants, SIZES)
    assert "37.5 [25.0-50.0]" in text
    assert "ok      decode, batch 1: ATOM bf16 >= 1.25 x the best of llama.cpp BF16, vLLM bf16: 1.25x" in text
    facts = summary(RECORDS, variants, SIZES)
    assert facts["limits"]["matmul_int8"]["median"] == 8e6
    assert facts["variants"]["ATOM bf16"]["shares"]["read_bandwidth"] == 0.75
    json.dumps(facts)


def test_the_chart_is_xml_with_a_bar_for_each_variant():
    chart = draw(summary(RECORDS, measured_variants(RECORDS), SIZES), "2 cores & more")
    root = ElementTree.fromstring(chart)
    kinds = [element.get("class") for element in root.iter() if element.tag.endswith("rect")]
    assert kinds.count("marked") >= 1 and kinds.count("bar") >= 3


def test_every_target_and_reference_is_a_variant():
    assert {name for target in TARGETS for name in (*target.contenders, *target.references)} <= BY_NAME.keys()
    assert len(BY_NAME) == len(VARIANTS)
    assert {variant.peer for variant in VARIANTS} - {"atom"} == installers.PEERS.keys()


def test_names_are_chosen_by_their_parts():
    assert {v.name for v in suite.select(["llama.cpp q4_"])} == {"llama.cpp Q4_K_M", "llama.cpp Q4_0"}
    assert suite.select([]) == list(VARIANTS)
    with pytest.raises(ConfigError, match="--only: 'nobody' is in none of ATOM bf16"):
        suite.select(["nobody"])


def test_records_survive_the_file(tmp_path):
    import msgspec

    file = tmp_path / "records.jsonl"
    assert suite.read_records(file) == []
    file.write_bytes(b"\n".join(msgspec.json.encode(entry) for entry in RECORDS))
    assert suite.read_records(file) == RECORDS
    file.write_text('{"variant": 1}')
    with pytest.raises(ConfigError, match="is not a file of records"):
        suite.read_records(file)


# -- what cannot be installed or run


def test_a_peer_that_cannot_be_installed_is_left_out_with_its_reason(tmp_path, monkeypatch, capsys):
    def fails(work):
        raise PeerUnavailable("no wheel for this Python")

    monkeypatch.setitem(installers.PEERS, "vllm", installers.Peer("vllm", fails))
    monkeypatch.setitem(installers.PEERS, "openvino", installers.Peer("openvino", lambda work: None))
    wanted = [BY_NAME["vLLM bf16"], BY_NAME["OpenVINO int8"]]
    found, reasons = available(Workspace(tmp_path), wanted, install=True)
    assert [variant.name for variant in found] == ["OpenVINO int8"]
    assert reasons == {"vLLM bf16": "no wheel for this Python"}


def test_a_setting_that_this_atom_lacks_is_left_out(tmp_path):
    from dataclasses import replace

    known = replace(BY_NAME["ATOM bf16"], settings={"lm_head_dtype": "int8"})
    unknown = replace(BY_NAME["ATOM int8"], settings={"no_such_field": 1})
    found, reasons = available(Workspace(tmp_path), [known, unknown], install=False)
    assert [variant.name for variant in found] == ["ATOM bf16"]
    assert "no_such_field" in reasons["ATOM int8"]


def test_a_step_fails_with_its_last_error_line_and_leaves_its_log(tmp_path):
    work = Workspace(tmp_path)
    code = "print('first'); print('ERROR: no space'); print('bye'); raise SystemExit(3)"
    with pytest.raises(PeerUnavailable, match="ERROR: no space"):
        work.run("step", [sys.executable, "-c", code])
    assert "bye" in (tmp_path / "logs" / "step.log").read_text()
    with pytest.raises(PeerUnavailable, match="no-such-program is not installed"):
        work.run("step", ["no-such-program"])
    assert last_line("") == "no output"


def test_stamps_say_what_is_there(tmp_path):
    work = Workspace(tmp_path)
    assert not work.is_done("peer", {"version": "1"})
    work.mark_done("peer", {"version": "1"})
    assert work.is_done("peer", {"version": "1"}) and not work.is_done("peer", {"version": "2"})


def test_a_run_that_fails_leaves_the_others_alone(tmp_path, monkeypatch):
    plan = Plan(num_threads=2, workloads=("decode",), max_attempts=1, idle_timeout_s=0.0)
    runner = RoundRunner(Workspace(tmp_path), plan, decode_text=str)

    def measure(variant):
        if variant.name == "OpenVINO int8":
            raise ChildError("exit code 1\nImportError: no such library\n")
        return RECORDS[0].measurement, "text"

    monkeypatch.setattr(runner, "measure", measure)
    monkeypatch.setattr(rounds, "run_child", lambda *args: LIMITS)
    variants = [BY_NAME["ATOM bf16"], BY_NAME["OpenVINO int8"], BY_NAME["vLLM bf16"]]
    names = [entry.variant for number in (0, 1) for entry in runner.run_round(number, variants)]
    assert names == ["ATOM bf16", "vLLM bf16", "vLLM bf16", "ATOM bf16"]  # turned by one
    assert runner.reasons == {"OpenVINO int8": "ImportError: no such library"}
    assert failure_reason(OSError()) == "OSError"


def test_atoms_server_gets_the_settings_as_flags():
    command = rounds.atom_server_command(BY_NAME["ATOM bf16, int8 head"], 1234, 2)
    assert "--lm-head-dtype=int8" in command and "--device=cpu" in command
    assert command[command.index("--server-port") + 1] == "1234"


def test_peers_has_its_own_options(monkeypatch):
    seen = []
    monkeypatch.setattr(suite, "main", lambda argv: seen.append(argv) or 0)
    assert cpu_suite.main(["--rounds", "2", "--peers", "--only", "ATOM"]) == 0
    assert seen == [["--rounds", "2", "--only", "ATOM"]]


# -- the load on a server

SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert len(body["prompt"]) == 128 and body["temperature"] == 0
        if "max_tokens" in body:
            answer = {"usage": {"completion_tokens": body["max_tokens"]}}
        else:
            answer = {"tokens_predicted": min(body["n_predict"], 5)}
        data = json.dumps(answer).encode()
        self.send_response(200); self.send_header("content-length", str(len(data))); self.end_headers()
        self.wfile.write(data)
    def log_message(self, *args): pass
class Server(ThreadingHTTPServer):
    request_queue_size = 64
Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_sixteen_requests_are_counted_and_the_server_is_ended():
    port = http_load.free_port()
    result = measure_server([sys.executable, "-c", SERVER, str(port)], port, ATOM_DIALECT, {})
    assert result.tok_s > 0 and result.peak_rss_bytes > 5_000_000
    assert not http_load._is_healthy(port)


def test_a_short_answer_is_no_measurement():
    port = http_load.free_port()
    with pytest.raises(PeerUnavailable, match="asked for 128 tokens, got 5"):
        measure_server([sys.executable, "-c", SERVER, str(port)], port, LLAMA_DIALECT, {})


def test_a_server_that_ends_is_no_measurement():
    port = http_load.free_port()
    with pytest.raises(PeerUnavailable, match="ended with 3 before it served"):
        measure_server([sys.executable, "-c", "raise SystemExit(3)"], port, ATOM_DIALECT, {})
