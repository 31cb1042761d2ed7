# Every target sets up what it needs: a fresh checkout and Python 3.11 or newer are enough.
PYTHON ?= python3
# Installed before all else: left to pip, torch brings gigabytes of CUDA libraries. The exact version takes a CPU
# build where one is offered. For CUDA: make TORCH=torch demo
TORCH ?= torch==2.13.0
# The newest versions that the tests have passed with, so that a release of another project breaks nothing here. With the
# newest of all: make CONSTRAINTS= test
CONSTRAINTS ?= constraints.txt

BIN := .venv/bin
# Named after TORCH, so that asking for another one is noticed.
STAMP := .venv/installed-$(shell printf '%s' '$(TORCH)' | cksum | cut -d ' ' -f 1)
BYTECODE := $(STAMP:.venv/installed-%=.venv/compiled-%)
QUICK := not slow and not gpu and not peers
# Tests start hundreds of processes: bytecode is kept, even where the environment says otherwise.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
# Files in the order in which they are given, the longest first, so that all end together. Tests wait for processes much of
# the time: three at a time keep two cores busy.
AT_ONCE := --dist loadfile --no-loadscope-reorder -n 3
# Tests in which processes are killed, stopped or lost wait for what others notice, so they come by themselves.
QUICK_FAULTS := $(addprefix tests/distributed/test_,ray_launch.py fault_matrix.py grpo_async.py restarts.py engines.py \
	ray_workers.py workers.py two_hosts.py sagemaker.py)
QUICK_OTHERS := $(filter-out $(QUICK_FAULTS),$(wildcard tests/distributed/test_*.py)) tests/equivalence tests/service \
	tests/docs tests/loops tests/unit tests/test_architecture.py

.PHONY: demo test check sweep test-transformers test-kernels test-peers test-llama-stack test-sagemaker format hooks docs site release constraints clean
.DEFAULT_GOAL := test

demo: $(BYTECODE)
	$(BIN)/lockstep demo

