# Everything runs in .venv, which the first target makes and which is renewed when setup.py or constraints.txt change.
.PHONY: venv demo test check lint types format bench clean

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check install --constraint constraints.txt
READY := .venv/.ready

venv: $(READY)

# torch goes first and exactly pinned, so that no other build of it is considered afterwards
$(READY): setup.py constraints.txt
	echo "installing into .venv (about a minute, once)"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch==$$(sed -n 's/^torch==//p' constraints.txt) setuptools wheel
	$(PIP) --no-build-isolation --editable '.[dev,demo]'
	touch $@

demo: $(READY)
	$(BIN)/oslo-models demo

# ARGS goes to pytest: make test ARGS="-k layout --seed 7"
test: $(READY)
	$(BIN)/python -m pytest --quiet $(ARGS)

check: lint types

lint: $(READY)
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .

types: $(READY)
	$(BIN)/mypy --no-error-summary

format: $(READY)
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format --quiet .

bench: $(READY)
	$(PIP) --no-build-isolation --editable '.[bench]'
	$(BIN)/python -m benchmarks $(ARGS)
	$(BIN)/python -m benchmarks.table --write README.md

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VERBOSE).SILENT:
