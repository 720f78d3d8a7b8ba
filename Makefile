# Every target makes `.venv` if no environment is active and installs once (again when pyproject.toml changes).
# In an active virtualenv or conda environment that one is used, and installed into only where a package is missing.

PYTHON ?= python3
ARGS ?=
ACTIVE := $(or $(VIRTUAL_ENV),$(CONDA_PREFIX))

ifeq ($(ACTIVE),)
PY := .venv/bin/python
INSTALLED := .venv/.installed
else
PY := $(ACTIVE)/bin/python
INSTALLED := active-environment
endif

define PROMPT
def parse_headers(fp, _class=HTTPMessage):
endef

# Names the requirements of pyproject.toml, [dev] included, that the environment lacks; versions are its owner's choice.
define MISSING
import re, sys, tomllib
from importlib.metadata import distributions
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
wanted = [w for w in wanted if sys.platform == "linux" or "sys_platform" not in w]
norm = lambda name: re.sub("[-_.]+", "-", name).lower()
have = {norm(d.metadata["Name"]) for d in distributions() if d.metadata["Name"]}
missing = [w for w in wanted if norm(re.match("[A-Za-z0-9._-]+", w)[0]) not in have]
if missing: sys.exit("not installed: " + ", ".join(missing))
endef
export PROMPT MISSING

.PHONY: help run train test test-fast test-slow lint format install active-environment

help:
	@echo "make run        write text with the shipped checkpoint     (PROMPT='def f(n):' ARGS='temperature=0.8')"
	@echo "make train      train the tiny model and its tokenizer     (ARGS='key=value ...')"
	@echo "make test       everything that must hold                  (ARGS='-k name')"
	@echo "make test-fast  the inner loop, under 3 minutes"
	@echo "make test-slow  the longer suites"
	@echo "make lint       ruff check and ruff format --check;  make format  applies both"

run: $(INSTALLED)
	$(PY) -m scripts.generate "prompt=$$PROMPT" max_tokens=160 temperature=0.5 seed=4 speculate=true $(ARGS)

train: $(INSTALLED)
	$(PY) -m scripts.train $(ARGS)

test: $(INSTALLED)
	$(PY) -m pytest -m 'not slow' --durations=15 $(ARGS)

test-fast: $(INSTALLED)
	$(PY) -m pytest -m 'not slow and not medium' --durations=5 $(ARGS)

test-slow: $(INSTALLED)
	$(PY) -m pytest -m slow --durations=15 $(ARGS)

lint: $(INSTALLED)
	$(PY) -m ruff check
	$(PY) -m ruff format --check

format: $(INSTALLED)
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

install: $(INSTALLED)

.venv/.installed: pyproject.toml
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -e '.[dev]'
	touch $@

active-environment:
	@$(PY) -c "$$MISSING" || $(PY) -m pip install -e '.[dev]'
