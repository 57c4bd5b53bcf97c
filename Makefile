# `make roundtrip` and `make test` do all the set-up they need.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VENV_019 ?= .venv-019
VENV_PEER ?= .venv-peer

export OMP_NUM_THREADS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: setup roundtrip test test-all mutants interop-019 peer lint format fixtures bench clean

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

# also every topology that megatron-core is made to load, one process a rank, and 300 random faults and rewrites
test-all: $(STAMP)
	MTPCHECK_ALL=1 $(BIN)/python -m pytest -n 2 --dist loadgroup tests

# the catalogue of damage, applied to the fixtures: what caught what, and the table in docs/faults.md
mutants: $(STAMP)
	$(BIN)/python -m tests.mutants.run --docs

interop-019: $(VENV_019)/.installed
	$(VENV_019)/bin/python -m pytest tests/interop/core_019.py

# 0.19 asks for Python 3.12 and runs on 3.11. Its MoE code imports triton, which torch for CPU comes without.
$(VENV_019)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV_019)
	$(VENV_019)/bin/python -m pip install --quiet $$(grep '^torch==' constraints.txt)
	$(VENV_019)/bin/python -m pip install --quiet --constraint constraints.txt --editable . einops psutil pytest
	$(VENV_019)/bin/python -m pip install --quiet --no-deps --ignore-requires-python megatron-core==0.19.2 triton==3.9.0
	touch $@

# mcore_bridge converts in an environment of its own, and the gate judges it; outcome in docs/peers.md
peer: $(STAMP) $(VENV_PEER)/.installed
	PATH="$(abspath $(VENV_PEER))/bin:$$PATH" $(BIN)/python tests/peer/run.py

$(VENV_PEER)/.installed: constraints.txt
	$(PYTHON) -m venv $(VENV_PEER)
	$(VENV_PEER)/bin/python -m pip install --quiet $$(grep '^torch==' constraints.txt)
	$(VENV_PEER)/bin/python -m pip install --quiet --constraint constraints.txt mcore_bridge==1.6.5 megatron-core transformers
	touch $@

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
	rm -rf $(VENV) $(VENV_019) $(VENV_PEER) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
