"""Advisories of servers of this kind, each tried against this one (``docs/security.md``)."""

import json

import msgspec
import pytest

from atom.entrypoints.openai.limits import MAX_STOP_TOKEN_IDS, MAX_TOOLS
from atom.errors import ModelLoadError
from atom.model_engine.messages import FromEngine, ToEngine
from atom.model_engine.scheduling.prefix_hash import mix_seed
from atom.model_loader.model_files import ModelFiles
from atom.model_loader.safetensors_file import read_folder
from tests.helpers.fake_engine import ids_of
from tests.helpers.tiny_model import make_tiny_model

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
# What unpickling would run: os.system("exit").
PICKLE = b"cos\nsystem\n(S'exit'\ntR."


def refused(answer, param: str | None = None) -> dict:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param
    return error


@pytest.mark.parametrize("kind", [ToEngine, FromEngine])
@pytest.mark.parametrize(
    "data",
    [PICKLE, b"\x80\x05K\x01.", msgspec.msgpack.encode(["no_such_tag", 1]), msgspec.msgpack.encode({"a": 1})],
)
def test_CVE_2025_30165_and_CVE_2026_3059_messages_outside_the_list_of_types_are_dropped(kind, data):
    with pytest.raises(msgspec.MsgspecError):
        msgspec.msgpack.decode(data, type=kind)


def test_CVE_2025_62164_a_request_cannot_carry_tensors(http, engine):
    before = len(engine.requests)
    refused(http.post(COMPLETIONS, json={"prompt_embeds": "gASVAAAA"}))
    refused(http.post(COMPLETIONS, json={"prompt": {"prompt_embeds": "gASVAAAA"}}))
    part = {"type": "image_embeds", "image_embeds": "gASVAAAA"}
    refused(http.post(CHAT, json={"messages": [{"role": "user", "content": [part]}]}))
    assert len(engine.requests) == before


def test_CVE_2025_66448_and_CVE_2026_27893_a_malicious_model_folder_runs_nothing(tmp_path):
    folder, ran = make_tiny_model(tmp_path / "model"), tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w')\n"
    (folder / "encoding").mkdir()
    names = ("modeling_evil.py", "configuration_evil.py", "tokenization_evil.py", "encoding/encoding_evil.py")
    for name in (*names, "__init__.py", "setup.py", "conftest.py"):
        (folder / name).write_text(code)
    for name in ("config.json", "tokenizer_config.json"):
        path = folder / name
        values = msgspec.json.decode(path.read_bytes()) if path.exists() else {}
        values["auto_map"] = {
            "AutoConfig": "configuration_evil.Evil",
            "AutoModelForCausalLM": "modeling_evil.Evil",
            "AutoTokenizer": ["tokenization_evil.Evil", None],
        }
        path.write_bytes(msgspec.json.encode(values))
    files = ModelFiles.resolve(str(folder))
    assert files.load_tokenizer().encode("hello")
    assert not ran.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_CVE_2025_32434_pickled_weights_are_not_read(tmp_path, name):
    folder, ran = make_tiny_model(tmp_path / "model"), tmp_path / "ran"
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(f"cbuiltins\nopen\n(S'{ran}'\nS'w'\ntR.".encode())
    with pytest.raises(ModelLoadError, match=f"{name}.*never read"):
        read_folder(folder)
    assert not ran.exists()


URLS = (
    "http://169.254.169.254/latest/meta-data",
    "file:///etc/passwd",
    "data:image/png;base64,AAAA",
    "/etc/passwd",
)


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file", "image"])
def test_CVE_2026_24779_and_CVE_2025_6242_no_part_of_a_message_is_fetched(http, engine, url, kind):
    before = len(engine.requests)
    part = {"type": kind, kind: {"url": url, "data": url, "file_data": url}}
    error = refused(http.post(CHAT, json={"messages": [{"role": "user", "content": [part]}]}))
    assert "messages" in error["param"] and len(engine.requests) == before


