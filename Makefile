# make demo       build a tiny model, fine-tune it on the sample dialogues, show what it learned
# make lint       ruff, its format, types       make format     let ruff mend what it can
# make test       the fast tests                make test-slow  the slow ones
# make test-all   both, and every product of settings in full
# Each makes .venv and installs what it needs, once. WORKERS=1 runs the tests one after the other.

PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -q --numprocesses $(WORKERS) --dist worksteal --durations 15

.DELETE_ON_ERROR:
.PHONY: demo test test-slow test-all lint format clean

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12 ...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: requirements.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --requirement requirements.txt
	@touch $@

$(VENV)/.installed-dev: requirements-dev.txt requirements-tracking.txt $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --requirement requirements-dev.txt
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/python -m tools.demo

test: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow and not full"

test-slow: $(VENV)/.installed-dev
	$(PYTEST) -m "slow and not full"

test-all: $(VENV)/.installed-dev
	$(PYTEST)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) outputs .pytest_cache .ruff_cache .mypy_cache
