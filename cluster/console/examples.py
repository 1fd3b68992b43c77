"""Examples of each command, which end its ``--help``. Comments behind ``#`` are shown with them."""

from collections.abc import Mapping
from types import MappingProxyType

MAX_WIDTH = 78  # characters: a terminal of 80 has room for them on one line

# By the words after ``tramontane``.
EXAMPLES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "generate": (
            'tramontane generate "ROMEO:" "JULIET:"  # the demo model over Ray, two stages',
            'tramontane generate --local --max-tokens 32 "ROMEO:"  # without Ray',
            "tramontane generate --model /models/Mistral-7B-v0.3 --json < prompts.txt",
        ),
        "serve": (
            "tramontane serve  # the demo model, on http://127.0.0.1:8000",
            "tramontane serve --model /models/Mixtral-8x7B-v0.1 --stages 4 --quantize int8",
            "tramontane serve --host 0.0.0.0 --api-key-file keys.txt",
            "tramontane serve --address auto --max-replicas 3  # on a running Ray cluster",
        ),
        "chat": (
            "tramontane chat --model /models/Mistral-7B-Instruct-v0.3",
            'tramontane chat --local --system "Answer briefly." --temperature 0',
        ),
        "batch": (
            "tramontane batch submit requests.jsonl",
            "tramontane batch watch batch_1f3a",
            "tramontane batch results batch_1f3a -o results.jsonl",
        ),
        "batch submit": (
            "tramontane batch submit requests.jsonl",
            "tramontane batch submit chats.jsonl --endpoint /v1/chat/completions",
        ),
        "batch results": (
            "tramontane batch results batch_1f3a  # to standard output",
            "tramontane batch results batch_1f3a -o results.jsonl",
        ),
        "plan": (
            "tramontane plan --model mixtral-8x7b --gpus 4 --gpu-memory 48GiB",
            "tramontane plan --model /models/Mixtral-8x7B-v0.1 --quantize int8",
            "tramontane plan --model ministral-8b --gpu-memory 24GiB,24GiB,80GiB",
        ),
        "config": (
            "tramontane config --stages 4 --max-num-seqs 32 > server.yaml",
            "tramontane config --config server.yaml --max-num-seqs 64",
        ),
        "bench": (
            "tramontane bench  # the demo model, over Ray",
            "tramontane bench --model ministral-8b --load-format dummy --stages 2 --json",
            "tramontane bench --url http://127.0.0.1:8000 --request-rate 4  # a server",
        ),
        "simulate": (
            "tramontane simulate --stages 8 --request-rate 5",
            "tramontane simulate --calibrate --input-len 200 --output-len 100",
        ),
        "top": ("tramontane top", "tramontane top --once --json"),
        "trace": ("tramontane trace -o trace.json --seconds 5",),
        "experts": (
            "tramontane experts --watch",
            "tramontane experts --json > load.json",
            "tramontane experts --adopt load.json",
            "tramontane experts --of verse.txt --of code.txt",
        ),
        "drain": ("tramontane drain --address auto", "tramontane drain --address auto --undo"),
        "k8s": (
            "tramontane k8s --model mixtral-8x7b --stages 4 --gpu-memory 48GiB -o mixtral",
            "tramontane k8s --stages 2 --cpu --gpu-memory 4GiB -o demo",
        ),
        "cluster-yaml": (
            "tramontane cluster-yaml --provider aws --model mixtral-8x7b --stages 4",
            "tramontane cluster-yaml --provider local --cpu --stages 2 --gpu-memory 8GiB",
        ),
        "monitoring": ("tramontane monitoring --out monitoring",),
        "make-random": ("tramontane make-random --like mixtral-8x7b --scale small --out tiny",),
    }
)


def epilog(command: str) -> str | None:
    """Return the examples of a command as typer ends its help with them; None if it has none."""
    lines = EXAMPLES.get(command)
    return None if lines is None else "\n".join(("Examples:", *lines))
