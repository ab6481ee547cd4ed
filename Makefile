# make demo              LoRA in memory that is too small, three ways: as it is, checkpointed, with the block; two minutes on
#                        two cores
# make demo ZERO=3       a deep, narrow model with ZeRO-3's parameters on NVMe; builds DeepSpeed's aio op at the first run
# make check             lint, types, the quick tests and a smoke of the engine
# make test              lint, types, and what decides whether a change lands: faults, engines, some rows of each table;
#                        half an hour on two cores, 7 minutes of it for the first build of DeepSpeed's ops
# make test-all          everything, and the tables of docs/ written again: hours
# make bench             the benchmarks
# make gpu               what only a GPU can tell, the most important first, in 8 minutes; run again, it goes on
#                        (GPU_ARGS="--minutes 40": and more; "--pieces headline --again": this, once more)
# make gpu REHEARSE=1    the eight minutes on the CPU, tiny, in 2
# make site              the documentation as a site, in .cache/site; a link that leads nowhere is an error
# make reference         the pages of keys, commands, report and Python, and the JSON Schema, from the code; make freeze:
#                        the frozen names too
# make sbom              .cache/ds_tba.cdx.json: what pip installs with the package today, with hashes, as CycloneDX
# make canary            private names, hooks, every operator, on the newest pre-releases of PyTorch and DeepSpeed
# make frameworks        environments of Lightning, Ray Train and LLaMA-Factory, for their tests: gigabytes
# make soak              2,000 random steps with random faults, compared with the run without us: about 10 minutes

VENV    ?= .venv
PYTHON  ?= python3
ZERO    ?= 2
BACKEND ?= $(if $(filter 2,$(ZERO)),posix)
STEPS   ?= 1
# Eight layers as wide as SmolLM2-135M's, frozen, with LoRA. With ZeRO-3 narrow, deep and long instead, so that activations
# fill the memory of a model that is trained in full: parameters take 6 MiB of it, in FP32.
SIZE_2  := --width 576 --depth 8 --lora_rank 16 --batch 1 --sequence 1024 --also_lengths 256 512 --memory 0.22
SIZE_3  := --width 64 --depth 32 --batch 8 --sequence 2048 --also_lengths 1024 1536
SIZE    ?= $(SIZE_$(ZERO))
# Everything leaves, through little staging: this training is small.
LIMITS  ?= --placement nvme --staging_bytes 8388608 --min_tensor_bytes 65536
NVME    ?= $(CURDIR)/.cache/nvme
RANKS   ?= 1
PYTEST_ARGS ?= -m "not slow and not thorough"
QUICK ?= -m "smoke or not (slow or thorough or engine or long or fault)"
# Processes that share the tests, one more than the cores of the least machine: many tests wait for other processes, or for
# drives that are slow on purpose. More of them need more memory, some GiB each.
WORKERS ?= 3
GPU_ARGS ?=

BIN := $(VENV)/bin
# One cache of compiled DeepSpeed ops for the demo, the tests and the benchmarks.
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/.cache/torch_extensions
export PATH := $(abspath $(BIN)):$(PATH)

CONFIG_2 := ds_configs/zero2_activations.json
CONFIG_3 := ds_configs/zero3_nvme_params_activations.json
CONFIG := $(CONFIG_$(ZERO))
NEEDS_AIO := $(filter 3,$(ZERO))$(filter aio,$(BACKEND))

# Without the device files of any accelerator DeepSpeed needs not be surprised that it finds none.
ACCELERATORS := $(wildcard /dev/nvidia* /dev/kfd /dev/dxg /dev/dri/renderD* /dev/accel* /dev/davinci* /dev/hpu*)
ifeq ($(ACCELERATORS),)
demo: export DS_ACCELERATOR ?= cpu
# In which many processors are ten times as fast as in BF16.
PRECISION ?= --fp32
endif

.PHONY: help demo check test test-all ready lint site reference freeze reliability compatibility frameworks rematerialize operators mutants bench gpu soak sbom venv aio cpu_ops ops libaio canary clean

help:
	@sed -n 's/^# make/make/p' $(MAKEFILE_LIST)

# --quiet is the launcher's: it has lines about its own work, and a warning that there is no list of other hosts.
# glibc is to give freed memory back, or a process on the CPU holds what it needs no more, with the block and without.
# And DeepSpeed calls functions of torch.distributed that have new names since torch 2.13: nothing for a user to mend.
DEMO_ENV := MALLOC_MMAP_THRESHOLD_=65536 PYTHONWARNINGS=ignore::FutureWarning:torch.distributed.c10d_logger

