PYTHON ?= python3
BIN := .venv/bin
export PYTHON

.PHONY: demo gpu gallery docs check test lint types imports unit tests coverage clean

# What hookdrop does and an effect, with a page. It installs only what it uses.
demo: .venv/demo
	$(BIN)/python examples/demo.py --out runs/demo

# On a machine with a GPU, within 8 minutes: tests and times, with a page in benchmarks/results/<device>.
gpu:
	@command -v nvidia-smi > /dev/null || command -v rocm-smi > /dev/null || \
		{ echo "make gpu: this machine has no GPU driver (neither nvidia-smi nor rocm-smi)."; exit 1; }
	@$(MAKE) --no-print-directory .venv/dev
	@timeout 480 bash benchmarks/gpu.sh $(BIN)/python

gallery: .venv/dev
	$(BIN)/python examples/gallery.py --out docs
	$(BIN)/python examples/how_it_works.py --out docs/pictures

# The documentation site, in docs/_build/html; a warning is an error.
docs: .venv/docs
	$(BIN)/python -m sphinx -q -W --keep-going -b html $(SPHINXOPTS) docs docs/_build/html

# What to run on every save: at most two minutes.
check: lint types imports unit

# Everything, as in CI.
test: lint types imports tests

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

types: .venv/dev
	$(BIN)/mypy

imports: .venv/dev
	PYTHONPATH=benchmarks $(BIN)/lint-imports

# A worker for each core. Each starts with a part of the files, so that fixtures of a module are built once, and helps the others at the end.
PYTEST := $(BIN)/pytest -n logical --dist worksteal

unit: .venv/dev
	$(PYTEST) -q tests/unit

tests: .venv/dev
	$(PYTEST) tests/unit tests/integration tests/statistics tests/docs
	$(PYTEST) tests/benchmarks

# Not part of `test`, because tracing slows the tests down.
coverage: .venv/dev
	$(PYTEST) --cov --cov-report=term tests/unit tests/integration tests/statistics tests/docs

# One environment: `make test` adds the development packages to what `make demo` has installed.
.venv/%: pyproject.toml hatch_build.py hookdrop/accel/_blocks.c
	@.ci/install $*
	@touch $@

clean:
	rm -rf .venv .coverage runs docs/_build docs/tutorials docs/reference/generated
