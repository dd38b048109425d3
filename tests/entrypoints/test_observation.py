"""What is seen from outside: request log, log lines, stages, collector counts, and the census."""

import gc
import json
import logging
import stat
import threading
import time

import httpx
import pytest

from atom.entrypoints.openai import request_observer
from atom.entrypoints.openai.metrics import EngineSnapshot, ServerMetrics
from atom.entrypoints.openai.request_log import RequestLog, make_line
from atom.errors import ConfigError
from atom.sampling_params import SamplingParams
from tests.helpers.fake_engine import FakeEngine, ids_of
from tests.helpers.live_server import LiveServer, wait_for

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
def logged(tmp_path):
    path = tmp_path / "requests.jsonl"
    server = LiveServer(FakeEngine(), request_log=RequestLog(str(path)))
    with httpx.Client(base_url=server.url) as client:
        yield server, client, path
    server.stop()


def lines_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- request log


def test_requests_chunks_and_responses_are_logged_in_order(logged):
    server, client, path = logged
    body = {"prompt": "päß", "max_tokens": 3}
    plain = client.post(
        COMPLETIONS, json=body, headers={"x-request-id": "plain", "authorization": "Bearer sk-secret"}
    )
    streamed = client.post(COMPLETIONS, json={**body, "stream": True}, headers={"x-request-id": "stream"})
    client.post(
        COMPLETIONS, content=b"{broken", headers={"x-request-id": "bad", "content-type": "application/json"}
    )
    client.get("/health")
    assert wait_for(lambda: len(lines_of(path)) >= 7)
    lines = lines_of(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and "sk-secret" not in path.read_text()
    assert abs(lines[0].pop("time") - time.time()) < 60
    assert lines[0] == {
        "request_id": "plain", "event": "request", "method": "POST", "path": COMPLETIONS, "data": body,
    }  # fmt: skip
    assert lines[1]["status"] == 200 and lines[1]["data"] == plain.json()
    of_stream = [line for line in lines if line["request_id"] == "stream"]
    assert [line["event"] for line in of_stream] == ["request", *["chunk"] * (len(of_stream) - 2), "response"]
    assert "".join(line["data"] for line in of_stream[1:]) == streamed.text
    assert [(line["event"], line["data"]) for line in lines[-2:]][0] == ("request", "{broken")
    assert lines[-1]["status"] == 400 and lines[-1]["data"]["error"]["code"] == "invalid_json"


def test_a_stream_that_its_client_left_ends_incomplete_in_the_log(logged):
    server, client, path = logged
    server.engine.script, server.engine.step_s = lambda prompt, index: ids_of("z" * 200), 0.02
    with client.stream("POST", COMPLETIONS, json={"prompt": "x", "stream": True}) as answer:
        next(answer.iter_lines())
    assert wait_for(lambda: lines_of(path)[-1]["event"] == "response", 3)
    last = lines_of(path)[-1]
    assert last["is_complete"] is False and last["status"] == 200


def test_a_full_disk_or_a_slow_one_costs_lines_and_no_request(tmp_path):
    slow = threading.Event()
    log = RequestLog(str(tmp_path / "log"), max_lines=3)
    log._file = type("Slow", (), {"write": lambda self, data: slow.wait(5), "close": lambda self: None})()
    started = time.monotonic()
    for _ in range(50):
        log.put(make_line("r", "request"), b"{}")
    assert time.monotonic() - started < 0.5 and 46 <= log.num_dropped <= 47
    slow.set()
    log.close()
    full = RequestLog("/dev/full")
    full.put(make_line("r", "request"), b"{}")
    assert wait_for(lambda: full.num_dropped == 1)
    full.close()
    with pytest.raises(ConfigError, match="--request-log /no/such"):
        RequestLog("/no/such/folder/log")


def test_what_the_log_drops_is_a_metric(logged):
    server, client, _ = logged
    server.context.request_log.num_dropped = 7
    assert "atom:request_log_dropped_total 7.0" in client.get("/metrics").text


# -- log lines


def test_with_log_more_every_request_is_one_line_with_its_id(monkeypatch, caplog):
    monkeypatch.setenv("ATOM_LOG_MORE", "1")
    server = LiveServer(FakeEngine(num_cached_tokens=1))
    with caplog.at_level(logging.INFO, logger="atom.server"):
        body = {"prompt": "abc", "stream": True}
        httpx.post(server.url + COMPLETIONS, json=body, headers={"x-request-id": "mine"})
        httpx.post(server.url + "/no%0a/such", json={})
        httpx.get(server.url + "/health")
        server.stop()
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("event=request_end")]
    assert len(lines) == 2
    fields = dict(part.split("=") for part in lines[0].split())
    assert fields["route"] == COMPLETIONS and fields["status"] == "200" and fields["complete"] == "true"
    assert (fields["prompt_tokens"], fields["cached_tokens"], fields["output_tokens"]) == ("4", "1", "13")
    assert fields["finish"] == "stop" and float(fields["ttft_ms"]) > 0 and "abc" not in lines[0]
    assert "route=other" in lines[1] and "status=404" in lines[1]


