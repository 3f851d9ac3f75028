PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# real data sets, where they are at hand; tests that need one skip where it is not
DATA := $(abspath ../shared/data)
ifneq ($(wildcard $(DATA)),)
export VAERDICT_DATA ?= $(DATA)
endif
# a second environment, with the newest releases of everything, where a newer Python is at hand
NEWEST_PYTHON ?= $(shell for python in python3.14 python3.13 python3.12 \
	$(foreach v,3.14 3.13 3.12,$(HOME)/.pyenv/versions/$v.*/bin/python); do \
	$$python -c '' 2>/dev/null && command -v $$python && break; done)
NEWEST_CONSTRAINTS := constraints-newest.txt
NEWEST := .venv-newest
.PHONY: install demo test test-newest test-slow test-gpu test-browser test-mutations lint format bench docs figures readme tutorials dist clean

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

test-newest:
ifeq ($(NEWEST_PYTHON),)
	@echo 'test-newest: skipped, no Python 3.12 or newer found (NEWEST_PYTHON=/path/to/python names one)'
else
	$(MAKE) $(NEWEST)/.installed
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest -m 'not slow and not gpu' --numprocesses 2 --dist loadfile

$(NEWEST)/.installed: pyproject.toml paper/pyproject.toml $(NEWEST_CONSTRAINTS)
	$(NEWEST_PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --upgrade pip
	$(NEWEST)/bin/python -m pip install --quiet --constraint $(NEWEST_CONSTRAINTS) torch numpy scipy
	$(NEWEST)/bin/python -m pip install --quiet --constraint $(NEWEST_CONSTRAINTS) --editable '.[dev]' --editable './paper[rivals]'
	touch $@
endif

test-slow: install
	$(BIN)/python -m pytest -m slow

test-gpu: install
	$(BIN)/python -m pytest -m gpu

# bugs planted in a copy of the sources, each of which a test must catch: a few minutes
test-mutations: install
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutations.py --jobs 2

# axe-core checks accessibility; it is fetched where npm is installed, and its tests skip otherwise
AXE := $(VENV)/axe/package/axe.min.js

$(AXE): $(STAMP)
	mkdir -p $(VENV)/axe
	-cd $(VENV)/axe && npm pack --silent axe-core && tar xzf axe-core-*.tgz

test-browser: install $(AXE)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[browser]'
	VAERDICT_AXE=$(if $(wildcard $(AXE)),$(abspath $(AXE))) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m browser

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
	$(BIN)/python -m vaerdict_paper.pages README.md docs/results.md docs/results/*.md docs/benchmarks.md docs/benchmarks/*.md

tutorials: install
	$(BIN)/python tests/notebooks.py

# wheel and source archive of both packages, each built in isolation and checked
dist:
	rm -rf dist
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet build twine
	.venv-dist/bin/python -m build --outdir dist .
	.venv-dist/bin/python -m build --outdir dist paper
	.venv-dist/bin/twine check --strict dist/*

clean:
	rm -rf .venv* build dist docs/generated src/*.egg-info .pytest_cache .ruff_cache
