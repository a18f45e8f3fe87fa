# Every target sets the project up first; the second time that takes no time at all.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ponder-setup
PORT ?= 8000
HOST ?= 127.0.0.1
MODEL ?= models/pebble
DEVICE ?= cpu
GPU_PYTHON ?= $(BIN)/python
# Two at most: more engines at once want more memory than a small machine has.
TEST_PROCESSES ?= 2
WEB := $(shell find web -type f -not -path 'web/node_modules/*' -not -path 'web/dist/*' 2>/dev/null)

.PHONY: setup serve test check bench gpu kernels train clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt hatch_build.py $(WEB)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Ponder needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Setting up $(VENV): Python packages and the web page. The first time takes a few minutes."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

serve: setup
	@$(BIN)/ponder serve --host $(HOST) --port $(PORT) --model $(MODEL)

test: setup
	$(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --dist loadfile $(PYTEST_ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	$(BIN)/ponder bench $(BENCH_ARGS)

# What needs a CUDA device, kernels against their twins first, then the measurements; elsewhere it says that there is
# none. With GPU_PYTHON=python3 it runs on that interpreter's packages and sets nothing up. Under ten minutes: 200 s of
# tests and 5.5 minutes of figures, with what is begun by then (GPU_TEST_ARGS="--seconds 600" GPU_ARGS="--minutes 20" is
# more). Figures are written as they come, to --out FILE, or to bench/results; parts that are there already are kept, so
# that `python -m bench.gpu --only peers --minutes 9 --out FILE` goes on with the same file.
gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),setup)
	@$(GPU_PYTHON) -m tests.gpu $(GPU_TEST_ARGS); status=$$?; $(GPU_PYTHON) -m bench.gpu $(GPU_ARGS) || status=1; exit $$status

# Compiles every Triton kernel for the GPUs of three generations, none of which need be here; then whatever the engine
# launches, by the way that it is launched.
kernels: setup
	@$(BIN)/python -m engine.kernels.ahead
	@$(BIN)/python -m tests.engine.kernels.dry

train: setup
	$(BIN)/python -m training --device $(DEVICE)

clean:
	rm -rf $(VENV) web/dist build dist
