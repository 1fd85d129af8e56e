# make demo       build a tiny model, fine-tune it on the sample dialogues, show what it learned
# make test       the fast tests            make test-slow  the slow ones
# make lint       ruff, its format, types   make format     let ruff mend what it can
# Each makes .venv and installs what it needs, once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.DELETE_ON_ERROR:
.PHONY: demo test test-slow lint format clean

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
	$(BIN)/python -m pytest -q -m "not slow" --durations 15

test-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -m slow --durations 15

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) outputs .pytest_cache .ruff_cache .mypy_cache
