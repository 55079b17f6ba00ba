# Everything runs in .venv, which the first target creates and which is updated when setup.py or constraints/newest.txt change.
.PHONY: venv demo test test-zoo test-stacks fuzz pins check check-pins lint types imports prose docs format table stub plots \
	bench rehearse-gpu rehearse-wheels clean

# without the bytecode of installed packages, each process of the tests would compile them anew
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
# The index of another build of torch than PyPI's, which is for GPUs and has some 4 GB with its libraries:
# make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
BIN := .venv/bin
# modules are compiled when they are first imported, since compiling all of them takes two minutes
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check install --no-compile --constraint constraints/newest.txt
# stamps: what the library and the demo need is installed; so is what the tests and checks need
DEMO := .venv/.demo
READY := .venv/.ready
# torchao and bitsandbytes, which transformers imports wherever they are installed, take a second of every process, and
# print; so only the tests that need them see them
QUANTIZATION := .venv/quantization
RAY := .venv/ray
UV := .venv/bin/uv
PEERS := .venv/peers

venv: $(READY)

# torch goes first and exactly pinned, so that pip considers no other build of it afterwards; what it requires is not
# taken from its own index, which has older versions
$(DEMO): setup.py constraints/newest.txt
	echo "installing the library into .venv (about a minute, once)"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) $(if $(TORCH_INDEX),--no-deps --index-url $(TORCH_INDEX)) torch==$$(sed -n 's/^torch==//p' constraints/newest.txt)
	$(PIP) setuptools wheel
	$(PIP) --no-build-isolation --editable '.[demo]'
	touch $@

# DeepSpeed is built from source, which needs torch; its compiled operations are left out
$(READY): $(DEMO)
	echo "installing the tools of the tests and checks into .venv (about a minute, once)"
	$(PIP) --no-build-isolation --editable '.[dev,demo,docs,ecosystem]'
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation --editable '.[deepspeed]' >.venv/deepspeed.log 2>&1 \
		|| echo "DeepSpeed cannot be installed here, so its tests are skipped: see .venv/deepspeed.log"
	touch $@

$(QUANTIZATION): $(READY)
	$(PIP) --no-deps --upgrade --target $@ bitsandbytes compressed-tensors loguru torchao
	touch $@

# where Ray is installed, transformers and Lightning do other things, so only its tests see it
$(RAY): $(READY)
	$(PIP) --no-deps --upgrade --target $@ attrs jsonschema jsonschema-specifications protobuf ray referencing rpds-py \
		tensorboardX
	touch $@

demo: $(DEMO)
	$(BIN)/oslo-models demo

# ARGS is passed to pytest: make test ARGS="-k layout --seed 7 --numprocesses 0". Three processes on two cores, since tests
# wait for ranks now and then.
# pytest ends with 5 where ARGS select none of the tests of quantisation
# the tests of quantisation run beside the others, and print what they have to say behind them
test: $(READY) $(QUANTIZATION)
	PYTHONPATH=$(QUANTIZATION) $(BIN)/python -m pytest --quiet -m "quantization and not zoo" $(ARGS) \
		>.venv/quantization.log 2>&1 & \
	beside=$$!; trap 'kill $$beside' INT TERM; \
	$(BIN)/python -m pytest --quiet --numprocesses 3 --dist loadfile $(ARGS); status=$$?; \
	wait $$beside; beside=$$?; cat .venv/quantization.log; \
	test $$status -eq 0 && { test $$beside -eq 0 || test $$beside -eq 5; }

# the slow tests: the other classes and sizes of each architecture, and Ray
test-zoo: $(READY) $(QUANTIZATION) $(RAY)
	$(BIN)/python -m pytest --quiet --numprocesses 2 --dist loadfile -m "zoo and not (quantization or ray)" $(ARGS)
	PYTHONPATH=$(QUANTIZATION) $(BIN)/python -m pytest --quiet --numprocesses 2 --dist loadfile \
		-m "quantization and zoo" $(ARGS) || test $$? -eq 5
	PYTHONPATH=$(RAY) $(BIN)/python -m pytest --quiet --numprocesses 0 -m ray $(ARGS) || test $$? -eq 5

# some of the tests with other versions of Python, torch and transformers, each in an environment below .venv-stacks/
test-stacks: $(UV)
	PYTHONPATH=tests $(BIN)/python -m support.stacks test $(ARGS)

# damaged requests, grammars, checkpoints and data files for an hour; .fuzz/ keeps the corpus
fuzz: $(READY)
	HF_HUB_OFFLINE=1 PYTHONPATH=tests $(BIN)/python -m support.fuzzing --minutes 60 --corpus .fuzz $(ARGS)

$(UV):
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) uv

# takes the newest versions that fit to constraints/*.in
pins: $(UV)
	PYTHONPATH=tests $(BIN)/python -m support.stacks pins

# whether PyPI alone has what is pinned, for each Python, and the pins fit to each other
check-pins: $(UV)
	PYTHONPATH=tests $(BIN)/python -m support.stacks check-pins

check: lint types imports prose docs check-pins

lint: $(READY)
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .

# where a stub stands beside a module, mypy reads the stub, so the module is checked by itself
types: $(READY)
	PYTHONPATH=tests $(BIN)/python -m support.stub --check
	$(BIN)/mypy --no-error-summary
	$(BIN)/mypy --no-error-summary --follow-imports skip --cache-dir /dev/null oslo_models/__init__.py

# the import order of the packages, as declared in pyproject.toml
imports: $(READY)
	$(BIN)/lint-imports --no-cache >.venv/imports.log || { cat .venv/imports.log; exit 1; }

# marks of unidiomatic prose in code and documents
prose: $(READY)
	PYTHONPATH=tests $(BIN)/python -m pytest -q -p no:cacheprovider --numprocesses 0 tests/suite/test_prose.py

# the manual, as a site of static files in site/; needs no network. Material's note on its own future is not ours
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: $(READY)
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format --quiet .

# the table of architectures in docs/models.md, and those of docs/migration/documents.md, between their markers
table: $(READY)
	PYTHONPATH=tests $(BIN)/python -m support.document_rows
	$(BIN)/python -c "from pathlib import Path; from oslo_models.cli.support_table import update_table; \
		page = Path('docs/models.md'); page.write_text(update_table(page.read_text()))"

# oslo_models/__init__.pyi, from the registry and the sources of the architectures
stub: $(READY)
	PYTHONPATH=tests $(BIN)/python -m support.stub

# the images of README.md and docs/, from the committed CSV files
plots: $(READY)
	$(BIN)/python -m benchmarks.plots

# llama.cpp, a peer of generation, is built from source for this processor (some ten minutes, once)
$(PEERS): $(READY)
	$(PIP) --no-deps --upgrade --target $@ diskcache gguf llama-cpp-python \
		|| echo "llama.cpp cannot be built here, so its rows are left out"
	mkdir -p $@
	touch $@

bench: $(READY) $(PEERS)
	$(PIP) --no-build-isolation --editable '.[bench]'
	PYTHONPATH=$(PEERS) $(BIN)/python -m benchmarks $(ARGS)
	$(BIN)/python -m benchmarks.table --write docs/benchmarks.md
	$(BIN)/python -m benchmarks.plots

# everything about one GPU, in four parts of under ten minutes; without a GPU a dry run of some minutes. For another
# environment, whose torch supports the GPU: make rehearse-gpu BIN=/path/to/its/bin
OUT ?= rehearsal
rehearse-gpu: $(if $(filter .venv/bin,$(BIN)),$(READY))
	PYTHONPATH=.:kernels:$$PYTHONPATH $(BIN)/python -m benchmarks.rehearse all --out $(OUT) $(ARGS)

# the peers that a machine without network lacks, for --wheels; for its Python, which is named here
rehearse-wheels:
	$(PYTHON) -m pip -qq download --no-deps --only-binary=:all: --python-version 3.12 --dest $(OUT) \
		liger-kernel trl datasets dill multiprocess

clean:
	rm -rf .venv .venv-stacks build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VERBOSE).SILENT:
