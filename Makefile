# Every target does all its set-up, on a machine with Python 3.11.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The CPU build of torch; on a GPU machine use TORCH=torch.
TORCH ?= torch==2.13.0
# Aborted requests per engine in test-engines.
ABORTS ?= 1000
# Random lives in random.
LIVES ?= 2000
# april is read anew by every process that a test starts; an environment that forbids bytecode would compile it each time.
export PYTHONDONTWRITEBYTECODE :=
# A process of tests per core, so one thread for each: those of torch would wait for each other.
test planted random coverage: export OMP_NUM_THREADS = 1

.PHONY: demo demo-vllm demo-sglang study test planted random test-ranks test-engines test-adapters test-clients test-exporters docs verify coverage picture clean

demo: $(VENV)/.installed
	$(BIN)/python -m benchmarks.demo

test: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n auto --dist worksteal --deselect tests/test_planted_bugs.py::test_planted_bug_is_caught

# Each planted bug, and the tests that must notice it: as long as `test` again.
planted: $(VENV)/.installed
	$(BIN)/python -m pytest -q -n auto --dist worksteal tests/test_planted_bugs.py

# Lives of trainers that do not wait, of servers, of agents, of weights that go wrong and of settings that change, and
# calls that are cancelled between any two turns of the loop, of which `test` runs a few.
random: $(VENV)/.installed
	APRIL_RANDOM_LIVES=$(LIVES) $(BIN)/python -m pytest -q -n auto tests/test_random_trainers.py tests/test_random_weights.py \
		tests/test_random_restarts.py tests/test_random_served.py tests/test_random_chains.py \
		tests/test_random_agent_restarts.py tests/test_core_lives.py tests/test_core_auto.py \
		tests/test_cancellation.py

# Trainers of two and three ranks under torchrun: DDP, FSDP2, restarts, ranks that die.
test-ranks: $(VENV)/.installed
	$(BIN)/python -m tests.ranks

# The real vLLM and SGLang on this CPU, each in an environment of its own below .venv, held to the conformance suite;
# april's endpoint before each of them, held to the suite for gateways.
test-engines: $(VENV)/.installed
	$(BIN)/python -m tests.real_engines --aborts $(ABORTS)
	$(BIN)/python -m tests.real_engines.keep --contexts 1000
	$(BIN)/python -m tests.real_engines.caches
	$(BIN)/python -m tests.real_engines.experts
	$(BIN)/python -m tests.real_engines.sent_weights
	$(BIN)/python -m tests.real_engines.images vllm
	$(BIN)/python -m tests.real_engines.images sglang
	$(BIN)/python -m tests.real_engines.adapters vllm
	$(BIN)/python -m tests.real_engines.adapters sglang
	$(BIN)/python -m tests.real_engines.gateway vllm
	$(BIN)/python -m tests.real_engines.gateway sglang
	$(BIN)/python -m tests.real_engines.weight_routes vllm
	$(BIN)/python -m tests.real_engines.weight_routes sglang

# The adapters against the real trainers on this CPU, each in an environment of its own below .venv.
test-adapters: $(VENV)/.installed
	$(BIN)/python -m tests.adapters

# Clients, frameworks and coding harnesses as they are installed from pip and npm, cut in mid-call by weight updates.
test-clients: $(VENV)/.installed
	$(BIN)/python -m tests.clients

# The exporters against the real TensorBoard and W&B, offline.
test-exporters: $(VENV)/.installed
	$(BIN)/python -m tests.real_exporters

# The demo on a real server, which is started and stopped.
demo-vllm demo-sglang: demo-%: $(VENV)/.installed
	$(BIN)/python -m tests.real_engines.demo $*

# What partial rollouts do to what is learned: hours of small trainings, which go on where they were stopped, and the
# page of them, docs/study.md.
study: $(VENV)/.installed
	$(BIN)/python -m benchmarks.study

# The pages as a site, runs/site/index.html; a broken link or a signature that is not documented is an error.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Everything there is.
verify: test planted coverage random docs test-ranks test-engines test-adapters test-clients test-exporters demo demo-vllm demo-sglang

# The same tests in nearly twice the time, and which lines and branches they reach; less than this of the core is an error.
coverage: $(VENV)/.installed
	$(BIN)/python -m pytest -n auto --dist worksteal --ignore tests/test_planted_bugs.py --cov --cov-report=term-missing
	$(BIN)/coverage report --include='april/core/*' --fail-under=95

# The picture in the README, and the one with all figures, are those of a demo run.
picture: demo
	mkdir -p docs/images
	cp runs/demo/demo.png runs/demo/slots.png docs/images/

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[demo]" --group test --group lint
	touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --group docs
	touch $@

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .coverage
