"""Benchmark of loading a stage: bytes read and memory used, and for a GPU also the speed.

    python tests/bench/loading.py [--layers 4] [--stages 2] [--json]
    python tests/bench/loading.py --device cuda [--layers 16] [--rounds 3] [--json]

Stages on CPUs are loaded by Ray actors (see ``loading_stages``); a GPU is loaded in this process, without Ray (see
``loading_gpu``).
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from rich.console import Console


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3, help="for each way of loading a GPU")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.device == "cpu":
        _stages(options)
    else:
        _gpu(options)


def _stages(options: argparse.Namespace) -> None:
    import loading_stages  # imports Ray

    figures = loading_stages.run(options.layers, options.stages)
    if options.json:
        print(json.dumps({name: [asdict(f) for f in stages] for name, stages in figures.items()}))
    else:
        Console().print(loading_stages.table(figures))
    if not all(f.is_within_limits for stages in figures.values() for f in stages):
        sys.exit(
            f"a stage reads more than {loading_stages.READ_LIMIT} times the bytes of its weights, "
            f"or needs more memory than {loading_stages.MEMORY_LIMIT} times these bytes (or 128 MiB more)"
        )


def _gpu(options: argparse.Namespace) -> None:
    import loading_gpu
    import torch

    if options.device != "cpu" and not torch.cuda.is_available():
        sys.exit("no GPU is available")
    figures = loading_gpu.run(options.device, options.layers, options.rounds)
    if options.json:
        print(json.dumps([asdict(f) for f in figures]))
    else:
        Console().print(loading_gpu.table(figures))
    if not all(f.is_within_limits for f in figures):
        sys.exit(f"staged loading needs more than {loading_gpu.EXTRA_LIMIT // 2**20} MiB of the GPU in addition to the weights")


if __name__ == "__main__":
    main()
