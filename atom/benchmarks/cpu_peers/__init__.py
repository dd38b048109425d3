"""ATOM beside other engines on the CPU: ``python -m atom.benchmarks.cpu_suite --peers``."""
