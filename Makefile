# The few verbs of this project; CI calls the same. `make help` lists them.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# As it was typed: a prompt may have a $ in it, which make would expand.
override PROMPT := $(value PROMPT)
export PROMPT

.PHONY: help setup demo test test-all lint format bench proto prometheus clean

help: ## list these verbs
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# Installed anew only when what is to be installed changes.
$(VENV)/.installed: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "Paceline needs Python 3.11 or newer; set PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Paceline needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "No virtual environment could be made (Debian: apt-get install python3-venv)"; exit 1; }
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	@if [ -t 1 ]; then quiet=; else quiet=-qq; fi; \
	$(BIN)/pip install $$quiet --upgrade pip && $(BIN)/pip install $$quiet -c constraints.txt -e '.[worker,dev]' || { echo "The install failed. Is the package index reachable and is there disk space (df -h .)? Then run make again."; exit 1; }
	@touch $@

setup: $(VENV)/.installed ## make .venv and install everything into it

demo: setup ## stream one answer through all three services (PROMPT="...")
	@$(BIN)/paceline demo $(if $(PROMPT),--prompt "$$PROMPT")

# Two runners, as the machines that this is timed on have two cores; tests/conftest.py says what stays on one.
SIDE_BY_SIDE := -n 2 --no-loadscope-reorder

test: setup ## the tests, under 10 minutes
	$(BIN)/pytest $(SIDE_BY_SIDE) -m "not slow"

test-all: setup ## the tests and the long proofs
	$(BIN)/pytest $(SIDE_BY_SIDE)

# Linters whose dependencies would not go together with Paceline's own.
.venv-deploy/.installed: deploy/requirements.txt
	@test -x .venv-deploy/bin/python || $(PYTHON) -m venv .venv-deploy
	@echo "Installing the manifests' linters into .venv-deploy (a minute or two) ..."
	@.venv-deploy/bin/pip install -qq --no-deps --no-compile -r $< || { echo "The install failed. Is the package index reachable and is there disk space (df -h .)? Then run make again."; exit 1; }
	@touch $@

lint: ## ruff, mypy, import contracts, protos, manifests, Dockerfiles
	@$(MAKE) --no-print-directory -j2 setup .venv-deploy/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	$(BIN)/python deploy/dashboard.py --check
	$(BIN)/python deploy/check.py

format: setup ## rewrite the code in its standard form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/buf format --write

bench: setup ## the full comparison with what people use (ARGS="--quick" for a look; writes bench/results)
	$(BIN)/python -m bench compare $(ARGS)

# Debian's own, unpacked and not installed: no service is started and nothing outside this folder changes.
.prometheus/usr/bin/prometheus:
	@command -v apt-get >/dev/null || { echo "Prometheus comes from Debian's package, and here is no apt-get: put prometheus and promtool on the PATH."; exit 1; }
	@rm -rf .prometheus && mkdir .prometheus
	cd .prometheus && { apt-get download -qq prometheus 2>/dev/null || { apt-get update -qq && apt-get download -qq prometheus; } }
	cd .prometheus && dpkg -x prometheus_*.deb . && rm prometheus_*.deb

prometheus: .prometheus/usr/bin/prometheus ## unpack Prometheus for the tests that need it (they are skipped without)

# Stubs come from the oldest supported grpcio-tools: generated code refuses a runtime older than itself.
.venv-proto/.installed: protos/requirements.txt
	$(PYTHON) -m venv .venv-proto
	.venv-proto/bin/pip install --quiet -r $<
	@touch $@

proto: .venv-proto/.installed ## regenerate paceline/v1 from protos/
	.venv-proto/bin/python -m grpc_tools.protoc -Iprotos \
		--plugin=protoc-gen-mypy=.venv-proto/bin/protoc-gen-mypy \
		--plugin=protoc-gen-mypy_grpc=.venv-proto/bin/protoc-gen-mypy_grpc \
		--python_out=. --grpc_python_out=. --mypy_out=quiet:. --mypy_grpc_out=quiet:. protos/paceline/v1/*.proto

clean: ## remove what make made
	rm -rf .venv .venv-proto .venv-deploy .prometheus
