"""The serving benchmark against a live server with a fake engine, and against servers that misbehave."""

import asyncio
import json
import threading
from contextlib import contextmanager
from html.parser import HTMLParser

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from atom.benchmarks import benchmark_serving
from atom.benchmarks.serving_client import Client, Outcome, RequestForm
from atom.model_loader.tokenizer import Tokenizer
from tests.helpers.fake_engine import EOS, FakeEngine, ids_of
from tests.helpers.live_server import LiveServer


def ascii_tokenizer(chat_template: str | None = None) -> Tokenizer:
    """An id a printable ASCII character; a space is Ġ."""
    chars = ["Ġ", *map(chr, range(33, 127))]
    backend = Backend(models.BPE(vocab={char: i for i, char in enumerate(chars)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, chat_template=chat_template)


@pytest.fixture
def tokenizer(monkeypatch):
    made = ascii_tokenizer()

    class Files:
        @staticmethod
        def resolve(name):
            return Files

        load_tokenizer = staticmethod(lambda: made)

    monkeypatch.setattr(benchmark_serving, "ModelFiles", Files)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return made


@contextmanager
def serving(engine: FakeEngine):
    server = LiveServer(engine)
    try:
        yield server
    finally:
        server.stop()


def run(url: str, tmp_path, *flags: str, num_prompts: int = 12) -> tuple[int, dict]:
    """Exit code and the JSON result of a small run."""
    argv = ["--model", "fake/model", "--dataset-name", "random", "--base-url", url, "--disable-tqdm"]
    argv += ["--num-prompts", str(num_prompts), "--random-input-len", "20", "--random-output-len", "10"]
    argv += ["--result-dir", str(tmp_path), "--result-filename", "r.json", "--save-result", *flags]
    code = benchmark_serving.main(argv)
    path = tmp_path / "r.json"
    return code, json.loads(path.read_text()) if path.exists() else {}


def test_a_run_counts_tokens_and_writes_every_key(tokenizer, tmp_path, capsys):
    with serving(FakeEngine(script=lambda prompt, index: ids_of("z" * 50), step_s=0.002)) as server:
        code, result = run(server.url, tmp_path, "--num-warmups", "2", "--metadata", "tp=1", "note=a=b")
        assert len(server.engine.requests) == 14
        prompts, params = zip(*server.engine.requests, strict=True)
        assert {len(ids) for ids in prompts} == {21}  # 20 and the server's BOS, which this tokenizer lacks
        assert {p.temperature for p in params} == {0.0}
    assert code == 0
    assert list(result) == [
        *(
            "date",
            "backend",
            "model_id",
            "tokenizer_id",
            "best_of",
            "num_prompts",
            "metadata",
            "request_rate",
        ),
        *(
            "burstiness",
            "max_concurrency",
            "duration",
            "completed",
            "total_input_tokens",
            "total_output_tokens",
        ),
        *("request_throughput", "request_goodput", "request_goodput:", "output_throughput"),
        *("total_token_throughput", "concurrency"),
        *(f"{s}_{m}_ms" for m in ("ttft", "tpot", "itl") for s in ("mean", "median", "std", "p99")),
        *("accept_length", "acceptance_rate"),
    ]
    assert (result["completed"], result["total_input_tokens"], result["total_output_tokens"]) == (
        12,
        240,
        120,
    )
    assert (result["backend"], result["request_rate"], result["max_concurrency"]) == ("vllm", "inf", None)
    assert result["metadata"] == {"tp": "1", "note": "a=b"}
    assert result["request_goodput"] is result["request_goodput:"] is None
    assert result["output_throughput"] == pytest.approx(120 / result["duration"])
    assert result["total_token_throughput"] == pytest.approx(360 / result["duration"])
    assert 1 < result["mean_tpot_ms"] < 200 and 1 < result["mean_itl_ms"] < 200
    assert 0 < result["concurrency"] <= 12
    out = capsys.readouterr().out
    assert "Successful requests:" in out and "FAILED" not in out and "P99 ITL (ms):" in out


def test_the_chat_backend_with_all_metrics_and_details(tokenizer, tmp_path):
    with serving(FakeEngine(script=lambda prompt, index: [*ids_of("Hello"), EOS])) as server:
        flags = ["--backend", "openai-chat", "--save-detailed", "--metric-percentiles", "50,99.9"]
        flags += ["--percentile-metrics", "e2el,ttft", "--goodput", "ttft:60000", "e2el:60000"]
        code, result = run(server.url, tmp_path, *flags)
    assert code == 0
    assert {"p50_e2el_ms", "p99.9_e2el_ms", "p99.9_ttft_ms"} <= result.keys() and "mean_tpot_ms" not in result
    assert result["generated_texts"] == ["Hello"] * 12
    assert result["output_lens"] == [6] * 12 and result["errors"] == [""] * 12
    assert [len(itls) for itls in result["itls"]] == [4] * 12 and all(t > 0 for t in result["ttfts"])
    assert result["request_goodput:"] == result["request_goodput"] == pytest.approx(12 / result["duration"])


def test_concurrency_is_bounded_and_arrivals_are_spread(tokenizer, tmp_path):
    most = []

    class Watching(FakeEngine):
        def stream(self, *args, **kwargs):
            stream = super().stream(*args, **kwargs)
            most.append(len(self.running))
            return stream

    with serving(Watching(script=lambda prompt, index: ids_of("zz"), step_s=0.005)) as server:
        _, result = run(server.url, tmp_path, "--max-concurrency", "3")
        assert max(most) == 3 and result["max_concurrency"] == 3
        _, result = run(server.url, tmp_path, "--request-rate", "40", "--burstiness", "100")
    assert result["request_rate"] == 40.0
    assert 11 / 40 * 0.6 < result["duration"] < 11 / 40 + 1.0


def test_failures_are_counted_by_reason(tokenizer, tmp_path, capsys):
    with serving(
        FakeEngine(script=lambda prompt, index: ids_of("z" * 50), max_queue=4, step_s=0.01)
    ) as server:
        code, result = run(server.url, tmp_path, "--save-detailed", num_prompts=10)
    out = capsys.readouterr().out
    assert code == 0 and result["completed"] == 4 and result["total_output_tokens"] == 40
    assert sum("HTTP 429" in error for error in result["errors"]) == 6
    assert "FAILED requests:" in out and "6 x HTTP 429: the queue holds 4 requests" in out


def test_an_answer_that_fails_on_the_way_is_a_failure(tokenizer, tmp_path, capsys):
    engine = FakeEngine(script=lambda prompt, index: ids_of("zzzz"), fail_with="engine trouble")
    with serving(engine) as server:
        code, result = run(server.url, tmp_path, "--num-warmups", "0", num_prompts=3)
        assert code == 0 and result["completed"] == 0
        assert result["mean_ttft_ms"] == 0.0
        assert "3 x error in the stream" in capsys.readouterr().out
        assert run(server.url, tmp_path)[0] == 1  # the warm-up fails
        assert "the warm-up request failed" in capsys.readouterr().err


class Outline(HTMLParser):
    """Tags of a page, and every reference out of it."""

    def __init__(self):
        super().__init__()
        self.tags, self.links = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]


def test_the_report_has_plots_and_needs_nothing_else(tokenizer, tmp_path):
    report = tmp_path / "report.html"
    with serving(FakeEngine(script=lambda prompt, index: ids_of("z" * 10), step_s=0.002)) as server:
        run(server.url, tmp_path, "--report", str(report), "--metadata", "host=<b>")
    page = report.read_text()
    outline = Outline()
    outline.feed(page)
    assert outline.tags.count("svg") == 4 and not outline.links and "script" not in outline.tags
    assert "url(" not in page and "http" not in page
    assert outline.tags.count("rect") > 3 and outline.tags.count("polyline") == 2
    for title in ("Time to first token", "Inter-token latency", "Output throughput over time", "&lt;b&gt;"):
        assert title in page


def test_pytorch_format_key_profile_and_served_name(tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SAVE_TO_PYTORCH_BENCHMARK_FORMAT", "1")
    with serving(FakeEngine(script=lambda prompt, index: ids_of("zz"))) as server:
        code, result = run(server.url, tmp_path, num_prompts=2)
        assert code == 0
        assert run(server.url, tmp_path, "--profile", num_prompts=1)[0] == 1
        assert "is the server's profiler on?" in capsys.readouterr().err
        assert run(server.url, tmp_path, "--served-model-name", "other", num_prompts=1)[0] == 1
        assert "HTTP 404" in capsys.readouterr().err
    records = json.loads((tmp_path / "r.pytorch.json").read_text())
    by_name = {record["metric"]["name"]: record["metric"]["benchmark_values"] for record in records}
    assert by_name["mean_ttft_ms"] == [result["mean_ttft_ms"]]
    assert records[0]["benchmark"]["extra_info"]["args"]["request_rate"] == "inf"


def test_the_name_of_the_result(tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with serving(FakeEngine(script=lambda prompt, index: ids_of("zz"))) as server:
        argv = [
            "--model",
            "fake/model",
            "--dataset_name",
            "random",
            "--base_url",
            server.url,
            "--disable_tqdm",
        ]
        argv += ["--num_prompts", "1", "--random_input_len", "9", "--random_output_len", "2", "--save_result"]
        assert benchmark_serving.main([*argv, "--max_concurrency", "2"]) == 0
    (path,) = tmp_path.glob("*.json")
    assert path.name.startswith("vllm-infqps-concurrency2-model-20")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--backend", "tgi"], "--backend tgi is not available; that server speaks OpenAI's API too"),
        (["--dataset-name", "sonnet"], "--dataset-name sonnet is not available"),
        (["--dataset-name", "sharegpt"], "needs --dataset-path"),
        (["--sonnet-input-len", "3"], "--sonnet-input-len is not available"),
        (["--hf-split", "train"], "--hf-split is not available"),
        (["--num-prompts", "0"], "--num-prompts must be at least 1, got 0"),
        (["--request-rate", "0"], "--request-rate must be greater than 0"),
        (["--goodput", "itl:3"], "--goodput must be one of ttft, tpot, e2el"),
        (["--goodput", "ttft"], "--goodput must be one of"),
        (["--percentile-metrics", "ttft,x"], "--percentile-metrics must be of"),
        (["--metric-percentiles", "101"], "--metric-percentiles must be numbers from 0 to 100"),
        (["--metadata", "x"], "--metadata must be KEY=VALUE"),
        (["--random-range-ratio", "2"], "--random-range-ratio must be in [0, 1]"),
        (["--use-chat-template"], "needs a model with a chat template"),
        (["--base-url", "ftp://x"], "--base-url must be http"),
        (
            ["--backend", "openai-chat", "--endpoint", "/v1/completions"],
            "--endpoint must end in chat/completions",
        ),
    ],
)
def test_mistakes_are_refused_by_name(tokenizer, flags, told, capsys):
    argv = [
        "--model",
        "m",
        "--dataset-name",
        "random",
        "--num-prompts",
        "1",
        "--random-input-len",
        "4",
        *flags,
    ]
    assert benchmark_serving.main(argv) == 2
    assert told in capsys.readouterr().err


# -- servers that are not ours


@contextmanager
def raw_server(*writes: bytes):
    """Answers every connection with these bytes, written one after another, and keeps what it was sent."""
    seen: list[bytes] = []
    ready = threading.Event()

    async def answer(reader, writer):
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:  # the client only looked whether anybody is there
            return
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        seen.append(head + await reader.readexactly(length))
        for data in writes:
            writer.write(data)
            await asyncio.sleep(0.001)
        writer.close()

    async def serve():
        nonlocal port, stop, loop
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            ready.set()
            await stop.wait()

    port, stop, loop = 0, None, None
    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(5)
    yield f"http://127.0.0.1:{port}", seen
    loop.call_soon_threadsafe(stop.set)
    thread.join(5)


def ask(url: str, key: str | None = None, **fields) -> Outcome:
    form = RequestForm(**({"is_chat": False, "path": "/v1/completions", "model": "m"} | fields))

    async def go() -> Outcome:
        client, outcome = Client(url, key), Outcome(3)
        await client.open()
        await client.stream(form.path, form.body("hi", 5), outcome)
        return outcome

    return asyncio.run(go())


OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
EVENTS = b"\r\n\r\n".join(
    [
        b'data: {"choices":[{"text":"a"}]}',
        b'data:{"choices":[{"text":"bc"}]}',
        b": ping",
        b"data: [DONE]",
        b"",
    ]
)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_cut_anywhere_without_length_or_usage(size):
    whole = OK + b"\r\n" + EVENTS
    with raw_server(*(whole[i : i + size] for i in range(0, len(whole), size))) as (url, seen):
        outcome = ask(url, key="secret", ignore_eos=True, logprobs=2, best_of=2, use_beam_search=True)
    assert not outcome.error and outcome.texts == ["a", "bc"] and outcome.num_output_tokens == 0
    assert outcome.latency >= outcome.ttft > 0 and len(outcome.itls) == 1
    head, body = seen[-1].split(b"\r\n\r\n")
    assert b"Authorization: Bearer secret" in head
    assert json.loads(body) == {
        **{"model": "m", "prompt": "hi", "max_tokens": 5, "temperature": 0.0, "stream": True},
        **{"stream_options": {"include_usage": True}, "ignore_eos": True, "logprobs": 2, "best_of": 2},
        "use_beam_search": True,
    }


@pytest.mark.parametrize(
    ("writes", "error"),
    [
        ([OK + b"Content-Length: 500\r\n\r\n" + EVENTS], "ConnectionError: the server closed the connection"),
        ([OK + b"\r\n" + EVENTS.replace(b"data: [DONE]\r\n\r\n", b"")], "the stream ended early"),
        ([OK + b"\r\ndata: [DONE]\n\n"], "the stream held no answer"),
        ([OK + b"\r\ndata: {nonsense}\n\n"], "DecodeError"),
        ([b"SSH-2.0-OpenSSH\r\n"], "HttpParser"),
        ([], "ConnectionError"),
        ([b"HTTP/1.1 503 No\r\nContent-Length: 4\r\n\r\nbusy"], "HTTP 503: busy"),
        ([b'HTTP/1.1 400 No\r\nContent-Length: 28\r\n\r\n{"error":{"message":"why"}}\n'], "HTTP 400: why"),
        ([OK + b'\r\ndata: {"error":{"message":"late"}}\n\ndata: [DONE]\n\n'], "error in the stream: late"),
    ],
)
def test_what_goes_wrong_is_told(writes, error):
    with raw_server(*writes) as (url, _):
        assert error in ask(url).error


def test_no_server_is_a_failed_request():
    assert "Error" in ask("http://127.0.0.1:9").error
