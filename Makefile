# make demo, make test: each sets everything up first, in .venv, at the versions in constraints.txt.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all faults lint docs bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo      train ERM, SWAD and AGFA on embedded digits and write a report (under 4 minutes)"
	@echo "make test      lint, types, layers and the default tests (under 8 minutes)"
	@echo "make test-all  the slow tests too (those on PACS and MNIST need \$$AGFA_DATA)"
	@echo "make faults    everything that is made to fail on purpose, a hundred kills included"
	@echo "make lint      ruff, mypy, import-linter"
	@echo "make docs      the documentation as a site, in build/docs"
	@echo "make bench     speed: steps beside plain loops (ResNet-50, 10 minutes on 2 cores), then the input"

$(BIN)/.ready: pyproject.toml constraints.txt
	@echo "== setting up $(VENV) (once; PyTorch is several GB, this takes a few minutes)"
	$(PYTHON) -c 'import sys; sys.exit("agfa needs Python 3.11 or newer, found " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[lite,ray,export,serve,docs,dev]'
	@touch $@

demo: $(BIN)/.ready
	@echo "== agfa demo: ERM, SWAD and AGFA on embedded digits"
	$(BIN)/agfa demo

lint: $(BIN)/.ready
	@echo "== ruff, mypy, import-linter"
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	@echo "== default tests, a file at a time on each core"
	$(BIN)/pytest -n auto --dist loadfile

test-all: lint
	@echo "== all tests, slow ones included"
	$(BIN)/pytest -m ''

faults: $(BIN)/.ready
	@echo "== faults: a hundred kills, damaged files, lost storage, numbers that are none"
	$(BIN)/pytest -m '' -s tests/faults

docs: $(BIN)/.ready
	@echo "== the site; a dead link fails it"
	$(BIN)/python -m sphinx --fail-on-warning --nitpicky --keep-going --quiet docs build/docs
	@echo "site: build/docs/index.html"

bench: $(BIN)/.ready
	@echo "== steps of ERM, AGFA and SWAD beside plain loops and the machine's peak, in one run"
	$(BIN)/agfa bench --bars
	@echo "== images a second, from files to minibatches, beside DomainBed's way, in one run"
	$(BIN)/python benchmarks/input.py

clean:
	rm -rf $(VENV) build dist demo runs
