# make help          this list
# make lab           open the lab in JupyterLab
# make test          package tests, and every notebook re-executed and compared with what is stored
# make browser-test  the same notebooks in JupyterLab in Chromium, sliders moved
# make execute       re-run and store all notebooks (NB=notebooks/01_rounding.ipynb: one of them)
# make bench         side-by-side measurements
# make lint          ruff and mypy
# make lock          resolve requirements.lock anew

BIN := .venv/bin
READY := .venv/ready
BROWSER_READY := .venv/ready-browser
NBVAL := --nbval --nbval-current-env --nbval-cell-timeout=300 --nbval-sanitize-with tests/nbval_sanitize.cfg
LOCKED_TORCH := torch==2.13.0
# JupyterLab refuses to start as root, which one is in most containers.
AS_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

.PHONY: help lab test browser-test execute bench lint lock

help:
	@sed -n 's/^# make/make/p' Makefile

# A start page, so that the printed address opens it as well where there is no browser to open.
lab: $(READY)
	$(BIN)/jupyter lab $(AS_ROOT) --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb

# One thread for each of the two workers: on the tests' small tensors more of them only wait for each
# other, and results must not depend on it.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --ignore=tests/browser $(NBVAL) tests notebooks

browser-test: $(BROWSER_READY)
	$(BIN)/python -m pytest tests/browser

execute: $(READY)
	$(BIN)/python tools/execute_notebooks.py $(NB)

bench: $(READY)
	$(BIN)/python benchmarks/run.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# CUDA's libraries are left out: each torch names the exact ones it was built with.
lock: $(READY)
	echo "$(LOCKED_TORCH)" | $(BIN)/uv pip compile pyproject.toml --constraint - --all-extras --universal \
		--python-version 3.11 --no-header --no-annotate --no-emit-index-url --quiet \
		| grep -v -E '^(nvidia-|cuda-|triton)' > requirements.lock

$(READY): pyproject.toml requirements.lock tools/setup_env.sh
	@sh tools/setup_env.sh test
	@touch $@

$(BROWSER_READY): $(READY)
	@sh tools/setup_env.sh test,browser
	@touch $@