# -- metrics


def test_slices_and_queue_time_sum_to_the_time_to_first_token():
    server = LiveServer(FakeEngine(step_s=0.01))
    for _ in range(5):
        httpx.post(server.url + CHAT, json={"messages": [{"role": "user", "content": "x"}], "stream": True})
    tallies = server.context.metrics.tallies
    server.stop()
    names = [f"{name}_seconds" for name in request_observer.SLICES] + ["request_queue_time_seconds"]
    sums = [tallies.histograms[name].buckets() for name in names]
    assert all(buckets[-1] == ("+Inf", 5) for buckets, _ in sums)
    buckets, total = tallies.ttft["true"].buckets()
    assert buckets[-1] == ("+Inf", 5)
    assert sum(seconds for _, seconds in sums) == pytest.approx(total, rel=0.01)


def test_stages_before_the_generation_are_measured(server, http):
    tallies = server.context.metrics.tallies
    before = {name: tallies.histograms[f"{name}_seconds"].buckets() for name in request_observer.STAGES}
    http.post(CHAT, json={"messages": [{"role": "user", "content": "x" * 20}], "max_tokens": 1})
    for name, (buckets, total) in before.items():
        after, after_total = tallies.histograms[f"{name}_seconds"].buckets()
        assert after[-1][1] == buckets[-1][1] + 1 and after_total > total, name


def test_the_most_starved_stream_shows():
    server = LiveServer(FakeEngine(script=lambda prompt, index: ids_of("z" * 50)))
    server.engine.is_paused = True
    metrics = server.context.metrics
    with httpx.Client(base_url=server.url) as client:
        thread = threading.Thread(
            target=lambda: client.post(COMPLETIONS, json={"prompt": "x", "stream": True})
        )
        thread.start()
        assert wait_for(lambda: metrics.tallies.longest_silence_s(time.monotonic()) > 0.2, 3)
        assert "atom:stream_longest_silence_seconds 0.0" not in client.get("/metrics").text
        server.engine.is_paused = False
        thread.join(5)
    assert wait_for(lambda: not metrics.tallies.open_streams)
    assert metrics.tallies.longest_silence_s(time.monotonic()) == 0.0
    server.stop()


def test_M1_a_part_that_cannot_be_told_leaves_the_others(monkeypatch):
    metrics = ServerMetrics(
        lambda: EngineSnapshot({"requests_running": "nonsense"}, {}, True, 0.0, 1.0), lambda: 0
    )
    metrics.refresh()
    text = metrics.render().decode()
    assert "atom:requests_running" not in text and "atom:requests_finished" in text
    assert "atom:engine_up 1.0" in text and "atom:metrics_refresh_errors_total 1.0" in text


def test_M1_odd_orders_of_ends_and_aborts_count_up_only():
    tallies = request_observer.RequestTallies()
    for aborted in (0, 2, 0):
        observer = request_observer.RequestObserver(tallies, time.monotonic(), True, "id", SamplingParams())
        observer.close(aborted)
        observer.close(0)
    assert tallies.finished == {"abort": 2} and not tallies.open_streams


def test_processes_and_collector_are_exported(http):
    text = http.get("/metrics").text
    assert 'atom:process_cpu_seconds_total{mode="user",process="server"}' in text
    threads = float(text.split('atom:process_threads{process="server"} ')[1].split()[0])
    assert threads >= 2
    for generation, threshold in enumerate(gc.get_threshold()):
        assert f'atom:gc_threshold{{generation="{generation}"}} {float(threshold)}' in text
        assert f'atom:gc_collections_total{{generation="{generation}"}}' in text


# -- census


def test_the_census_counts_types_and_owners_and_names_no_contents(server, http):
    class Planted(dict):
        pass

    planted = [Planted(secret_of_a_request=i) for i in range(500)]
    census = http.get("/debug/gc_census", params={"top": 1000, "types_per_owner": 1}).json()
    assert set(census) == {"generations", "frozen", "thresholds", "stats", "by_type", "by_owner"}
    assert set(census["generations"]) == {"0", "1", "2"} and census["thresholds"] == list(gc.get_threshold())
    assert sum(census["generations"].values()) > len(planted)
    (count,) = [entry["count"] for entry in census["by_type"] if entry["type"].endswith("Planted")]
    assert count == len(planted)
    assert all(len(owner["types"]) <= 1 and owner["count"] > 0 for owner in census["by_owner"])
    assert "secret_of_a_request" not in json.dumps(census)


def test_the_census_is_bounded_and_off_the_loop(http):
    census = http.get("/debug/gc_census").json()
    assert len(census["by_type"]) <= 30 and all(len(owner["types"]) <= 2 for owner in census["by_owner"])
    assert len(http.get("/debug/gc_census?top=3").json()["by_type"]) == 3
    for query in ("top=-1", "top=x", "top=1001", "types_per_owner=101", "top=99999999999999999999"):
        answer = http.get(f"/debug/gc_census?{query}")
        assert answer.status_code == 400 and answer.json()["error"]["param"] == query.split("=")[0]
