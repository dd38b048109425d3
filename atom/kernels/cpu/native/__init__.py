"""Kernels in C, built on first use: ``src/`` holds them, ``build`` compiles them, ``library`` calls them."""
