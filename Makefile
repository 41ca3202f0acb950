# What a developer types. `make` lists it; everything runs from .venv, which the first target makes.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

# Cores, each test with one thread of torch's. A SEED draws the sample of `make slow`, and a TURN what CI draws anew for
# each commit. Images of containers often forbid bytecode: every process that a test starts would then compile gpuwatch,
# and every pytest all tests.
JOBS ?= 2
SEED ?= 0
TURN ?= $(SEED)
# Some machines ask Python not to keep the compiled files: each process of a test would then compile all of gpuwatch.
export PYTHONDONTWRITEBYTECODE =
# With ONCE_MORE=1, as in .ci/run, a test that failed runs again alone, and a few that pass then do not fail the target.
ONCE_MORE ?=
PYTHON_INCLUDE = $(shell $(BIN)/python -c "import sysconfig; print(sysconfig.get_path('include'))")
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python $(if $(ONCE_MORE),tests/once_more.py run,-m pytest) --seed $(SEED) --turn $(TURN)

.PHONY: help demo test slow frameworks flaky sanitize soak matrix fuzz gpu gpu-quick cuda-stub lint named typecheck docs check ci-here clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

# The constraints pin torch: without them pip would take a newer one, with gigabytes of CUDA libraries. Few
# of the files that pip would compile are imported, and Python compiles those then.
$(READY): pyproject.toml constraints.txt
	@echo "Installing into .venv; this takes a minute or two."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY)  ## two ranks train until one overflows (a minute or two); prints the combined report and its path
	@echo "Two ranks train a small network in fp16; one rank has a bad sample. Which rank, module and line overflows first?"
	OMP_NUM_THREADS=1 $(BIN)/gpuwatch launch --nproc-per-node 2 examples/train_notes.py \
	    || { code=$$?; test $$code -eq 4 || exit $$code; }  # 4: overflow found, which is what the demo is for

test: $(READY)  ## the quick tests, and a whole run; two minutes on two cores
	$(PYTEST) -m 'not slow and not soak and not gpu' --durations 10 --numprocesses $(JOBS) --dist worksteal

# MINUTES=8: those that can begin within eight minutes, in an order that TURN draws.
MINUTES ?=
# Many of them wait, for a deadline or for SLURM: twice as many as the cores can run at a time.
slow: $(READY)  ## a sample of the long tests, each kind among them; half an hour on two cores
	$(PYTEST) -m 'slow and not soak and not gpu' --sample --each 4 $(if $(MINUTES),--minutes $(MINUTES)) --durations 20 --numprocesses $$((2 * $(JOBS))) --dist loadgroup --no-loadscope-reorder

frameworks: $(READY)  ## a sample of the tests with Lightning, DeepSpeed and others, drawn by TURN; they need '.[frameworks]'
	$(PYTEST) -m 'slow and not soak' --sample --durations 10 --numprocesses $(JOBS) tests/frameworks

TIMES ?= 30
flaky: $(READY)  ## each test that the last .ci/run calls flaky, thirty times (TIMES), one at a time
	OMP_NUM_THREADS=1 $(BIN)/python tests/once_more.py flaky $(TIMES)

sanitize: $(READY)  ## the tests of the part in C under AddressSanitizer and UBSan, in a build of their own; five minutes
	$(BIN)/python tests/sanitized.py -q

soak: $(READY)  ## every test that needs no GPU, with new random examples; hours
	$(PYTEST) -m 'not gpu' --hypothesis-profile soak --numprocesses $(JOBS) --dist loadgroup
	$(MAKE) sanitize
	$(MAKE) matrix MATRIX=--remove

# TORCH=2.8.0 PYTHON=python3.12 picks one, and MATRIX="--short --remove" is what CI runs.
TORCH ?=
MATRIX ?=
matrix:  ## the tests with other releases of torch and Python, which makes docs/versions.md; hours (TORCH=, PYTHON=)
	python3 tests/matrix.py --jobs $(JOBS) $(if $(TORCH),--torch $(TORCH)) \
	    $(if $(filter file,$(origin PYTHON)),,--python $(PYTHON)) $(if $(ONCE_MORE),--once-more) $(MATRIX)

FUZZ_S ?= 600
fuzz: $(READY)  ## what reads bytes, each reader for ten minutes (FUZZ_S), guided by coverage
	$(BIN)/python -m pip install --quiet --disable-pip-version-check atheris
	for reader in wire recorder spool store report; do \
	    $(BIN)/python tests/fuzz/readers.py $$reader -max_total_time=$(FUZZ_S) -verbosity=0 -print_final_stats=1 || exit; done

# It needs no install: it runs with the torch that is there.
gpu:  ## on a machine with GPUs: the tests marked gpu, then what is measured there (docs/gpu.md)
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) benchmarks/gpu_acceptance.py

# CALL=2 adds the second half to the table of the first; QUICK=--rehearsal: small sizes, where no figure counts.
CALL ?= 1
QUICK ?=
gpu-quick:  ## the same in two calls of six minutes at most, what decides first: CALL=1, then CALL=2
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) benchmarks/gpu_acceptance.py --quick $(CALL) $(QUICK)

# It makes a virtual environment of its own, of 5.5 GB: torch's build for CUDA. SAMPLE=--sample: one test of each kind.
SAMPLE ?=
cuda-stub:  ## without a GPU: torch's build for CUDA on a stand-in for the driver (tests/fakes/cuda); a quarter of an hour
	$(PYTHON) tests/fakes/cuda/run.py --jobs $(JOBS) $(SAMPLE) $(if $(TORCH),--torch $(TORCH)) \
	    $(if $(ONCE_MORE),--once-more)

lint: $(READY)  ## formatting and lint rules; a warning of the C compiler is an error
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@for file in worker/native/*.c worker/native/device/*.c; do \
	    $(CC) -std=c99 -O2 -Wall -Wextra -Werror -Iworker/native/include -I$(PYTHON_INCLUDE) -c $$file -o /dev/null || exit 1; \
	done

# mypy and mkdocs do not see an editable install whose package folder is the repository's root. They see these folders
# with links to its files; through a link to the root, mkdocs would read all of .venv. What a process that compiles beside
# this writes into __pycache__ vanishes again.
PACKAGE := __init__.py __main__.py py.typed cli collector core launcher slurm worker
named: $(READY)
	@rm -rf .venv/typing && mkdir -p .venv/typing/gpuwatch
	@find $(PACKAGE) -name __pycache__ -prune -o -type d -exec mkdir -p .venv/typing/gpuwatch/{} \; \
	    -o -type f -exec ln -s "$(CURDIR)/{}" .venv/typing/gpuwatch/{} \;

typecheck: named  ## strict types
	MYPYPATH=.venv/typing $(BIN)/mypy -p gpuwatch

docs: named  ## docs/ as a site in build/site; a link or a name that leads nowhere is an error
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

check: lint typecheck docs test slow  ## all that CI runs

ci-here:  ## what CI itself runs, which installs what is missing; ends with the seconds of each step and the slowest tests
	bash .ci/run

clean:  ## remove what the targets above made, except gpuwatch-runs
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
