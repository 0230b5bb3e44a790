# make serve    install, start a private Ray cluster and serve deploy.yaml     (PORT=8000, DEPLOY=deploy.yaml)
# make test     install, run every test that needs no GPU and is not long
# make help     the rest
#
# Both make an environment in .venv with the first Python that serves (PYTHON=python3.12 names one).

DEPLOY ?= deploy.yaml
PORT   ?=
BIN    := .venv/bin
JOBS   ?= 2
ROUNDS ?= 10
CLIENTS ?= litellm aiperf guidellm

.PHONY: help serve demo ask test test-long test-broad test-drain explore test-gpu test-lowest test-newest chaos conformance clients check format bench-engine bench-gpu bench-tokenizer bench-router bench-overhead bench-placement bench-fleet bench-schedule bench-cache clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

serve: .venv/serve.installed ## install what is needed, start a private Ray cluster, serve deploy.yaml (DEPLOY=) until Ctrl-C
	@exec $(BIN)/python -m deploy serve $(DEPLOY) $(if $(PORT),--port $(PORT))

demo: .venv/serve.installed ## against a running server: round robin beside prefix-aware, one table
	@exec $(BIN)/python -m loadtest.demo $(if $(PORT),--url http://127.0.0.1:$(PORT))

ask: .venv/serve.installed ## two questions about one long table, offline, without Ray
	@exec $(BIN)/python -m replica ask

# JOBS processes, in the order that tests/conftest.py gives (pytest-xdist would begin the slowest last, which have few
# tests), and one more for the tests that need clusters.
TOGETHER := -n $(shell expr $(JOBS) + 1) --dist loadfile --no-loadscope-reorder tests
# A cluster is a dozen processes, and each would compile the project anew where the shell says to keep no bytecode.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 RAY_worker_niceness=0 $(BIN)/python -m pytest

test: .venv/dev.installed ## every test that needs no GPU and is not in the long suite (JOBS=2)
	$(PYTEST) -m "not long and not gpu" $(TOGETHER) $(ARGS)

test-long: .venv/dev.installed ## the suites that take minutes: clusters, kills, more examples
	$(PYTEST) -m "long and not gpu and not drain and not broad" $(TOGETHER) $(ARGS)

test-broad: .venv/dev.installed ## more families, shapes and examples of what the other suites say: minutes
	$(PYTEST) -m "long and broad and not gpu" $(TOGETHER) $(ARGS)

test-drain: .venv/dev.installed ## a node is told to leave under streams, as by kubectl drain: minutes, most of them waiting
	$(PYTEST) -m drain tests/e2e $(ARGS)

explore: .venv/dev.installed ## the property tests ROUNDS times, each with other random examples (ROUNDS=10)
	for round in $$(seq $(ROUNDS)); do \
	  WARMPATH_EXPLORE=1 $(PYTEST) -q -m "not long and not gpu" -n $(JOBS) tests/property $(ARGS) || exit 1; \
	done

test-gpu: .venv/dev.installed ## every check that needs a card; elsewhere: python -m tests.gpu
	$(BIN)/python -m tests.gpu $(ARGS)

# What needs neither Ray nor sockets nor structured output. Triton 3.6's interpreter reads numbers as numpy warns.
LOWEST := async_scheduling bench_gpu exactness failed_forward gpu_checks greedy_screen layered_parts logprobs model_runner refusals runner_contract sampled_output tensor_parallel triton_engine
LOWEST_LAWS := async_scheduling decode_graphs flash_attention greedy_screen out_of_memory paged_attention sampling several_answers triton_attention triton_rows
INTERPRETED := -W "ignore:Conversion of an array with ndim:DeprecationWarning"

test-lowest: .venv-lowest/installed ## the engine's tests on the oldest torch and transformers, without Ray or sockets
	OMP_NUM_THREADS=1 .venv-lowest/bin/python -m pytest $(INTERPRETED) -m "not long and not gpu" -n $(JOBS) --dist loadfile \
	  $(addprefix tests/unit/replica/,attention engine layers models output parallel runners scheduling) \
	  $(addprefix tests/unit/benchmarks/,gpu test_transformers_engines.py) \
	  $(LOWEST:%=tests/integration/test_%.py) $(LOWEST_LAWS:%=tests/property/test_%.py) $(ARGS)

test-newest: | .venv/bin/python ## make test on the newest packages that pyproject.toml admits, without constraints.txt
	$(BIN)/python -m venv .venv-newest
	.venv-newest/bin/python -m pip install --disable-pip-version-check --upgrade --upgrade-strategy eager -e '.[dev]'
	$(PYTEST:$(BIN)/%=.venv-newest/bin/%) -m "not long and not gpu" $(TOGETHER) $(ARGS)

chaos: .venv/dev.installed ## harm done to real deployments, held beside what is promised; ARGS="--minutes 60"
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.e2e.faults $(ARGS)

conformance: .venv/dev.installed ## the API, row by row, asked by the openai client of real engines; ARGS="stream stop"
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.conformance $(ARGS)

clients: .venv/dev.installed $(CLIENTS:%=.clients/%.installed) ## unmodified clients against a server; CLIENTS="litellm aiperf guidellm", each in its own environment
	OMP_NUM_THREADS=1 WARMPATH_CLIENTS="$(CLIENTS)" $(BIN)/python -m pytest tests/e2e/test_clients.py $(ARGS)

check: .venv/dev.installed ## format, lint, types, import borders, manifests; changes nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m k8s check

format: .venv/dev.installed ## rewrite the sources in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench-engine: .venv/dev.installed ## the engine against generate and transformers' continuous batching
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.engine $(ARGS)

bench-gpu: .venv/dev.installed ## one card: correctness, throughput, first tokens, beside its limits; elsewhere: python -m benchmarks.gpu
	$(BIN)/python -m benchmarks.gpu $(ARGS)

bench-tokenizer: .venv/dev.installed ## a conversation's next turn: tokenized by segment beside whole
	@$(BIN)/python -m benchmarks.tokenization $(ARGS)

bench-router: .venv/dev.installed ## the router's index and whole decision, beside Ray's prefix tree
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.router $(ARGS)

bench-overhead: .venv/dev.installed ## what proxy and Router add to a direct call, under Serve's modes
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.overhead $(ARGS)

bench-placement: .venv/dev.installed ## placement policies in a simulated cluster; ARGS="--full" for all of it
	OMP_NUM_THREADS=1 $(BIN)/python -m loadtest bench-placement $(ARGS)

bench-schedule: .venv/dev.installed ## a long prompt beside decodes, a greedy tenant, host memory, the queue's orders
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.schedule $(ARGS)

bench-cache: .venv/dev.installed ## the cache disciplines on the same traffic: what they find, and what they cost
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.cache $(ARGS)

bench-fleet: .venv/dev.installed ## policies on four real engines, Ray Serve's own router among them; ARGS="--quick" for 10 minutes of it
	@OMP_NUM_THREADS=1 $(BIN)/python -m loadtest bench-fleet $(ARGS)

clean: ## remove the environments and every cache
	rm -rf .venv .venv-lowest .venv-newest .clients .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache cache/native/*.so router/native/*.so

# The interpreter is tried, not only looked up: a shim may exist for a version that is not there. PYTHON= names
# the one to take.
.venv/bin/python:
	@for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do \
	  if $$python -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then \
	    echo "Creating .venv with $$($$python --version)"; exec $$python -m venv .venv; \
	  fi; \
	done; \
	echo "Warmpath needs Python 3.11, 3.12 or 3.13 with venv (on Debian: apt install python3-venv)." >&2; \
	python=$(or $(PYTHON),python3); \
	echo "Found: $$({ command -v $$python >/dev/null && $$python --version 2>&1; } || echo "no $$python")." >&2; exit 1

# One stamp per set of packages: a second start installs nothing.
INSTALLED := pyproject.toml constraints.txt hatch_build.py $(wildcard cache/native/*.[ch] router/native/*.[ch])

# Compiling 18,000 modules is two fifths of pip's work, on one core: they are compiled afterwards, on all. Some are
# not of this Python. With PIP_COMPILE=0 each is when it is first imported.
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt -e
COMPILE := $(if $(filter 0,$(PIP_COMPILE)),@:,$(BIN)/python -m compileall -qq -j 0 .venv/lib || true)

.venv/serve.installed: $(INSTALLED) | .venv/bin/python
	$(INSTALL) .
	$(COMPILE)
	@touch $@

# torch from PyPI brings CUDA's libraries, two gigabytes of them; PIP_INDEX_URL may name torch's own CPU wheels.
.venv-lowest/installed: tests/lowest.txt | .venv/bin/python
	$(BIN)/python -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --disable-pip-version-check -r $<
	@touch $@

.venv/dev.installed: $(INSTALLED) | .venv/bin/python
	$(INSTALL) '.[dev]'
	$(COMPILE)
	@touch $@ .venv/serve.installed

# guidellm needs a torch to load, not to run; it finds ours rather than fetching gigabytes of CUDA.
SHARE_TORCH := import pathlib, sysconfig; ours = pathlib.Path(sysconfig.get_path('purelib')); \
  theirs = pathlib.Path('.clients/guidellm') / ours.relative_to(pathlib.Path('.venv').absolute()); \
  (theirs / 'torch-of-the-project.pth').write_text(f'{ours}\n')

.clients/%.installed: tests/clients/%.txt | .venv/bin/python
	$(BIN)/python -m venv .clients/$*
	$(if $(filter guidellm,$*),$(BIN)/python -c "$(SHARE_TORCH)")
	.clients/$*/bin/python -m pip install --disable-pip-version-check -r $<
	@touch $@
