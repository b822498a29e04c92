PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo gallery test lint types imports tests clean

demo: .venv/installed
	$(BIN)/python benchmarks/compare.py --config benchmarks/configs/quick.yaml --out runs/demo

gallery: .venv/installed
	$(BIN)/python examples/gallery.py --out docs

test: lint types imports tests

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/mypy

imports: .venv/installed
	PYTHONPATH=benchmarks $(BIN)/lint-imports

tests: .venv/installed
	$(BIN)/pytest -n 2 --cov --cov-report=term

# One environment for all targets, rebuilt when the requirements or the C source change.
.venv/installed: pyproject.toml hatch_build.py hookdrop/kernels/_blocks.c
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "hookdrop requires Python 3.11 or newer: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "installing PyTorch, torchvision, timm and development tools into .venv (several GB, a few minutes) ..."
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

clean:
	rm -rf .venv .coverage runs
