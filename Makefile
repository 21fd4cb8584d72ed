# From nothing to a running demo or to tested sources: each target makes .venv first, again when pyproject.toml changes.
# The package itself takes a range of torch releases; this environment pins one, so that two machines test the same.

PYTHON ?= python3
TORCH := torch==2.13.0
BIN := .venv/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check

.PHONY: demo demo-smollm2 test

demo: .venv/demo.stamp
	@$(BIN)/tinyloop demo

demo-smollm2: .venv/demo.stamp
	@$(BIN)/tinyloop demo --smollm2

test: .venv/test.stamp
	@echo "format and lint"
	@$(BIN)/ruff format --check -q
	@$(BIN)/ruff check -q
	@echo "types"
	@$(BIN)/mypy
	@echo "tests"
	@$(BIN)/pytest

.venv/demo.stamp: .venv/torch.stamp pyproject.toml
	@echo "installing tinyloop"
	@$(PIP) -e '.[all]'
	@touch $@

.venv/test.stamp: .venv/torch.stamp pyproject.toml
	@echo "installing tinyloop and what its tests need"
	@$(PIP) -e '.[dev]'
	@touch $@

.venv/torch.stamp: Makefile
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else \
	    f"{sys.executable} is Python {sys.version.split()[0]}; 3.10 or later is needed: make PYTHON=python3.12")'
	@echo "making .venv with $(TORCH)"
	@$(PYTHON) -m venv .venv
	@$(PIP) '$(TORCH)'
	@touch $@
