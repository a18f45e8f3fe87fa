# Every target sets the project up first; the second time that takes no time at all.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ponder-setup
PORT ?= 8000
HOST ?= 127.0.0.1
MODEL ?= models/pebble
WEB := $(shell find web -type f -not -path 'web/node_modules/*' -not -path 'web/dist/*' 2>/dev/null)

.PHONY: setup serve test check bench gpu train clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt hatch_build.py $(WEB)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Setting up $(VENV): Python packages and the web page. The first time takes a few minutes."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

serve: setup
	@$(BIN)/ponder serve --host $(HOST) --port $(PORT) --model $(MODEL)

test: setup
	$(BIN)/python -m pytest -q

check: setup
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	$(BIN)/ponder bench

gpu: setup
	$(BIN)/python -m pytest -q -m gpu

train: setup
	$(BIN)/python -m training

clean:
	rm -rf $(VENV) web/dist build dist
