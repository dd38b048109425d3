"""Keys, CORS, TLS, and the bounds of a request's head and body."""

import asyncio
import json
import os
import re
import socket
import ssl
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from atom.entrypoints.openai import connection
from atom.entrypoints.openai.app import make_routes
from atom.entrypoints.openai.auth import OPEN_PATHS, Access, access_of
from atom.entrypoints.openai.context import make_context
from atom.entrypoints.openai.http import read_json_body
from atom.entrypoints.openai.keys import KeyRing
from atom.entrypoints.openai.settings import add_settings_args
from atom.errors import ConfigError, RequestError
from atom.utils.cli_parser import FlexibleArgumentParser
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.live_server import LiveServer, settings_of

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "x", "max_tokens": 1}
GUIDE = Path(__file__).parents[2].joinpath("docs/security.md").read_text()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("# for the second team\nsk-two\n\n")
    flags = ("--api-key", "sk-one", "--api-key-file", str(path), "--admin-api-key", "sk-admin")
    server = LiveServer(FakeEngine(), *flags)
    with httpx.Client(base_url=server.url) as client:
        yield client
    server.stop()


# -- keys


@pytest.mark.parametrize(
    "headers", [bearer("sk-one"), bearer("sk-two"), bearer("sk-admin"), {"x-api-key": "sk-one"}]
)
def test_every_key_opens_the_api(keyed, headers):
    assert keyed.post(COMPLETIONS, json=BODY, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("sk-on"),
        bearer("sk-one "[:-1] + "x"),
        {"authorization": "Bearer"},
        {"authorization": "Basic sk-one"},
        {"authorization": "sk-one"},
        {"x-api-key": "SK-ONE"},
        {"authorization": "Bearer \xff\xfe"},
        {"authorization": "Bearer wrong", "x-api-key": "sk-one"},
    ],
)
def test_CVE_2025_59425_a_wrong_or_missing_key_is_a_401_in_openais_form(keyed, headers):
    raw = [(name, value.encode("latin-1")) for name, value in headers.items()]
    answer = keyed.post(COMPLETIONS, json=BODY, headers=raw)
    assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] in ("missing_api_key", "invalid_api_key")
    assert "sk-" not in answer.text


def test_CVE_2025_59425_every_route_is_closed_unless_listed_open(keyed):
    engine = FakeEngine()
    engine.config.torch_profiler_dir = "/tmp"
    for operation, _ in make_routes(make_context(engine)):
        path = operation.path.replace("{model_id:path}", "fake/model")
        for method in operation.methods:
            answer = keyed.request(method, path)
            assert (answer.status_code == 401) == (path not in OPEN_PATHS), (method, path)
    for path in ("/", "/nothing", "/v1", "/v1/completions/", "//health", "/health/", "/debug/nothing"):
        assert keyed.get(path).status_code == 401, path
    assert keyed.get("/health").json() == {"status": "ok"}


def test_CVE_2025_59425_administrators_routes_need_their_own_key(keyed):
    paths = ("/debug/gc_census", "/debug/cache_stats", "/debug/nothing", "/start_profile", "/stop_profile")
    for path in paths:
        refused = keyed.get(path, headers=bearer("sk-one"))
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "admin_only", path
        assert keyed.get(path, headers=bearer("sk-admin")).status_code in (200, 404), path
    assert all(access_of(path) is Access.ADMIN for path in paths)


def test_with_client_keys_alone_administrators_routes_are_closed():
    server = LiveServer(FakeEngine(), "--api-key", "k")
    assert httpx.get(server.url + "/debug/gc_census", headers=bearer("k")).status_code == 403
    server.stop()


def test_with_an_administrators_key_alone_the_api_is_open():
    server = LiveServer(FakeEngine(), "--admin-api-key", "k")
    assert httpx.post(server.url + COMPLETIONS, json=BODY).status_code == 200
    assert httpx.get(server.url + "/debug/gc_census").status_code == 401
    assert httpx.get(server.url + "/debug/gc_census", headers=bearer("k")).status_code == 200
    server.stop()


