"""The walk of a reader who follows one call through the modules of the rooms, as a measurement.

A function counts at its first call only, as a reader reads it once. Functions outside of the rooms
do not count, and neither does the end of a call: the walk is the order of the first calls.
Consecutive functions of one module are one stay. A return is a stay in a module that has been left
before.

Module a has the functions f and h, module b has g, and module c has i. f calls g twice, then h, and
h calls i. The first calls are f g h i, so the walk is a b a c: 4 stays in 3 modules, with 1 return,
to a.

``python tests/support/walk.py`` measures both walks and prints them; with ``--write`` it writes
them into ARCHITECTURE.md. They are measured in a process of their own: there no other test has
started threads, which would not be recorded, or filled a cache.
"""

import argparse
import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType

import httpx
from scripted_token_source import http_app_for
from simulated_routers import CACHE, LIMITS, Replica, harness
from tiny_models import random_model, tiny_args, tiny_plan
from virtual_time import run_in_virtual_time

from tramontane.proto.request import SamplingParams
from tramontane.proto.step import NO_DECODES, Chunk, DecodeColumns, MicroBatch
from tramontane.workers.attention.sdpa_backend import cpu_kernels
from tramontane.workers.stage.device_backend import DeviceBackend
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.stage.step_executor import SerialExecutor

ROOT = Path(__file__).parents[2]
ROOMS = ("proto", "workers", "router", "cluster")
PAGE = ROOT / "ARCHITECTURE.md"
BEGIN = "<!-- walks: written by python tests/support/walk.py --write -->"
END = "<!-- walks: end -->"
CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "What news?"}],
    "max_tokens": 3,
    "temperature": 0,
    "stream": True,
}


@dataclass(frozen=True)
class Walk:
    """The stays of a walk: the paths of modules, relative to the repository."""

    stays: tuple[str, ...]

    @classmethod
    def through(cls, modules: Iterable[str]) -> "Walk":
        """Return the walk through these modules, one for each function, by their first calls."""
        return cls(tuple(module for module, _ in groupby(modules)))

    @property
    def modules(self) -> tuple[str, ...]:
        """Every module once, in the order of the first stays."""
        return tuple(dict.fromkeys(self.stays))

    @property
    def num_returns(self) -> int:
        """Stays in modules that had been left before."""
        return len(self.stays) - len(self.modules)


@dataclass
class Recorder:
    """Notes the functions that are called within ``noting``. To be given to ``sys.setprofile``."""

    root: Path = ROOT
    rooms: tuple[str, ...] = ROOMS
    _called: dict[CodeType, None] = field(default_factory=dict)
    _is_noting: bool = False

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        """Note the function of a call."""
        if self._is_noting and event == "call":
            self._called.setdefault(frame.f_code)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Forget what was called before, and note what is called within the context."""
        self._called.clear()
        self._is_noting = True
        try:
            yield
        finally:
            self._is_noting = False

    def walk(self) -> Walk:
        """Return the walk through the functions of the rooms that were called."""
        paths = (Path(code.co_filename) for code in tuple(self._called))
        relative = (path.relative_to(self.root) for path in paths if path.is_relative_to(self.root))
        return Walk.through(str(path) for path in relative if path.parts[0] in self.rooms)


@contextmanager
def installed(recorder: Recorder) -> Iterator[Recorder]:
    """Give the recorder the calls of this thread, and of those that begin within the context."""
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    try:
        yield recorder
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


# ---- the two walks


def stage_step() -> Walk:
    """Measure one step of a stage with all layers of a small dense model, on a CPU with torch's
    attention: decodes of two sequences and the prompt of another. The step before was alike.
    """
    args = tiny_args(n_layers=2, moe=False)
    backend = DeviceBackend(cpu_kernels())  # the same on every machine
    worker = StageWorker(tiny_plan(args).stages[0], random_model(args), backend=backend)
    executor = SerialExecutor(worker, num_threads=1)
    executor.fence(0)
    sampling = SamplingParams(temperature=0.0)

    def batch(step_id: int, prompts: Iterable[int], decodes: DecodeColumns) -> MicroBatch:
        chunks = tuple(  # all positions of sequence 3 are in page 3
            Chunk(seq_id, 0, (1, 2, 3, 4), ((seq_id,),), sampling, needs_sample=True)
            for seq_id in prompts
        )
        return MicroBatch(0, step_id, chunks, decodes=decodes)

    batches = (
        batch(0, (0, 1), NO_DECODES),
        batch(1, (2,), DecodeColumns((0, 1), (4, 4), (5, 5))),
        batch(2, (3,), DecodeColumns((0, 1), (5, 5), (5, 5))),
    )
    with installed(Recorder()) as recorder:
        for each in batches[:-1]:
            executor.step(each, lambda: None)
        with recorder.noting():
            executor.step(batches[-1], lambda: None)
    return recorder.walk()


def chat_completion() -> Walk:
    """Measure one streamed chat completion: from the HTTP application through an ingress's router
    client to a router with scripted stages, and back. The request before was alike.
    """
    with installed(Recorder()) as recorder:
        run_in_virtual_time(_chat_twice(recorder))
    return recorder.walk()


async def _chat_twice(recorder: Recorder) -> None:
    replica = Replica("a", limits=LIMITS, cache=CACHE)
    async with harness([replica], running="a") as routers:
        app = http_app_for(routers).app()
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://ingress") as client:
            await _chat(client)
            with recorder.noting():
                await _chat(client)


async def _chat(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/chat/completions", json=CHAT)
    assert response.text.endswith("data: [DONE]\n\n"), response.text


CHAT_COMPLETION = "A streamed chat completion, from the HTTP application to a router and back"
STAGE_STEP = "A step of a stage on a CPU, with decodes and a prompt"
WALKS: Mapping[str, Callable[[], Walk]] = {
    CHAT_COMPLETION: chat_completion,
    STAGE_STEP: stage_step,
}


# ---- the page


def block(walks: Mapping[str, Walk]) -> str:
    """Return the walks as a block of a page."""
    return "\n".join([BEGIN, *(line for item in walks.items() for line in _table(*item)), END])


def _table(name: str, walk: Walk) -> Iterator[str]:
    """Yield the lines of one walk: its packages and their modules, by their first calls."""
    packages: dict[str, list[str]] = {}
    for module in walk.modules:
        path = Path(module)
        packages.setdefault(str(path.parent), []).append(f"`{path.stem}`")
    yield f"{name}: {len(walk.modules)} modules, {walk.num_returns} returns."
    yield ""
    yield "| package | modules, in the order of their first calls |"
    yield "|---|---|"
    yield from (f"| `{package}` | {', '.join(names)} |" for package, names in packages.items())
    yield ""


def with_block(text: str, new: str) -> str:
    """Return a page with its block replaced. Raises ValueError if it has none."""
    before, after = text.index(BEGIN), text.index(END)
    return text[:before] + new + text[after + len(END) :]


def main() -> None:
    """Measure both walks in this process."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--write", action="store_true", help="write them into ARCHITECTURE.md")
    arguments = parser.parse_args()
    walks = {name: measure() for name, measure in WALKS.items()}
    if arguments.write:
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(with_block(text, block(walks)), encoding="utf-8")
    print(json.dumps({name: asdict(walk) for name, walk in walks.items()}))


if __name__ == "__main__":
    main()
