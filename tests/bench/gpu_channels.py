"""The direct link's channel between two processes, which share a GPU if there is one: is what
arrives what was sent, and when.

    python tests/bench/gpu_channels.py [--device cuda] [--small] [--json FILE]

A ``hop`` is from the request for one tensor to its arrival on the receiver's device, a median: with
the message of the request, which stages do not need. A ``stream`` has tensors that are sent one
after the other, as stages send them: ``us`` is the time of the whole stream divided by their
number, the median of some streams. All numbers that arrive are compared.
"""

import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from bench_parts import gpu_parser
from targets import at_most, exit_status
from torch import Tensor

from tramontane.workers.links.channel import Channel
from tramontane.workers.links.gpu_channel import channel_factory_for

HOST = "127.0.0.1"
TOKENS, DIM = (1, 64, 4096), 4096
# hops; streams and the tensors of each, a small part of them with --small
ROUNDS, STREAMS, STREAM = 200, 9, 50
PERIOD = 97  # numbers that are sent in turn; each is exact in bfloat16
EXIT_S = 30


def send(pipe: Connection, device: torch.device, small: bool) -> None:
    """Send tensors to the other process: as many for each of its requests as it names, until it
    closes its end.
    """
    torch.zeros(1, device=device)
    listener = channel_factory_for(device).listen(HOST)
    pipe.send(listener.address)
    channel = listener.accept()
    pipe.send(type(channel).__name__)
    for shape in _shapes(small):
        number = 0
        for length in _lengths(small):
            tensors = [
                torch.full(shape, float(n % PERIOD), device=device, dtype=torch.bfloat16)
                for n in range(number, number + length)
            ]
            number += length
            _synchronize(device)
            pipe.recv()
            for tensor in tensors:
                channel.send(tensor)
    with suppress(EOFError):
        pipe.recv()
    channel.close()


def _shapes(small: bool) -> list[tuple[int, int]]:
    return [(num_tokens, 64 if small else DIM) for num_tokens in TOKENS]


def _lengths(small: bool) -> list[int]:
    """Return the numbers of tensors that follow each request: hops, then streams."""
    return [1] * (5 if small else ROUNDS) + [5 if small else STREAM] * (2 if small else STREAMS)


def receive(
    pipe: Connection, channel: Channel, device: torch.device, small: bool
) -> Iterator[dict[str, object]]:
    """Receive what ``send`` sends; yields two rows for each shape."""
    for shape in _shapes(small):
        seconds: dict[str, list[float]] = {"hop": [], "stream": []}
        number = num_wrong = 0
        for length in _lengths(small):
            targets = [
                torch.empty(shape, device=device, dtype=torch.bfloat16) for _ in range(length)
            ]
            _synchronize(device)
            began = time.perf_counter()
            pipe.send(None)
            for target in targets:
                channel.receive(target)
            _synchronize(device)
            seconds["hop" if length == 1 else "stream"].append(
                (time.perf_counter() - began) / length
            )
            num_wrong += sum(
                not _is_all(target, (number + n) % PERIOD) for n, target in enumerate(targets)
            )
            number += length
        for what, each in seconds.items():
            us = statistics.median(each) * 1e6
            yield {
                "what": what,
                "shape": shape,
                "us": us,
                "gb_per_s": 2 * shape[0] * shape[1] / us / 1e3,
                "wrong": num_wrong,
            }


def _is_all(tensor: Tensor, number: int) -> bool:
    return bool((tensor == float(number)).all())


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> int:
    options = gpu_parser(__doc__).parse_args()
    device = torch.device(options.device, 0 if options.device == "cuda" else None)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=send, args=(theirs, device, options.small), daemon=True)
    process.start()
    theirs.close()
    torch.zeros(1, device=device)
    channel = channel_factory_for(device).connect(ours.recv(), HOST)
    rows: list[dict[str, object]] = [
        {"what": "channels", "ours": type(channel).__name__, "theirs": ours.recv()}
    ]
    for row in receive(ours, channel, device, options.small):
        rows.append(row)
        _save(rows, options.json)
    ours.close()
    channel.close()
    process.join(EXIT_S)
    rows.append({"what": "end", "exit_code": process.exitcode})
    _save(rows, options.json)
    num_wrong = sum(int(str(row.get("wrong", 0))) for row in rows)
    has_failed = process.exitcode != 0
    return exit_status(
        [
            at_most("tensors that arrived wrong", num_wrong, 0),
            at_most("senders that failed", has_failed, 0),
        ]
    )


def _save(rows: list[dict[str, object]], file: Path | None) -> None:
    print(rows[-1], flush=True)
    if file:
        file.write_text(json.dumps(rows))


if __name__ == "__main__":
    sys.exit(main())
