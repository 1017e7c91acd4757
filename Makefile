# Everything happens in one virtual environment; nothing outside this folder is changed.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
# What `make mutants` changes: a room of tools/mutants/rooms.toml, how many places of it, and which ones.
ROOM ?= tasks
SAMPLE ?= 60
SEED ?= 1
# How long the kernels are tested under sanitizers, or damaged files are read.
MINUTES ?= $(if $(filter fuzz,$(MAKECMDGOALS)),10,20)
# How many commands `make kills` kills.
KILLS ?= 100
# Compiled modules are kept: the tests start many processes.
unexport PYTHONDONTWRITEBYTECODE
# What pip installs before anything else, to choose a build of PyTorch: TORCH=torch==2.13.0, or any words that pip understands.
TORCH ?=

# Every lower bound of pyproject.toml, one a line.
LOWEST = grep -oE '"[a-z0-9_-]+>=[0-9.]+' pyproject.toml | tr -d '"' | sed 's/>=/==/' | sort -u

# The C of the kernels.
C = kernels/approx_kernels/cpu/c

# Modules are compiled when they are first imported: few of those installed ever are.
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check
NO_GPU := $(shell [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null 2>&1 && echo yes)

.PHONY: help demo test test-all test-lowest lint site audit bench clean mutants sanitize fuzz kills
.DEFAULT_GOAL := help

help:  ## This list
	@sed -n 's/^\([a-z-]*\):.*  ## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14
	@echo
	@echo "Variables: TORCH=torch==2.13.0 (a build of PyTorch), PYTHON=$(PYTHON), VENV=$(VENV), JOBS=$(JOBS)"

demo: $(VENV)/.demo  ## Install, then convert, evaluate and time the embedded model: runs/quickstart
	$(VENV)/bin/approx run recipes/quickstart.yaml -o runs/quickstart --force

test: $(VENV)/.dev  ## Install what the tests need and run them; slow ones, most of many near-equal cases, and what needs a GPU or a hub are left out
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal --sample

test-all: $(VENV)/.dev  ## All cases and the slow tests too, of more families, more sizes of heads, and runs that are killed: about 40 minutes
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal -m "not gpu and not network"

test-lowest:  ## The same with the oldest dependencies that pyproject.toml allows (but TORCH as given)
	$(MAKE) test-all VENV=.venv-lowest CONSTRAINTS=.venv-lowest/lowest.txt

lint: $(VENV)/.dev  ## Style, layout and types; of C too, where clang-format and clang-tidy are installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python
ifneq ($(shell command -v clang-format),)
	clang-format --dry-run --Werror $$(find $(C) -name '*.[ch]')
endif
ifneq ($(shell command -v clang-tidy),)
	for file in $$(find $(C) -name '*.c'); do clang-tidy --quiet $$file -- -I $(C) -std=gnu11 -march=x86-64-v4 || exit 1; done
endif

site: $(VENV)/.site  ## The documentation as a site, with an API reference: build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build

# Without --strict, pip-audit succeeds where it reaches no database.
audit:  ## Known vulnerabilities of the oldest versions that pyproject.toml allows, by pip-audit; needs its database
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip --disable-pip-version-check install --quiet pip-audit
	$(LOWEST) >.venv-audit/lowest.txt
	@.venv-audit/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off -r .venv-audit/lowest.txt \
	  >.venv-audit/output.txt 2>&1 && cat .venv-audit/output.txt || { tail -n 60 .venv-audit/output.txt; \
	  grep -q 'known vulnerabilit' .venv-audit/output.txt || \
	  echo "Not audited: the database of vulnerabilities cannot be reached from here, so nothing is known. Try again elsewhere."; exit 1; }

sanitize: $(VENV)/.dev  ## Test the kernels with their C under AddressSanitizer and UBSan: MINUTES=20
	$(VENV)/bin/python tools/sanitizers --minutes $(MINUTES) --jobs $(JOBS)

fuzz: $(VENV)/.dev  ## Damage files of every kind and watch that they are refused or read: MINUTES=10 SEED=1
	$(VENV)/bin/python tools/fuzz --minutes $(MINUTES) --seed $(SEED) --jobs $(JOBS) $(if $(REPORT),-o $(REPORT))

kills: $(VENV)/.dev  ## Kill commands at random moments, go on, and compare what they end with: KILLS=100 SEED=1
	$(VENV)/bin/python tools/fuzz/kills.py --kills $(KILLS) --seed $(SEED) $(if $(REPORT),-o $(REPORT))

mutants: $(VENV)/.dev  ## Plant small errors in a room of the code and count those its tests notice: ROOM=tasks SAMPLE=60 SEED=1
	$(VENV)/bin/python tools/mutants $(ROOM) --sample $(SAMPLE) --seed $(SEED) --jobs $(JOBS) $(if $(AGAIN),--again)

bench: $(VENV)/.demo  ## MiniLM on SST-2, quality and speed: the run behind reports/minilm-sst2
	$(VENV)/bin/approx run recipes/minilm-sst2.yaml -o runs/minilm-sst2 --force

clean:  ## Remove the environments and everything that was built or run
	rm -rf .venv .venv-audit .venv-lowest build dist runs *.egg-info .pytest_cache .ruff_cache .hypothesis

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "approx needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
	         "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
ifeq ($(TORCH),)
ifeq ($(NO_GPU),yes)
	@echo "No NVIDIA GPU is seen here, and PyTorch's default build for Linux brings several GB of CUDA libraries."
	@echo "For a CPU build stop this and say which, as on pytorch.org/get-started: make $(MAKECMDGOALS) TORCH='torch --index-url …'"
endif
else
	$(PIP) install --no-compile $(TORCH)
endif
	@touch $@

# One lower bound a line, as pip's constraints; torch is left to TORCH.
$(VENV)/lowest.txt: pyproject.toml $(VENV)/.python
	$(LOWEST) | grep -v '^torch==' >$@

$(VENV)/.demo: pyproject.toml $(VENV)/.python $(CONSTRAINTS)
	$(PIP) install --no-compile $(addprefix -c ,$(CONSTRAINTS)) -e .
	@touch $@

$(VENV)/.site: pyproject.toml $(VENV)/.python
	$(PIP) install --no-compile -e '.[site]'
	@touch $@ $(VENV)/.demo

$(VENV)/.dev: pyproject.toml $(VENV)/.python $(CONSTRAINTS)
	$(PIP) install --no-compile $(addprefix -c ,$(CONSTRAINTS)) -e '.[dev]'
	@touch $@ $(VENV)/.demo
