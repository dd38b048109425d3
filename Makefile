# Every target says what it does: `make help`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test serve lint format bench-host bench-cpu gpu-test clean

help:  ## List the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## Create .venv and install ATOM with everything the demo and the tests need

$(STAMP): pyproject.toml constraints/cpu.txt
	@echo "==> creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 12) else "ATOM needs Python 3.11 or 3.12; name one with PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "==> installing the pinned packages of constraints/cpu.txt (a minute or two)"
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar on -q -c constraints/cpu.txt torch
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar on -q -c constraints/cpu.txt -e '.[demo,dev]'
	@touch $@

demo: $(STAMP)  ## Generate text with the bundled demo model on the CPU and print tokens/s
	@$(BIN)/python -m atom.examples.demo_model
	@$(BIN)/python -m atom.examples.simple_inference --model demo --device cpu --temperature 0 --max-tokens 64

test: $(STAMP)  ## Run the whole test suite (CPU)
	@$(BIN)/python -m atom.examples.demo_model
	@$(BIN)/python -m pytest tests/ -m "not gpu"

serve: $(STAMP)  ## Serve the demo model on http://127.0.0.1:8000 (MODEL=path for another one)
	@$(BIN)/atom serve $(or $(MODEL),demo)

lint: $(STAMP)  ## Check style: ruff and black
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m black --check -q . && echo "black: clean"

format: $(STAMP)  ## Rewrite the code in the house format
	@$(BIN)/python -m black -q . && $(BIN)/python -m ruff check --fix .

bench-host: $(STAMP)  ## Time the host's share of a decode step, of streaming and of a request, with a fake model
	@$(BIN)/python -m atom.benchmarks.host_overhead

bench-cpu: $(STAMP)  ## Time the demo model beside transformers on this CPU (ARGS=--peers: other engines too)
	@$(BIN)/python -m atom.benchmarks.cpu_suite $(ARGS)

gpu-test:  ## Run the GPU tests with the machine's own interpreter: make gpu-test PYTHON=python3
	@$(PYTHON) -m tests.gpu.run $(ARGS)

clean:  ## Remove the virtual environment and caches of the tools
	@rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build *.egg-info
