"""One module for each danger: nothing else in the package opens sockets, fetches, compares keys, renders
templates or decodes a body. Complements the rules against pickle and eval in ``test_architecture``."""

import ast
from collections.abc import Iterator

from tests.test_architecture import ROOT, dotted, file_imports, sources, tree, walk

SERVER = "atom/entrypoints"
# Who may import what speaks to a network. Nobody may import a client that follows a URL given by a request.
NETWORK_CLIENTS = {"requests", "httpx", "aiohttp", "urllib3", "ftplib", "smtplib", "telnetlib"}
URL_FETCHERS = {"urllib.request", "http.client"}
MAY_FETCH = {
    "atom/model_loader/model_files.py",  # model names of the command line, by huggingface_hub
    "atom/runtime/tracing.py",  # spans, to the collector of the environment
}
MAY_BENCHMARK = "atom/benchmarks/"  # clients: they are told where to connect on their own command line


def relative(path) -> str:
    return path.relative_to(ROOT).as_posix()


def calls(path) -> Iterator[tuple[int, str, ast.Call]]:
    for node in walk(tree(path)):
        if isinstance(node, ast.Call):
            yield node.lineno, dotted(node.func) or getattr(node.func, "attr", ""), node


def users_of(*names: str, folder: str = "atom") -> set[str]:
    """Files that import one of ``names`` or something below it."""
    return {
        relative(path)
        for path in sources(folder)
        for _, name in file_imports(path)
        if any(name == wanted or name.startswith(wanted + ".") for wanted in names)
    }


def test_CVE_2026_24779_nothing_in_the_server_can_fetch_a_url():
    found = users_of(*NETWORK_CLIENTS, *URL_FETCHERS)
    assert not {path for path in found if not path.startswith(MAY_BENCHMARK)}
    others = users_of("huggingface_hub", "opentelemetry")
    assert others <= MAY_FETCH
    assert not {path for path in users_of("socket") if path.startswith(SERVER)} - {
        "atom/entrypoints/openai_server.py",
        "atom/entrypoints/openai/serving.py",
        "atom/entrypoints/openai/sockets.py",
    }
    fetchers = ("urlopen", "create_connection", "open_connection", "getaddrinfo")
    for path in sources(SERVER):
        for line, name, _ in calls(path):
            may = relative(path) == "atom/entrypoints/openai/sockets.py"
            assert may or name.split(".")[-1] not in fetchers, f"{path}:{line}"


def test_CVE_2025_32444_and_30202_messages_travel_over_private_unix_sockets_only():
    users = {path for path in users_of("zmq") if not path.startswith(MAY_BENCHMARK)}
    assert users <= {"atom/model_engine/engine_core_mgr.py", "atom/runtime/transport.py"}
    transport = ROOT / "atom/runtime/transport.py"
    text = transport.read_text()
    assert "tcp://" not in text and text.count("ipc://") == 1
    kinds = {node.attr for node in walk(tree(transport)) if isinstance(node, ast.Attribute)}
    assert not kinds & {"PUB", "XPUB", "SUB", "XSUB"}  # a slow subscriber would be somebody's problem
    for path in sources("atom"):
        for line, name, _ in calls(path):
            if name.split(".")[-1] == "bind" and relative(path).startswith(
                ("atom/entrypoints", "atom/runtime")
            ):
                allowed = {"atom/entrypoints/openai/sockets.py", "atom/runtime/transport.py"}
                assert relative(path) in allowed, f"{path}:{line}"


def test_CVE_2025_59425_keys_are_compared_in_one_module_and_in_constant_time():
    assert users_of("hmac") == {"atom/entrypoints/openai/keys.py"}
    mentions = {relative(path) for path in sources(SERVER) if 'b"authorization"' in path.read_text()}
    assert mentions == {"atom/entrypoints/openai/auth.py"}
    compares = [
        node for node in walk(tree(ROOT / "atom/entrypoints/openai/keys.py")) if isinstance(node, ast.Compare)
    ]
    assert not any(isinstance(op, (ast.Eq, ast.NotEq)) for node in compares for op in node.ops)


def test_CVE_2026_115911_templates_are_rendered_in_one_module_in_a_sandbox():
    assert users_of("jinja2") == {"atom/entrypoints/openai/chat_template.py"}
    text = (ROOT / "atom/entrypoints/openai/chat_template.py").read_text()
    assert "ImmutableSandboxedEnvironment" in text


def test_CVE_2025_9141_nothing_that_a_model_wrote_is_evaluated():
    forbidden = {"eval", "exec", "compile", "literal_eval", "__import__", "import_module", "getattr_static"}
    for path in sources(SERVER):
        for line, name, _ in calls(path):
            last = name.split(".")[-1]
            if name == "re.compile":
                continue
            assert last not in forbidden, f"{path}:{line}: {name}"


def test_CVE_2025_48887_patterns_of_the_server_are_its_own():
    """A pattern made of what a client or a model wrote could take for ever: every pattern is a constant."""
    escapes = {"atom/entrypoints/openai/tool_parsers/reader.py"}  # joins the literals of a dialect, escaped
    functions = {
        f"re.{name}" for name in ("compile", "match", "search", "fullmatch", "sub", "split", "findall")
    }
    for path in sources(SERVER):
        for line, name, node in calls(path):
            if name in functions and relative(path) not in escapes:
                assert isinstance(node.args[0], (ast.Constant, ast.JoinedStr, ast.BinOp)), f"{path}:{line}"


def test_CVE_2025_62164_and_30165_the_server_reads_no_tensors():
    assert not users_of("torch", "safetensors", "numpy.lib", folder="atom/entrypoints")
    for path in sources("atom"):
        for line, name, _ in calls(path):
            assert name not in (
                "torch.frombuffer_unchecked",
                "torch.jit.load",
                "torch.package",
            ), f"{path}:{line}"


def test_CVE_2025_66448_code_of_a_model_folder_is_loaded_nowhere():
    loaders = {
        "importlib.util.spec_from_file_location",
        "runpy.run_path",
        "runpy.run_module",
        "imp.load_source",
    }
    for path in sources("atom"):
        for line, name, node in calls(path):
            assert name not in loaders, f"{path}:{line}"
            for keyword in node.keywords:
                if keyword.arg == "trust_remote_code":
                    value = keyword.value
                    assert not (isinstance(value, ast.Constant) and value.value), f"{path}:{line}"
