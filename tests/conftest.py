"""Settings of every test run; they must be in place before torch starts its threads."""

import os

# Threads of libgomp give their core up soon: tests run several processes on few cores (see engine_core_mgr).
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

# Without a device, Triton kernels run under the interpreter; it must be asked for before they are defined.
if not os.path.exists("/dev/nvidiactl") and not os.path.exists("/dev/kfd"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
