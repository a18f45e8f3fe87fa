# Every target sets the project up first; the second time that takes no time at all.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ponder-setup
PORT ?= 8000
HOST ?= 127.0.0.1
MODEL ?= models/pebble
DEVICE ?= cpu
TEST_PROCESSES ?= auto
WEB := $(shell find web -type f -not -path 'web/node_modules/*' -not -path 'web/dist/*' 2>/dev/null)

.PHONY: setup serve test test-all check bench gpu kernels train sbom audit clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt hatch_build.py $(wildcard requirements/*) $(WEB)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Ponder needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Setting up $(VENV): Python packages and the web page. The first time takes a few minutes."
	$(BIN)/python requirements/install.py
	@touch $@

serve: setup
	@$(BIN)/ponder serve --host $(HOST) --port $(PORT) --model $(MODEL)

# Bytecode is kept, whatever the environment says: asserts of all files would be rewritten each time, by each process.
PYTEST := PYTHONDONTWRITEBYTECODE= \
	$(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

# What takes about ten minutes on two cores; `make test-all` runs what is marked slow, too, of which TEST_MINUTES=60
# begins none after an hour.
test: setup
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-all: setup
	$(PYTEST) $(PYTEST_ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	$(BIN)/ponder bench $(BENCH_ARGS)

# What needs a CUDA device, kernels against their twins first, then the measurements; elsewhere it says that there is
# none. Runs on GPU_PYTHON's packages; by default on those of $(PYTHON) where its torch finds a GPU, and nothing is set up
# then. Under ten minutes: 200 s of tests at most, then figures for what is left of 9.3 (GPU_TEST_ARGS="--seconds 600"
# GPU_ARGS="--minutes 20" is more). Figures are written as they come, to --out FILE, or to bench/results; parts that are
# there already are kept, so that `python -m bench.gpu --only peers --minutes 9 --out FILE` goes on with the same file.
gpu:
	@began=$$(date +%s); python=$(GPU_PYTHON); \
	if [ -z "$$python" ] && $(PYTHON) -c 'import pytest, sys, torch, transformers, triton; \
		sys.exit(not torch.cuda.is_available())' 2>/dev/null; then python=$(PYTHON); fi; \
	if [ -z "$$python" ]; then $(MAKE) -s setup && python=$(BIN)/python || exit 1; fi; \
	$$python -m tests.gpu $(GPU_TEST_ARGS); status=$$?; \
	$$python -m bench.gpu --minutes 9.3 --taken $$(($$(date +%s) - began)) $(GPU_ARGS) || status=1; exit $$status

# Compiles every Triton kernel for the GPUs of three generations, none of which need be here; then whatever the engine
# launches, by the way that it is launched, beside it.
kernels: setup
	@$(BIN)/python -m tests.engine.kernels.dry & dry=$$!; \
	$(BIN)/python -m engine.kernels.ahead; status=$$?; wait $$dry && exit $$status

train: setup
	$(BIN)/python -m training --device $(DEVICE)

# What is installed, as a CycloneDX bill of materials; and whether anything of it is known to be vulnerable, which needs
# PyPI's or OSV's database (where neither can be reached, every package is listed as not audited).
AUDIT := build/audit/bin

$(AUDIT)/pip-audit:
	$(PYTHON) -m venv build/audit
	$(AUDIT)/python -m pip install --quiet --disable-pip-version-check cyclonedx-bom pip-audit

sbom: setup $(AUDIT)/pip-audit
	$(AUDIT)/cyclonedx-py environment $(BIN)/python --pyproject pyproject.toml --output-reproducible -o build/sbom.cdx.json
	@echo "build/sbom.cdx.json"

audit: $(AUDIT)/pip-audit
	$(AUDIT)/pip-audit --require-hashes --disable-pip --strict -r requirements/base.txt -r requirements/torch.txt

clean:
	rm -rf $(VENV) web/dist build dist
