"""How often streams write, by the load of their ingress."""

import asyncio
import json

import pytest
from fixed_load import FixedLoad
from scripted_token_source import MODEL, ScriptedSource
from virtual_time import in_virtual_time

from tramontane.cluster.http.sse import Pacer, sse_events
from tramontane.cluster.http.token_endpoints import wait_for_first
from tramontane.router.openai.completion import prepare_completion
from tramontane.router.openai.completion_request import parse_completion


@pytest.mark.parametrize(
    ("level", "written_at"),
    [(0.0, [1.0, 2.0, 3.0, 4.0]), (0.01, [1.0, 2.2, 3.4, 4.6]), (1.0, [1.0, 22.0, 43.0, 64.0])],
)
@in_virtual_time
async def test_the_less_the_load_the_sooner_a_token_is_written(
    level: float, written_at: list[float]
) -> None:
    """One of 20 streams, which write once a second together under full load."""
    now, load = asyncio.get_running_loop().time, FixedLoad(level)
    pacer, written = Pacer(1, load), list[float]()
    request = parse_completion(
        json.dumps({"prompt": "a", "max_tokens": 4, "stream": True}).encode()
    )
    answer = await prepare_completion(MODEL, request, 0.0)
    changes = answer.generation.stream(ScriptedSource(pause_s=1.0))
    pacer.num_streams = 19
    first = await wait_for_first(changes)
    async for chunk in sse_events(pacer, answer, first, changes, "r"):
        written += [now()] * chunk.data.count(b"data: {")
    assert written == pytest.approx(written_at)
    assert pacer.num_streams == 19
    assert load.counts == [1, 0], "it is measured while there are streams"
