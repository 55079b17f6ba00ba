# Everything runs in .venv, which the first target makes and which is renewed when setup.py or constraints.txt change.
.PHONY: venv demo test test-zoo check lint types imports format table bench clean

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check install --constraint constraints.txt
READY := .venv/.ready

venv: $(READY)

# torch goes first and exactly pinned, so that no other build of it is considered afterwards; DeepSpeed comes from source,
# which needs torch, and without its compiled parts
$(READY): setup.py constraints.txt
	echo "installing into .venv (about a minute, once)"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch==$$(sed -n 's/^torch==//p' constraints.txt) setuptools wheel
	$(PIP) --no-build-isolation --editable '.[dev,demo]'
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation --editable '.[deepspeed]' >.venv/deepspeed.log 2>&1 \
		|| echo "DeepSpeed cannot be installed here, so its tests are skipped: .venv/deepspeed.log says why"
	touch $@

demo: $(READY)
	$(BIN)/oslo-models demo

# ARGS goes to pytest: make test ARGS="-k layout --seed 7 --numprocesses 0". Two processes, as one leaves cores idle
test: $(READY)
	$(BIN)/python -m pytest --quiet --numprocesses 2 --dist loadfile $(ARGS)

# what `make test` has no time for: the other classes and sizes of each architecture, and Ray
test-zoo: $(READY)
	$(BIN)/python -m pytest --quiet --numprocesses 2 --dist loadfile -m zoo $(ARGS)

check: lint types imports

lint: $(READY)
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .

types: $(READY)
	$(BIN)/mypy --no-error-summary

# the order of the packages, as pyproject.toml states it
imports: $(READY)
	$(BIN)/lint-imports --no-cache >.venv/imports.log || { cat .venv/imports.log; exit 1; }

format: $(READY)
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format --quiet .

# the README's table of architectures
table: $(READY)
	$(BIN)/python -c "from pathlib import Path; from oslo_models.cli import support_table; \
		readme = Path('README.md'); readme.write_text(support_table.renewed(readme.read_text()))"

bench: $(READY)
	$(PIP) --no-build-isolation --editable '.[bench]'
	$(BIN)/python -m benchmarks $(ARGS)
	$(BIN)/python -m benchmarks.table --write README.md

# on a machine with a GPU, in an environment whose torch knows it: make bench-gpu BIN=/path/to/its/bin
bench-gpu:
	PYTHONPATH=.:kernels $(BIN)/python -m pytest --quiet -m gpu
	PYTHONPATH=.:kernels $(BIN)/python -m benchmarks.gpu

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VERBOSE).SILENT:
