# SPDX-License-Identifier: Apache-2.0
# The main targets are `make demo` and `make check`; the others are parts of them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
# Programs that tests start would compile the package at each start.
unexport PYTHONDONTWRITEBYTECODE

BUILD  := build
PY     := .venv/bin/python
MYPY   := .venv/bin/mypy --strict
SUITE  ?= trixie
ARCH   ?= $(shell dpkg --print-architecture)
# Most tests wait for a daemon; tests/conftest.py separates shared resources.
# Tests import helpers of their own folder and of tests/unit/support.
UNIT_FOLDERS = $$(git ls-files 'tests/unit/*.py' | xargs dirname | sort -u | paste -sd:)
JOBS   ?= $(shell echo $$((1 + 2 * $$(nproc))))
UNIT   := VHPC_GUEST_BIN=$(CURDIR)/$(BUILD)/unit/guest scripts/in-memory-tmp scripts/tests unit $(JOBS) -q --dist loadgroup --no-loadscope-reorder

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z%-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: ## Build everything, start the lab, run a two-node job in guests
	@scripts/demo

.PHONY: check
check: ## All checks, from lint to end-to-end tests on the lab; prints what took how long
	@scripts/check

.PHONY: check-slow
check-slow: check ## Slow checks too: those that have not passed on this commit; scripts/slow shows which did when
	@scripts/slow all

slow-%: ## slow-PART: one part of the slow checks (scripts/slow lists them)
	@scripts/slow $*

.PHONY: deps
deps: ## Install build and test dependencies; nothing to do takes a moment
	@scripts/deps

.PHONY: lint
lint: deps ## ruff, clang-format, clang-tidy, cycles of C modules, shellcheck, mandoc, links of documents, SPDX lines
	scripts/lint

.PHONY: fix
fix: deps ## Format all sources, apply ruff's fixes, write SPDX lines
	scripts/lint --fix

.PHONY: docs
docs: deps ## The documents as a site with search, in build/docs/site
	@scripts/docs

.PHONY: promises
promises: ## Print the promises that each file of tests holds
	@scripts/promises.py

.PHONY: types
types: deps ## mypy --strict
	@scripts/types-cache take
	$(MYPY)
	$(MYPY) lab/vlablib vmimages
	$(MYPY) scripts/spdx.py scripts/cmodules.py scripts/links.py scripts/promises.py scripts/plain_english.py
	for script in arm64 check pace release slow steady tidy; do MYPYPATH=scripts $(MYPY) scripts/$$script; done
	MYPYPATH=python:tests $(MYPY) $$(git ls-files 'tests/*.py' ':!tests/*/*')
	MYPYPATH=bench:python:tests:$(UNIT_FOLDERS):. $(MYPY) --explicit-package-bases bench/vhpcbench
	for part in unit lab image fuzz hw packages; do \
	    MYPYPATH=python:tests:$(UNIT_FOLDERS):tests/fuzz:tests/$$part:bench:. $(MYPY) --explicit-package-bases $$(git ls-files "tests/$$part/*.py"); \
	done
	@scripts/types-cache give

.PHONY: unit-programs
unit-programs: deps
	@mkdir -p $(BUILD)
	@cmake -S . -B $(BUILD)/unit -G Ninja -DBUILD_TESTING=OFF -DVHPC_SPANK=OFF >$(BUILD)/unit.log || \
	    { cat $(BUILD)/unit.log; exit 1; }
	@cmake --build $(BUILD)/unit >$(BUILD)/unit.log || { cat $(BUILD)/unit.log; exit 1; }

.PHONY: unit
unit: unit-programs ## Python unit tests, including tests of the guest programs
	$(UNIT) -m "not lab and not slow and not hw" tests

.PHONY: quick
quick: unit-programs ## After each change: lint of changed files, types, fast unit tests
	scripts/lint --changed
	@$(MAKE) --no-print-directory types
	$(UNIT) -m "not lab and not slow and not hw and not long" tests

.PHONY: test-one
test-one: unit-programs ## T=…: a test file, a node id, or C tests by name
	@scripts/test-one "$(T)"

.PHONY: ctest
ctest: deps ## C tests with address and undefined-behaviour sanitizers, and a short fuzz run
	@mkdir -p $(BUILD)/check
	@cmake -S . -B $(BUILD)/asan -G Ninja -DVHPC_SANITIZE=ON >$(BUILD)/asan.log || { cat $(BUILD)/asan.log; exit 1; }
	cmake --build $(BUILD)/asan
	ctest --test-dir $(BUILD)/asan --output-on-failure -j $(shell nproc) --output-junit $(CURDIR)/$(BUILD)/check/ctest.xml
	scripts/fuzz --runs 2000

.PHONY: lab-up
lab-up: deps ## Start the one-machine cluster with this checkout installed and an image published
	lab/vlab up
	scripts/publish-image

.PHONY: lab-tests
lab-tests: deps ## End-to-end tests with real jobs
	scripts/lab-tests

.PHONY: check-hw
check-hw: deps ## Devices on a real kernel: jobs and faults in an emulated machine with an IOMMU, SR-IOV and NUMA nodes
	$(PY) -m pytest -m "hw and not slow" tests/hw

.PHONY: hw-case
hw-case: deps ## One job of check-hw, with a GPU and a virtual function
	$(PY) -m pytest -m hw --junitxml=$(BUILD)/check/hw-case.xml tests/hw/test_hw_devices.py

.PHONY: packages
packages: deps ## Debian packages of this checkout in build/packages (as root); SUITE=bookworm: for Debian 12, in build/packages-bookworm; ARCH=arm64
	@packaging/build --suite $(SUITE) --arch $(ARCH)

.PHONY: release
release: deps ## Release the commit that is checked out, into build/release (as root); CONTRIBUTING.md has the steps
	@$(PY) scripts/release

.PHONY: clean
clean: ## Stop the lab and remove built files; caches in /var/cache stay
	-lab/vlab down
	-lab/hwlab down
	rm -rf $(BUILD) .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
