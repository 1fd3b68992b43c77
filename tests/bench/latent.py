"""Benchmark of latent attention: what a decode step costs at a long context, against a short one.

    python tests/bench/latent.py [--threads 2] [--rounds 5] [--json]

The random model in the shape of Mistral Small 4 with about 200 million parameters runs in one stage
in this process. Decode steps of 1, 4 and 16 sequences with 512 and with 4,096 tokens of context
alternate in rounds; figures are medians.
"""

import argparse

import torch
from arithmetic import SMALL_4_200M, STEPS, Bench, Phase, measure
from rich.table import Table
from targets import at_most, conclude

CONTEXTS, SEQUENCES = (512, 4096), (1, 4, 16)
MAX_RATIO = 1.3  # of the step at the longer context to that at the shorter one


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="figures as JSON on standard output")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    bench = Bench(SMALL_4_200M, "bfloat16")
    steps_s = {
        (phase.num_seqs, phase.context_len): seconds
        for phase, seconds in measure(
            bench, [phase(n, length) for n in SEQUENCES for length in CONTEXTS], options.rounds
        ).items()
    }
    short, long = CONTEXTS
    table = Table(
        "sequences", f"{short} tokens of context, ms", f"{long}, ms", "ratio", title="a decode step"
    )
    targets = []
    for number in SEQUENCES:
        ratio = steps_s[number, long] / steps_s[number, short]
        table.add_row(
            str(number),
            *(f"{steps_s[number, length] * 1e3:.2f}" for length in CONTEXTS),
            f"{ratio:.2f}",
        )
        targets.append(
            at_most(f"decode of {number} at {long} tokens, against {short}", ratio, MAX_RATIO, "x")
        )
    data = [
        {"sequences": n, "context": length, "step_ms": s * 1e3}
        for (n, length), s in steps_s.items()
    ]
    conclude(targets, table, data={"steps": data}, as_json=options.json)


def phase(num_seqs: int, context_len: int) -> Phase:
    return Phase(f"decode {num_seqs} at {context_len}", num_seqs, 1, context_len, STEPS)


if __name__ == "__main__":
    main()
