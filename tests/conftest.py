"""Settings of every test run; they must be in place before torch starts its threads."""

import os

# Threads of libgomp give their core up soon: tests run several processes on few cores (see engine_core_mgr).
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
