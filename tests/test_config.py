"""Configuration: defaults, limits, JSON, what the environment adds, and what is not available yet."""

import ast
import dataclasses
import json
import os
from pathlib import Path

import pytest

from atom.config import (
    ENGINE_FIELDS,
    LATER_FIELDS,
    CompilationConfig,
    CompilationLevel,
    Config,
    CUDAGraphMode,
    DCPConfig,
    DSparkConfig,
    EPLBConfig,
    KVEventsConfig,
    OnlineQuantConfig,
    ParallelConfig,
    SpeculativeConfig,
    check_supported,
)
from atom.errors import ConfigError
from atom.model_engine.config_guide import markdown

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("ATOM_"):
            monkeypatch.delenv(name)


DEFAULTS = {
    "trust_remote_code": False,
    "max_num_batched_tokens": None,
    "long_prefill_token_threshold": 0,
    "attn_prefill_chunk_size": 16384,
    "state_checkpoint_interval_tokens": 8192,
    "state_checkpoint_demand": True,
    "scheduler_delay_factor": 0.0,
    "max_num_seqs": 512,
    "max_model_len": None,
    "gpu_memory_utilization": 0.9,
    "tensor_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "enforce_eager": False,
    "kv_cache_block_size": 16,
    "num_kvcache_blocks": -1,
    "kv_cache_dtype": "bf16",
    "index_cache_dtype": None,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "port": 8006,
    "master_addr": "127.0.0.1",
    "load_dummy": None,
    "dp_load_balance": "least_requests",
    "moe_backend": "standard",
    "dynamic_chunking_min_chunk_size": 4096,
    "enable_log_stats": True,
    "throughput_log_interval": 10.0,
    "cache_hit_rate_window": 1000,
    "kv_transfer_config": {},
    "bos_token_id": -1,
    "eos_token_id": -1,
    "stop_token_ids": (),
    "capture_sizes": (),
    "device": "auto",
    "dtype": "auto",
    "loop": "auto",
    "kv_cache_memory": None,
    "prefix_hash_seed": None,
    "max_consecutive_prefill_steps": None,
    "lm_head_dtype": "auto",
    "attention_backend": "auto",
    "gguf_dtype": "auto",
    "cpu_weights": None,
    "deterministic": False,
    "num_threads": None,
}


@pytest.mark.parametrize(("name", "value"), DEFAULTS.items())
def test_defaults(name, value):
    assert getattr(Config("m"), name) == value


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"max_num_seqs": 0}, ["max_num_seqs", "at least 1", "0"]),
        ({"max_num_seqs": "8"}, ["max_num_seqs", "an integer", "'8'"]),
        ({"max_num_seqs": True}, ["max_num_seqs", "an integer", "True"]),
        ({"dtype": "bf16"}, ["dtype", "'bfloat16'", "'bf16'"]),
        ({"gguf_dtype": "pack"}, ["gguf_dtype", "'keep'", "'pack'"]),
        ({"cpu_weights": "int3"}, ["cpu_weights", "'int4'", "'int3'"]),
        ({"gpu_memory_utilization": 1.2}, ["gpu_memory_utilization", "at most 1", "1.2"]),
        ({"gpu_memory_utilization": float("nan")}, ["gpu_memory_utilization", "nan"]),
        ({"tensor_parallel_size": 9}, ["tensor_parallel_size", "at most 8", "9"]),
        ({"kv_cache_block_size": 24}, ["kv_cache_block_size", "multiple of 16", "24"]),
        ({"long_prefill_token_threshold": 8}, ["long_prefill_token_threshold", "16", "8"]),
        (
            {"long_prefill_token_threshold": 512, "max_model_len": 256},
            ["long_prefill_token_threshold", "256", "512"],
        ),
        ({"load_dummy": "ones"}, ["load_dummy", "'xavier'", "'ones'"]),
        ({"device": "tpu"}, ["device", "'cuda'", "'tpu'"]),
        ({"port": 70000}, ["port", "65535", "70000"]),
        ({"state_checkpoint_interval_tokens": -2}, ["state_checkpoint_interval_tokens", "-1", "-2"]),
        ({"prefix_hash_seed": -1}, ["prefix_hash_seed", "at least 0", "-1"]),
        ({"kv_cache_memory": 0}, ["kv_cache_memory", "greater than 0", "0"]),
        ({"kv_cache_memory": "two"}, ["kv_cache_memory", "2GiB", "'two'"]),
        ({"kv_transfer_config": "{"}, ["kv_transfer_config", "JSON object", "'{'"]),
        ({"dynamic_chunking_calibration": [1.0]}, ["dynamic_chunking_calibration", "four", "[1.0]"]),
        (
            {"tensor_parallel_size": 4, "decode_context_parallel_size": 3},
            ["decode_context_parallel_size", "4", "3"],
        ),
        ({"dcp_config": {"interleave_size": 5}}, ["interleave_size", "16", "5"]),
        ({"moe_backend": "mega"}, ["moe_backend", "enable_expert_parallel"]),
        ({"disagg_constrained": True}, ["disagg_constrained", "enable_rapidserve"]),
        (
            {"enable_dp_attention": True, "pipeline_parallel_size": 2},
            ["pipeline_parallel_size", "enable_dp_attention", "2"],
        ),
        (
            {"pipeline_parallel_size": 2, "parallel_config": {"data_parallel_size": 2}},
            ["pipeline_parallel_size", "data_parallel_size"],
        ),
        ({"dspark": 3}, ["dspark", "DSparkConfig", "3"]),
        ({"model": ""}, ["model", "''"]),
    ],
)
def test_a_bad_value_names_field_limit_and_value(fields, parts):
    with pytest.raises(ConfigError) as caught:
        Config(**{"model": "m", **fields})
    for part in parts:
        assert part in str(caught.value)


