# make demo       build a tiny model, fine-tune it on the sample dialogues, show what it learned
# make lint       ruff, its format, types       make format     let ruff mend what it can
# make test       the fast tests                make test-slow  the slow ones
# make test-both  both in one go, which costs less: tests are collected once, and runs that both look at are made once
# make test-all   both, and every product of settings in full
# make test-lowest  the fast tests with the lowest version of each package that requirements*.txt allow
# make test-float8  those of --float8 that need torchao, which is installed beside .venv: transformers imports it, slowly
# make test-cluster  real Slurm, and pods in network namespaces; what they need is installed by apt
# make audit      asks PyPI's advisories about every installed package
# Each makes .venv and installs what it needs, once. WORKERS=1 runs the tests one after the other; three keep two cores busy,
# since many tests wait: for launchers, for ranks to end, for one that hangs.

PYTHON ?= python3
WORKERS ?= 3
VENV := .venv
LOWEST := .venv-lowest
FLOAT8 := .venv-float8
K8S := .venv-k8s
# make test-lowest TORCH=2.13.0 takes another torch: pip may have the lowest one with gigabytes of CUDA only.
TORCH ?= $(shell sed -nE 's/^torch>=([0-9.]+).*/\1/p' requirements.txt)
BIN := $(VENV)/bin
# Python compiles modules as they are imported. pip would compile all of them, five times as many, on one core.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/python -m pytest -q --numprocesses $(WORKERS) --dist worksteal --durations 15

.DELETE_ON_ERROR:
.PHONY: demo test test-slow test-both test-float8 bytecode cluster-tools test-cluster test-all test-lowest audit lint format clean

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12 ...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: requirements.txt | $(VENV)/bin/python
	$(INSTALL) --requirement requirements.txt
	@touch $@

$(VENV)/.installed-dev: requirements-dev.txt requirements-tracking.txt requirements-evaluation.txt requirements-images.txt $(VENV)/.installed
	$(INSTALL) --requirement requirements-dev.txt
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/python -m tools.demo

test: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow and not full and not cluster"

test-slow: $(VENV)/.installed-dev
	$(PYTEST) -m "slow and not full"

test-both: $(VENV)/.installed-dev
	$(PYTEST) -m "not full and not cluster"

$(FLOAT8)/.installed: requirements-float8.txt | $(VENV)/.installed-dev
	$(INSTALL) --no-deps --upgrade --target $(FLOAT8) --requirement requirements-float8.txt
	@touch $@

test-float8: $(VENV)/.installed-dev $(FLOAT8)/.installed
	PYTHONPATH=$(abspath $(FLOAT8)) $(PYTEST) -m "not full" $(wildcard tests/*/test_float8*.py tests/*/*/test_float8*.py)

# Each of pytest's workers, which begin at once, would compile torch, transformers and the tests for itself: 22 s of CPU.
bytecode: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --quiet --collect-only > /dev/null || true  # what cannot be imported is told by the tests

cluster-tools:
	bash .ci/cluster_tools $(PYTHON) $(K8S)

test-cluster: $(VENV)/.installed-dev cluster-tools
	$(BIN)/python -m pytest -q -rs --numprocesses $(WORKERS) --dist loadfile --durations 5 -m "cluster and not full" \
		$$(grep --recursive --files-with-matches --include='test_*.py' mark.cluster tests)

test-all: $(VENV)/.installed-dev
	$(PYTEST)

$(LOWEST)/.installed: requirements.txt requirements-dev.txt requirements-tracking.txt requirements-evaluation.txt requirements-images.txt
	$(PYTHON) -m venv --clear $(LOWEST)
	sed -nE 's/^([A-Za-z0-9_-]+)>=([0-9.]+).*/\1==\2/p' requirements.txt requirements-tracking.txt requirements-evaluation.txt requirements-images.txt \
		| sed -E 's/^torch==.*/torch==$(TORCH)/' > $(LOWEST)/versions.txt
	$(LOWEST)/bin/python -m pip install --quiet --requirement requirements-dev.txt --constraint $(LOWEST)/versions.txt
	@touch $@

test-lowest: $(LOWEST)/.installed
	$(LOWEST)/bin/python -m pytest -q --numprocesses $(WORKERS) --dist worksteal -m "not slow and not full and not cluster"

audit: $(VENV)/.installed-dev
	$(PYTHON) -m venv $(VENV)-audit
	$(VENV)-audit/bin/python -m pip install --quiet pip-audit
	$(VENV)-audit/bin/pip-audit --path $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers $(WORKERS)

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VENV)-audit $(LOWEST) $(FLOAT8) $(K8S) outputs logs .pytest_cache .ruff_cache .mypy_cache