def test_keys_are_kept_as_keyed_hashes_only():
    ring = KeyRing(["sk-one", "sk-two"])
    assert ring.holds("sk-two") and not ring.holds("sk-tw") and not ring.holds("")
    assert not KeyRing([]) and not KeyRing([]).holds("")
    assert "sk-one" not in repr(vars(ring))
    assert ring._digests != KeyRing(["sk-one", "sk-two"])._digests


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--api-key", ""], "--api-key"),
        (["--api-key", "two words"], "visible ASCII"),
        (["--api-key-file", "/no/such/file"], "/no/such/file"),
        (["--api-key", "same", "--admin-api-key", "same"], "must differ"),
        (["--allowed-origins", "example.com"], "example.com"),
        (["--allowed-origins", "*", "--allow-credentials"], "by name"),
        (["--ssl-keyfile", "k"], "--ssl-certfile"),
        (["--ssl-certfile", "/no/such/file"], "/no/such/file"),
        (["--ready-timeout", "-1"], "--ready-timeout"),
        (["--ready-timeout", "nan"], "--ready-timeout"),
    ],
)
def test_flags_that_cannot_work_are_told_at_once(flags, words):
    with pytest.raises(ConfigError, match=words):
        settings_of(*flags)


def test_a_key_file_without_keys_or_open_to_others(tmp_path, caplog):
    path = tmp_path / "keys"
    path.write_text("# nothing\n")
    with pytest.raises(ConfigError, match="at least 1 key"):
        settings_of("--api-key-file", str(path))
    path.write_text("secret-key-1\nbad key\n")
    with pytest.raises(ConfigError, match="line 2") as caught:
        settings_of("--api-key-file", str(path))
    assert "bad key" not in str(caught.value)
    path.write_text("secret-key-1\n")
    os.chmod(path, 0o644)
    with caplog.at_level("WARNING"):
        assert settings_of("--api-key-file", str(path)).clients.holds("secret-key-1")
    assert "chmod 600" in caplog.text and "secret-key-1" not in caplog.text


# -- CORS


