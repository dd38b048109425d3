import subprocess
import sys

import pytest
import torch

from atom.errors import ConfigError
from atom.platforms import FEATURES, PLATFORMS, get_platform, meta_stands_for, platform_of_device
from atom.platforms import cpu as cpu_module
from atom.platforms.cpu import CpuFacts, CpuPlatform


def test_importing_platforms_does_not_import_torch():
    code = "import sys, atom.platforms; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_cpu_by_name_and_by_absence_of_accelerators(monkeypatch):
    assert get_platform("cpu").reason == "--device cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    platform = get_platform("auto")
    assert platform.name == "cpu"
    assert platform.reason.startswith("auto: no accelerator (cuda: ")


def test_asking_for_a_missing_device_says_why(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device: 'cuda' was asked for, but"):
        get_platform("cuda")
    with pytest.raises(ConfigError, match="'tpu' is not one of auto, cpu, cuda, rocm"):
        get_platform("tpu")


def test_cpu_facts_and_memory():
    platform = get_platform("cpu")
    assert platform.default_dtype() is torch.bfloat16
    assert platform.device() == torch.device("cpu")
    assert 0 < platform.free_memory() <= platform.total_memory()
    assert 1 <= platform.default_num_threads <= cpu_module.num_usable_cpus()
    assert {"device", "cores", "memory", "instruction sets"} == set(platform.describe())


def test_free_memory_respects_the_cgroup(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text(f"{3 << 30}\n")
    (tmp_path / "memory.current").write_text(f"{2 << 30}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {1 << 30}\n")
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       67108864 kB\nMemAvailable:   60000000 kB\n")
    monkeypatch.setattr(cpu_module, "_MEMINFO", meminfo)
    monkeypatch.setattr(cpu_module, "_own_cgroup", lambda: tmp_path)
    platform = CpuPlatform()
    assert platform.total_memory() == 3 << 30
    assert platform.free_memory() == 2 << 30  # the page cache of files can be dropped
    (tmp_path / "memory.max").write_text("max\n")
    assert platform.total_memory() == 64 << 30


@pytest.mark.parametrize(
    ("vendor", "flags", "fast"),
    [
        ("GenuineIntel", "avx512f avx512_bf16", False),
        ("GenuineIntel", "avx512f avx512_bf16 amx_bf16", True),
        ("AuthenticAMD", "avx512f avx512_bf16", True),
        ("AuthenticAMD", "avx2", False),
    ],
)
def test_fast_bf16_follows_vendor_and_flags(vendor, flags, fast):
    facts = CpuFacts(f"vendor_id\t: {vendor}\nmodel name\t: X: Y\nflags\t\t: {flags}\n")
    assert facts.model_name == "X: Y"
    assert facts.has_fast_bf16 is fast


def test_an_unknown_feature_is_an_error_not_a_no():
    platform = get_platform("cpu")
    assert {name for name in FEATURES if platform.supports(name)} >= {"bf16", "int8_matmul"}
    assert not platform.supports("device_graphs")
    with pytest.raises(ValueError, match="unknown platform feature 'bf17'"):
        platform.supports("bf17")


def test_platform_of_a_tensor():
    assert platform_of_device(torch.device("meta")).name == "cpu"
    assert platform_of_device(torch.zeros(1).device).name == "cpu"


def test_what_is_built_on_the_meta_device_chooses_for_the_platform_that_it_stands_for():
    meta = torch.device("meta")
    with meta_stands_for(PLATFORMS["cuda"]("a test")):
        assert platform_of_device(meta).name == "cuda"
        assert platform_of_device(torch.device("cpu")).name == "cpu"
    assert platform_of_device(meta).name == "cpu"
