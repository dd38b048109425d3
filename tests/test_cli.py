"""Flags, the ``atom`` command, and how mistakes are told."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atom import __version__, cli
from atom.config import CUDAGraphMode, check_supported
from atom.errors import ConfigError
from atom.model_engine.arg_utils import EngineArgs, add_server_args
from atom.utils.cli_parser import FlexibleArgumentParser, json_object
from atom.utils.doctor import diagnose, render

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("ATOM_"):
            monkeypatch.delenv(name)


def parser():
    made = FlexibleArgumentParser(prog="atom")
    EngineArgs.add_cli_args(made)
    return add_server_args(made)


def parse(line):
    return parser().parse_args(line.split())


def config_of(line):
    return EngineArgs.from_cli_args(parse(line)).create_config()


def error_of(capsys, line):
    with pytest.raises(SystemExit) as caught:
        parse(line)
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "--kv-cache-dtype fp8",
        "--kv_cache_dtype fp8",
        "--kv_cache-dtype=fp8",
        "--kv-cache_dtype=fp8",
    ],
)
def test_kebab_and_snake_are_the_same_flag(line):
    assert config_of(line).kv_cache_dtype == "fp8"


def test_only_the_name_is_transformed():
    namespace = parse("--served_model_name=my_model-v1 --chat-template a_b-c")
    assert namespace.served_model_name == "my_model-v1"
    assert namespace.chat_template == "a_b-c"


def test_a_registered_spelling_beats_the_alias():
    made = FlexibleArgumentParser()
    made.add_argument("--a-b", dest="kebab")
    made.add_argument("--a_b", dest="snake")
    namespace = made.parse_args(["--a_b", "1", "--a-b", "2"])
    assert (namespace.snake, namespace.kebab) == ("1", "2")


def test_the_first_spelling_names_the_attribute():
    made = FlexibleArgumentParser()
    made.add_argument("--eplb-enable", "--enable-eplb", action="store_true")
    assert made.parse_args(["--enable_eplb"]).eplb_enable is True


def test_words_after_the_separator_are_left_alone():
    made = FlexibleArgumentParser()
    made.add_argument("--a-b")
    made.add_argument("rest", nargs="*")
    assert made.parse_args(["--", "--a_b"]).rest == ["--a_b"]


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("--kv-cach-dtype bf16", ["unknown flag '--kv-cach-dtype'", "did you mean '--kv-cache-dtype'"]),
        ("--kv-cache-dtype bf17", ["--kv-cache-dtype", "bf16, fp8", "'bf17'", "did you mean 'bf16'"]),
        ("--max-num-seqs many", ["--max-num-seqs", "'many'"]),
        ("--max-num 3", ["unknown flag '--max-num'", "did you mean '--max-num-seqs'"]),
        ("--cudagraph-mode ful", ["--cudagraph-mode", "FULL_DECODE_ONLY", "did you mean 'FULL'"]),
        ("--level 4", ["--level", "0, 1, 2, 3", "4"]),
        ("--hf-overrides [1]", ["--hf-overrides", "JSON object", "'[1]'"]),
        ("--hf-overrides {", ["--hf-overrides", "JSON object", "'{'"]),
        ("--cudagraph-capture-sizes 1,x", ["--cudagraph-capture-sizes", "'1,x'"]),
        ("--dynamic-chunking-calibration a", ["--dynamic-chunking-calibration", "'a'"]),
        ("stray", ["unexpected argument 'stray'"]),
        ("--model", ["--model", "expected one argument"]),
    ],
)
def test_a_wrong_flag_or_value_names_the_near_match(capsys, line, parts):
    told = error_of(capsys, line)
    for part in parts:
        assert part in told
    assert len(told.splitlines()) == 2  # the error and where help is


def test_level_and_mode_are_the_platforms_unless_asked_for():
    config = EngineArgs().create_config()
    check_supported(config)
    assert config == config_of("")
    on_gpu = config.compilation_config.settled(3, CUDAGraphMode.FULL)
    assert (on_gpu.level, on_gpu.cudagraph_mode) == (3, CUDAGraphMode.FULL)
    asked = config_of("--level 0 --cudagraph-mode tr_hybrid").compilation_config
    asked = asked.settled(3, CUDAGraphMode.FULL)
    assert (asked.level, asked.cudagraph_mode) == (0, CUDAGraphMode.TR_HYBRID)


def test_flags_become_fields():
    config = config_of(
        "--model m --block-size 32 --kv-cache-memory 2GiB --max-num-seqs 8 --no-enable-prefix-caching "
        "--no_enable_chunked_prefill --load-dummy -tp 4 -dcp 2 -dp 3 --enable-eplb --device cpu --dtype float32 "
        "--loop plain --prefix-hash-seed 7 --max-consecutive-prefill-steps 0 --lm-head-dtype int8 --num-threads 2 "
        "--gguf-dtype dequantize --cpu-weights int8_a8 --deterministic "
        "--cudagraph-capture-sizes [1,2,4] --all2all-backend low-latency --enable-tbo all --throughput-log-interval 5 "
        '--eplb-config {"num_redundant_experts":2} --kv-transfer-config {"kv_connector":"x"}'
    )
    assert config.model == "m"
    assert config.kv_cache_block_size == 32
    assert config.kv_cache_memory == 2 << 30
    assert config.max_num_seqs == 8
    assert not config.enable_prefix_caching and not config.enable_chunked_prefill
    assert config.load_dummy == "empty"
    assert (config.tensor_parallel_size, config.decode_context_parallel_size) == (4, 2)
    assert config.parallel_config.data_parallel_size == config.parallel_config.data_parallel_size_local == 3
    assert config.eplb_enable and config.eplb_config.num_redundant_experts == 2
    assert (config.device, config.dtype, config.loop) == ("cpu", "float32", "plain")
    assert (config.prefix_hash_seed, config.max_consecutive_prefill_steps, config.num_threads) == (7, 0, 2)
    assert config.lm_head_dtype == "int8"
    assert (config.gguf_dtype, config.cpu_weights) == ("dequantize", "int8_a8")
    assert config.deterministic
    assert config.compilation_config.cudagraph_capture_sizes == (1, 2, 4)
    assert config.enable_low_latency and config.enable_tbo and config.enable_tbo_decode
    assert config.throughput_log_interval == 5.0
    assert config.kv_transfer_config == {"kv_connector": "x"}


def test_speculation_flags():
    config = config_of("--model m --method dspark --draft-model d --num-speculative-tokens 5")
    assert (config.speculative_config.method, config.speculative_config.model) == ("dspark", "d")
    assert config.speculative_config.num_speculative_tokens == 5
    assert config_of("--model m --method mtp").speculative_config.model == "m"
    assert config_of("").speculative_config is None
    with pytest.raises(ConfigError, match="--draft-model needs --method"):
        config_of("--draft-model d")
    with pytest.raises(ConfigError, match="eagle3.*draft model"):
        config_of("--method eagle3")
    with pytest.raises(ConfigError, match="mtp.*no draft model"):
        config_of("--method mtp --draft-model d")


def test_every_engine_argument_has_help_and_a_flag():
    made = parser()
    for name in EngineArgs.__dataclass_fields__:
        action = made._option_string_actions["--" + name.replace("_", "-")]
        assert action.dest == name and action.help


def test_server_flags():
    namespace = parse("")
    assert (namespace.host, namespace.server_port, namespace.timeout_keep_alive) == ("127.0.0.1", 8000, 5)
    namespace = parse('--default-chat-template-kwargs {"a":1} --disable-uvicorn-access-log')
    assert namespace.default_chat_template_kwargs == {"a": 1}
    assert namespace.disable_uvicorn_access_log is True


def test_json_object_values():
    assert json_object('{"a": [1]}') == {"a": [1]}
    with pytest.raises(argparse.ArgumentTypeError, match="JSON object"):
        json_object("3")


@pytest.mark.parametrize(
    ("argv", "code", "told"),
    [
        ([], 2, ""),
        (["sreve"], 2, "did you mean 'serve'"),
        (["generate", "m", "--max-num-seq", "1"], 2, "did you mean '--max-num-seqs'"),
        (["generate", "m", "-p", "x", "--kv-cache-memory", "x"], 2, "kv_cache_memory must be"),
        (["generate", "m", "-p", "x", "--top-p", "3"], 2, "top_p must be in (0, 1], got 3.0"),
        (["generate", "m", "-p", "x", "-tp", "2"], 2, "--tensor-parallel-size is not available"),
        (["generate", "m", "-p", ""], 2, "--prompt must not be empty"),
        (["doctor", "--jsn"], 2, "did you mean '--json'"),
        (
            ["bench", "sreve"],
            2,
            "KIND must be one of serve, host, text, cpu, quality, determinism, got 'sreve'; did you mean 'serve'",
        ),
        (["bench", "serve", "--model", "x", "--backend", "vlm"], 2, "did you mean 'vllm'"),
    ],
)
def test_mistakes_are_told_with_code_2(capsys, argv, code, told):
    try:
        result = cli.main(argv)
    except SystemExit as exit:
        result = exit.code
    assert result == code
    assert told in capsys.readouterr().err


def test_version_and_help(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"atom {__version__}\n"
    assert cli.main(["--help"]) == 0
    assert "generate MODEL" in capsys.readouterr().out


class FakeEngine:
    def __init__(self):
        self.calls = []

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.calls.append("closed")

    def generate(self, prompts, params):
        self.calls.append((prompts, params))
        return [{"text": f"<{prompt}>"} for prompt in prompts]


def test_generate_prints_one_answer_a_prompt(capsys, monkeypatch):
    engine = FakeEngine()
    monkeypatch.setattr(EngineArgs, "create_engine", lambda self: engine)
    argv = ["generate", "m", "-p", "a", "--prompt", "b", "--max_tokens", "5", "--stop", "x", "--seed", "3"]
    assert cli.main(argv) == 0
    assert capsys.readouterr().out == "<a>\n<b>\n"
    (prompts, params), closed = engine.calls
    assert prompts == ["a", "b"] and closed == "closed"
    assert (params.max_tokens, params.stop_strings, params.seed, params.temperature) == (5, ["x"], 3, 0.0)


def test_generate_reads_the_prompt_from_standard_input(capsys, monkeypatch):
    monkeypatch.setattr(EngineArgs, "create_engine", lambda self: FakeEngine())
    monkeypatch.setattr(sys, "stdin", __import__("io").StringIO("from a pipe\n"))
    assert cli.main(["generate", "m"]) == 0
    assert capsys.readouterr().out == "<from a pipe>\n"


def test_a_mistake_is_told_before_torch_is_imported():
    code = (
        "import sys\nfrom atom import cli\n"
        "try: cli.main(['generate', 'm', '-p', 'x', '--max-num-seqs', '0'])\n"
        "finally: print([m for m in ('torch', 'transformers', 'triton') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.strip() == "[]"
    assert "max_num_seqs must be at least 1, got 0" in run.stderr


def test_the_doctor_names_versions_devices_and_variables(monkeypatch):
    monkeypatch.setenv("ATOM_GC_FREZE", "1")
    monkeypatch.setenv("ATOM_LOG_MORE", "0")
    found = diagnose()
    assert found.versions["atom"] == __version__
    assert found.versions["msgspec"] != "missing"
    assert found.device["name"] in ("cpu", "cuda", "rocm")
    assert "cores" in found.cpu and "memory" in found.cpu
    text = render(found)
    assert "ATOM_LOG_MORE" in text and "did you mean 'ATOM_GC_FREEZE'" in text
    assert found.is_usable


def test_the_doctor_works_without_torch(monkeypatch, capsys):
    from atom.utils import doctor

    version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "torch" else version(name))
    assert cli.main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"] == "missing"
    assert found["device"] == {"name": "none", "reason": "torch is missing"}
    assert [line for line in found["missing"] if line.startswith("torch: ATOM cannot run")]


def test_the_doctor_needs_the_standard_library_alone():
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from atom import cli; sys.exit(cli.main(['doctor']))"
    )
    run = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True)
    assert run.returncode == 1, run.stderr
    assert "msgspec: ATOM cannot run; pip install msgspec" in run.stdout
    assert "cores" in run.stdout


def test_the_doctor_survives_a_broken_device(monkeypatch, capsys):
    import atom.platforms

    def broken(name="auto"):
        if name == "auto":
            raise RuntimeError("driver too old")
        return get_platform(name)

    get_platform = atom.platforms.get_platform
    monkeypatch.setattr(atom.platforms, "get_platform", broken)
    assert cli.main(["doctor"]) == 1
    assert "device: RuntimeError: driver too old" in capsys.readouterr().out
