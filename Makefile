# Set-up is part of every target: a virtual environment outside the checkout, made once and reused.
# The first that runs: a pyenv shim may exist for a version that is not installed.
PYTHON ?= $(shell for p in python3.12 python3.11 python3; do $$p -c pass 2>/dev/null && echo $$p && break; done)
VENV   ?= $(HOME)/.cache/sglang-dart/venv-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
ALGO   ?= DART
BIN     = $(VENV)/bin
# Says that this checkout is what the environment holds.
STAMP   = $(VENV)/.installed-$(shell pwd | cksum | cut -d' ' -f1)

.PHONY: demo test lint bench install

demo: install
	$(BIN)/sglang-dart demo --algorithm $(ALGO)

# Two at a time: an engine is one busy core, and takes some GB.
test: install lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile

lint: install
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/deptry .

# What they run on is generated once into ~/.cache/sglang-dart/benchmarks.
bench: install
	$(BIN)/python -m benchmarks.growth
	$(BIN)/python -m benchmarks.ngram_lookup
	$(BIN)/python -m benchmarks.ngram_build
	if nvidia-smi -L >/dev/null 2>&1; then PYTHON=$(BIN)/python benchmarks/h200.sh; fi

install: $(STAMP)

# Python files are used in place; what is compiled or declared asks for a new installation.
$(STAMP): pyproject.toml $(shell find cpp -type f) | $(BIN)/python
	@echo "installing into $(VENV); SGLang and torch take some minutes at the first time"
	$(BIN)/pip install -q -e ".[test]"
	rm -f $(VENV)/.installed-* && touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip
