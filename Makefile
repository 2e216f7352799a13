# The doors of the project. `make demo` and `make test` install what is missing, say what they do, and can be
# repeated; everything they make is in .venv, .cache-marks and the user's cache folder.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup demo test check bench clean

VENV := .venv
BIN := $(VENV)/bin

help:
	@echo "make demo    evaluate the example tasks in real microVMs"
	@echo "make test    run every test"
	@echo "make check   lint, types, layers"
	@echo "make bench   benchmarks, as ratios in one run"

setup:
	@scripts/setup

demo: setup
	@scripts/demo

test:
	@scripts/setup tests
	@scripts/run-tests

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	@scripts/run-benchmarks

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
