"""``guidellm run``, unchanged: its report has the requests and tokens that it asked for, and no error."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.real_model

NUM_REQUESTS, NUM_STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 6, 2, 24, 6


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_report(demo, offline, tokenizer_folder, tmp_path, route):
    path = tmp_path / "report.json"
    options = {
        "--backend": f"kind=openai_http,target={demo.url},request_format={route}",
        "--profile": f"kind=concurrent,streams={NUM_STREAMS}",
        "--constraint": f"kind=max_requests,count={NUM_REQUESTS}",
        "--data": f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        "--tokenizer": f"kind=huggingface_auto,model={tokenizer_folder}",
        "--output": f"kind=json,path={path}",
    }
    done = subprocess.run(
        [sys.executable, "-m", "guidellm", "run", "--disable-console-interactive"]
        + [word for pair in options.items() for word in pair],
        env={**offline, "GUIDELLM__MAX_WORKER_PROCESSES": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (benchmark,) = json.loads(path.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) == NUM_REQUESTS, requests["errored"]
    assert not requests["errored"] and not requests["incomplete"]
    for request in requests["successful"]:
        assert request["output_tokens"] == OUTPUT_TOKENS and request["output"]
        # The server counts the start token and the template's words too.
        assert PROMPT_TOKENS <= request["prompt_tokens"] <= PROMPT_TOKENS + 16
        assert 0 < request["time_to_first_token_ms"] < 1000 * request["request_latency"]
    metrics = benchmark["metrics"]
    assert metrics["output_token_count"]["successful"]["total_sum"] == NUM_REQUESTS * OUTPUT_TOKENS
    assert metrics["output_tokens_per_second"]["successful"]["mean"] > 0
