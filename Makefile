# Every target does its own set-up: `make demo` or `make test` alone is enough on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1

.PHONY: install demo study test nightly bench lint clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[report,examples,study,dev]'
	touch $@

demo: install
	$(BIN)/python examples/demo.py

study: install
	$(BIN)/shoal study run examples/study_quick.toml

test: install
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not nightly"

nightly: install
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m nightly --timeout 3600

bench: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python -m benchmarks elastic
	$(BIN)/python -m benchmarks study

lint: install
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/pyright

clean:
	rm -rf $(VENV) runs studies .pytest_cache .hypothesis .ruff_cache
