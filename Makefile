# Everything a clone needs. Each target installs what it lacks into $(VENV) and says so; a second call starts at once.
#   make demo        train the tiny FLUX pipeline against the tiny judge, about 5 minutes on 2 cores; runs/demo/report.html
#   make demo-ocr    train a tiny FLUX pipeline that draws words against an OCR package; runs/demo-ocr/report.html
#   make test        lint, types, layers and the tests of every change, a few minutes on 2 cores
#   make test-all    make test, then the exhaustive tests
#   make demo-vllm   the demo with its judge behind a real vLLM server, in .venv-vllm
#   make bench       the benchmarks of the ops
#   make science     the experiments of docs/science.md, under an hour on 4 cores; JOBS=2 on fewer
#   make docs        the site of README and docs/ in site/, every link checked
#   make lint        the static half of `make test`
#   make venv        the development environment alone
# Choose the interpreter with PYTHON=python3.12, pass pip options (an index of CPU wheels, say) with PIP_ARGS=….

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
VENV_VLLM ?= .venv-vllm
PIP_ARGS ?=
export PYTHON PIP_ARGS
# Small parallel regions follow each other closely: threads spin a moment before they sleep. Sleeping at once (passive)
# doubles the demo's step; the default, spinning for long, is many times slower where cores are shared.
export OMP_NUM_THREADS ?= 2
export GOMP_SPINCOUNT ?= 10000

BIN := $(VENV)/bin
SOURCES := $(wildcard pyproject.toml constraints.txt setup.py CMakeLists.txt) $(shell find csrc -type f 2>/dev/null)

.PHONY: help venv demo demo-ocr demo-vllm test test-all lint bench science docs

help:
	@sed -n '2,12s/^# \{0,1\}//p' Makefile

$(VENV)/.installed-train: $(SOURCES) scripts/install.sh
	@scripts/install.sh "$(VENV)" train

$(VENV)/.installed-rewards: $(SOURCES) scripts/install.sh
	@scripts/install.sh "$(VENV)" rewards

$(VENV)/.installed-dev: $(SOURCES) scripts/install.sh
	@scripts/install.sh "$(VENV)" dev

$(VENV)/.installed-docs: $(SOURCES) scripts/install.sh
	@scripts/install.sh "$(VENV)" docs

venv: $(VENV)/.installed-dev

demo: $(VENV)/.installed-train
	@$(BIN)/prefgrpo demo --resume

demo-ocr: $(VENV)/.installed-train $(VENV)/.installed-rewards
	@$(BIN)/prefgrpo train scripts/demo/ocr.yaml --resume

demo-vllm: $(VENV)/.installed-train
	@scripts/setup_vllm_cpu.sh "$(VENV_VLLM)"
	@GOMP_SPINCOUNT=0 scripts/demo_vllm.sh $(VENV) $(VENV_VLLM)  # the server wants the same cores: nobody spins

lint: $(VENV)/.installed-dev
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/clang-format --dry-run --Werror csrc/*.*
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/mypy

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test: lint
	@$(PYTEST) -m "not full"

test-all: test
	@$(PYTEST) -m full

bench: $(VENV)/.installed-dev
	@$(BIN)/python -m benchmarks

JOBS ?= 4
SEEDS ?= 0 1 2 3 4
science: $(VENV)/.installed-dev
	@$(BIN)/python -m benchmarks.science --jobs $(JOBS) --seeds $(SEEDS)
	@$(BIN)/python -m benchmarks.science --render

docs: $(VENV)/.installed-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "the site is site/index.html; with search: $(BIN)/python -m http.server -d site"
