"""The native library: built once, kept privately, never in the way of a machine without a compiler."""

import logging
import os
import re
import shutil
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from atom.errors import ConfigError
from atom.kernels.cpu.native import build
from atom.kernels.cpu.native.build import BuildError, Compiler, Target, build_library
from atom.kernels.cpu.native.library import NativeLibrary, native_library
from atom.platforms.cpu import CpuFacts, cpu_facts

ROOT = Path(__file__).resolve().parents[2]
HEADER = build.SOURCES / "atom.h"
has_compiler = pytest.mark.skipif(native_library() is None, reason="no C compiler")


@pytest.fixture
def small_sources(tmp_path, monkeypatch):
    """A cache of our own and the least sources that load, so that a build takes no time."""
    folder = tmp_path / "src"
    folder.mkdir()
    for name in ("atom.h", "machine.c", "threads.c"):
        shutil.copy(build.SOURCES / name, folder)
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@has_compiler
def test_is_built_once_into_a_private_folder(small_sources, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    target = Target.of(cpu_facts())
    path = build_library(target)
    folder = tmp_path / "cache" / "atom" / build.KIND
    assert path.parent.parent == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(p.name for p in path.parent.iterdir()) == ["kernels.so", "manifest.json"]
    assert [r.message.split(":")[1].split()[0] for r in caplog.records] == ["compiling", "compiled"]
    before = path.stat().st_mtime_ns
    assert build_library(target) == path and path.stat().st_mtime_ns == before
    (small_sources / "threads.c").write_text((small_sources / "threads.c").read_text() + "\n")
    assert build_library(target) != path  # other sources, another library
    assert NativeLibrary(path).num_threads == 1


@has_compiler
def test_two_processes_build_once(small_sources, tmp_path):
    script = textwrap.dedent(f"""
        import logging, pathlib, sys
        logging.basicConfig(level=logging.INFO, stream=sys.stdout)
        from atom.kernels.cpu.native import build
        from atom.platforms.cpu import cpu_facts
        build.SOURCES = pathlib.Path({str(small_sources)!r})
        build.build_library(build.Target.of(cpu_facts()))
    """)
    children = [
        subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    logs = "".join(child.communicate(timeout=120)[0] for child in children)
    assert [child.returncode for child in children] == [0, 0]
    assert logs.count("compiled in") == 1


@has_compiler
def test_a_damaged_library_is_built_again(small_sources, caplog):
    target = Target.of(cpu_facts())
    path = build_library(target)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert len(build_library(target).read_bytes()) >= len(whole) // 2
    assert NativeLibrary(path).num_threads == 1
    assert [r.message for r in caplog.records if "kernels.so" in r.message]


@has_compiler
def test_a_folder_that_others_may_write_to_is_not_used(small_sources):
    path = build_library(Target.of(cpu_facts()))
    path.parent.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="can be written by others"):
        build_library(Target.of(cpu_facts()))


@has_compiler
def test_an_artifact_that_others_may_write_to_is_built_again(small_sources):
    path = build_library(Target.of(cpu_facts()))
    path.parent.chmod(0o777)
    assert build_library(Target.of(cpu_facts())) == path
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.fixture
def asked_anew():
    native_library.cache_clear()
    yield
    native_library.cache_clear()


@pytest.mark.parametrize("compiler", ["/nonexistent/cc", "false"])
def test_without_a_compiler_there_is_one_line_and_no_library(compiler, monkeypatch, caplog, asked_anew):
    monkeypatch.setenv("CC", compiler)
    caplog.set_level(logging.INFO)
    assert native_library() is None and native_library() is None
    (line,) = caplog.records
    assert line.levelname == "WARNING" and compiler in line.message and "PyTorch" in line.message


@has_compiler
def test_sources_that_do_not_compile_are_one_line(small_sources, monkeypatch, caplog, asked_anew):
    (small_sources / "broken.c").write_text("int f(void) { return missing; }\n")
    with pytest.raises(BuildError, match="missing"):
        build_library(Target.of(cpu_facts()))
    assert native_library() is None
    assert sum(record.levelno >= logging.WARNING for record in caplog.records) == 1
    assert not list((small_sources.parent / "cache" / "atom" / build.KIND).glob("*/kernels.so"))


def test_can_be_turned_off(monkeypatch, asked_anew):
    monkeypatch.setenv("ATOM_CPU_NATIVE", "0")
    assert native_library() is None


def _facts(flags, vendor="GenuineIntel"):
    return CpuFacts(f"vendor_id: {vendor}\nmodel name: x\nflags: {flags}\n")


@pytest.mark.skipif(cpu_facts().machine != "x86_64", reason="tiers of x86")
def test_targets_name_what_the_processor_has():
    avx2 = "avx2 fma f16c bmi1 bmi2"
    avx512 = avx2 + " avx512f avx512bw avx512vl avx512dq avx512cd"
    assert Target.of(_facts("sse2")) == Target("baseline", ())
    assert Target.of(_facts(avx2 + " avx_vnni")).optional_flags == ("-mavxvnni",)
    best = Target.of(_facts(avx512 + " avx512_vnni avx512_bf16 amx_tile amx_int8"))
    assert best.tier == "avx512" and "-mavx512dq" in best.flags
    assert set(best.optional_flags) == {"-mavx512vnni", "-mavx512bf16"}
    assert "-DATOM_FAST_BF16=1" in Target.of(_facts(avx512 + " avx512_bf16", "AuthenticAMD")).flags
    assert "-DATOM_FAST_BF16=1" not in Target.of(_facts(avx512 + " avx512_bf16")).flags
    # Tiles are another unit: they do not make vdpbf16ps fast.
    assert "-DATOM_FAST_BF16=1" not in Target.of(_facts(avx512 + " avx512_bf16 amx_bf16")).flags
    assert not any("march" in flag for flag in best.flags)


@has_compiler
def test_thread_counts_are_checked():
    with pytest.raises(ConfigError, match="num_threads must be between 1 and 1024, got 0"):
        native_library().set_threads(0)
    with pytest.raises(ConfigError, match="cpus must name 2 CPUs"):
        native_library().set_threads(2, [0])


TEAM_PROGRAM = r"""
#include "atom.h"
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
static int64_t hits[64], sums[64];
static void body(atom_worker *w, const void *rounds) {
    for (int round = 0; round < *(const int *)rounds; round++) {
        for (int64_t piece; (piece = atom_next(w)) < 64;) {
            volatile double x = 1;
            for (int i = 0; i < 3000; i++) x = x * 0.999 + 0.1; /* several us */
            hits[piece]++;
        }
        atom_barrier(w); /* then every thread sees all hits of the round */
        for (int64_t piece; (piece = atom_next(w)) < 64;) sums[piece] += hits[63 - piece] == round + 1;
        atom_barrier(w);
    }
}
static int check(int rounds) {
    for (int i = 0; i < 64; i++) {
        if (hits[i] != rounds || sums[i] != rounds) return 1;
        hits[i] = sums[i] = 0;
    }
    return 0;
}
int main(int argc, char **argv) {
    int threads = atoi(argv[1]), rounds = atoi(argv[2]), one = 1;
    atom_set_threads(threads, NULL);
    atom_run(body, &rounds);
    if (check(rounds)) return 1;
    atom_run_alone(body, &one);
    if (check(1)) return 2;
    pid_t child = fork();
    if (child == 0) { atom_run(body, &one); _exit(check(1) ? 3 : 0); }
    int status;
    waitpid(child, &status, 0);
    if (status) return 4;
    atom_set_threads(3, (int[]){0, 0, 0});
    atom_run(body, &one);
    if (check(1) || atom_num_threads() != 3) return 5;
    struct rusage before, after;
    usleep(20000);
    getrusage(RUSAGE_SELF, &before);
    usleep(200000); /* idle: nobody spins */
    getrusage(RUSAGE_SELF, &after);
    long seconds = after.ru_utime.tv_sec - before.ru_utime.tv_sec;
    printf("%ld\n", seconds * 1000000 + after.ru_utime.tv_usec - before.ru_utime.tv_usec);
    return 0;
}
"""


@pytest.fixture(scope="module")
def team_program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("team")
    (folder / "team.c").write_text(TEAM_PROGRAM)
    command = [*Compiler.find().command, "-O2", "-pthread", "-I", str(build.SOURCES), str(folder / "team.c")]
    subprocess.run([*command, str(build.SOURCES / "threads.c"), "-o", str(folder / "team")], check=True)
    return folder / "team"


@has_compiler
@pytest.mark.parametrize("num_threads", [1, 2, 7])
def test_team_hands_out_every_piece_once_and_sleeps_when_idle(team_program, num_threads):
    result = subprocess.run(
        [team_program, str(num_threads), "20"], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0
    assert int(result.stdout) < 20_000  # us of 200,000


@has_compiler
def test_two_busy_teams_share_the_cores(team_program):
    """With pure spinning the second process multiplies the time; here it about doubles it."""

    def run(num_processes):
        start = time.monotonic()
        children = [
            subprocess.Popen([team_program, "2", "300"], stdout=subprocess.DEVNULL)
            for _ in range(num_processes)
        ]
        assert [child.wait(timeout=120) for child in children] == [0] * num_processes
        return time.monotonic() - start - 0.22  # the idle part of the program

    alone = min(run(1) for _ in range(3))
    assert min(run(2) for _ in range(3)) < 5 * alone + 0.1


@has_compiler
@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")
@pytest.mark.skipif("avx512f" not in cpu_facts().flags, reason="counts zmm registers")
def test_hot_loops_do_not_spill():
    path = native_library().path
    text = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(path)], capture_output=True, text=True, check=True
    ).stdout
    functions = dict(re.findall(r"^[0-9a-f]+ <(\w+)>:\n(.*?)(?:\n\n|\Z)", text, re.S | re.M))
    # Heads one or two at a time add up vectors in memory after their loops; nothing else may.
    limits = {
        "atom_prefill_scores": 0,
        "atom_prefill_values": 0,
        "atom_decode_heads4": 0,
        "atom_decode_heads2": 12,
    }
    for name, limit in limits.items():
        body = functions[name]
        assert body.count("vfmadd") > 50, f"{name} is not where the products are"
        spills = re.findall(r"\(%r[sb]p[^)]*\),%zmm|%zmm\d+,-?(?:0x[0-9a-f]+)?\(%r[sb]p", body)
        assert len(spills) <= limit, f"{name} spills {len(spills)} vectors"


def test_sources_are_package_data():
    text = (ROOT / "pyproject.toml").read_text()
    assert '"atom.kernels.cpu.native" = ["src/*.c", "src/*.h"]' in text
    assert HEADER.exists() and not os.access(HEADER, os.X_OK)
