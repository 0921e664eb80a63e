# Every target does its own set-up: Python 3.11 or newer and make are all that must be there.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed-for-development
# More arguments for pytest: make test PYTEST_ARGS="-k lineage"
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test engine inside bench lint types wheel format clean distclean

help: ## Show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/\1|\2/p' $(firstword $(MAKEFILE_LIST)) | \
		while IFS='|' read -r name text; do printf '  make %-9s %s\n' "$$name" "$$text"; done

demo: $(STAMP) ## Run the whole loop on this machine with the built-in engine
	@$(BIN)/token-capture demo

test: $(STAMP) ## Run every test that needs no real engine
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

engine: $(STAMP) ## Run the suite in front of a real vLLM (installs it: 3.5 GB)
	@$(BIN)/python tests/engine/prepare.py
	@$(BIN)/python -m pytest tests/engine --ignore=tests/engine/inside $(PYTEST_ARGS)

inside: $(STAMP) ## Run the suite inside a real vLLM (several starts, about ten minutes)
	@$(BIN)/python tests/engine/prepare.py
	@$(BIN)/python -m pytest tests/engine/inside $(PYTEST_ARGS)

bench: $(STAMP) ## Measure, in the short form that also asserts
	@if [ -f tests/bench/__main__.py ]; then $(BIN)/python -m tests.bench --short; \
	else echo "no benchmarks yet"; fi

lint: $(STAMP) ## Check format and style
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .

format: $(STAMP) ## Format, and fix what can be fixed
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

types: $(STAMP) ## Check types, strictly
	@$(BIN)/mypy

wheel: $(STAMP) ## Build the wheel, install it in an empty environment, run the demo from there
	@$(BIN)/python tests/e2e/check_wheel.py

clean: ## Remove what was built, cached and installed here, except the engine
	rm -rf $(VENV) dist build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find middleware capture_server tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## As clean, and the engine with its model too
	rm -rf .venv-vllm .cache

# The stamp makes a second run quick; a change of the dependencies installs again.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else \
		"Python 3.11 or newer is needed; name one: make PYTHON=python3.11 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) ..."
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-input -e '.[dev]'
	@touch $@
