# Every target sets itself up: a fresh clone needs no other command.
#   TORCH=torch==2.14.1 make setup    takes that torch instead of the tested CPU one, and is remembered
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
HELD := $(shell cat .venv/.torch 2>/dev/null)
WANTED := $(or $(TORCH),$(HELD))
PIP_TORCH := $(if $(WANTED),"$(WANTED)",-c constraints/cpu.txt)
export OMP_NUM_THREADS ?= 1

.PHONY: setup demo test unit store cluster soak check format bench docs clean other-torch

setup: $(READY)

ifneq ($(WANTED),$(HELD))
$(READY): other-torch
endif

$(READY): pyproject.toml setup.py constraints/cpu.txt $(wildcard everstep/kernels/csrc/*.c everstep/kernels/csrc/*.h)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("everstep needs Python 3.11 or newer: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_TORCH) -e '.[test,dev]'
	@printf '%s' '$(WANTED)' > .venv/.torch
	@touch $@

demo: setup
	$(BIN)/python examples/demo.py

test: unit store cluster

unit: setup
	$(BIN)/pytest tests/unit tests/golden tests/kernels -n 2 $(PYTEST_ARGS)

store: setup
	$(BIN)/pytest tests/s3 tests/faults -n 2 $(PYTEST_ARGS)

cluster: setup
	$(BIN)/pytest tests/cluster -m "not soak" -n 2 --dist worksteal $(PYTEST_ARGS)

soak: setup
	$(BIN)/pytest tests/cluster -m soak -n 2 --dist worksteal $(PYTEST_ARGS)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	@set -e; for script in benchmarks/*.py; do \
	    if [ -e "$$script" ]; then $(BIN)/python "$$script"; else echo "no benchmarks yet"; fi; done

docs: setup
	@echo "docs/ is plain Markdown: nothing to build"

clean:
	rm -rf .venv build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
