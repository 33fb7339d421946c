# Two commands do all the set-up, each from a plain clone: `make demo` and `make test`.
# PYTHON=python3.12 names the interpreter (3.10 to 3.12); otherwise the first suitable one is taken.
# MODEL=... is a Hugging Face directory, a .gguf file or a hub id; engine and repository go to demo/NAME/.

SHELL := /bin/bash
.DELETE_ON_ERROR:
.PHONY: demo test engines serve request bench peers lint typecheck clean
export PYTHONSAFEPATH := 1  # `builder` and the others must not be importable by their bare names
override PROMPT := $(value PROMPT)
export PROMPT  # to the shell as it is, dollar signs and quotes too

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
SOURCES := pyproject.toml $(wildcard setup.py plugins/cpu/*.cpp plugins/cpu/*.hpp plugins/cpu/*.h)
NAME := $(if $(MODEL),$(patsubst %.gguf,%,$(notdir $(MODEL:%/=%))),SmolLM2-135M-Instruct)
OUT := demo/$(NAME)

demo: .venv/serve.stamp
	@$(BIN)/python -m trtforge.model_repo.demo

test: .venv/dev.stamp
	$(BIN)/pytest $(ARGS)

engines: .venv/serve.stamp
	$(BIN)/trtforge build $(or $(MODEL),$(error MODEL=... is missing)) -o $(OUT)/engine $(if $(RECIPE),--recipe $(RECIPE)) $(if $(KV),--kv-cache-dtype $(KV)) $(if $(TARGET),--target $(TARGET))
	$(BIN)/trtforge package $(OUT)/engine -o $(OUT)/repository

serve: .venv/serve.stamp
	@$(BIN)/trtforge serve $(OUT)/repository

request: .venv/serve.stamp
	$(if $(value PROMPT),,$(error PROMPT='...' is missing))
	@$(BIN)/trtforge client --chat --prompt "$$PROMPT"

bench: .venv/serve.stamp
	$(BIN)/trtforge bench $(OUT)/engine --concurrency 8
	$(BIN)/python benchmarks/inflight.py $(OUT)/engine
	$(BIN)/python benchmarks/triton.py --engine $(OUT)/engine

peers: .venv/serve.stamp
	$(BIN)/python benchmarks/peers.py $(ARGS)

lint: .venv/dev.stamp
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

typecheck: .venv/dev.stamp
	mkdir -p build/ns/trtforge && ln -sfn ../../../builder ../../../plugins ../../../runtime ../../../model_repo build/ns/trtforge/
	$(BIN)/mypy

clean:
	rm -rf build dist demo .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info

.venv/bin/pip:
	@python="$$(python3 model_repo/preflight.py $(if $(PYTHON),--python $(PYTHON)) --disk-gb 3)" && "$$python" -m venv .venv

.venv/serve.stamp: $(SOURCES) | .venv/bin/pip
	@echo "installing trtforge with what serving needs (the first time this downloads about 300 MB)"
	@$(PIP) install -e '.[serve]' && touch $@

.venv/dev.stamp: $(SOURCES) | .venv/bin/pip
	@echo "installing trtforge with what tests need (the first time this downloads about 600 MB)"
	@$(PIP) install -e '.[serve,dev]' && touch $@ .venv/serve.stamp
