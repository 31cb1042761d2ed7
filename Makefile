# Every target sets up what it needs: a fresh checkout and Python 3.11 or newer are enough.
PYTHON ?= python3
# Installed before all else: left to pip, torch brings gigabytes of CUDA libraries. The exact version takes a CPU
# build where one is offered. For CUDA: make TORCH=torch demo
TORCH ?= torch==2.13.0

BIN := .venv/bin
# Named after TORCH, so that asking for another one is noticed.
STAMP := .venv/installed-$(shell printf '%s' '$(TORCH)' | cksum | cut -d ' ' -f 1)
QUICK := not slow and not gpu and not peers
# Two at a time, but for those in which processes are stopped, killed and waited for.
SIDE_BY_SIDE := tests/test_architecture.py tests/unit tests/loops tests/service tests/equivalence
ONE_BY_ONE := tests/distributed

.PHONY: demo test check sweep test-peers test-llama-stack format docs clean
.DEFAULT_GOAL := test

demo: $(STAMP)
	$(BIN)/lockstep demo

test: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "$(QUICK)" $(SIDE_BY_SIDE)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "$(QUICK)" $(ONE_BY_ONE)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

sweep: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow and not gpu and not peers"

# Beside TRL, loss by loss.
test-peers: $(STAMP)
	$(BIN)/python -m pip install --quiet -e '.[dev,peers]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "peers and not gpu"

# The real Llama Stack server and client need an environment of their own.
test-llama-stack:
	test -e .venv-stack/bin/llama || $(PYTHON) -m venv .venv-stack
	.venv-stack/bin/python -m pip install --quiet $(TORCH)
	.venv-stack/bin/python -m pip install --quiet -e '.[llama-stack]' pytest
	OMP_NUM_THREADS=1 .venv-stack/bin/python -m pytest tests/service/providers $(filter-out %_schema.py,$(wildcard tests/service/test_llama_stack_*.py))

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP)
	$(BIN)/python docs/reference.py

clean:
	rm -rf .venv .venv-stack build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find lockstep tests examples docs -name __pycache__ -type d -exec rm -rf {} +

# Another torch means another environment: pip would take the one that is there for good enough.
$(STAMP): pyproject.toml
	test -e $@ || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@