@pytest.mark.parametrize(
    "given",
    ["tcp://10.0.0.1:5555", "___prefill_addr_10.0.0.1:5555___decode_addr_10.0.0.2:1", "a b", "x" * 129, "é"],
)
def test_CVE_2026_116176_a_request_id_is_a_label_and_nothing_else(http, engine, given):
    answer = http.post(COMPLETIONS, json={"prompt": "x"}, headers=[(b"x-request-id", given.encode())])
    assert answer.status_code == 200
    told = answer.headers["x-request-id"]
    assert told == given or told.startswith("req-")
    assert "/" not in told and " " not in told and len(told) <= 128


@pytest.mark.parametrize(
    "field, value",
    [
        ("n", 10**9),
        ("n", 129),
        ("best_of", 10**9),
        ("stop", ["x"] * 10_000),
        ("stop", "x" * 10**6),
        ("stop_token_ids", [1] * (MAX_STOP_TOKEN_IDS + 1)),
        ("logit_bias", {str(i): 1 for i in range(261)} | {f"0{i}": 1 for i in range(300)}),
        ("logprobs", 10**6),
        ("prompt_logprobs", 10**6),
        ("bad_words", ["x"] * 10_000),
        ("prompt", ["x"] * 10_000),
        ("max_tokens", 2**63),
        ("min_tokens", 2**40),
        ("priority", 2**70),
        ("seed", 2**80),
    ],
)
def test_CVE_2026_34756_and_CVE_2024_8939_every_number_and_list_has_a_ceiling(http, engine, field, value):
    before = len(engine.requests)
    refused(http.post(COMPLETIONS, json={"prompt": "x", field: value}))
    assert len(engine.requests) == before


def test_CVE_2026_34756_messages_and_tools_have_a_ceiling(http):
    refused(http.post(CHAT, json={"messages": HI * 5000}))
    tool = {"type": "function", "function": {"name": "f"}}
    tools = [{**tool, "function": {"name": f"f{i}"}} for i in range(MAX_TOOLS + 1)]
    refused(http.post(CHAT, json={"messages": HI, "tools": tools}))


@pytest.mark.parametrize(
    "kwargs",
    [
        {"messages": []},
        {"tokenize": True},
        {"bos_token": "x"},
        {"raise_exception": "x"},
        {"chat_template": "{{ 1 }}"},
        {"self": 1},
        {"add_generation_prompt": {"a": [1] * 10**5}},
    ],
)
def test_CVE_2025_62426_template_variables_override_nothing_internal(http, kwargs):
    refused(http.post(CHAT, json={"messages": HI, "chat_template_kwargs": kwargs}))


def test_CVE_2025_62426_a_client_brings_no_template(http):
    refused(
        http.post(CHAT, json={"messages": HI, "chat_template": "{% for i in range(10**9) %}{% endfor %}"})
    )


def test_CVE_2025_25183_the_prefix_hash_depends_on_key_and_salt():
    seeds = {mix_seed(seed, salt) for seed in (1, 2, 3) for salt in (None, "a", "b")}
    assert len(seeds) == 9


@pytest.mark.parametrize("salt", ["", "x" * 257, "new\nline", "nul\0", "\ud800", 7, ["a"]])
def test_CVE_2025_46570_and_CVE_2026_105756_a_bad_salt_is_a_400(http, engine, salt):
    body = json.dumps({"prompt": "x", "cache_salt": salt})  # ASCII: half a character travels as an escape
    answer = http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert http.post(COMPLETIONS, json={"prompt": "x", "cache_salt": "tenant-1"}).status_code == 200


def test_CVE_2025_9141_tool_calls_that_a_model_wrote_are_never_run(http, engine, tmp_path):
    ran = tmp_path / "ran"
    engine.script = lambda prompt, index: ids_of(
        f"<tool_call>__import__('os').system('touch {ran}')</tool_call>"
    )[:200]
    assert http.post(CHAT, json={"messages": HI}).status_code == 200
    assert not ran.exists()


def test_errors_of_the_server_itself_tell_nothing_of_its_inside(http, server, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("/secret/path and a stack")

    monkeypatch.setattr(server.engine, "preprocess", broken)
    answer = http.post(COMPLETIONS, json={"prompt": "x"})
    monkeypatch.undo()
    assert answer.status_code == 500 and "secret" not in answer.text and "Traceback" not in answer.text
