# make demo    set everything up, train on the built-in scenes, compare both retrieval directions
# make test    set everything up, pass the tests
# make check   style, types and the layers of imports
# make docs    the pages of docs/ as a site, in site/
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test check docs clean

demo: $(VENV)/.installed
	$(BIN)/mmclip demo

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q --strict

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --disable-pip-version-check -q -e '.[test,text,clip-benchmark,serving,tensorboard]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-test
	$(BIN)/python -m pip install --disable-pip-version-check -q -e '.[test,text,clip-benchmark,serving,tensorboard,docs,dev]'
	touch $@

clean:
	rm -rf $(VENV) site data/scenes* data/cache data/bench-venv logs
