# Everything a checkout can do. The first target that needs an environment makes it; later runs find it made.
# Needs python3 (3.10 or newer) with pip, and make.

PYTHON ?= python3
PYTEST_ARGS ?=
JOBS ?= 2
VENV := .venv
PEERS := .venv-peers
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PEER_STAMPS := $(PEERS)/.stamps

DISTRIBUTIONS := . plugins/triton_kernels plugins/cpu_reference plugins/cuda plugins/hip examples/oot_vendor_plugin
# Shown by no demo: it brings OpenCL with it. Tested like the others.
TESTED_ONLY := examples/opencl_vendor_plugin
PIP_INSTALL := $(BIN)/python -m pip install -qq --constraint constraints.txt

# What a user's shell may hold changes neither what is installed nor what is shown and tested.
$(foreach name,$(filter OPGRAFT_%,$(.VARIABLES)),$(eval unexport $(name)))
unexport PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX PIP_USER
export PYTHONNOUSERSITE = 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help
help: ## Say what the targets do
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# ------------------------------------------------------------------------------------- environments

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit("python3 is %d.%d, opgraft needs 3.10 or newer" % sys.version_info[:2] if sys.version_info < (3, 10) else 0)'
	@echo "Creating $(VENV)"
	@$(PYTHON) -m venv $(VENV) 2>/dev/null \
		|| { $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install -qq pip; }
	@mkdir -p $(STAMPS)
	@touch $@

$(STAMPS)/build: $(STAMPS)/venv constraints.txt pyproject.toml
	@$(PIP_INSTALL) pip
	@$(PIP_INSTALL) --group build
	@touch $@

# Our distributions as editable installs, torch and the rest as constraints.txt pins them.
$(STAMPS)/distributions: $(STAMPS)/build $(DISTRIBUTIONS:%=%/pyproject.toml)
	@echo "Installing opgraft, its plugins and what they need into $(VENV)"
	@$(PIP_INSTALL) --no-build-isolation --group demo $(DISTRIBUTIONS:%=--editable %)
	@touch $@

$(STAMPS)/test-tools: $(STAMPS)/distributions $(TESTED_ONLY:%=%/pyproject.toml)
	@echo "Installing the test tools into $(VENV)"
	@$(PIP_INSTALL) --no-build-isolation --group test $(TESTED_ONLY:%=--editable %)
	@touch $@

$(STAMPS)/%-tools: $(STAMPS)/distributions
	@echo "Installing the $* tools into $(VENV)"
	@$(PIP_INSTALL) --group $*
	@touch $@

$(PEER_STAMPS)/peers: benchmarks/peers.txt $(STAMPS)/test-tools
	@echo "Creating $(PEERS) with the peers of the benchmark"
	@$(BIN)/python -m venv --without-pip $(PEERS)
	@$(PEERS)/bin/python scripts/reach_environment.py $(BIN)/python
	@$(BIN)/python -m pip --python $(PEERS)/bin/python install -qq --no-deps --requirement benchmarks/peers.txt
	@mkdir -p $(PEER_STAMPS)
	@touch $@

# --------------------------------------------------------------------------------------------- show

.PHONY: demo
demo: $(STAMPS)/distributions ## See it work: backends found, chosen, run, forced and denied
	@$(BIN)/python scripts/demo.py

# -------------------------------------------------------------------------------------------- check

.PHONY: test
test: lint types unit ## Lint, types and all tests

.PHONY: lint
lint: $(STAMPS)/lint-tools ## Style and format
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check

.PHONY: format
format: $(STAMPS)/lint-tools ## Mend what ruff can mend
	$(BIN)/python -m ruff check --fix
	$(BIN)/python -m ruff format

.PHONY: types
types: $(STAMPS)/lint-tools $(STAMPS)/test-tools ## mypy --strict over the core, the plugins and the example
	$(BIN)/python -m mypy

.PHONY: unit
unit: $(STAMPS)/test-tools ## All tests that need no accelerator; PYTEST_ARGS="-k ..." narrows, JOBS=0 runs them in one process
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile $(PYTEST_ARGS)

.PHONY: test-gpu
test-gpu: $(STAMPS)/test-tools ## The tests that need an accelerator
	$(BIN)/python -m pytest tests/gpu --gpu $(PYTEST_ARGS)

# ------------------------------------------------------------------------------------------ measure

.PHONY: bench
bench: $(PEER_STAMPS)/peers ## Dispatch cost against SGLang and vLLM, start-up, memory
	$(PEERS)/bin/python benchmarks/dispatch_peers.py
	$(BIN)/python benchmarks/dispatch_variants.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/memory_growth.py

.PHONY: bench-check
bench-check: $(PEER_STAMPS)/peers ## Fail if the dispatch, start-up or memory figures are missed
	$(PEERS)/bin/python benchmarks/check_ratio.py
	$(BIN)/python benchmarks/startup.py --check
	$(BIN)/python benchmarks/memory_growth.py --check

.PHONY: bench-suite
bench-suite: $(STAMPS)/test-tools ## The pytest-benchmark suite
	$(BIN)/python -m pytest benchmarks --benchmark-enable --benchmark-only $(PYTEST_ARGS)

# -------------------------------------------------------------------------------- write and release

.PHONY: docs
docs: $(STAMPS)/docs-tools ## Build the documentation into site/
	$(BIN)/python -m mkdocs build --strict

.PHONY: wheels
wheels: $(STAMPS)/build ## Build every distribution into dist/
	@rm -rf dist
	@for folder in $(DISTRIBUTIONS) $(TESTED_ONLY); do \
		$(BIN)/python -m build --no-isolation --wheel --outdir dist "$$folder" || exit 1; \
	done

.PHONY: changelog
changelog: $(STAMPS)/release-tools ## Show the changelog of the next release
	$(BIN)/python -m towncrier build --draft

.PHONY: clean
clean: ## Remove the environments and everything built
	rm -rf $(VENV) $(PEERS) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks
	find core plugins examples benchmarks scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +
