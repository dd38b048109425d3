"""Advisories of servers of this kind that only a whole server shows: its processes, its sockets, its cache."""

import concurrent.futures
import json
import shutil

import psutil
import pytest

from tests.helpers.server_process import CHAT, ServerProcess
from tests.integration.test_surface_cases import TOOLS_TEMPLATE, USER_HI


def test_CVE_2025_32444_nothing_listens_but_the_http_socket(server):
    """Neither of the server nor of any process below it, and that one on loopback unless told otherwise."""
    server.ask(prompt="x", max_tokens=1, guided_choice=["a"])  # the guide compiler runs as well
    family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    assert len(family) >= 3
    listening = {
        (connection.laddr.ip, connection.laddr.port)
        for process in family
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {("127.0.0.1", int(server.url.rpartition(":")[2]))}


def test_CVE_2025_66448_a_malicious_model_folder_is_served_and_runs_nothing(tiny_model, tmp_path):
    folder, ran = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(tiny_model, folder)
    names = ("modeling_evil", "configuration_evil", "tokenization_evil", "__init__", "sitecustomize")
    for name in names:
        (folder / f"{name}.py").write_text(f"open({str(ran)!r}, 'w')\n")
    (folder / "encoding").mkdir()
    (folder / "encoding" / "encoding_evil.py").write_text(f"open({str(ran)!r}, 'w')\n")
    for name in ("config.json", "tokenizer_config.json"):
        path = folder / name
        values = json.loads(path.read_text()) if path.exists() else {}
        values["auto_map"] = {
            "AutoConfig": "configuration_evil.Evil",
            "AutoModelForCausalLM": "modeling_evil.Evil",
            "AutoTokenizer": ["tokenization_evil.Evil", None],
        }
        path.write_text(json.dumps(values))
    server = ServerProcess(folder)
    try:
        server.ask(CHAT, messages=USER_HI, max_tokens=2)
        server.check_sound()
    finally:
        server.kill()
    assert not ran.exists()


def test_CVE_2025_46570_another_salt_finds_nothing_of_what_others_asked(server):
    prompt = "A secret that is long enough to fill more than one block of the cache. " * 2

    def num_cached(salt: str | None) -> int:
        answer = server.post(prompt=prompt, max_tokens=1, cache_salt=salt).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert num_cached("tenant-a") == 0 < num_cached("tenant-a")
    assert num_cached("tenant-b") == num_cached(None) == 0
    stats = server.wait_for_metrics(lambda m: m["prefix_cache_requests_total"] >= 4, 5, "a snapshot")
    told = server.http.get("/debug/cache_stats").json()
    assert told["enabled"] and told["requests"] >= stats["prefix_cache_requests_total"]
    assert 0 < told["cached_tokens"] < told["full_tokens"]
    assert told["hit"] == pytest.approx(told["cached_tokens"] / told["full_tokens"])


@pytest.mark.parametrize(
    "parameters, words",
    [
        ({"type": "no_such_type"}, "no_such_type"),
        ({"properties": {"a": {"type": "string", "pattern": "(" * 65 + "a" + ")" * 65}}}, "64 levels"),
        ({"properties": {"a": "b"}}, "#/properties/a"),
    ],
)
def test_CVE_2025_48944_a_bad_schema_of_a_tool_is_a_400_and_hurts_nobody(tiny_model, parameters, words):
    server = ServerProcess(tiny_model, "--chat-template", TOOLS_TEMPLATE)
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            other = pool.submit(lambda: server.post(prompt="x", max_tokens=100, ignore_eos=True))
            answer = server.post(CHAT, messages=USER_HI, tools=[tool], tool_choice="required")
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"
            assert words in answer.json()["error"]["message"]
            assert other.result().json()["usage"]["completion_tokens"] == 100
        server.check_sound()
    finally:
        server.kill()
