# For a newcomer: make demo, make lab, make docs, make test. PYTHON picks the interpreter (3.11 or newer).
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo lab docs test test-tiers test-thorough lint clean

demo: .venv/core
	@$(BIN)/workbench run experiments/first_light.yaml
	@case "$$($(BIN)/python -c 'from workbench.models.store import default_model; print(default_model())')" in \
	smollm2) $(BIN)/workbench chat "What is the capital of France?" --model smollm2 --temperature 0 --max-tokens 32;; \
	*) echo '  $(BIN)/workbench model get smollm2  # fetches a model that speaks English (98 MB)';; esac

# PORT=8899 names the server's port; with BROWSER=no it prints its address and opens nothing.
lab: .venv/lab
	$(BIN)/workbench lab $(PORT:%=--port %) $(if $(filter no,$(BROWSER)),--no-browser)

# The site: build/site/html, which needs no network to be read.
docs: .venv/docs
	@$(BIN)/python -m tools.site

# The suite, in processes of one thread each, one a core: each has the tests of neighbouring files, which share what is
# compiled; one that is done takes over another's last. tests/README.md tells the tiers that `make test` has one test of.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --maxprocesses 8 --dist worksteal
TIERS := browser or ray or processes or interpreter or site or levels
test: .venv/dev
	$(PYTEST) -m "smoke or not ($(TIERS))"

# What `make test` leaves out: a third process, as the one with the browser waits half of its time. Where the machine has
# more than AVX2, then the tests of this package's code for it again with everything limited to AVX2.
test-tiers: .venv/dev
	$(PYTEST:logical=3) -m "not smoke and ($(TIERS))"
	@case "$$($(BIN)/python -c "from compiled_kernels.level import main; main()")" in "v3 "*) \
	echo "once more at v3 (AVX2): $(AT_V3)"; WORKBENCH_LEVEL=v3 $(PYTEST) -m "not ($(TIERS))" $(AT_V3);; esac
AT_V3 = $(addprefix tests/kernels/test_, agreement.py decode_step.py laws.py layouts.py leaf_operators.py level.py panels.py \
	pages_read.py quantized_pages.py quantized_weights.py) $(addprefix tests/engine/test_, mlir_step.py prefill.py speculation.py)

# Six times as many examples of every law, drawn anew, all cases, and every numerical test at AVX2: before an issue is ended.
test-thorough: export WORKBENCH_TESTS_THOROUGH = 1
test-thorough: AT_V3 += $(addprefix tests/kernels/test_, check.py mlir_backend.py builder.py) $(addprefix tests/engine/test_, compiled.py \
	kinds.py oracle.py quantized_cache.py autotune.py) tests/model/test_every_family.py tests/measure/test_run.py tests/test_cli.py
test-thorough: test test-tiers

# Style, guards of text, words, figures and pages, and types: the quick ones first.
lint: .venv/dev
	$(BIN)/ruff check . && $(BIN)/python -m tools.lint && $(BIN)/pyright --pythonpath $(BIN)/python

.venv/bin/python:
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed; make PYTHON=..."'
	@$(PYTHON) -m venv .venv

# Twice quiet: a newcomer needs only pip's errors.
INSTALL := $(BIN)/pip install -qq --disable-pip-version-check --constraint constraints.txt --editable

.venv/core: .venv/bin/python pyproject.toml constraints.txt
	@echo 'installing into .venv (once; a minute or more, as the network has it)'
	@$(INSTALL) .
	@touch $@

.venv/lab: .venv/core
	@echo 'installing what the notebooks show into .venv (once)'
	@$(INSTALL) '.[lab]'
	@$(BIN)/workbench model get smollm2 || echo 'going on without it: the small demo models are at hand'
	@touch $@

.venv/docs: .venv/core
	@echo 'installing what the site needs into .venv (once)'
	@$(INSTALL) '.[docs]'
	@touch $@

.venv/dev: .venv/core
	@echo 'installing what the tests need into .venv (once)'
	@$(INSTALL) '.[dev]'
	@touch $@

clean:
	rm -rf .venv build/lib *.egg-info