demo: $(BIN)/.installed $(if $(NEEDS_AIO),aio)
	@test -n "$(CONFIG)" || { echo "ZERO=$(ZERO): the demo has ZERO=2 and ZERO=3"; exit 2; }
	@mkdir -p $(NVME)
	$(DEMO_ENV) python examples/demo.py --deepspeed_config $(CONFIG) --nvme_path $(NVME) --ranks $(RANKS) --steps $(STEPS) \
	    $(SIZE) $(LIMITS) --report $(CURDIR)/.cache/report.json $(if $(BACKEND),--backend $(BACKEND)) $(PRECISION)

PYTEST := python -m pytest --basetemp=$(CURDIR)/.cache/pytest
# Whoever is done takes over what another has not begun: a few tests take a minute. A thread for each of them, or threads
# of one wait for those of the other at every operation.
SHARED := OMP_NUM_THREADS=1 $(PYTEST) -n $(WORKERS) --dist worksteal --durations=30

check: lint
	$(SHARED) $(QUICK)

test: ready
	$(SHARED) $(PYTEST_ARGS)

test-all: ready
	$(SHARED)
	$(MAKE) reliability compatibility rematerialize operators mutants bench soak

lint: $(BIN)/.installed
	ruff check .
	ruff format --check .
	mypy

