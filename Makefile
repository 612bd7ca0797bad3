# Two commands are enough: `make demo` and `make test`. Both set up .venv first.
SHELL := /bin/bash
PY := .venv/bin/python
PARALLEL := -n 4 --dist loadgroup
BODIES := 10000
JOBS ?= 2
.DEFAULT_GOAL := help
.PHONY: help setup demo test dist images test-images test-compose test-kubernetes test-kubernetes-guide test-systemd evidence-gpu test-libraries test-machines test-pythons lint check native bench bench-detect bench-jobs chaos soak fuzz lock docs clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: ## make .venv with everything; quick when nothing changed
	@scripts/setup

demo: setup ## replay a real 64-GPU trace through a real Fleet, name the culprit, and ask a real Echo
	@.venv/bin/ingero replay AR --speed 200 --echo --gpu-rate 2.50

test: setup ## run every test tier that this machine allows; each skip says why
	@status=0; $(PY) -m pytest $(PARALLEL) -m "not live" || status=$$?; \
	  $(PY) -m pytest -n 0 -m live $$(grep -rl --include='test_*.py' 'pytest\.mark\.live' tests) || status=$$?; exit $$status

dist: setup ## sdist and wheel, the same bits from everywhere, with a bill of materials and checksums, into dist/
	@scripts/dist

IMAGES := ingero ingero-fleet ingero-echo ingero-sink ingero-alerter ingero-remediator
BUILDER ?= $(firstword $(foreach name,podman docker buildah,$(if $(shell command -v $(name)),$(name))))
images: ## build an image of each program with podman, docker or buildah; IMAGES=, BUILDER=, BASE= and IMAGE_FLAGS= choose
	@for name in $(IMAGES); do $(BUILDER) build $(if $(BASE),--build-arg BASE=$(BASE)) $(IMAGE_FLAGS) \
	  -f deploy/containers/Containerfile.$$name -t $$name . || exit 1; done

test-images: setup ## build every image on Debian's Python and start it; root, buildah and mmdebstrap of Debian; minutes; ARCH=arm64: those of another processor, emulated (qemu-user-static, arch-test), ONLY='sink' some
	@own=$$(scripts/image_base) && base=$$own && \
	  { [ -z "$(ARCH)" ] || base=$$(scripts/image_base localhost/ingero-base-$(ARCH) $(ARCH)); } && \
	  INGERO_IMAGE_BASE=$$base INGERO_IMAGE_BUILD_BASE=$$own $(PY) -m pytest -q -n 0 tests/deploy/test_built_images.py -k '$(ONLY)'

test-compose: setup ## follow the guide for docker and docker compose in a Docker engine of its own; root, docker.io, iptables and mmdebstrap of Debian; minutes
	@files=$$(mktemp -d) && trap 'rm -rf "$$files"' EXIT && scripts/install_docker_compose && scripts/registry_images "$$files" && \
	  INGERO_REGISTRY_IMAGES=$$files $(PY) -m pytest -q -n 0 tests/deploy/test_compose.py

test-systemd: setup ## follow the guide for systemd in a Debian under a real systemd; root, mmdebstrap and systemd-container of Debian; minutes
	@tree=$$(mktemp -d) && trap 'rm -rf "$$tree"' EXIT && scripts/systemd_root "$$tree" && \
	  INGERO_SYSTEMD_ROOT=$$tree $(PY) -m pytest -q -n 0 tests/deploy/test_systemd_guide.py

test-kubernetes: setup ## build a real Kubernetes without kubelets out of Debian's source, and run the remediator's tests on it; minutes
	@scripts/install_kubernetes && scripts/install_helm && $(PY) -m pytest -q -n 0 tests/remediation/kubernetes

test-kubernetes-guide: setup ## follow the guide for Kubernetes on a cluster of one node; root, cgroup v1, and containerd, runc, containernetworking-plugins, dnsmasq-base, kubernetes-client, conntrack, buildah and mmdebstrap of Debian; half an hour the first time
	@files=$$(mktemp -d) && trap 'rm -rf "$$files"' EXIT && scripts/install_kubernetes kubelet kube-proxy && scripts/install_helm && \
	  scripts/kubernetes_images "$$files" && INGERO_KUBERNETES_IMAGES=$$files $(PY) -m pytest -q -n 0 tests/deploy/test_kubernetes_guide.py

