# The two commands of a fresh clone: make demo, make test.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

PYTEST := $(BIN)/python -m pytest -n logical --maxprocesses 8 --dist loadfile -rs

VENDOR := src/mae/web/vendor
RUNTIME := $(VENDOR)/ort.wasm.bundle.min.mjs $(VENDOR)/ort-wasm-simd-threaded.wasm

# Afresh, since what the commands print may have changed though no page has.
SPHINX := -q -n -W --keep-going -E -c docs

.PHONY: demo test test-slow lint format docs docs-links install web clean

demo: $(VENV)/installed
	$(BIN)/mae demo

test: $(VENV)/installed-dev lint
	@if command -v npm >/dev/null; then $(MAKE) web || echo "make web failed: tests of the page are skipped"; fi
	$(PYTEST) -m "not slow"

# What takes many seconds each: several processes, whole studies, exports read by fresh processes.
test-slow: $(VENV)/installed-dev
	$(PYTEST) -m slow

# What the page of mae web needs of onnxruntime-web, by the lock file's checksums; never committed, carried in the wheel.
web: $(firstword $(RUNTIME))

$(firstword $(RUNTIME)): package.json package-lock.json
	npm ci --ignore-scripts --no-audit --no-fund
	mkdir -p $(VENDOR)
	cp $(patsubst $(VENDOR)/%,node_modules/onnxruntime-web/dist/%,$(RUNTIME)) $(VENDOR)
	touch $@

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
	rm -rf node_modules $(VENDOR) $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
