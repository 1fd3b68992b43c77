"""Benchmark of the order of work in a layer with a shared expert, whose other experts are on an
actor.

    python tests/bench/shared_experts.py [--rounds 40] [--json]

The random model in the shape of Mistral Small 4 with about 200 million parameters: one stage with
one thread, and one expert actor with another in a process of its own. A stage sends the rows to the
actor and computes the shared expert while that works. Here both orders alternate: this one, and the
shared expert before the rows are sent. Micro-batches are open one at a time, so that no other one
hides the wait. Times are the stage's own: a step is the time with a micro-batch, and the exposed
wait is the part of it in which the stage computed nothing. Ratios are of the same micro-batch in
both orders; figures are medians.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
from arithmetic import CONTEXT, PROMPT, SMALL_4_200M, Bench, Phase
from experts import expert_processes, process_client
from local_expert_actors import expert_plan
from rich.table import Table
from targets import Target, conclude
from torch import Tensor

from tramontane.proto.step import StepResult
from tramontane.router.engine.stats import StageUsage
from tramontane.workers.experts.remote_experts import RemoteExperts
from tramontane.workers.model.moe import ExpertPermutation
from tramontane.workers.model.transformer import OnChoices, StageModel
from tramontane.workers.stage.ping_pong_executor import PingPongExecutor

PHASES = (Phase("decode 16", 16, 1, CONTEXT, 4), Phase("chunks 4 x 128", 4, PROMPT, 0, 2))
OURS, OTHER = "while the actor works", "before the rows are sent"


@dataclass(frozen=True)
class Figures:
    """Seconds of a step."""

    exposed_wait_s: float
    step_s: float


Pair = dict[str, Figures]  # of one micro-batch, by order
Pairs = dict[Phase, list[Pair]]


@contextmanager
def shared_experts_first(model: StageModel) -> Iterator[None]:
    """Let the model compute a layer's shared expert when it has chosen the others, before their
    rows are sent.
    """
    choose, compute = model.choose_experts, model.run_shared_experts
    computed: dict[int, Tensor | None] = {}

    def choose_and_compute(
        layer: int, x_TD: Tensor, on_choices: OnChoices
    ) -> tuple[ExpertPermutation, Tensor]:
        chosen = choose(layer, x_TD, on_choices)
        computed[layer] = compute(layer, x_TD)
        return chosen

    with (
        patch.object(model, "choose_experts", choose_and_compute),
        patch.object(model, "run_shared_experts", lambda layer, _: computed.pop(layer)),
    ):
        yield


ORDERS: dict[str, Callable[[StageModel], AbstractContextManager[None]]] = {
    OURS: nullcontext,  # type: ignore[dict-item]
    OTHER: shared_experts_first,
}


def run_phase(
    bench: Bench, experts: RemoteExperts, phase: Phase
) -> tuple[list[Figures], list[int]]:
    """Return the times of a phase's micro-batches, and their tokens."""
    figures, tokens = list[Figures](), list[int]()
    batches = bench.batches(phase)
    with closing(PingPongExecutor(bench.worker, experts, max_open=1, num_threads=1)) as stage:
        for batch in batches:
            result = stage.step(batch, lambda: None)
            assert isinstance(result, StepResult)
            usage = StageUsage().add(result.timings[0])
            figures.append(Figures(usage.exposed_wait_s, usage.open_s))
            tokens.extend(result.token_ids)
    return figures, tokens


def run(rounds: int) -> Pairs:
    """Run all phases in both orders, which take turns in being the first. A round that warms up is
    not counted.
    """
    found: Pairs = {phase: [] for phase in PHASES}
    plan = expert_plan(SMALL_4_200M, 1, dtype="bfloat16")
    bench = Bench(SMALL_4_200M, "bfloat16", experts_inside=False)
    with (
        expert_processes(plan) as pipes,
        closing(RemoteExperts(plan, partial(process_client, pipes, plan))) as experts,
    ):
        for number in range(rounds + 1):
            for phase in PHASES:
                figures, tokens = dict[str, list[Figures]](), list[list[int]]()
                for order in (OURS, OTHER) if number % 2 else (OTHER, OURS):
                    with ORDERS[order](bench.worker.model):
                        figures[order], chosen = run_phase(bench, experts, phase)
                    tokens.append(chosen)
                assert tokens[0] == tokens[1], f"{phase.name}: the orders have different tokens"
                if number:
                    found[phase].extend(
                        {OURS: a, OTHER: b}
                        for a, b in zip(figures[OURS], figures[OTHER], strict=True)
                    )
    return found


def ratios(pairs: list[Pair], value: Callable[[Figures], float]) -> list[float]:
    """Return what the stage's order has of the other one's, for every micro-batch."""
    return [value(pair[OURS]) / value(pair[OTHER]) for pair in pairs]


def exposed_wait(figures: Figures) -> float:
    return figures.exposed_wait_s


def step(figures: Figures) -> float:
    return figures.step_s


def targets(found: Pairs) -> list[Target]:
    return [
        Target(
            f"{phase.name}: exposed wait, of the other order",
            statistics.median(ratios(pairs, exposed_wait)),
            "<",
            1.0,
            "x",
        )
        for phase, pairs in found.items()
    ]


def as_row(phase: Phase, pairs: list[Pair]) -> dict[str, str | float | list[float]]:
    """Return the medians, in milliseconds of a step, and the quartiles of the ratios."""
    row: dict[str, str | float | list[float]] = {"micro-batches": phase.name}
    for name, value in (("exposed wait", exposed_wait), ("step", step)):
        row |= {
            f"{name} {order}, ms": 1e3 * statistics.median(value(pair[order]) for pair in pairs)
            for order in ORDERS
        }
        row[f"{name}, ratio"] = statistics.quantiles(ratios(pairs, value), n=4)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", action="store_true", help="figures as JSON on standard output")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = run(options.rounds)
    rows = [as_row(phase, pairs) for phase, pairs in found.items()]
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(shown(value) for value in row.values()))
    conclude(targets(found), table, data={"steps": rows}, as_json=options.json)


def shown(value: str | float | list[float]) -> str:
    if isinstance(value, list):
        low, middle, high = value
        return f"{middle:.3f} ({low:.3f} to {high:.3f})"
    return value if isinstance(value, str) else f"{value:.2f}"


if __name__ == "__main__":
    main()
