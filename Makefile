# The two commands are `make demo` and `make check`; the rest are their parts.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

BUILD  ?= build
PY     := .venv/bin/python
SUITES ?= bookworm sid

.PHONY: help
help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: ## Build all, bring the lab up, run a two-node job in guests
	@scripts/demo

.PHONY: check
check: lint types unit ctest lab-tests ## Everything from lint to end-to-end tests on the lab
	@echo "make check: all passed"

.PHONY: check-slow
check-slow: check ## Also what takes long: the other Slurm releases, fuzzing, image rebuilds
	scripts/fuzz --seconds 60
	$(PY) -m pytest -m slow tests
	scripts/check-suites $(SUITES)

.PHONY: deps
deps: .venv/.done ## Install what building and testing need

.venv/.done: pyproject.toml scripts/deps scripts/packages.txt
	@scripts/deps

.PHONY: lint
lint: deps ## ruff, clang-format, shellcheck
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	git ls-files '*.c' '*.h' | xargs clang-format --dry-run --Werror
	scripts/shell-files | xargs shellcheck

.PHONY: types
types: deps ## mypy --strict
	.venv/bin/mypy
	.venv/bin/mypy --strict lab/vlablib vmimages

.PHONY: unit
unit: deps ## Python unit tests
	$(PY) -m pytest -q -m "not lab and not slow" tests

.PHONY: ctest
ctest: deps ## C tests with address and undefined-behaviour sanitizers, and a short fuzz run
	cmake -S . -B $(BUILD)/asan -G Ninja -DVHPC_SANITIZE=ON >$(BUILD)-asan.log || { cat $(BUILD)-asan.log; exit 1; }
	cmake --build $(BUILD)/asan
	ctest --test-dir $(BUILD)/asan --output-on-failure
	scripts/fuzz --runs 20000

.PHONY: lab-up
lab-up: deps ## Bring the one-machine cluster up, with this checkout installed and an image published
	lab/vlab up
	scripts/publish-image

.PHONY: lab-tests
lab-tests: lab-up ## End-to-end tests with real jobs
	$(PY) -m pytest -m "lab and not slow" tests

.PHONY: clean
clean: ## Take the lab down and remove what was built
	-lab/vlab down
	rm -rf $(BUILD) .venv
