# Linux only (Ray, the Triton kernels and the process handling of `serve` are). Needs Python >= 3.11 and make.
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin
# The first interpreter that is new enough and can make virtual environments; `make PYTHON=... venv` overrides.
PYTHON ?= $(shell for candidate in python3 python3.13 python3.12 python3.11; do \
	$$candidate -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& { echo $$candidate; break; }; done)
PIP := $(BIN)/python -m pip --disable-pip-version-check install --progress-bar on
SEEDS ?= 500

export RAY_USAGE_STATS_ENABLED := 0
export PYTHONFAULTHANDLER := 1

.PHONY: help venv demo test test-full test-rayup lint simulate bench clean

help:
	@echo 'make demo       8 chat prompts streamed from a scheduler, 2 workers and a gRPC front end on a local cluster'
	@echo 'make test       lint, types and every test that needs no GPU (a sample of the large matrices)'
	@echo 'make test-full  the same with the whole matrices'
	@echo 'make test-rayup `ray up` on three hosts made of namespaces (root; skipped with the reason elsewhere)'
	@echo 'make lint       ruff and mypy'
	@echo 'make simulate   SEEDS=$(SEEDS) random worlds around the scheduler core'
	@echo 'make bench      tokens/s over Ray and gRPC beside the in-process engine'

$(BIN)/python:
	@[ "$$(uname -s)" = Linux ] || { echo 'Slipstream runs on Linux only.' >&2; exit 1; }
	@[ -n "$(PYTHON)" ] || { echo 'No Python >= 3.11 with venv and ensurepip found' \
		'(Debian and Ubuntu: apt-get install python3-venv).' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Stamps inside the environment: removed with it, renewed when the requirements change.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(PIP) --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) --editable '.[test]'
	@touch $@

venv: $(VENV)/.installed-test

demo: $(VENV)/.installed
	@$(BIN)/slipstream demo

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -m 'not gpu and not slow and not ray'
	$(BIN)/python -m pytest -m 'ray and not gpu and not slow'

test-full: lint
	SLIPSTREAM_FULL=1 $(BIN)/python -m pytest -m 'not gpu' --timeout 7200

test-rayup: $(VENV)/.installed-test
	$(BIN)/python -m pytest tests/test_rayup.py --timeout 1500

simulate: $(VENV)/.installed-test
	$(BIN)/python -m tests.simulation --seeds $(SEEDS)

bench: $(VENV)/.installed-test
	$(BIN)/python -m tests.bench.serving

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
