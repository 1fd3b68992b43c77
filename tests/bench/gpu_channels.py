"""The direct link's channel between two processes, which share a GPU if there is one: is what arrives what was sent, and when.

    python tests/bench/gpu_channels.py [--device cuda] [--small] [--json FILE]

``us`` is from the announcement that the tensor may be sent to its arrival on the receiver's device, a median.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from tramontane.workers.links.channel import Channel
from tramontane.workers.links.gpu_channel import channel_factory_for

HOST = "127.0.0.1"
ROUNDS, SHAPES = 200, ((1, 4096), (64, 4096), (4096, 4096))
PERIOD = 97  # numbers that are sent in turn; each is exact in bfloat16


def send(pipe: Connection, device: str, rounds: int) -> None:
    """Send tensors to the other process, one for each of its announcements."""
    torch.zeros(1, device=device)
    listener = channel_factory_for(_device(device)).listen(HOST)
    pipe.send(listener.address)
    channel = listener.accept()
    pipe.send(_name(channel))
    for shape in SHAPES:
        for number in range(rounds):
            tensor = torch.full(shape, float(number % PERIOD), device=device, dtype=torch.bfloat16)
            pipe.recv()
            channel.send(tensor)
    pipe.recv()
    channel.close()


def _device(name: str) -> torch.device:
    return torch.device("cuda", 0) if name == "cuda" else torch.device(name)


def _name(channel: Channel) -> str:
    return type(channel).__name__


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device, rounds = options.device, 5 if options.small else ROUNDS
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=send, args=(theirs, device, rounds), daemon=True)
    process.start()
    torch.zeros(1, device=device)
    channel = channel_factory_for(_device(device)).connect(ours.recv(), HOST)
    rows: list[dict[str, object]] = [{"what": "channels", "ours": _name(channel), "theirs": ours.recv()}]
    num_wrong = 0
    for shape in SHAPES:
        seconds = []
        for number in range(rounds):
            target = torch.empty(shape, device=device, dtype=torch.bfloat16)
            began = time.perf_counter()
            ours.send(None)
            channel.receive(target)
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
            num_wrong += not bool((target == float(number % PERIOD)).all())
        rows.append({"what": "hop", "shape": shape, "us": statistics.median(seconds) * 1e6})
    ours.send(None)
    channel.close()
    process.join(30)
    rows.append({"what": "end", "wrong": num_wrong, "exit_code": process.exitcode})
    for row in rows:
        print(row)
    if options.json:
        options.json.write_text(json.dumps(rows))
    return int(bool(num_wrong) or process.exitcode != 0)


if __name__ == "__main__":
    sys.exit(main())
