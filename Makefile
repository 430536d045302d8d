# autosplit: every target makes its own environment from constraints.txt; a machine needs python3 (3.11 or newer) and make.
#
#   make demo     run the demonstration
#   make test     check, then the quick tests, a process per core (four at most): 10 minutes on two cores; what CI runs
#                 ARGS="-k name" goes to pytest
#   make test-all the same with long oracles and more cases of dear tests: 25 minutes, by hand
#   make campaign all there is: also the rest of full products, 20 kills, 200 random modules over ranks; hours, by hand
#   make browser  Debian's Chromium, in which the tests open the report's page: installed as root where it is missing
#   make check    lint, format, types, layers, the line budget     fast
#   make docs     the documentation as a site, in build/docs; a warning is an error
#   make golden   rewrite the golden files from what the tests produce
#   make clean    remove environments and caches
#
#   make test TORCH=2.15.0     the suite with that torch, in an environment of its own

PYTHON ?= python3
TORCH ?=
ARGS ?=

# Two workers with a thread per core each spin on each other's locks: one thread per worker takes a third of the time.
export OMP_NUM_THREADS ?= 1

# Many tests start Python anew: it compiles what it imports once, whatever the environment says.
unexport PYTHONDONTWRITEBYTECODE

# The most lines of source: a change that needs more takes something out first, or says in its message why not.
MOST_LINES := 69167

VENV := .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

.PHONY: demo test test-all campaign check docs golden clean browser

demo: $(INSTALLED)
	$(BIN)/python examples/demo.py

test: SELECTION := -m "not slow"
test-all: SELECTION := -m "not campaign" --hypothesis-profile=full
campaign: SELECTION := --hypothesis-profile=campaign
test test-all campaign: browser $(if $(TORCH),,check) $(INSTALLED)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal $(SELECTION) $(ARGS)

# A page is tested where it is read. Without root, or on another system, its tests are skipped, and say so.
browser:
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then :; \
	elif [ "$$(id -u)" -ne 0 ] || ! grep -qsx ID=debian /etc/os-release; then \
	  echo "the tests of the report's page are skipped: there is no chromium and chromedriver on the PATH, and only" \
	    "root on a Debian system installs them here (apt-get install chromium chromium-driver)" >&2; \
	else \
	  echo "installing chromium and chromium-driver for the tests of the report's page" >&2; \
	  apt-get -qq -o DPkg::Lock::Timeout=300 update && DEBIAN_FRONTEND=noninteractive apt-get -qq -y \
	    -o DPkg::Lock::Timeout=300 install --no-install-recommends chromium chromium-driver >/dev/null; \
	fi

check: $(INSTALLED)
	@lines=$$(find autosplit cost_models -name '*.py' -exec cat {} + | wc -l); [ "$$lines" -le $(MOST_LINES) ] \
	  || { echo "autosplit and cost_models have $$lines lines, the budget is $(MOST_LINES) (MOST_LINES in the Makefile)" >&2; exit 1; }
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

golden: $(INSTALLED)
	$(BIN)/python -m pytest --update-golden $(ARGS)

clean:
	rm -rf .venv .venv-torch-* .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Another torch brings its own versions of what only torch needs: the pins end where torch's section begins.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "autosplit needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V); choose one: make PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
ifeq ($(TORCH),)
	cp constraints.txt $(VENV)/constraints.txt
else
	sed '/^# torch and/,$$d' constraints.txt > $(VENV)/constraints.txt
	echo 'torch==$(TORCH)' >> $(VENV)/constraints.txt
endif
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[test,dev]'
	touch $@

# What builds the site is installed when it is first built; the tests do without.
$(VENV)/installed-docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[docs]'
	touch $@