# In an environment of its own, of a few small packages: none of them is wanted where models are trained.
SITE_VENV := .cache/site_venv
site: $(SITE_VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(SITE_VENV)/bin/mkdocs --quiet build --strict
	@echo "the site is in .cache/site: python3 -m http.server --directory .cache/site"

$(SITE_VENV)/.installed: requirements-site.lock
	$(PYTHON) -m venv $(SITE_VENV)
	$(SITE_VENV)/bin/pip install -q --no-compile -r requirements-site.lock
	@touch $@

# What users hold on to, as the code has it: docs/reference, and with freeze the file that a test compares with.
reference freeze: $(BIN)/.installed
	PYTHONPATH=tests python tests/support/interface.py $(if $(filter freeze,$@),--freeze)

# The table of faults and outcomes, from a run of the tests that inject them.
reliability: aio
	$(PYTEST) -m fault --reliability=docs/evidence/faults.md

# The table of models, trainers and settings, from a run of the tests that train each: make frameworks first, or its rows
# say "not run on this machine".
compatibility: $(BIN)/.installed
	$(PYTEST) -m compatible --compatibility=docs/evidence/compatibility.md tests

# An environment for each framework of tests/compatibility/test_frameworks.py: gigabytes. torchaudio, which LLaMA-Factory
# imports, is built for CUDA on PyPI: without CUDA an empty module stands in for it.
FRAMEWORKS := .cache/frameworks
frameworks:
	@mkdir -p $(FRAMEWORKS)
	grep -E '^(torch|deepspeed)==' requirements-dev.lock > $(FRAMEWORKS)/constraints.txt
	set -e; for pair in lightning=lightning ray='ray[train]' llamafactory=llamafactory; do \
	    $(PYTHON) -m venv $(FRAMEWORKS)/$${pair%%=*}; \
	    $(FRAMEWORKS)/$${pair%%=*}/bin/pip install -q -c $(FRAMEWORKS)/constraints.txt torch deepspeed "$${pair#*=}"; \
	    $(FRAMEWORKS)/$${pair%%=*}/bin/pip install -q .; \
	done
	$(FRAMEWORKS)/llamafactory/bin/pip uninstall -q -y torchvision torchaudio
	echo '"""Stands in for torchaudio."""' > $$(echo $(FRAMEWORKS)/llamafactory/lib/python3*/site-packages)/torchaudio.py

# The table of saved bytes, from a run of the tests that train each model without and with rematerialization.
rematerialize: $(BIN)/.installed
	$(PYTEST) -m rematerialized --rematerialized=docs/guides/rematerialize.md tests

# The page of PyTorch's operators, from a run of the tests that compare each.
operators: $(BIN)/.installed
	$(SHARED) tests/sweep/test_operators.py --operators=docs/evidence/operators.md

# Takes out every wait that orders copies, one at a time: a test must fail for each. Minutes.
mutants: $(BIN)/.installed
	@mkdir -p .cache
	PYTHONPATH=tests python tests/mutants.py

bench: $(BIN)/.installed aio
	python benchmarks/hook_cost.py
	python benchmarks/planner_scale.py
	python benchmarks/at_scale.py
	python benchmarks/step_time.py

# On a GPU with the torch that is there, and `pip install .`; the tests and others' offloaders, which come behind the eight
# minutes, want `pip install .[examples] pytest hypothesis`. Our venv's torch is for the CPU.
gpu: $(if $(REHEARSE),$(BIN)/.installed)
	@mkdir -p $(NVME)
	$(PYTHON) benchmarks/gpu $(if $(REHEARSE),--rehearse) --nvme_path $(NVME) $(GPU_ARGS)

soak: $(BIN)/.installed aio
	python benchmarks/soak.py --nvme_path $(NVME)

# The newest that there is of PyTorch and DeepSpeed, before it is a release. A failure is news, and stops nobody.
CANARY := .cache/canary_venv
CANARY_TESTS := tests/test_private_names.py tests/recompute/test_selective_checkpoints.py tests/hazards/test_hazards.py \
    tests/sweep/test_operators.py
canary:
	@mkdir -p $(CURDIR)/.cache
	$(PYTHON) -m venv --clear $(CANARY)
	$(CANARY)/bin/pip install -q --pre torch --index-url https://download.pytorch.org/whl/nightly/cpu
	$(CANARY)/bin/pip install -q --pre deepspeed pydantic numpy packaging xxhash jinja2 pytest hypothesis ninja expecttest
	$(CANARY)/bin/pip install -q --no-deps -e .
	$(CANARY)/bin/python -m pytest --basetemp=.cache/pytest_canary -m "not aio and not slow" $(CANARY_TESTS)

# The SBOM lists the versions that pip would install. Nothing is installed, because gigabytes come with torch.
SBOM_VENV := .cache/sbom_venv
sbom:
	$(PYTHON) -m venv $(SBOM_VENV)
	$(SBOM_VENV)/bin/pip install -q --no-compile cyclonedx-bom uv
	$(SBOM_VENV)/bin/uv pip compile -q --generate-hashes pyproject.toml -o .cache/requirements.txt
	$(SBOM_VENV)/bin/cyclonedx-py requirements .cache/requirements.txt --pyproject pyproject.toml --mc-type library \
	    --output-reproducible -o .cache/ds_tba.cdx.json

venv: $(BIN)/.installed

# Without compiling the Python of all packages, a minute, of which most is never imported.
$(BIN)/.installed: requirements-dev.lock pyproject.toml
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || { echo "the pinned versions need Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { echo "no venv module: apt-get install python3-venv"; exit 2; }
	$(BIN)/pip install -q --no-compile -r requirements-dev.lock
	$(BIN)/pip install -q --no-deps --no-build-isolation -e .
	@touch $@

# DeepSpeed's aio op: its first build takes minutes on two cores.
aio: $(BIN)/.installed libaio
	@mkdir -p $(NVME) && ds_tba doctor --build --nvme-path $(NVME)

# All that the tests need, beside each other, so that no core waits for the network or for the last file of an op. The ops
# come before the tests: a test that is ended while it compiles leaves a lock behind, for which all later ones wait.
ready:
	$(MAKE) --jobs 4 lint aio cpu_ops site

ops:
	$(MAKE) --jobs 2 aio cpu_ops

cpu_ops: $(BIN)/.installed libaio
	@DS_ACCELERATOR=cpu MAX_JOBS=1 python -c "from deepspeed.ops.op_builder import cpu; cpu.CPUAdamBuilder().load(verbose=False); cpu.ShareMemCommBuilder().load(verbose=False)" >/dev/null

libaio:
	@if ! test -e /usr/include/libaio.h || ! command -v g++ >/dev/null; then \
	    if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	        echo "installing g++, python3-dev and libaio-dev, which DeepSpeed's aio op needs"; \
	        apt-get update -qq && apt-get install -y -qq g++ python3-dev libaio-dev >/dev/null; \
	    else \
	        echo "DeepSpeed's aio op needs a compiler and libaio: sudo apt-get install g++ python3-dev libaio-dev"; \
	        echo "(Fedora: gcc-c++ python3-devel libaio-devel). Without them: make demo ZERO=2 BACKEND=posix"; exit 2; \
	    fi; fi

clean:
	rm -rf $(VENV) .cache build dist *.egg-info
