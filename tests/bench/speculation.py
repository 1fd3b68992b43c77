"""Benchmark of speculation: drafts from the text itself (n-grams) against none.

    python tests/bench/speculation.py [--rounds 3] [--drafts 5] [--json]

The demo model in float32, on two stages of one core each. In each round an engine with speculation and one without do the same
work one after the other, in turns:

* one stream, greedy: the demo model's answers of 512 tokens repeat themselves after some lines;
* one stream at a temperature of 1, which hardly repeats anything, 256 tokens;
* 64 streams at once of the latter kind, 64 tokens each.

Ratios of tokens per second are medians of the rounds' ratios. All tokens have to be the same with and without.
"""

import argparse
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from rich.console import Console
from rich.table import Table
from targets import Target, at_least, conclude, none_of

from tramontane.cluster.config.engine_config import DEMO_MODEL
from tramontane.cluster.llm import LLM, SamplingParams

WITH, WITHOUT = "with", "without"
REPEATING, RANDOM, MANY = "one stream, greedy", "one stream, random text", "64 streams, random text"
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

Answers = list[tuple[int, ...]]


class Bench:
    """``tokens_per_s`` of every round, by work and system; ``different``: works whose tokens were not the same."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.tokens_per_s: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.different: list[str] = []
        self._answers: dict[str, Answers] = {}

    def run(self, rounds: int, num_drafts: int) -> None:
        for number in range(rounds):
            for system in [WITH, WITHOUT] if number % 2 else [WITHOUT, WITH]:
                self._console.print(f"round {number + 1} of {rounds}: {system} ...", style="dim")
                self._measure(system, num_drafts)

    def _measure(self, system: str, num_drafts: int) -> None:
        drafts = {"method": "ngram", "num_speculative_tokens": num_drafts} if system == WITH else None
        settings = {"stages": 2, "threads_per_stage": 1, "dtype": "float32", "speculative_config": drafts}
        with LLM(str(DEMO_MODEL), **settings, progress=False) as llm:
            for work, prompts in PROMPTS.items():
                llm.generate(prompts, SAMPLING[work])  # warms up, and trains the cost model
                started = time.perf_counter()
                answers = [tuple(answer.outputs[0].token_ids) for answer in llm.generate(prompts, SAMPLING[work])]
                self.tokens_per_s[work][system].append(sum(map(len, answers)) / (time.perf_counter() - started))
                if self._answers.setdefault(work, answers) != answers:
                    self.different.append(f"{work}, {system}")

    def ratio(self, work: str) -> float:
        """Return the median of the rounds' ratios, with against without."""
        pairs = zip(self.tokens_per_s[work][WITH], self.tokens_per_s[work][WITHOUT], strict=True)
        return statistics.median(own / other for own, other in pairs)


def targets(bench: Bench) -> list[Target]:
    return [
        at_least(f"{REPEATING}: tokens/s, with / without", bench.ratio(REPEATING), 1.8, "x"),
        at_least(f"{RANDOM}: tokens/s, with / without", bench.ratio(RANDOM), 0.98, "x"),
        at_least(f"{MANY}: tokens/s, with / without", bench.ratio(MANY), 0.98, "x"),
        none_of("answers with other tokens", bench.different),
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
    parser.add_argument("--json", action="store_true", help="figures as JSON on standard output")
    options = parser.parse_args()
    bench = Bench(Console(stderr=True, highlight=False))
    bench.run(options.rounds, options.drafts)
    conclude(targets(bench), show(bench), data={"tokens_per_s": bench.tokens_per_s}, as_json=options.json)


if __name__ == "__main__":
    main()