test-machines: setup ## boot Debian's kernels in QEMU and check each; ONLY=6.1-x86_64 takes one, ONLY='6.12-*' some, CHECKS='up filter*' some checks, two at a time (JOBS=3: three), RECORD=1 keeps what was seen in the README
	@set -f; $(PY) -m scripts.machines '$(ONLY)' --jobs $(JOBS) $(if $(RECORD),--record) --checks $(CHECKS)

evidence-gpu: setup ## measure on this machine's NVIDIA device, into docs/evidence/gpu; goes on where it was interrupted; DRY_RUN=1 shows, without a device, that every part starts
	@+$(PY) -m scripts.evidence $(if $(DRY_RUN)$(findstring n,$(firstword -$(MAKEFLAGS))),--dry-run) # with `+` also under `make --dry-run`

test-libraries: setup ## probe each release of NCCL and of CUDA's runtime that PyPI has, with our plug-in (10 GB); ONLY='2.28.*' takes some of NCCL's
	@$(PY) -m scripts.libraries '$(ONLY)' >/dev/null
	@$(PY) -m scripts.libraries --cuda '' >/dev/null
	@INGERO_LIBRARIES='$(ONLY)' $(PY) -m pytest -q -n 0 tests/ncclprof/test_real_nccl.py tests/kernel/test_nccl_releases.py tests/kernel/test_cuda_releases.py

test-pythons: setup ## the fast tests on each Python from 3.12 to 3.14 that this machine has
	@scripts/test_pythons

lint: setup ## format, lint, types and layers
	@.venv/bin/ruff format --check .
	@.venv/bin/ruff check .
	@.venv/bin/mypy --num-workers auto
	@.venv/bin/lint-imports --config pyproject.toml

check: lint ## lint, sizes, docs and the fast tests: what a commit must pass
	@$(PY) -m pytest -q $(PARALLEL) -m "not kernel and not gpu and not slow"

native: setup ## compile the BPF objects, the simulator and the NCCL plug-in (setup does it too)
	@$(PY) scripts/build_native.py

bench: setup ## speed, as ratios against a floor in the same run
	@$(PY) -m benchmarks

bench-detect: setup ## precision, recall and delay of every detection method on every data set
	@$(PY) -m benchmarks.detect

bench-jobs: setup ## real PyTorch jobs with real faults: who is named, when and why, beside others' rules; root and torch; FULL=1 takes all, HEALTHY=1 five minutes of each job (both go on from benchmarks/jobs, AFRESH=1 does not), ONLY='ddp.*' some, RESUME=1 goes on, JUDGE=1 runs nothing
	@$(PY) -m benchmarks.jobs $(if $(FULL),--full) $(if $(HEALTHY),--healthy) $(if $(RESUME),--resume) $(if $(AFRESH),--afresh) $(if $(JUDGE),--judge) $(if $(ONLY),--only '$(ONLY)')

FAULTS ?= 10000
SECONDS ?= $(if $(filter 10000,$(FAULTS)),150,3600)
chaos: setup ## kill, pause, cut off and fill up parts of a site at random under a live replay, and check what came out (5 min); FAULTS=200 does so many, SEED=7 the same ones, HISTORY=FILE keeps what was seen
	@$(PY) -m tests.chaos --faults $(FAULTS) --seconds $(SECONDS) --verbose $(if $(SEED),--seed $(SEED)) $(if $(HISTORY),--history $(HISTORY))

soak: SECONDS = 120
soak: setup ## half the load that a Fleet takes, for SECONDS=120; fails where memory, latency or a counter of loss creeps
	@$(PY) -m tests.chaos.soak --seconds $(SECONDS)

docs: setup ## regenerate docs/reference/
	@$(PY) -m ingero.cli.reference docs/reference
	@$(PY) -m scripts.metric_pages

fuzz: setup ## give each decoder 10000 mutated bodies (BODIES=1000000: as many), and each property test 1000 other examples
	@$(PY) -m tests.fuzz --bodies $(BODIES)
	@INGERO_PROPERTIES=any $(PY) -m pytest -q $(PARALLEL) -m "hypothesis and not kernel"

# Without pandas, which chdb names and does without: where it is installed, PyArrow imports it in each program that starts.
lock: ## pin every dependency again, with hashes
	.venv/bin/uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate --python-version 3.11 \
	  --no-emit-package pandas --all-extras --group dev pyproject.toml -o requirements/dev.txt

clean: ## remove .venv and every cache
	rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
