# What a developer types. `make` lists it; everything runs from .venv, which the first target makes.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: help demo test slow gpu lint typecheck check clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

# The constraints pin torch: without them pip would take a newer one, with gigabytes of CUDA libraries.
$(READY): pyproject.toml constraints.txt
	@echo "Installing into .venv; this takes a minute or two."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY)  ## two ranks train until one overflows (half a minute); prints the combined report
	@echo "Two ranks train a small fp16 transformer; the learning rate is too high. Which rank and module overflows first?"
	OMP_NUM_THREADS=1 $(BIN)/gpuwatch launch --nproc-per-node 2 examples/train_transformer.py \
	    || { code=$$?; test $$code -eq 4 || exit $$code; }  # 4: overflow found, which is what the demo is for

test: $(READY)  ## all tests that need neither a GPU nor much time
	$(BIN)/python -m pytest -m 'not slow and not gpu'

# Most of them wait, for a deadline or for SLURM; those of a network or a cluster bring up one of their own.
slow: $(READY)  ## the long tests, three at a time; a quarter of an hour
	$(BIN)/python -m pytest -m 'slow and not gpu and not alone' --numprocesses 3 --dist loadfile
	$(BIN)/python -m pytest -m 'slow and not gpu and alone'

# It needs no install: it runs with the torch that is there.
gpu:  ## on a machine with GPUs: the tests marked gpu, then what is measured there (docs/gpu.md)
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) benchmarks/gpu_acceptance.py

lint: $(READY)  ## formatting and lint rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# mypy does not see an editable install whose package folder is the repository's root; it sees this link.
typecheck: $(READY)  ## strict types
	@mkdir -p .venv/typing && ln -sfn "$(CURDIR)" .venv/typing/gpuwatch
	MYPYPATH=.venv/typing $(BIN)/mypy -p gpuwatch

check: lint typecheck test slow  ## all that CI runs

clean:  ## remove what the targets above made, except gpuwatch-runs
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
