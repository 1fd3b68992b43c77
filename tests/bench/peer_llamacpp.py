"""llama.cpp's llama-batched-bench, built from llama-cpp-python's source (see peers.py). Prints
seconds by number of prompts.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--input-len", "--output-len", "--threads"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=int, nargs="+", required=True)
    options = parser.parse_args()
    (source,) = Path(sys.prefix).glob("llama_cpp_python-*/vendor/llama.cpp")
    converted = options.model / "model-bf16.gguf"
    if not converted.exists():
        part = converted.with_suffix(".part")  # an interrupted conversion must not be used
        convert = [
            sys.executable,
            source / "convert_hf_to_gguf.py",
            options.model,
            "--outtype",
            "bf16",
            "--outfile",
            part,
        ]
        subprocess.run(convert, check=True, stdout=sys.stderr)
        part.rename(converted)
    context = max(options.prompts) * (options.input_len + options.output_len)
    flags = [
        "-c",
        max(context, 16_384),
        "-b",
        2048,
        "-ub",
        512,
        "-t",
        options.threads,
        "-tb",
        options.threads,
    ]
    flags += [
        "-npp",
        options.input_len,
        "-ntg",
        options.output_len,
        "-npl",
        ",".join(map(str, options.prompts)),
    ]
    bench = [
        source / "build" / "bin" / "llama-batched-bench",
        "-m",
        converted,
        *flags,
        "--output-format",
        "jsonl",
    ]
    run = subprocess.run(
        [str(part) for part in bench], check=True, stdout=subprocess.PIPE, text=True
    )
    rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    seconds = {row["pl"]: row["t"] for row in rows}
    command = "llama-batched-bench " + " ".join(map(str, flags))
    print(json.dumps({"version": source.parents[1].name, "flags": command, "seconds": seconds}))


if __name__ == "__main__":
    main()
