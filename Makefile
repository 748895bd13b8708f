# `make demo` and `make test` do all the set-up that they need: an environment in .venv, the wheel built and installed
# into it with everything around it, then the run. Stamp files in .venv make a second run quick.
#
#   PYTHON=python3.12            the Python that .venv is made with (3.11 or newer)
#   TORCH=torch==2.13.0          what pip is asked for; a PyTorch that already stands in .venv and fits is kept
#   PIP_FLAGS="--find-links D"   added to every pip command
#   DEMO_FLAGS, PYTEST_FLAGS     arguments of `softlookup demo` and of pytest

PYTHON ?= python3
VENV ?= .venv
TORCH ?= $(shell grep '^torch==' constraints.txt)
PIP_FLAGS ?=
DEMO_FLAGS ?= --model auto --out demo-out
PYTEST_FLAGS ?=

python := $(VENV)/bin/python
constraints := $(VENV)/constraints.txt
pip_install := $(python) -m pip install --constraint $(constraints) $(PIP_FLAGS)
sources := CMakeLists.txt pyproject.toml README.md LICENSE $(shell find cmake core src -not -path '*/__pycache__*')
core_files := $(wildcard core/*.h core/*.cpp)

.PHONY: demo test wheel lint types doctest format sanitize clean
.DELETE_ON_ERROR:

demo: $(VENV)/demo.stamp
	$(VENV)/bin/softlookup demo $(DEMO_FLAGS)

test: $(VENV)/install.stamp
	$(python) -m pytest $(PYTEST_FLAGS)

wheel: $(VENV)/wheel.stamp

# TORCH is left out of the constraints so that another version can be asked for.
$(VENV)/build.stamp: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "softlookup needs Python 3.11 or newer, found " + sys.version.split()[0] + ": try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	grep -v '^torch==' constraints.txt > $(constraints)
	$(pip_install) nanobind 'scikit-build-core[wheels]'
	touch $@

$(VENV)/wheel.stamp: $(VENV)/build.stamp $(sources)
	rm -rf build/wheel
	$(python) -m pip wheel . --no-deps --no-build-isolation --wheel-dir build/wheel
	touch $@

# Two steps: pip leaves an installed wheel of the same version alone, and only the second replaces it. The demo asks for less
# than the tests, which run the benchmark's peers too.
$(VENV)/demo.stamp: extras := demo
$(VENV)/install.stamp: extras := demo,lint,test
$(VENV)/demo.stamp $(VENV)/install.stamp: $(VENV)/wheel.stamp
	$(pip_install) $(TORCH) "$$(echo ./build/wheel/*.whl)[$(extras)]"
	$(python) -m pip install --no-deps --force-reinstall build/wheel/*.whl
	touch $@

lint: $(VENV)/install.stamp
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror $(core_files)

types: $(VENV)/install.stamp
	$(VENV)/bin/mypy

doctest: $(VENV)/install.stamp
	$(python) -m pytest --doctest-modules --pyargs softlookup
	$(python) -m pytest --doctest-glob='*.md' README.md docs

format: $(VENV)/install.stamp
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(core_files)

# The tests of the core on a module built with the address and undefined-behaviour sanitizers (GCC). Python itself is
# not built with them, so their run-time library has to be loaded first.
sanitize: $(VENV)/install.stamp
	$(python) -m pip install . --no-deps --no-build-isolation --upgrade --target build/sanitize/site \
	    --config-settings=build-dir=build/sanitize/cmake --config-settings=cmake.build-type=RelWithDebInfo \
	    --config-settings=cmake.define.SOFTLOOKUP_SANITIZE=address,undefined
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH=$(CURDIR)/build/sanitize/site \
	    $(python) -m pytest --capture=sys --ignore=tests/test_wheel.py --ignore=tests/test_isolation.py $(PYTEST_FLAGS)

clean:
	rm -rf $(VENV) build demo-out .hypothesis .mypy_cache .pytest_cache .ruff_cache
