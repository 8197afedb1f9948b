# Two commands on a fresh machine: `make demo` trains an agent, `make test` runs the tests. Both make .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-slow test-scaling check chaos bench zoo wheel lock clean

demo: $(READY)
	$(BIN)/fever train CartPole-v1
	$(BIN)/fever eval last
	$(BIN)/fever plot last

test: $(READY)
	$(BIN)/python -m pytest -n 2

# Tests that take long, some of them minutes: a cluster on AWS from up to down, hosts that come and go, jobs cut at their
# limit, every algorithm that RLlib has, Go and Pong learned.
test-slow: $(READY)
	$(BIN)/python -m pytest -m slow -n 2 --ignore tests/scaling

# Those that measure how speed grows with workers: they need all cores for themselves.
test-scaling: $(READY)
	$(BIN)/python -m pytest -m slow tests/scaling

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive fever
	$(BIN)/python .ci/audit.py $(BIN)/pip-audit fever/constraints.txt

# dist/fever-VERSION-py3-none-any.whl
wheel: $(READY)
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .

bench: $(READY) .venv-bench/.ready
	$(BIN)/python benchmarks/bench.py --sb3 .venv-bench/bin/python

# Repeat a row of the zoo (docs/zoo.md); without ROW, list the rows. CHECK=1: two seeds against the stored result.
SEEDS ?= 5
zoo: $(READY)
	$(BIN)/python benchmarks/zoo.py $(ROW) --seeds $(SEEDS) $(if $(CHECK),--check)

# Trainings that are broken on purpose, and what became of them (docs/failures.md). Exit code 1 if a bar is missed.
SEED ?= 0
FAULTS ?= 100
chaos: $(READY)
	$(BIN)/python -m chaos --seed $(SEED) --faults $(FAULTS)

$(READY): pyproject.toml fever/constraints.txt
	@echo "setting up $(VENV) with the versions in fever/constraints.txt (a few minutes the first time)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fever needs Python 3.11 or newer; try: make PYTHON=python3.11")'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0 2>&1 | { grep -v '^WARNING: Location' || true; }
	@$(BIN)/pip install --quiet --disable-pip-version-check -c fever/constraints.txt -e '.[dev]' 2>&1 | { grep -v '^WARNING: Location' || true; }
	@$(BIN)/fever --help > /dev/null
	@touch $@

# The environment of stable-baselines3 for the benchmarks; torch is installed first, so that no build with CUDA is.
.venv-bench/.ready: benchmarks/requirements.txt
	@$(PYTHON) -m venv .venv-bench
	@.venv-bench/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	@.venv-bench/bin/pip install --quiet --disable-pip-version-check -r benchmarks/requirements.txt
	@touch $@

# Rewrite fever/constraints.txt with the newest versions that pyproject.toml allows.
lock:
	rm -rf .venv-lock && $(PYTHON) -m venv .venv-lock
	.venv-lock/bin/pip install --quiet --disable-pip-version-check '.[dev]'
	.venv-lock/bin/pip freeze --exclude fever > fever/constraints.txt
	rm -rf .venv-lock

clean:
	rm -rf $(VENV) .venv-bench dist .pytest_cache .mypy_cache .ruff_cache
