"""Eight seeded streams at once, run inside the cluster's network as a program of its own.

It prints "flowing" when every stream has its first token and at last one line of JSON: of each
stream its text, its error, the longest time without a token and when that began.
"""

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from tramontane.client import AsyncClient

NUM_STREAMS = 8


@dataclass
class Stream:
    """What a client saw of its stream. Times are seconds since the program began."""

    number: int
    text: str = ""
    error: str | None = None
    finish: str | None = None
    num_pieces: int = 0
    first_s: float | None = None
    longest_gap_s: float = 0.0
    gap_began_s: float = 0.0
    ended_s: float = 0.0
    num_comments: int = 0  # lines that keep a connection alive
    longest_silence_s: float = 0.0  # without any line, once the answer has begun


class Load:
    """The streams of one run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._began = time.monotonic()
        self.streams = [Stream(number) for number in range(options.streams)]
        self._last = [0.0] * options.streams

    def body(self, number: int) -> dict[str, Any]:
        """The request of a stream, the same in every run."""
        return {
            "prompt": f"{number}. The wind of the morning said",
            "max_tokens": self._options.tokens,
            "temperature": 0.9,
            "seed": 1000 + number,
            "ignore_eos": True,
        }

    def add(self, stream: Stream, text: str) -> None:
        """A piece of a stream has arrived."""
        now = time.monotonic() - self._began
        if stream.first_s is None:
            stream.first_s = now
            if all(other.first_s is not None for other in self.streams):
                print("flowing", flush=True)
        elif (gap := now - self._last[stream.number]) > stream.longest_gap_s:
            stream.longest_gap_s, stream.gap_began_s = gap, self._last[stream.number]
        self._last[stream.number] = now
        stream.num_pieces += 1
        stream.text += text

    async def run(self) -> None:
        """Run all streams to their ends."""
        read = self._read_grpc if self._options.grpc else self._read_http
        await asyncio.gather(*(self._watch(stream, read) for stream in self.streams))

    async def _watch(self, stream: Stream, read: Any) -> None:
        try:
            await read(stream)
        except Exception as error:
            stream.error = repr(error)
        stream.ended_s = time.monotonic() - self._began

    async def _read_http(self, stream: Stream) -> None:
        body = self.body(stream.number) | {"model": self._options.model, "stream": True}
        headers = {"Authorization": f"Bearer {self._options.key}"}
        async with (
            httpx.AsyncClient(timeout=self._options.timeout, trust_env=False) as client,
            client.stream(
                "POST", f"http://{self._options.address}/v1/completions", json=body, headers=headers
            ) as answer,
        ):
            if answer.status_code != 200:
                content = (await answer.aread()).decode(errors="replace")
                stream.error = f"{answer.status_code}: {content[:300]}"
                return
            last = time.monotonic()
            async for line in answer.aiter_lines():
                now = time.monotonic()
                stream.longest_silence_s = max(stream.longest_silence_s, now - last)
                stream.num_comments += line.startswith(":")
                last = now
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    stream.error = json.dumps(event["error"])
                for choice in event.get("choices", ()):
                    stream.finish = choice.get("finish_reason") or stream.finish
                    self.add(stream, choice["text"])

    async def _read_grpc(self, stream: Stream) -> None:
        body = self.body(stream.number)
        prompt = body.pop("prompt")
        async with AsyncClient(self._options.address, api_key=self._options.key) as client:
            async for chunk in client.generate(prompt, **body):
                stream.finish = chunk.finish_reason or stream.finish
                self.add(stream, chunk.text)


def main() -> None:
    """Run the streams that the command line describes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("key")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, default=NUM_STREAMS)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--grpc", action="store_true")
    load = Load(parser.parse_args())
    asyncio.run(load.run())
    print(json.dumps([asdict(stream) for stream in load.streams]))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
