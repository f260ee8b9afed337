# Set-up is part of every target: a virtual environment outside the checkout, made once and reused.
PYTHON ?= $(firstword $(shell command -v python3.12 python3.11 python3))
VENV   ?= $(HOME)/.cache/sglang-dart/venv-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
ALGO   ?= DART
BIN     = $(VENV)/bin

.PHONY: demo test lint bench install

demo: install
	$(BIN)/sglang-dart demo --algorithm $(ALGO)

test: install lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q

lint: install
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/deptry .

bench: install
	$(BIN)/python -m benchmarks

install: $(BIN)/python
	$(BIN)/pip install -q ".[test]"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip
