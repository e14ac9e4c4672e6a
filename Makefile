# make install   .venv with everything for the demo and the tests
# make demo      rotary against learned positions, end to end, on real text
# make test      linter, type checker and every test

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
ROFORMER := $(BIN)/roformer

.PHONY: install demo demo-clean lint test test-clusters chaos golden

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch setuptools wheel
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[demo,test]'
	touch $@

demo: install
	$(BIN)/python -m launch.demo data/demo/text
	$(ROFORMER) tokenizer configs/demo.yaml
	$(ROFORMER) shards configs/demo.yaml
	$(ROFORMER) plan configs/demo.yaml
	$(ROFORMER) compare configs/demo.yaml

demo-clean:
	rm -rf data/demo data/demo.* runs/demo

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup

# the long form of what is proven on a real Slurm and over ssh: slurm-wlm, munge, pdsh, openssh-server
test-clusters: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m long tests/integration

# random faults for hours, and their table: make chaos CHAOS='--faults 200 --seed 1'
chaos: install
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos $(CHAOS)

# write the resolved configs and the example scripts anew, after a wanted change of a default
golden: install
	$(BIN)/python -m tests.configs.golden
	$(BIN)/python -m tests.launch.examples
