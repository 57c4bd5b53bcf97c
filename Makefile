# `make roundtrip` and `make test` do all the set-up they need.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

export OMP_NUM_THREADS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: setup roundtrip test lint format fixtures bench clean

setup: $(STAMP)

# torch first and by its exact version: where it is not installed yet, a loose requirement takes a CUDA build
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

roundtrip: $(STAMP)
	$(BIN)/mtpcheck roundtrip fixtures/glm4_moe

test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

fixtures: $(STAMP)
	$(BIN)/python fixtures/make.py

bench: $(STAMP)
	$(BIN)/python tests/bench/bench.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
