"""The rules of the house: import order, file length, no pickle, no eval, one place that asks for hardware."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 600

# Bottom to top; a module imports its own line and the lines before it. The longest prefix counts.
ROOMS: tuple[tuple[str, ...], ...] = (
    ("atom.errors", "atom.utils.envs", "atom.utils.env_table", "atom.utils.env_var", "atom.utils.suggest"),
    (
        "atom.core",
        "atom.config",
        "atom.config_fields",
        "atom.config_parts",
        "atom.sampling_params",
        "atom.guide",
    ),
    ("atom.platforms",),
    ("atom.utils", "atom.distributed.nccl_watchdog"),
    ("atom.runtime",),
    ("atom.kernels",),
    ("atom.distributed",),
    ("atom.quantization",),
    ("atom.model_ops",),
    ("atom.model_loader",),
    ("atom.mono",),
    ("atom.models",),
    ("atom.spec_decode", "atom.kv_transfer"),
    ("atom.model_engine",),
    ("atom.diffusion",),
    ("atom.plugin", "atom.mesh", "atom.rollout"),
    ("atom.entrypoints", "atom.cli", "atom.benchmarks", "atom.examples"),
)
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}

PICKLING_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "joblib"}
PICKLING_CALLS = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    "send_pyobj",
    "recv_pyobj",
}
# Questions about the hardware, as dotted names. Acting on a device (streams, events, graphs) is not asking.
HARDWARE_QUESTIONS = {
    *(
        f"torch.cuda.{name}"
        for name in (
            "is_available",
            "device_count",
            "get_device_properties",
            "get_device_capability",
            "get_device_name",
            "get_arch_list",
            "mem_get_info",
            "is_bf16_supported",
        )
    ),
    "torch.version.hip",
    "torch.version.cuda",
    "torch.backends.cuda.is_built",
    "torch.backends.mps.is_available",
    "torch.backends.cpu.get_cpu_capability",
    "torch.accelerator.is_available",
    "torch.accelerator.current_accelerator",
    "os.cpu_count",
    "os.sched_getaffinity",
    "multiprocessing.cpu_count",
    "psutil.cpu_count",
    "psutil.virtual_memory",
}
HARDWARE_PATHS = (
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/sys/fs/cgroup",
    "/sys/devices",
    "nvidia-smi",
    "rocm-smi",
)
HARDWARE_MODULES = {"platform", "pynvml", "amdsmi", "cpuinfo"}

# What the server process imports, and the scheduler's side of the engine: neither torch nor transformers.
TORCH_FREE = (
    "atom",
    "atom.cli",
    "atom.config",
    "atom.core",
    "atom.sampling_params",
    "atom.entrypoints.openai_server",
    "atom.kv_transfer.connector",
    "atom.model_engine.arg_utils",
    "atom.model_engine.detokenizer",
    "atom.model_engine.engine_core_mgr",
    "atom.model_engine.llm_engine",
    "atom.model_engine.messages",
    "atom.model_engine.outputs",
    "atom.model_engine.runner.forward_mode",
    "atom.model_engine.scheduler",
    "atom.model_engine.stop_strings",
    "atom.model_engine.structured.guide_compiler",
    "atom.model_engine.structured.guide_manager",
    "atom.model_loader.hf_config",
    "atom.model_loader.tokenizer",
    "atom.platforms",
    "atom.runtime.process",
    "atom.utils.doctor",
    "atom.utils.forward_context",
    "atom.utils.gc_utils",
    "atom.utils.logging",
)
TORCH_FREE_PACKAGES = ("atom/model_engine/scheduling", "atom/entrypoints/openai")
HEAVY = ("torch", "transformers", "triton")


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def exists(module: str) -> bool:
    path = ROOT.joinpath(*module.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs; the body of ``if TYPE_CHECKING`` does not."""
    yield node
    if isinstance(node, ast.If) and dotted(node.test).split(".")[-1] == "TYPE_CHECKING":
        children: list[ast.AST] = list(node.orelse)
    else:
        children = list(ast.iter_child_nodes(node))
    for child in children:
        yield from walk(child)