def test_by_default_no_other_origin_may_read_anything(http):
    answer = http.get("/v1/models", headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in answer.headers
    preflight = http.options(COMPLETIONS, headers={"origin": "https://evil.example"})
    assert preflight.status_code == 405


def test_allowed_origins_pass_preflight_without_a_key_and_no_others():
    server = LiveServer(FakeEngine(), "--allowed-origins", "https://ok.example", "--api-key", "k")
    ask = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    with httpx.Client(base_url=server.url) as client:
        preflight = client.options(COMPLETIONS, headers={"origin": "https://ok.example", **ask})
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://ok.example"
        evil = client.options(COMPLETIONS, headers={"origin": "https://evil.example", **ask})
        assert evil.status_code == 400 and "access-control-allow-origin" not in evil.headers
        refused = client.post(COMPLETIONS, json=BODY, headers={"origin": "https://ok.example"})
        assert refused.status_code == 401  # the page may read why
        assert refused.headers["access-control-allow-origin"] == "https://ok.example"
    server.stop()


# -- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    command += " -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*command.split(), "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


def test_tls_serves_https_and_nothing_else(certificate):
    cert, key = certificate
    server = LiveServer(FakeEngine(), "--ssl-certfile", cert, "--ssl-keyfile", key)
    assert server.url.startswith("https://")
    trust = ssl.create_default_context(cafile=cert)
    with httpx.Client(base_url=server.url, verify=trust) as client:
        assert client.post(COMPLETIONS, json={**BODY, "stream": True}).text.endswith("data: [DONE]\n\n")
    with pytest.raises(httpx.HTTPError):
        httpx.get(server.url.replace("https", "http") + "/health")
    server.stop()


def test_tls_with_client_certificates(certificate):
    cert, key = certificate
    server = LiveServer(FakeEngine(), "--ssl-certfile", cert, "--ssl-keyfile", key, "--ssl-ca-certs", cert)
    trust = ssl.create_default_context(cafile=cert)
    with pytest.raises(httpx.HTTPError):
        httpx.get(server.url + "/health", verify=trust)
    trust = ssl.create_default_context(cafile=cert)
    trust.load_cert_chain(cert, key)
    assert httpx.get(server.url + "/health", verify=trust).status_code == 200
    server.stop()


def test_a_key_that_does_not_belong_to_the_certificate_is_told_at_start(certificate, tmp_path):
    cert, _ = certificate
    other = str(tmp_path / "other.pem")
    subprocess.run(["openssl", "genrsa", "-out", other, "2048"], check=True, capture_output=True)
    with pytest.raises(ConfigError, match="--ssl-certfile"):
        settings_of("--ssl-certfile", cert, "--ssl-keyfile", other)


# -- bounds of a head


def exchange(server: LiveServer, *parts: bytes, timeout_s: float = 5.0) -> bytes:
    """Everything that comes back for ``parts`` until the server closes."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=timeout_s) as client:
        received = b""
        try:
            for part in parts:
                client.sendall(part)
            while chunk := client.recv(65536):
                received += chunk
        except (ConnectionResetError, BrokenPipeError):
            pass
    return received


def status_and_error(reply: bytes) -> tuple[int, dict]:
    head, _, body = reply.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


HEAD = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"


def test_CVE_2025_48956_headers_are_bounded_in_number_and_size(server, http):
    many = b"".join(b"x-%d: y\r\n" % i for i in range(connection.MAX_HEADERS))
    status, error = status_and_error(exchange(server, HEAD + many + b"\r\n"))
    assert status == 431 and error["code"] == "headers_too_large"
    assert (
        str(connection.MAX_HEADERS) in error["message"] and str(connection.MAX_HEAD_BYTES) in error["message"]
    )
    large = b"x-large: " + b"y" * connection.MAX_HEAD_BYTES + b"\r\n"
    assert status_and_error(exchange(server, HEAD + large + b"\r\n"))[0] == 431
    path = b"GET /" + b"p" * connection.MAX_HEAD_BYTES + b" HTTP/1.1\r\nhost: x\r\n\r\n"
    assert status_and_error(exchange(server, path))[0] == 431
    fits = b"".join(b"x-%d: y\r\n" % i for i in range(connection.MAX_HEADERS - 3))
    assert exchange(server, HEAD + fits + b"\r\n").startswith(b"HTTP/1.1 200")


def test_CVE_2025_48956_a_header_without_end_is_cut_off(server, http):
    started = time.monotonic()
    endless = (b"y" * 65536 for _ in range(1000))
    reply = exchange(server, HEAD + b"x-endless: ", *endless)
    assert time.monotonic() - started < 3
    assert reply == b"" or status_and_error(reply)[0] == 431


def test_a_head_that_comes_too_slowly_is_cut_off(server, http, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.1)
    for parts in ((), (b"GET /hea",), (HEAD,)):
        started = time.monotonic()
        status, error = status_and_error(exchange(server, *parts))
        assert status == 408 and error["code"] == "request_timeout"
        assert time.monotonic() - started < 2


def test_an_answer_takes_as_long_as_it_takes_whatever_the_heads_timeout(server, engine, http, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.1)
    engine.step_s = 0.05
    for _ in range(2):  # twice on one connection
        assert http.post(COMPLETIONS, json={"prompt": "x"}).status_code == 200


def test_what_is_not_http_is_told_in_the_same_form(server, http):
    status, error = status_and_error(exchange(server, b"\x16\x03\x01 hello\r\n\r\n"))
    assert status == 400 and error["type"] == "invalid_request_error"


# -- bounds of a body


def test_CVE_2025_48956_bodies_are_bounded_in_size_and_depth(server, http):
    for depth in (100, 200_000):
        nested = (
            b'{"prompt": "x", "max_tokens": 1, "metadata": ' + b'{"a":' * depth + b"1" + b"}" * depth + b"}"
        )
        answer = http.post(COMPLETIONS, content=nested, headers={"content-type": "application/json"})
        assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
        unknown = nested.replace(b"metadata", b"unknown_field")
        answer = http.post(COMPLETIONS, content=unknown, headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    status, error = status_and_error(exchange(server, head + b"content-length: %d\r\n\r\n{" % 2**40))
    assert status == 413 and error["code"] == "body_too_large"


def test_a_body_that_comes_too_slowly_is_a_408(monkeypatch):
    monkeypatch.setattr("atom.entrypoints.openai.http.BODY_TIMEOUT_S", 0.05)
    scope = {"headers": [(b"content-type", b"application/json")]}

    async def receive():
        await asyncio.sleep(0.03)
        return {"type": "http.request", "body": b" ", "more_body": True}

    with pytest.raises(RequestError) as caught:
        asyncio.run(read_json_body(scope, receive))
    assert caught.value.status == 408


# -- the guide


def test_the_guide_lists_every_flag_and_bound():
    parser = add_settings_args(FlexibleArgumentParser())
    flags = {
        action.option_strings[0]
        for group in parser._action_groups
        if group.title in ("protection", "observation")
        for action in group._group_actions
    }
    assert set(re.findall(r"^\| `(--[a-z-]+)`", GUIDE, re.MULTILINE)) == flags
    for bound in (connection.MAX_HEAD_BYTES, connection.MAX_HEADERS, int(connection.HEAD_TIMEOUT_S)):
        assert str(bound) in GUIDE
