# The two commands: `make demo` trains a model before your eyes, `make test` runs what continuous integration runs.
# Each makes the virtual environment if it is not there; nothing but Python (≥ 3.11) and make is needed.

PYTHON ?= python3

# `make test TORCH=2.14.1`, `make test PYTHON=python3.13` and `make test LOWEST=1` (the lowest versions that
# pyproject.toml promises) run everything on other versions, each in a virtual environment of its own.
VARIANT := $(if $(TORCH),-torch-$(TORCH))$(if $(LOWEST),-lowest)
ifneq ($(origin PYTHON),file)
VARIANT := $(VARIANT)-$(notdir $(PYTHON))
endif
VENV ?= .venv$(VARIANT)
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The versions that are installed: those of constraints.txt, but for what is asked for.
VERSIONS := $(if $(VARIANT),$(VENV)/constraints.txt,constraints.txt)
EXTRAS := $(if $(LOWEST),test,dev)

export OMP_NUM_THREADS ?= 1
# Tests start hundreds of processes: where bytecode is not kept, each compiles the package anew (0.4 s of a core).
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-full check format clean

demo: $(READY)
	$(BIN)/python examples/demo.py

# Files of tests run side by side: most tests wait for processes that they start more than they compute.
WORKERS ?= 4
SIDE_BY_SIDE := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# The checks use one core, so they run beside the tests; they judge the code, not the versions it runs with.
test: $(READY) system
	@$(MAKE) --no-print-directory -j 2 $(if $(VARIANT),,check) tests

.PHONY: tests
tests: $(READY)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE)

# While you work on a room, as in `make room ROOM=checkpoint`: the checks, and all tests of its files, parity cases
# included (`python -m tests.rooms checkpoint` lists them). `make quick ROOM=…` leaves out those that start processes.
.PHONY: room
room: $(READY)
	@$(MAKE) --no-print-directory -j 2 check room-tests

.PHONY: room-tests
room-tests: $(READY)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) $$($(BIN)/python -m tests.rooms $(ROOM))

.PHONY: quick
quick: $(READY)
	$(BIN)/python -m pytest --no-processes -n 2 --dist loadfile $$($(BIN)/python -m tests.rooms $(ROOM))

test-full: $(READY)
	$(BIN)/python -m pytest -m "full or not full" $(SIDE_BY_SIDE)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Tests of several hosts need `ip` and `tc`, that of Slurm needs Slurm; without them (or without root) they are skipped,
# and the run says so.
.PHONY: system
SLURM := slurmctld slurmd slurm-client munge
system: $(READY)
	@{ command -v ip && command -v slurmctld && command -v munged; } >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends iproute2 $(SLURM) >/dev/null; } || true

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
ifdef LOWEST
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --quiet --python $(BIN)/python --resolution lowest-direct --extra test pyproject.toml --output-file $(VERSIONS)
else ifneq ($(VARIANT),)
	sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' constraints.txt > $(VERSIONS)
endif
	$(BIN)/python -m pip install --quiet --upgrade pip -c constraints.txt
	$(BIN)/python -m pip install --quiet -c $(VERSIONS) -e '.[$(EXTRAS)]'
	@touch $@

# The documentation as a site, in site/; a warning is an error. Nothing is fetched to read it.
.PHONY: docs
docs: $(READY)
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Puts the site of this version beside those of others on the branch gh-pages, to be pushed; a menu leads from one to
# another.
.PHONY: docs-version
docs-version: export PATH := $(abspath $(BIN)):$(PATH)
docs-version: $(READY)
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 DOCS_VERSIONS=mike mike deploy --update-aliases $$(python -c 'from importlib.metadata import version; print(version("lockstep-train"))') latest
	mike set-default latest

clean:
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache runs site

# The Free Transformer and its baseline under FSDP, on as many ranks as there are GPUs (else NPROC, 2 on a CPU).
.PHONY: train-free-fsdp train-baseline-fsdp
NPROC ?= $(shell n=$$(nvidia-smi -L 2>/dev/null | wc -l); [ "$$n" -gt 0 ] && echo $$n || echo 2)

train-free-fsdp: $(READY)
	$(BIN)/lockstep train ready/free_transformer_fsdp.yaml --nproc-per-node $(NPROC) $(ARGS)

train-baseline-fsdp: $(READY)
	$(BIN)/lockstep train ready/transformer_fsdp.yaml --nproc-per-node $(NPROC) $(ARGS)

# What only a GPU can show: runs all programs of benchmarks/gpu/, and writes their pages into benchmarks/results/.
.PHONY: gpu
gpu: $(READY)
	$(BIN)/python -m benchmarks.gpu.all $(ARGS)

# Kills ranks, launchers and all of them, also inside of commits, and compares what is left with an undisturbed run.
.PHONY: chaos
ROUNDS ?= 100
SEED ?= 1

chaos: $(READY)
	$(BIN)/python -m benchmarks.chaos --rounds $(ROUNDS) --seed $(SEED) --output benchmarks/results/chaos.md

# How the code reads, in figures, beside other projects': a mirror, not a limit.
.PHONY: style
style: $(READY)
	@$(BIN)/python -m benchmarks.style $(ARGS)