def dotted(node: ast.AST) -> str:
    """``torch.cuda.is_available`` of the matching attribute chain; empty for anything else."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def imports(module: str, is_package: bool, root: ast.Module) -> Iterator[tuple[int, str]]:
    """``(line, imported module)``, function-level imports included."""
    for node in walk(root):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parts, *filter(None, [node.module])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield node.lineno, inner if inner.startswith("atom.") and exists(inner) else base


def file_imports(path: Path) -> Iterator[tuple[int, str]]:
    return imports(module_name(path), path.name == "__init__.py", tree(path))


def room_of(module: str) -> str | None:
    """The room of a module; None for the package itself, which anyone may import."""
    parts = module.split(".")
    for length in range(len(parts), 1, -1):
        room = ".".join(parts[:length])
        if room in LEVEL:
            return room
    return None


def import_violation(importer: str, imported: str) -> str | None:
    above, below = room_of(importer), room_of(imported)
    if above is None or below is None:
        return None
    if LEVEL[below] > LEVEL[above]:
        return f"{importer} (room {above}) imports {imported} (room {below}), which is above it"
    if above == "atom.diffusion" and below == "atom.model_engine":
        return f"{importer} imports {imported}: the two engines are siblings"
    return None


def security_violations(path: Path, root: ast.Module) -> Iterator[str]:
    may_load = "atom/utils/debug_helper" in path.as_posix()
    for node in walk(root):
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        keywords = {k.arg: k.value for k in node.keywords}
        where = f"{path}:{node.lineno}"
        if name in ("eval", "exec", "builtins.eval", "builtins.exec"):
            yield f"{where}: {name}()"
        if name.split(".")[-1] in PICKLING_CALLS:
            yield f"{where}: {name}() pickles"
        if is_constant(keywords.get("allow_pickle"), True):
            yield f"{where}: allow_pickle=True"
        if is_constant(keywords.get("weights_only"), False):
            yield f"{where}: weights_only=False"
        if name == "torch.load" and not (may_load and is_constant(keywords.get("weights_only"), True)):
            yield f"{where}: torch.load() is for utils/debug_helper, with weights_only=True"


def is_constant(node: ast.AST | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def pickling_imports(path: Path, found: Iterator[tuple[int, str]]) -> Iterator[str]:
    for line, name in found:
        top = name.split(".")[0]
        if top in PICKLING_MODULES:
            yield f"{path}:{line}: imports {name}"
        # Processes, queues and pools of multiprocessing pickle what they carry; shared memory does not.
        if top in ("multiprocessing",) and not name.startswith("multiprocessing.shared_memory"):
            yield f"{path}:{line}: imports {name}, which pickles; see atom.runtime.process"
        if name.startswith("torch.multiprocessing"):
            yield f"{path}:{line}: imports {name}, which pickles"


def hardware_questions(path: Path, root: ast.Module) -> Iterator[str]:
    docstrings = {
        id(node.body[0].value)
        for node in walk(root)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in walk(root):
        where = f"{path}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Attribute) and dotted(node) in HARDWARE_QUESTIONS:
            yield f"{where}: {dotted(node)}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield from (f"{where}: {text}" for text in HARDWARE_PATHS if text in node.value)
        elif isinstance(node, ast.Import):
            names = (alias.name for alias in node.names)
            yield from (f"{where}: import {name}" for name in names if name.split(".")[0] in HARDWARE_MODULES)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            asked = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (f"{where}: {name}" for name in asked if name in HARDWARE_QUESTIONS)
            if (node.module or "").split(".")[0] in HARDWARE_MODULES:
                yield f"{where}: from {node.module} import"


def report(problems: list[str]) -> str:
    return "\n".join([f"{len(problems)} violations:", *problems])


def test_every_module_belongs_to_a_room():
    names = [module_name(path) for path in sources("atom")]
    homeless = [name for name in names if name != "atom" and room_of(name) is None]
    assert not homeless, report(homeless)


def test_imports_go_downward_only():
    problems = []
    for path in sources("atom"):
        for line, imported in file_imports(path):
            violation = import_violation(module_name(path), imported)
            if violation:
                problems.append(f"{path.relative_to(ROOT)}:{line}: {violation}")
    assert not problems, report(problems)


def test_the_bottom_layer_imports_the_standard_library_only():
    problems = []
    for module in ROOMS[0]:
        path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
        for line, name in file_imports(path):
            if name not in ROOMS[0] and name.split(".")[0] not in sys.stdlib_module_names:
                problems.append(f"{module}:{line}: {name}")
    assert not problems, report(problems)


def test_no_file_exceeds_the_ceiling():
    lengths = {path: len(path.read_text().splitlines()) for path in sources("atom", "tests")}
    problems = [f"{path}: {length} lines" for path, length in lengths.items() if length > MAX_LINES]
    assert not problems, report(problems)


def test_nothing_pickles_evaluates_or_loads_code():
    problems = []
    for path in sources("atom"):
        problems += security_violations(path, tree(path))
        problems += pickling_imports(path, file_imports(path))
    assert not problems, report(problems)


def test_only_platforms_asks_what_hardware_this_is():
    paths = [path for path in sources("atom") if not module_name(path).startswith("atom.platforms")]
    problems = [problem for path in paths for problem in hardware_questions(path, tree(path))]
    assert not problems, report(problems)


def test_the_server_and_the_scheduler_import_no_torch():
    modules = [module for module in TORCH_FREE if exists(module)]
    modules += [module_name(path) for folder in TORCH_FREE_PACKAGES for path in sources(folder)]
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = [h for h in {HEAVY!r} if h in sys.modules]\n"
        "    if heavy: sys.exit(f'{name} imports {heavy}')\n"
    )
    run = subprocess.run([sys.executable, "-c", code, *modules], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("importer", "imported", "is_allowed"),
    [
        ("atom.model_engine.scheduler", "atom.kv_transfer.connector", True),
        ("atom.model_ops.linear", "atom.models.llama", False),
        ("atom.utils.envs", "atom.utils.logging", False),
        ("atom.utils.logging", "atom.utils.envs", True),
        ("atom.config", "atom.platforms", False),
        ("atom.diffusion.engine", "atom.model_engine.messages", False),
        ("atom.cli", "atom.entrypoints.openai_server", True),
        ("atom.kernels.registry", "atom", True),
    ],
)
def test_the_import_rule_itself(importer, imported, is_allowed):
    assert (import_violation(importer, imported) is None) == is_allowed


def test_imports_are_found_in_functions_and_not_under_type_checking():
    text = (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import torch\n"
        "def f():\n    from atom.utils import envs\n    from . import messages\n"
    )
    found = {name for _, name in imports("atom.model_engine.x", False, ast.parse(text))}
    assert found == {"typing", "atom.utils.envs", "atom.model_engine.messages"}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("eval('1')", 1),
        ("model.eval()", 0),
        ("torch.load(p, weights_only=True)", 1),
        ("numpy.load(p, allow_pickle=True)", 1),
        ("dist.all_gather_object(a, b)", 1),
        ("ast.literal_eval(t)", 0),
    ],
)
def test_the_security_rule_itself(text, count):
    assert len(list(security_violations(Path("atom/x.py"), ast.parse(text)))) == count


def test_only_the_debug_helper_may_load_weights_only_tensors():
    path = Path("atom/utils/debug_helper/compare.py")
    assert not list(security_violations(path, ast.parse("torch.load(p, weights_only=True)")))
    assert list(security_violations(path, ast.parse("torch.load(p)")))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("torch.cuda.is_available()", 1),
        ("torch.cuda.Stream()", 0),
        ("import platform", 1),
        ("from os import cpu_count", 1),
        ("open('/proc/meminfo')", 1),
        ('"""It reads /proc/meminfo."""', 0),
    ],
)
def test_the_hardware_rule_itself(text, count):
    assert len(list(hardware_questions(Path("atom/x.py"), ast.parse(text)))) == count
