"""/metrics: names, counts, and that it neither is empty nor disturbs anything."""

import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from atom.entrypoints.openai import metric_names as names
from atom.entrypoints.openai.metrics import EngineSnapshot, ServerMetrics
from atom.runtime.histogram import Histogram, unflatten
from tests.helpers.fake_engine import FakeEngine, ids_of
from tests.helpers.live_server import LiveServer, wait_for

COMPLETIONS = "/v1/completions"


@pytest.fixture
def own_server():
    server = LiveServer(FakeEngine(num_cached_tokens=2))
    with httpx.Client(base_url=server.url) as client:
        yield server, client
    server.stop()


def scrape(client: httpx.Client) -> dict[str, float]:
    """Sample -> value, for example ``atom:requests_finished_total{finished_reason="stop"}``."""
    answer = client.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    samples = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = ",".join(f'{k}="{v}"' for k, v in sample.labels.items())
            samples[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return samples


def test_metrics_before_and_after_requests(own_server):
    server, client = own_server
    before = scrape(client)
    assert before["atom:engine_up"] == 1 and before["atom:metrics_snapshot_available"] == 1
    assert before["atom:kv_cache_blocks_used"] == 4 and "atom:prefix_cache_hit_ratio" not in before
    assert before["atom:kv_cache_blocks_total"] == 16 and before["atom:preemptions_total"] == 3
    assert before['atom:startup_phase_seconds{phase="load"}'] == 1.5
    assert (
        before["atom:generation_tokens_total"] == 0
        and before["atom:metrics_last_refresh_timestamp_seconds"] > 1e9
    )

    client.post(COMPLETIONS, json={"prompt": "abc"})
    client.post(COMPLETIONS, json={"prompt": ["abc", "d"], "n": 2, "max_tokens": 5})
    client.post(COMPLETIONS, json={"prompt": "abc", "stream": True})
    client.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 0})
    after = scrape(client)
    assert after['atom:requests_finished_total{finished_reason="stop"}'] == 2
    assert after['atom:requests_finished_total{finished_reason="length"}'] == 4
    assert after["atom:prompt_tokens_total"] == 4 + 4 + 2 + 4
    assert after["atom:generation_tokens_total"] == 13 + 4 * 5 + 13
    assert after['atom:time_to_first_token_seconds_count{streaming="false"}'] == 2
    assert after['atom:time_to_first_token_seconds_count{streaming="true"}'] == 1
    assert after["atom:inter_token_latency_seconds_count"] == 12 + 4 * 4 + 12
    assert after["atom:http_requests_in_flight"] == 0


def test_aborted_answers_are_counted(own_server):
    server, client = own_server
    server.engine.script, server.engine.step_s = lambda prompt, index: ids_of("z" * 200), 0.01
    with pytest.raises(httpx.ReadTimeout):
        client.post(COMPLETIONS, json={"prompt": "x", "n": 3}, timeout=0.1)
    assert wait_for(lambda: not len(server.context.inflight))
    assert scrape(client)['atom:requests_finished_total{finished_reason="abort"}'] == 3


def test_refused_requests_are_counted(own_server):
    server, client = own_server
    server.engine.max_queue = 0
    assert client.post(COMPLETIONS, json={"prompt": "x"}).status_code == 429
    assert scrape(client)["atom:requests_rejected_total"] == 1


def test_head_has_no_body(own_server):
    _, client = own_server
    answer = client.head("/metrics")
    assert answer.status_code == 200 and answer.content == b"" and int(answer.headers["content-length"]) > 100


def test_engine_that_cannot_be_read_breaks_nothing(monkeypatch):
    snapshots = [EngineSnapshot({"requests_running": 7}, {}, True, 0.0, 1.0)]

    def read() -> EngineSnapshot:
        return snapshots.pop()

    monkeypatch.setenv("ATOM_METRICS_UPDATE_INTERVAL_S", "0.001")
    metrics = ServerMetrics(read, lambda: 0)
    assert b"atom:metrics_snapshot_available 0.0" in metrics.render()  # never empty
    metrics.refresh()
    assert b"atom:requests_running 7.0" in metrics.render()
    assert wait_for(
        lambda: metrics.refresh() or b"atom:metrics_refresh_errors_total 0.0" not in metrics.render()
    )
    assert b"atom:requests_running 7.0" in metrics.render()  # the old one stays


def test_snapshot_is_renewed_once_an_interval(monkeypatch):
    monkeypatch.setenv("ATOM_METRICS_UPDATE_INTERVAL_S", "60")
    reads = []
    metrics = ServerMetrics(lambda: reads.append(1) or EngineSnapshot(), lambda: 0)
    for _ in range(5):
        metrics.refresh()
    assert len(reads) == 1


def test_histogram_weighs_observations():
    histogram = Histogram((0.1, 1.0))
    histogram.observe(0.1, 3)
    histogram.observe(0.5)
    histogram.observe(7, 2)
    assert histogram.buckets() == ([("0.1", 3), ("1.0", 4), ("+Inf", 6)], pytest.approx(14.8))


def test_histogram_travels_as_plain_numbers():
    histogram = Histogram((0.5, 2, 10))
    for value in (0.1, 3, 3, 99):
        histogram.observe(value)
    flat = histogram.flatten("a_b") | {"a_b_c|sum": 1.0, "other": 2.0}
    assert unflatten("a_b", flat) == histogram.buckets()
    assert unflatten("missing", flat) is None


ALL_NAMES = {
    *names.ENGINE_GAUGES,
    *names.ENGINE_COUNTERS,
    *names.ENGINE_HISTOGRAMS,
    *names.ENGINE_STATES,
    *names.SERVER_METRICS,
    *names.PROCESS_METRICS,
}


def test_guide_lists_exactly_the_metrics_there_are(own_server):
    guide = Path(__file__).parents[2].joinpath("docs/metrics_guide.md").read_text()
    documented = set(re.findall(r"^\| `([a-z0-9_]+)` \|", guide, re.MULTILINE))
    assert documented == ALL_NAMES
    for name in (*names.SERVER_METRICS, *names.PROCESS_METRICS):
        assert f"# TYPE atom:{name}" in own_server[1].get("/metrics").text, name


def test_engine_reports_nothing_that_is_not_exported():
    from atom.model_engine.engine_core import _METRICS
    from atom.model_engine.step_metrics import StepMetrics

    assert set(_METRICS) <= {*names.ENGINE_GAUGES, *names.ENGINE_COUNTERS}
    assert set(vars(StepMetrics())) <= set(names.ENGINE_HISTOGRAMS)
