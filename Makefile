# make demo: trains a tiny Qwen-Image on the CPU.  make test, make check: what CI runs.
PYTHON ?= python3
BIN := .venv/bin
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# OpenMP threads that spin for work they do not get cost a factor of ten on a busy machine.
export OMP_WAIT_POLICY := passive

.PHONY: demo test check docs standards format clean

demo: .venv/ready
	$(BIN)/python -m recipes.grpo_qwen_image configs/qwen_image/tiny_cpu.yaml \
		output_dir=runs/demo-$$(date +%Y%m%d-%H%M%S) $(ARGS)

test: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadgroup $(ARGS)

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: .venv/ready
	$(BIN)/python -m trainers.config_docs > docs/config.md
	$(BIN)/python -m miles_rollout.pipelines.docs > docs/models.md

# What the recipes compute now becomes what tests/standards compares with (CONTRIBUTING.md).
standards: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.standards.record

format: .venv/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# constraints.txt holds the CPU set that CI uses; CONSTRAINTS= installs the newest allowed set.
CONSTRAINTS ?= -c constraints.txt
.venv/ready: setup.py constraints.txt miles_rollout/__init__.py
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check $(CONSTRAINTS) -e '.[dev]'
	touch $@

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache *.egg-info
