PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# real data sets, where they are at hand; tests that need one skip where it is not
DATA := $(abspath ../shared/data)
ifneq ($(wildcard $(DATA)),)
export VAERDICT_DATA ?= $(DATA)
endif
.PHONY: install demo test test-slow test-gpu lint format bench docs figures readme tutorials clean

install: $(STAMP)

$(STAMP): pyproject.toml paper/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch numpy scipy
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]' --editable './paper[rivals]'
	touch $(STAMP)

demo: install
	$(BIN)/vaerdict demo --out vaerdict-demo

# two processes of one thread each; the tests of a file share what they set up
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not slow and not gpu' --numprocesses 2 --dist loadfile

test-slow: install
	$(BIN)/python -m pytest -m slow

test-gpu: install
	$(BIN)/python -m pytest -m gpu

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	$(BIN)/vaerdict bench all --force --out paper/results/bench

# the site, offline and without warnings: build/site/index.html
docs: install
	$(BIN)/python docs/generate.py
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs build/site

figures: install
	OMP_NUM_THREADS=1 $(BIN)/python docs/figures/verdicts.py
	OMP_NUM_THREADS=1 $(BIN)/python docs/figures/concepts.py
	$(BIN)/python docs/generate.py

readme: install
	$(BIN)/python -m vaerdict_paper.pages README.md docs/results/*.md docs/benchmarks.md docs/benchmarks/*.md

tutorials: install
	$(BIN)/python tests/notebooks.py

clean:
	rm -rf $(VENV) build dist docs/generated src/*.egg-info .pytest_cache .ruff_cache