def test_an_unknown_name_is_refused_with_the_near_match():
    with pytest.raises(ConfigError, match="unknown field 'max_num_seq'; did you mean 'max_num_seqs'"):
        Config.build("m", max_num_seq=3)
    with pytest.raises(ConfigError, match="did you mean 'kv_cache_block_size'"):
        Config.build("m", block_size=16)
    with pytest.raises(ConfigError, match="eplb_config: unknown field 'load_window'.*load_window_size"):
        Config.build("m", eplb_config={"load_window": 3})
    with pytest.raises(ConfigError, match="model is required"):
        Config.from_dict({})


def test_a_configuration_is_frozen_and_replaced():
    config = Config("m")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_num_seqs = 3
    assert config.replace(max_num_seqs=3).max_num_seqs == 3
    with pytest.raises(ConfigError, match="max_num_seqs"):
        config.replace(max_num_seqs=-3)


def test_a_configuration_survives_json():
    config = Config.build(
        "m",
        kv_cache_memory="1.5GiB",
        tensor_parallel_size=4,
        decode_context_parallel_size=2,
        compilation_config={"level": 3, "compile_sizes": [4, "cudagraph_capture_sizes"]},
        speculative_config={"method": "eagle3", "model": "draft", "num_speculative_tokens": 3},
        online_quant_config={"global_quant_config": "ptpc_fp8", "exclude_layer": ["lm_head"]},
        kv_transfer_config='{"kv_connector": "mooncake"}',
        dcp_config=DCPConfig(interleave_size=1),
        stop_token_ids=[3, 4],
    )
    wire = json.loads(json.dumps(config.to_dict()))
    restored = Config.from_dict(wire)
    assert restored == config
    assert restored.compilation_config.cudagraph_mode is CUDAGraphMode.TR_HYBRID
    assert restored.kv_cache_memory == 1536 * 2**20
    assert restored.parallel_config.decode_context_parallel_size == 2
    assert restored.stop_token_ids == (3, 4)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("2GiB", 2 << 30),
        ("512 MiB", 512 << 20),
        ("1.5gb", 1_500_000_000),
        ("3k", 3000),
        ("10B", 10),
        (None, None),
    ],
)
def test_memory_sizes(text, size):
    assert Config("m", kv_cache_memory=text).kv_cache_memory == size


@pytest.mark.parametrize("text", ["GiB", "2 apples", "-", "", "1e999GB", True, [1]])
def test_bad_memory_sizes(text):
    with pytest.raises(ConfigError, match="kv_cache_memory"):
        Config("m", kv_cache_memory=text)


def test_connector_settings_come_as_json_or_as_a_python_literal():
    assert Config("m", kv_transfer_config='{"a": true}').kv_transfer_config == {"a": True}
    assert Config("m", kv_transfer_config="{'a': True}").kv_transfer_config == {"a": True}
    assert Config("m", kv_transfer_config=None).kv_transfer_config == {}


