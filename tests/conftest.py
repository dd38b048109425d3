"""Settings of every test run; they must be in place before torch starts its threads."""

import os
import sys

import pytest

# Threads of libgomp give their core up soon: tests run several processes on few cores (see engine_core_mgr).
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

# Without a device, Triton kernels run under the interpreter; it must be asked for before they are defined.
if not os.path.exists("/dev/nvidiactl") and not os.path.exists("/dev/kfd"):
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True, scope="module")
def forget_compiled_code():
    """Dynamo remembers what differed between a process's models; an engine process has one model."""
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
