"""Engines that run at the same time and get the same work in turns, so that the machine's mood is
the same for all of them.
"""

import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from engine_process import EngineProcess
from rich.console import Console
from rich.table import Table

from tramontane.cluster.config.engine_config import DEMO_MODEL
from tramontane.cluster.llm.inputs import PromptEncoder


class Work(NamedTuple):
    """Prompts for all engines of one model."""

    prompts: list[tuple[int, ...]]
    sampling: dict[str, Any]


GENTLEMEN = [
    f"GENTLEMAN {number}: What news from Rome, and what of the tribunes?" for number in range(64)
]


def demo_work(prompts: list[str], **sampling: Any) -> Work:
    """Return work for the demo model that no end of sequence ends."""
    encoder = PromptEncoder(DEMO_MODEL, 2048, 1024)
    return Work(
        [encoder.encode(prompt, "a prompt") for prompt in prompts], sampling | {"ignore_eos": True}
    )


class EngineTurns:
    """``tokens_per_s`` of every round, by work and system; ``different``: works whose tokens were
    not the same.
    """

    def __init__(self, console: Console, comparable: Collection[str]) -> None:
        """``comparable``: the systems that have to return the same tokens."""
        self._console, self._comparable = console, comparable
        self.tokens_per_s: dict[str, dict[str, list[float]]] = defaultdict(
            lambda: defaultdict(list)
        )
        self.different: list[str] = []
        self._answers: dict[str, list[list[int]]] = {}

    def measure(
        self, engines: Mapping[str, EngineProcess], works: Mapping[str, Work], rounds: int
    ) -> None:
        """Give the works to all engines in turns. The first round warms up, and trains the cost
        model; it does not count.
        """
        for number in range(rounds + 1):
            self._console.print(f"round {number} of {rounds}: {', '.join(works)} ...", style="dim")
            for name, work in works.items():
                for system in list(engines) if number % 2 else reversed(list(engines)):
                    seconds, answers = engines[system].run(*work)
                    if number:
                        self.tokens_per_s[name][system].append(sum(map(len, answers)) / seconds)
                    if (
                        system in self._comparable
                        and self._answers.setdefault(name, answers) != answers
                    ):
                        self.different.append(f"{name}, {system}")

    def ratio(self, work: str, system: str, against: str) -> float:
        """Return the median of the rounds' ratios."""
        pairs = zip(self.tokens_per_s[work][system], self.tokens_per_s[work][against], strict=True)
        return statistics.median(own / other for own, other in pairs)

    def table(self, against: str) -> Table:
        """Return the tokens per second of all rounds, and the ratios to one of the systems."""
        table = Table("work", "system", "tokens/s of each round", f"ratio to {against}")
        for work, systems in self.tokens_per_s.items():
            for system, figures in systems.items():
                ratio = "" if system == against else f"{self.ratio(work, system, against):.2f}"
                table.add_row(work, system, " ".join(f"{each:,.0f}" for each in figures), ratio)
        return table