# mode: (separate, decode, mixed, has full, uses hybrid, max)
MODES = {
    "NONE": (False, "NONE", "NONE", False, False, "NONE"),
    "TR_HYBRID": (False, "TR_HYBRID", "TR_HYBRID", False, True, "TR_HYBRID"),
    "FULL": (False, "FULL", "FULL", True, False, "FULL"),
    "FULL_DECODE_ONLY": (True, "FULL", "NONE", True, False, "FULL"),
    "FULL_AND_TR_HYBRID": (True, "FULL", "TR_HYBRID", True, True, "FULL"),
}


@pytest.mark.parametrize(("name", "row"), MODES.items())
def test_graph_mode_helpers(name, row):
    mode = CUDAGraphMode[name]
    assert row == (
        mode.separate_routine(),
        mode.decode_mode().name,
        mode.mixed_mode().name,
        mode.has_full_cudagraphs(),
        mode.uses_tr_hybrid(),
        mode.max_cudagraph_mode().name,
    )


def test_graph_mode_values():
    assert [mode.value for mode in CUDAGraphMode] == [0, 1, 2, (2, 0), (2, 1)]
    assert list(CompilationLevel) == [0, 1, 2, 3]


@pytest.mark.parametrize("spelling", ["full", "FULL", "Full", CUDAGraphMode.FULL])
def test_graph_mode_spellings(spelling):
    assert CompilationConfig(cudagraph_mode=spelling).cudagraph_mode is CUDAGraphMode.FULL


def test_an_unknown_graph_mode_names_the_near_match():
    with pytest.raises(ConfigError, match="cudagraph_mode must be one of NONE.*'TR_HYBRYD'.*'TR_HYBRID'"):
        CompilationConfig(cudagraph_mode="TR_HYBRYD")


def test_level_3_sets_what_was_left_open():
    config = CompilationConfig(level=3)
    assert config.cudagraph_mode is CUDAGraphMode.TR_HYBRID
    assert any("mla" in name for name in config.splitting_ops)
    chosen = CompilationConfig(level=3, cudagraph_mode="NONE", splitting_ops=["a.b"])
    assert chosen.cudagraph_mode is CUDAGraphMode.NONE and chosen.splitting_ops == ("a.b",)
    assert CompilationConfig(level=2).cudagraph_mode is None


def test_capture_sizes():
    def sizes(**fields):
        return CompilationConfig(level=3, **fields).capture_sizes()

    assert sizes() == (*range(1, 9), *range(16, 513, 16))
    assert sizes(cuda_graph_sizes=[4]) == (1, 2, 3, 4)
    assert sizes(cuda_graph_sizes=[20]) == (*range(1, 9), 16)
    assert sizes(cuda_graph_sizes=[8, 2]) == (2, 8)
    assert sizes(cudagraph_capture_sizes=[4, 1]) == (1, 4)
    config = Config("m", max_num_seqs=4, compilation_config={"level": 3})
    assert config.capture_sizes == (1, 2, 3, 4)
    assert config.replace(enforce_eager=True).capture_sizes == ()
    assert config.replace(max_num_seqs=12).capture_sizes == (*range(1, 9), 12)  # full batches have a bucket
    compiled = CompilationConfig(compile_sizes=["cudagraph_capture_sizes", 3], cuda_graph_sizes=[2, 4])
    assert compiled.resolved_compile_sizes() == (2, 3, 4)


@pytest.mark.parametrize(
    "fields", [{"level": 4}, {"cuda_graph_sizes": []}, {"cuda_graph_sizes": [0]}, {"compile_sizes": ["x"]}]
)
def test_bad_compilation_values(fields):
    with pytest.raises(ConfigError, match=next(iter(fields))):
        CompilationConfig(**fields)


