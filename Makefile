# Everything from a fresh clone: the first target that needs it makes .venv and installs into it.
PYTHON ?= python3
BIN := .venv/bin
# Hundreds of interpreters are started: all but the first read what was compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-exhaustive test-tpu test-deepspeed check fuzz lint format api-docs bench bench-architectures bench-checkpoints bench-compression bench-hosts bench-input bench-keras-tests bench-overhead bench-pipelines bench-planner bench-small-calls bench-starting gpu soak wheel clean
demo: .venv/.installed-demo
	$(BIN)/lockstep demo

# The core of the tests; `test-all` also runs what is marked `thorough`, and `test-exhaustive` whole
# products of strategies, models and options. Three processes on two cores: some tests mostly wait.
test: .venv/.installed-dev
	$(BIN)/python -m pytest --numprocesses 3 -m "not thorough"

test-all: .venv/.installed-dev
	$(BIN)/python -m pytest --numprocesses 3

test-exhaustive: .venv/.installed-dev
	$(BIN)/python -m pytest --numprocesses 3 --exhaustive

# The tests of TPUs on Google's torch_tpu, whose runtime drives XLA's plugin for CPUs; needs a C compiler.
test-tpu: .venv-tpu/.installed
	.venv-tpu/bin/python tests/stand_ins/tpu/run.py -m pytest --exhaustive tests/tpu

# The tests of `lockstep.record` with DeepSpeed, on its backend for CPUs.
test-deepspeed: .venv-deepspeed/.installed
	.venv-deepspeed/bin/python -m pytest --exhaustive tests/parity/test_recorded_deepspeed.py

# Random trainings against plain loops on one device; prints what became of them, and how to repeat it.
fuzz: MINUTES = 10
fuzz: .venv/.installed-dev
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES)

# All that must be green: style, types, floors, tests.
check: lint test-all

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Writes docs/api.md anew, from the docstrings.
api-docs: .venv/.installed-dev
	$(BIN)/python tools/api_reference.py

# Compares with other libraries on the cores of this machine, and writes docs/benchmarks.md anew.
bench: .venv-bench/.installed
	.venv-bench/bin/python bench/data_parallel.py --report docs/benchmarks.md

# Architectures of transformers, cut and proven; writes docs/architectures.md anew. Takes an hour.
bench-architectures: .venv/.installed-dev
	$(BIN)/python bench/architectures.py --report docs/architectures.md

# Checkpoints every 10 steps, copies for restarts, the run's record, on two replicas; prints a table.
bench-checkpoints: .venv/.installed-demo
	$(BIN)/python bench/checkpoint_cost.py
	$(BIN)/python bench/copy_cost.py

# Keras's own tests under strategies; writes docs/keras-tests.md anew. Takes half an hour.
bench-keras-tests: .venv/.installed-dev
	$(BIN)/python bench/keras_tests.py --results bench/results/keras-tests --report docs/keras-tests.md

# Pipelines against torch.distributed.pipelining; prints tables.
bench-pipelines: .venv-bench/.installed
	.venv-bench/bin/python bench/pipelines.py

# The planner's predictions against measured steps and memory; writes a table into docs/planner.md.
bench-planner: .venv/.installed-dev
	$(BIN)/python bench/planner.py --report

# Two hosts, made of network namespaces, at 1 Gbit/s; needs root, prints a table.
bench-hosts: .venv/.installed-demo
	$(BIN)/python bench/hosts.py

# Two hosts at 100 Mbit/s: compressed gradients, local SGD, exact sums; needs root, prints a table.
bench-compression: .venv/.installed-demo
	$(BIN)/python bench/compression.py

# Reading ahead and caching, with samples that take 5 ms to read; prints a table.
bench-input: .venv/.installed-demo
	$(BIN)/python bench/input_pipeline.py

# Time to the first step, by what is done until then; prints a table.
bench-starting: .venv/.installed-demo
	$(BIN)/python bench/starting.py

# Keras's methods with few samples, plain and on two replicas; prints a table.
bench-small-calls: .venv/.installed-dev
	$(BIN)/python bench/small_calls.py

# What progress, metrics and callbacks add to a step; prints a table.
bench-overhead: .venv/.installed-demo
	$(BIN)/python bench/overhead.py

# Tests and speed on an accelerator, in 8 minutes; writes docs/gpu.md anew. With another Python, where
# torch has CUDA: `make gpu GPU_PYTHON=python3`.
GPU_PYTHON = $(BIN)/python
gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),.venv/.installed-dev)
	$(GPU_PYTHON) bench/gpu.py --report docs/gpu.md

# Kills and stops processes at random moments, and prints a table of faults survived.
MINUTES ?= 30
soak: .venv/.installed-demo
	$(BIN)/python bench/soak.py --minutes $(MINUTES)

# Builds a wheel in dist/; installs nothing else.
wheel: | .venv/bin/python
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf dist .venv .venv-bench .venv-tpu .venv-deepspeed bench/results .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

.venv/bin/python:
	$(PYTHON) -m venv .venv

# constraints.txt pins torch, so that every machine proves the same arithmetic. Modules are compiled as
# they are imported: those of the demo, or of the tests, are a small part of all that is installed.
.venv/.installed-demo: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable ".[demo]"
	touch $@

# What tests and checks need is four times as large, and comes when they are asked for.
.venv/.installed-dev: .venv/.installed-demo
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable ".[dev]"
	touch $@

# With torch_tpu, torch is another: it stays out of .venv. The plugin's own needs are not used here.
.venv-tpu/.installed: pyproject.toml constraints.txt tests/stand_ins/tpu/requirements.txt
	$(PYTHON) -m venv .venv-tpu
	.venv-tpu/bin/python -m pip install --quiet --no-compile --constraint constraints.txt --requirement tests/stand_ins/tpu/requirements.txt --editable .
	.venv-tpu/bin/python -m pip install --quiet --no-compile --no-deps lammps-jax-pjrt-cpu==0.11.2
	touch $@

# DeepSpeed names a torch of its own, and compiles nothing that is needed here.
.venv-deepspeed/.installed: pyproject.toml constraints.txt tests/parity/deepspeed_requirements.txt
	$(PYTHON) -m venv .venv-deepspeed
	.venv-deepspeed/bin/python -m pip install --quiet --no-compile --constraint constraints.txt --requirement tests/parity/deepspeed_requirements.txt --editable .
	DS_BUILD_OPS=0 .venv-deepspeed/bin/python -m pip install --quiet --no-deps --no-build-isolation deepspeed==0.19.8
	touch $@

# The other libraries stay out of .venv.
.venv-bench/.installed: pyproject.toml constraints.txt bench/requirements.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --requirement bench/requirements.txt --editable .
	touch $@
