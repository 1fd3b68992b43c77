"""Benchmark of loading a stage: bytes read and memory used, and for a GPU also the speed.

    python tests/bench/loading.py [--layers 4] [--stages 2] [--json]
    python tests/bench/loading.py --device cuda [--layers 16] [--rounds 3] [--json]

Stages on CPUs are loaded by Ray actors (see ``loading_stages``); a GPU is loaded in this process,
without Ray (see ``loading_gpu``).
"""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from rich.table import Table
from targets import Target, at_most, conclude


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3, help="for each way of loading a GPU")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    targets, table, data = (stages if options.device == "cpu" else gpu)(options)
    conclude(targets, table, data=data, as_json=options.json)


def stages(options: argparse.Namespace) -> tuple[list[Target], Table, dict[str, Any]]:
    import loading_stages  # imports Ray

    figures = loading_stages.run(options.layers, options.stages)
    targets = []
    for name, loaded in figures.items():
        read = max(f.read_ratio for f in loaded)
        memory = max(f.memory_ratio for f in loaded)
        targets.append(
            at_most(f"{name}: bytes read, of those stored", read, loading_stages.READ_LIMIT, "x")
        )
        targets.append(at_most(f"{name}: peak memory, of what is allowed", memory, 1.0, "x"))
    data = {name: [asdict(f) for f in loaded] for name, loaded in figures.items()}
    return targets, loading_stages.table(figures), data


def gpu(options: argparse.Namespace) -> tuple[list[Target], Table, dict[str, Any]]:
    import loading_gpu
    import torch

    if not torch.cuda.is_available():
        sys.exit("no GPU is available")
    figures = loading_gpu.run(options.device, options.layers, options.rounds)
    extra = max(f.extra for f in figures if f.way == "staged")
    target = at_most(
        "GPU memory in addition to the weights, staged",
        extra / 2**20,
        loading_gpu.EXTRA_LIMIT / 2**20,
        "MiB",
    )
    return [target], loading_gpu.table(figures), {"rows": [asdict(f) for f in figures]}


if __name__ == "__main__":
    main()