def test_forced_acceptance_spends_its_budget_on_the_earliest_positions():
    spec = SpeculativeConfig(method="dspark", num_speculative_tokens=7, synthetic_acceptance_length=3.78)
    assert spec.synthetic_acceptance_rates == pytest.approx((1, 1, 0.78, 0, 0, 0, 0))
    spec = SpeculativeConfig(method="mtp", num_speculative_tokens=4, synthetic_acceptance_rate=0.375)
    assert spec.synthetic_acceptance_rates == pytest.approx((1, 0.5, 0, 0))
    assert SpeculativeConfig(method="mtp").synthetic_acceptance_rates is None


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "mtp", "num_speculative_tokens": 5},
        {"method": "mpt"},
        {"synthetic_acceptance_length": 2.0, "synthetic_acceptance_rate": 0.5},
        {"synthetic_acceptance_length": 2.5, "num_speculative_tokens": 1},
    ],
)
def test_bad_speculation(fields):
    with pytest.raises(ConfigError, match="speculative_config"):
        SpeculativeConfig(**fields)


@pytest.mark.parametrize(
    ("spec", "more"),
    [
        ({"method": "eagle3", "model": "m"}, {}),
        ({"method": "mtp", "model": "draft"}, {}),
        ({"method": "dspark", "model": "draft", "num_speculative_tokens": 17}, {}),
        ({"method": "mtp"}, {"dcp_config": {"interleave_size": 2}}),
        (
            {"method": "dspark", "synthetic_acceptance_rate": 0.5},
            {"dspark": {"confidence_schedule": True}},
        ),
    ],
)
def test_speculation_that_does_not_fit_the_rest(spec, more):
    with pytest.raises(ConfigError):
        Config("m", speculative_config=spec, **more)


def test_an_inline_dspark_draft_may_be_long():
    spec = {"method": "dspark", "model": "m", "num_speculative_tokens": 128}
    assert Config("m", speculative_config=spec).speculative_config.num_speculative_tokens == 128


def test_the_smaller_configurations_check_themselves():
    with pytest.raises(ConfigError, match="rebalance_interval.*1000.*10"):
        EPLBConfig(rebalance_interval=10)
    with pytest.raises(ConfigError, match="dspark.ragged"):
        DSparkConfig(ragged=True)
    with pytest.raises(ConfigError, match="'mxfp5'; did you mean 'mxfp"):
        OnlineQuantConfig(layer_quant_config={"*.mlp": "mxfp5"})
    with pytest.raises(ConfigError, match="data_parallel_rank must be below data_parallel_size"):
        ParallelConfig(data_parallel_rank=1)
    assert ParallelConfig(data_parallel_size=4, data_parallel_size_local=None).data_parallel_size_local == 4


def test_the_environment_counts_only_where_it_is_set(monkeypatch):
    monkeypatch.setenv("ATOM_DP_SIZE", "4")
    monkeypatch.setenv("ATOM_DP_RANK", "2")
    parallel = Config.build("m", parallel_config={"data_parallel_master_port": 1234}).parallel_config
    assert (parallel.data_parallel_size, parallel.data_parallel_rank) == (4, 2)
    assert parallel.data_parallel_master_port == 1234
    # What another process sent is taken as it is.
    assert Config.from_dict({"model": "m"}).parallel_config == ParallelConfig()


def test_build_reads_events_profiler_and_checkpoints_from_the_environment(monkeypatch):
    monkeypatch.setenv("ATOM_KV_EVENTS_ENABLE", "1")
    monkeypatch.setenv("ATOM_KV_EVENTS_BUFFER_STEPS", "7")
    monkeypatch.setenv("ATOM_TORCH_PROFILER_DIR", "/traces")
    monkeypatch.setenv("ATOM_STATE_CHECKPOINT_DEMAND", "0")
    config = Config.build("m", state_checkpoint_demand=True)
    assert config.kv_events_config == KVEventsConfig(enable=True, buffer_steps=7)
    assert config.torch_profiler_dir == "/traces"
    assert config.state_checkpoint_demand is False
    assert Config.build("m", torch_profiler_dir="/mine").torch_profiler_dir == "/mine"


def test_a_bad_smooth_factor_cannot_hurt_who_does_not_use_it(monkeypatch):
    monkeypatch.setenv("ATOM_DYNAMIC_CHUNKING_SMOOTH_FACTOR", "7")
    assert Config.build("m").dynamic_chunking_smooth_factor is None
    with pytest.raises(ConfigError, match="ATOM_DYNAMIC_CHUNKING_SMOOTH_FACTOR"):
        Config.build("m", enable_dynamic_chunking=True)
    monkeypatch.delenv("ATOM_DYNAMIC_CHUNKING_SMOOTH_FACTOR")
    assert Config.build("m", enable_dynamic_chunking=True).dynamic_chunking_smooth_factor == 0.75


