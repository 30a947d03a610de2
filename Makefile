# The two commands of a fresh clone: make demo, make test.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

PYTEST := $(BIN)/python -m pytest -n logical --maxprocesses 8 --dist loadfile

# Afresh, since what the commands print may have changed though no page has.
SPHINX := -q -n -W --keep-going -E -c docs

.PHONY: demo test test-slow lint format docs docs-links install clean

demo: $(VENV)/installed
	$(BIN)/mae demo

test: $(VENV)/installed-dev lint
	$(PYTEST) -m "not slow"

# What takes many seconds each: several processes, whole studies, exports read by fresh processes.
test-slow: $(VENV)/installed-dev
	$(PYTEST) -m slow

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The pages and the reference from docstrings as a site, build/docs/html/index.html; a warning is an error.
docs: $(VENV)/installed-dev
	$(BIN)/python -m sphinx $(SPHINX) . build/docs/html

# Addresses on the network that the pages name; nothing else looks them up.
docs-links: $(VENV)/installed-dev
	$(BIN)/python -m sphinx $(SPHINX) -b linkcheck . build/docs/links

install: $(VENV)/installed

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info else "openmae needs Python 3.11 or newer; try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "on Debian and Ubuntu: apt install python3-venv"; exit 1; }

$(VENV)/installed: pyproject.toml constraints.txt $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/installed

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
