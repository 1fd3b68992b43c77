"""Benchmark of asynchronous scheduling: steps that are submitted before tokens are known, against
steps that are not.

    python tests/bench/async_scheduling.py [--rounds 7] [--cache .bench] [--json]

Two engines of one stage run at the same time, each in processes of its own with the demo model in
float32 on one core, and get the same work in turns:

* one stream, greedy, 512 tokens;
* 64 streams at a temperature of 1, 64 tokens each;
* 64 streams that end by a stop token, which the engine with asynchronous scheduling notices one
  step late: one token of a hundred is one, or one of ten.

Ratios of tokens per second are medians of the rounds' ratios. All tokens have to be the same.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from engines import our_engine
from engines_in_turns import GENTLEMEN, EngineTurns, Work, demo_work
from peers import HERE
from rich.console import Console
from targets import Target, at_least, conclude, none_of

from tramontane.cluster.config.engine_config import DEMO_MODEL

WITH, WITHOUT = "with", "without"
ONE, MANY = "one stream", "64 streams"
ENDING, SHORT = "64 streams, each token may be the last", "64 streams of very short answers"


def works() -> dict[str, Work]:
    return {
        ONE: demo_work(["ROMEO:"], max_tokens=512, temperature=0.0),
        MANY: demo_work(GENTLEMEN, max_tokens=64, temperature=1.0, seed=2),
        ENDING: demo_work(
            GENTLEMEN,
            max_tokens=256,
            temperature=1.0,
            seed=3,
            stop_token_ids=tuple(range(900, 910)),
        ),
        SHORT: demo_work(
            GENTLEMEN,
            max_tokens=256,
            temperature=1.0,
            seed=3,
            stop_token_ids=tuple(range(900, 1000)),
        ),
    }


def run(turns: EngineTurns, cache: Path, rounds: int) -> None:
    settings = {"stages": 1, "threads_per_stage": 1}
    with (
        our_engine(DEMO_MODEL, "float32", settings | {"async_scheduling": True}, cache) as own,
        our_engine(DEMO_MODEL, "float32", settings | {"async_scheduling": False}, cache) as other,
    ):
        turns.measure({WITHOUT: other, WITH: own}, works(), rounds)


def targets(turns: EngineTurns) -> list[Target]:
    wanted = {ONE: 1.05, MANY: 0.98, ENDING: 0.98, SHORT: 0.98}
    return [
        *(
            at_least(f"{work}: with / without", turns.ratio(work, WITH, WITHOUT), limit, "x")
            for work, limit in wanted.items()
        ),
        none_of("answers with other tokens", turns.different),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cache", type=Path, default=HERE.parents[1] / ".bench")
    parser.add_argument("--json", action="store_true", help="figures as JSON on standard output")
    options = parser.parse_args()
    cache: Path = options.cache.resolve()
    os.makedirs(cache, exist_ok=True)
    turns = EngineTurns(Console(stderr=True, highlight=False), comparable=(WITH, WITHOUT))
    run(turns, cache, options.rounds)
    conclude(
        targets(turns),
        turns.table(WITHOUT),
        data={"tokens_per_s": turns.tokens_per_s},
        as_json=options.json,
    )


if __name__ == "__main__":
    main()