# mypy has one core, and what pip installed is compiled on the other.
test: $(STAMP)
	$(MAKE) --jobs 2 check $(BYTECODE)
	$(PYTEST) $(AT_ONCE) -m "$(QUICK)" $(QUICK_OTHERS)
	$(PYTEST) $(AT_ONCE) -m "$(QUICK)" $(QUICK_FAULTS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The slow tests, in parts: `make sweep` runs them all and goes on after one that fails. What each covers, and when it was
# last run: docs/testing.md. tests/test_architecture.py checks that every test file belongs to exactly one part.
SWEEP_equivalence := $(filter-out %/test_zero.py,$(wildcard tests/equivalence/test_*.py))
SWEEP_verify := $(wildcard tests/distributed/test_verify*.py)
SWEEP_faults := $(addprefix tests/distributed/test_,fault_matrix.py engines.py grpo_async.py grpo_hybrids.py restarts.py)
SWEEP_resume := $(addprefix tests/distributed/test_,resume.py elastic.py grpo_resume.py preference_resume.py \
	interrupted.py export_layouts.py answers_in_training.py vision_run.py)
SWEEP_processes := $(addprefix tests/distributed/test_,workers.py ray_workers.py ray_launch.py training_service.py \
	two_hosts.py other_launchers.py kubernetes_run.py traffic_counts.py sagemaker.py hosts.py \
	slurm.py slurm_limits.py slurm_service.py slurm_ray.py)
SWEEP_deepspeed := tests/equivalence/test_zero.py $(wildcard tests/distributed/test_deepspeed*.py)
SWEEP_service := tests/service
SWEEP_unit := tests/unit tests/loops tests/docs
SWEEP_PARTS := equivalence verify faults resume processes deepspeed service unit

sweep:
	$(MAKE) --keep-going $(SWEEP_PARTS:%=sweep-%)

sweep-%: $(STAMP)
	$(PYTEST) -m "slow and not gpu and not peers" --timeout 1800 $(if $(filter equivalence,$*),$(AT_ONCE)) $(SWEEP_$*)

# Its quick tests too: `make test` skips them, because the extra is not part of dev.
sweep-deepspeed: $(STAMP)
	$(BIN)/python -m pip install --quiet -e '.[dev,deepspeed]'
	$(PYTEST) --timeout 1800 $(SWEEP_deepspeed)

# For tests/test_architecture.py.
sweep-files-%:
	@echo $(SWEEP_$*)

# Every family, the layouts of ten of them and sampling, with the oldest and the newest transformers that pyproject.toml allows,
# each in a folder of its own in front of the environment's. `make test-transformers-oldest`: with one of them.
TRANSFORMERS := $(shell sed -n 's/^ *"\(transformers[^"]*\)".*/\1/p' pyproject.toml)
TRANSFORMERS_oldest := $(shell printf '%s' '$(TRANSFORMERS)' | sed 's/>=\([0-9.]*\).*/==\1.*/')
TRANSFORMERS_newest := $(TRANSFORMERS)
TRANSFORMERS_TESTS := $(addprefix tests/equivalence/test_,families.py family_layouts.py mixtures.py) tests/unit/inference \
	tests/unit/model

test-transformers:
	$(MAKE) --keep-going test-transformers-oldest test-transformers-newest

test-transformers-%: $(STAMP)
	$(BIN)/python -m pip install --quiet --upgrade --target .transformers-$* '$(TRANSFORMERS_$*)'
	PYTHONPATH=.transformers-$* $(BIN)/python -c "import transformers; print('transformers', transformers.__version__)"
	PYTHONPATH=$(CURDIR)/.transformers-$* $(PYTEST) -m "not gpu and not peers" --timeout 1800 $(AT_ONCE) $(TRANSFORMERS_TESTS)

# Triton's kernels without a GPU: interpreted, in float32, against float64; and compiled for GPUs in bf16. The version is the
# one that torch of this version brings where it comes with CUDA.
TRITON ?= triton==3.7.1
KERNEL_TESTS := $(addprefix tests/gpu/test_,decode_kernel.py tile_kernel.py head_kernel.py experts_cuda.py quantised_cuda.py)

test-kernels: $(STAMP)
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target .triton '$(TRITON)'
	PYTHONPATH=$(CURDIR)/.triton TRITON_INTERPRET=1 $(PYTEST) -m gpu -n 2 --dist worksteal $(KERNEL_TESTS)
	PYTHONPATH=$(CURDIR)/.triton $(PYTEST) -m gpu -n 2 tests/gpu/test_kernels_compile.py

# Beside TRL, loss by loss.
test-peers: $(STAMP)
	$(BIN)/python -m pip install --quiet -e '.[dev,peers]'
	$(PYTEST) -m "peers and not gpu"

# The real Llama Stack server and client need an environment of their own.
test-llama-stack:
	test -e .venv-stack/bin/llama || $(PYTHON) -m venv .venv-stack
	.venv-stack/bin/python -m pip install --quiet $(TORCH)
	.venv-stack/bin/python -m pip install --quiet -e '.[llama-stack]' pytest pytest-timeout
	OMP_NUM_THREADS=1 .venv-stack/bin/python -m pytest tests/service/providers $(filter-out %_schema.py,$(wildcard tests/service/test_llama_stack_*.py))

# SageMaker's own tools, and SkyPilot's, need environments of their own: neither may choose the versions of ours.
test-sagemaker: $(STAMP)
	test -e .venv-sagemaker/bin/train || $(PYTHON) -m venv .venv-sagemaker
	.venv-sagemaker/bin/python -m pip install --quiet sagemaker-training sagemaker-inference
	test -e .venv-skypilot/bin/sky || $(PYTHON) -m venv .venv-skypilot
	.venv-skypilot/bin/python -m pip install --quiet skypilot
	$(PYTEST) --timeout 1800 tests/distributed/test_sagemaker.py tests/unit/launch/test_cloud_examples.py

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

hooks: $(STAMP)
	$(BIN)/python -m pip install --quiet pre-commit
	$(BIN)/pre-commit install

docs: $(STAMP)
	$(BIN)/python docs/reference.py
	$(BIN)/python docs/picture.py

# The documents as a site in site/, with search. Links that lead nowhere are errors.
site: $(STAMP)
	$(BIN)/python -m pip install --quiet -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# dist/ as it would be uploaded, proven by a training with the wheel in an environment of its own, away from the checkout.
release: $(STAMP)
	rm -rf build dist .venv-release
	$(BIN)/python -m pip install --quiet build
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install --quiet $(TORCH)
	.venv-release/bin/python -m pip install --quiet dist/*.whl
	cd "$$(mktemp -d)" && env -u PYTHONPATH "$(CURDIR)/.venv-release/bin/python" "$(CURDIR)/tests/installed_wheel.py"

# constraints.txt anew, with the newest versions that there are. Then: make test
constraints:
	rm -rf .venv-newest
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet $(TORCH)
	.venv-newest/bin/python -m pip install --quiet -e '.[dev]'
	sed -n '/^#/p' constraints.txt > constraints.new
	.venv-newest/bin/python -m pip freeze --exclude-editable | grep -Ev '^(torch|triton|nvidia-[a-z0-9-]*)==' | sed 's/==/<=/' >> constraints.new
	mv constraints.new constraints.txt
	rm -rf .venv-newest

clean:
	rm -rf .venv-newest .transformers-oldest .transformers-newest .triton .venv .venv-stack .venv-sagemaker .venv-skypilot .venv-release build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find lockstep tests examples docs -name __pycache__ -type d -exec rm -rf {} +

# Another torch means another environment: pip would take the one that is there for good enough.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	test -e $@ || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --no-compile $(TORCH)
	$(BIN)/python -m pip install --quiet --no-compile $(CONSTRAINTS:%=--constraint %) -e '.[dev]'
	touch $@

# By pip it would be one file after the other. Some packages hold templates that are no Python.
$(BYTECODE): $(STAMP)
	$(BIN)/python -m compileall -qq -j 0 .venv/lib || true
	touch $@
