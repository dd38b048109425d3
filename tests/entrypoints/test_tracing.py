"""Traces of requests, received by a real OTLP/HTTP collector."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from atom.runtime.tracing import make_tracer
from tests.helpers.fake_engine import FakeEngine, ids_of
from tests.helpers.live_server import LiveServer, wait_for

collector_proto = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

ROOT = Path(__file__).parents[2]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "the secret of the prompt"


class Collector:
    """Decodes what is posted to it."""

    def __init__(self) -> None:
        requests: list = []
        self.requests = requests

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                message = collector_proto.ExportTraceServiceRequest()
                message.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
                requests.append((self.path, self.headers["content-type"], message))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def spans(self) -> list:
        return [
            span
            for _, _, message in self.requests
            for resource in message.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def attributes_of(holder) -> dict:
    def value(item):
        kind = item.WhichOneof("value")
        if kind == "array_value":
            return [value(entry) for entry in item.array_value.values]
        return getattr(item, kind)

    return {entry.key: value(entry.value) for entry in holder.attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture
def traced(collector, monkeypatch) -> Iterator[tuple[LiveServer, httpx.Client]]:
    monkeypatch.setenv("ATOM_ENABLE_OTEL_TRACE", "True")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", collector.endpoint)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-service")
    monkeypatch.setenv("ATOM_TRACE_VERSION", "build-7")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    engine = FakeEngine(step_s=0.005, num_cached_tokens=2)
    server = LiveServer(engine, tracer=make_tracer(), served_model_name="fake")
    with httpx.Client(base_url=server.url) as client:
        yield server, client
    server.stop()


def wait_for_spans(collector: Collector, number: int) -> dict[str, object]:
    assert wait_for(lambda: len(collector.spans) >= number, 5), collector.spans
    return {span.name: span for span in collector.spans}


def test_a_streamed_request_is_one_server_span_with_its_phases(collector, traced):
    _, client = traced
    before = time.time_ns()
    messages = [{"role": "user", "content": SECRET}]
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "x-request-id": "my-request"}
    answer = client.post(CHAT, json={"messages": messages, "stream": True}, headers=headers)
    spans = wait_for_spans(collector, 5)
    assert set(spans) == {"chat fake", "preprocess", "queue", "prefill", "decode"}
    root = spans["chat fake"]
    assert root.kind == root.SPAN_KIND_SERVER
    assert root.trace_id.hex() == TRACE_ID and root.parent_span_id.hex() == PARENT_ID
    children = [spans[name] for name in ("preprocess", "queue", "prefill", "decode")]
    for child, after in zip(children, [*children[1:], None], strict=True):
        assert child.parent_span_id == root.span_id and child.trace_id == root.trace_id
        assert root.start_time_unix_nano <= child.start_time_unix_nano <= child.end_time_unix_nano
        assert child.end_time_unix_nano <= root.end_time_unix_nano
        if after is not None:
            assert abs(after.start_time_unix_nano - child.end_time_unix_nano) < 1000
    assert before < root.start_time_unix_nano < root.end_time_unix_nano < time.time_ns()
    found = attributes_of(root)
    assert found.pop("gen_ai.response.time_to_first_chunk") > 0
    assert found == {
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
        "atom.request_id": "my-request",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "atom",
        "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake",
        "gen_ai.request.stream": True,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.response.id": json.loads(answer.text.split("\n")[0][6:])["id"],
        "gen_ai.usage.input_tokens": found["gen_ai.usage.input_tokens"],
        "gen_ai.usage.output_tokens": 13,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.response.finish_reasons": ["stop"],
    }
    assert found["gen_ai.usage.input_tokens"] > len(SECRET)


def test_the_resource_names_service_and_version(collector, traced):
    _, client = traced
    client.post(COMPLETIONS, json={"prompt": SECRET})
    wait_for_spans(collector, 5)
    path, content_type, message = collector.requests[0]
    assert path == "/v1/traces" and content_type == "application/x-protobuf"
    resource = attributes_of(message.resource_spans[0].resource)
    assert resource["service.name"] == "my-service" and resource["atom.version"] == "build-7"


def test_no_span_holds_text_of_prompt_or_answer(collector, traced):
    server, client = traced
    server.engine.script = lambda prompt, index: ids_of("the secret of the answer")
    client.post(COMPLETIONS, json={"prompt": SECRET, "user": "who-asks", "stop": ["of the"]})
    client.post(f"/{SECRET}", json={"prompt": SECRET})
    client.post(COMPLETIONS, json={"prompt": SECRET, "n": 1000, "model": "secret-model"})
    wait_for_spans(collector, 7)
    for _, _, message in collector.requests:
        text = str(message)
        assert "secret" not in text and "who-asks" not in text


def test_refused_and_left_requests_are_traced_as_what_they_are(collector, traced):
    server, client = traced
    client.post(COMPLETIONS, json={"prompt": "x", "n": 0})
    server.engine.script, server.engine.step_s = lambda prompt, index: ids_of("z" * 200), 0.02
    with pytest.raises(httpx.ReadTimeout):
        client.post(COMPLETIONS, json={"prompt": "x"}, timeout=0.2)
    assert wait_for(lambda: sum(s.name == "text_completion fake" for s in collector.spans) == 2, 5)
    refused, left = (s for s in collector.spans if s.name == "text_completion fake")
    assert attributes_of(refused)["http.response.status_code"] == 400
    assert [s.name for s in collector.spans if s.parent_span_id == refused.span_id] == ["preprocess"]
    assert refused.status.code == refused.status.STATUS_CODE_UNSET  # the client's fault, not ours
    assert attributes_of(left)["http.response.status_code"] == 499
    assert attributes_of(left)["gen_ai.response.finish_reasons"] == ["abort"]
    assert left.status.code == left.status.STATUS_CODE_ERROR


def test_a_trace_that_the_client_does_not_record_is_not_sent(collector, traced):
    _, client = traced
    client.post(COMPLETIONS, json={"prompt": "x"}, headers={"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"})
    client.post(COMPLETIONS, json={"prompt": "x"}, headers={"traceparent": "nonsense"})
    spans = wait_for_spans(collector, 5)
    assert all(span.trace_id.hex() != TRACE_ID for span in collector.spans)
    assert not spans["text_completion fake"].parent_span_id


def test_probes_are_not_traced_and_a_dead_collector_costs_nothing(collector, traced):
    server, client = traced
    client.get("/health")
    client.get("/metrics")
    collector.close()
    started = time.monotonic()
    for _ in range(20):
        assert client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1}).status_code == 200
    assert time.monotonic() - started < 3
    assert not collector.spans
    started = time.monotonic()
    server.context.tracer.close()
    assert time.monotonic() - started < 2.5


@pytest.mark.parametrize("endpoint", ["", "localhost:4318"])
def test_without_an_endpoint_the_start_fails_and_says_so(endpoint, monkeypatch):
    from atom.errors import ConfigError

    monkeypatch.setenv("ATOM_ENABLE_OTEL_TRACE", "1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", endpoint)
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        make_tracer()


def test_without_the_packages_the_start_fails_and_says_what_to_install():
    code = (
        "import os, sys; sys.modules['opentelemetry'] = None\n"
        "os.environ |= {'ATOM_ENABLE_OTEL_TRACE': '1',"
        " 'OTEL_EXPORTER_OTLP_TRACES_ENDPOINT': 'http://127.0.0.1:9/v1/traces'}\n"
        "from atom.entrypoints import openai_server\n"
        "sys.argv = ['x', '--model', 'none', '--server-port', '0']\n"
        "sys.exit(openai_server._run())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "[tracing]" in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


def test_by_default_nothing_of_it_is_imported():
    code = (
        "import sys; from atom.runtime.tracing import make_tracer; import atom.entrypoints.openai.serving\n"
        "assert make_tracer() is None; sys.exit('opentelemetry' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