def test_the_context_is_the_smaller_of_asked_and_trained(caplog):
    assert Config("m").resolve_max_model_len(4096) == 4096
    assert Config("m").resolve_max_model_len(None) == 8192
    assert Config("m", max_model_len=100).resolve_max_model_len(4096) == 100
    assert Config("m", max_model_len=20000).resolve_max_model_len(None) == 20000
    assert not caplog.records
    assert Config("m", max_model_len=5000).resolve_max_model_len(4096) == 4096
    assert "5000" in caplog.text and "4096" in caplog.text


def test_the_hash_follows_what_a_graph_depends_on():
    config = Config("m")
    assert len(config.compute_hash()) == 10 and int(config.compute_hash(), 16) >= 0
    assert config.compute_hash() == Config("m").compute_hash()
    for changes in (
        {"model": "n"},
        {"max_num_seqs": 8},
        {"dtype": "float16"},
        {"compilation_config": {"level": 2}},
        {"quant_config": {"quant_method": "fp8"}},
    ):
        assert config.replace(**changes).compute_hash() != config.compute_hash(), changes
    for changes in ({"port": 9000}, {"mark_trace": True}, {"compilation_config": {"cache_dir": "/x"}}):
        assert config.replace(**changes).compute_hash() == config.compute_hash(), changes


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        (
            {"tensor_parallel_size": 2},
            "--tensor-parallel-size is not available in this version of ATOM, got 2",
        ),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({"parallel_config": {"data_parallel_size": 2}}, "--data-parallel-size"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype"),
        ({"speculative_config": {"method": "mtp"}}, "--method"),
        ({"kv_transfer_config": {"kv_connector": "x"}}, "--kv-transfer-config"),
        ({"enable_tbo_decode": True}, "--enable-tbo "),
        ({"enable_low_latency": True}, "--all2all-backend"),
        ({"dspark": {"q_buckets": "1"}}, "--dspark-config"),
    ],
)
def test_what_is_not_available_is_refused_by_flag(fields, flag):
    config = Config("m", **fields)  # valid as such
    with pytest.raises(ConfigError) as caught:
        check_supported(config)
    assert str(caught.value).startswith(flag)


def test_the_engines_own_port_is_not_taken_for_the_http_port():
    with pytest.raises(ConfigError, match="--port .*got 9000; the HTTP port is --server-port"):
        check_supported(Config("m", port=9000))


def test_what_the_engine_fills_is_not_set_by_hand():
    with pytest.raises(ConfigError, match="eos_token_id is set by the engine and not by hand, got 3"):
        check_supported(Config("m", eos_token_id=3))


def test_every_field_is_read_or_refused():
    """A field that is accepted works: what nothing reads yet is listed as later."""
    names = {field.name for field in dataclasses.fields(Config)}
    read = set()
    for path in (ROOT / "atom").rglob("*.py"):
        if path.parent.name != "atom" and path.name not in ("arg_utils.py", "config_guide.py"):
            nodes = ast.walk(ast.parse(path.read_text()))
            read |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and node.attr in names}
    refused = {*LATER_FIELDS, *ENGINE_FIELDS, "parallel_config", "compilation_config", "enforce_eager"}
    accepted = {
        "kv_events_config",  # its variables warn
        "state_checkpoint_demand",
        "enable_log_stats",  # without a status line there is nothing to turn off
        "trust_remote_code",  # no code of a model folder runs, with the flag or without
    }
    assert names - read - refused - accepted == set()
    assert set(LATER_FIELDS) | set(ENGINE_FIELDS) <= names


def test_what_is_available_passes():
    check_supported(Config("m"))
    check_supported(Config("m", max_num_seqs=3, enable_prefix_caching=False, dtype="float32", loop="plain"))
    check_supported(Config("m", enforce_eager=True, compilation_config={"level": 3}))
    check_supported(Config("m", compilation_config={"use_cudagraph": False, "cudagraph_mode": "FULL"}))


def test_the_guide_is_in_sync():
    page = (ROOT / "docs" / "configuration_guide.md").read_text()
    assert page == markdown(), "run: python -m atom.model_engine.config_guide > docs/configuration_guide.md"
    for field in dataclasses.fields(Config):
        assert f"`{field.name}`" in page
