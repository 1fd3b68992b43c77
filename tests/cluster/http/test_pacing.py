"""How often streams write, by the load of their ingress."""

import asyncio
import json
from collections.abc import AsyncGenerator

import pytest
from fixed_load import FixedLoad
from scripted_token_source import MODEL, ScriptedSource
from virtual_time import run_in_virtual_time

from tramontane.cluster.http.sse import Pacer, sse_events
from tramontane.proto.request import Request, RequestOutput
from tramontane.router.openai.completion import prepare_completion
from tramontane.router.openai.completion_request import parse_completion


class EverySecond(ScriptedSource):
    """Has a token a second after it is asked for one."""

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        async for batch in super().generate(request):
            await asyncio.sleep(1.0)
            yield batch


@pytest.mark.parametrize(
    ("level", "written_at"),
    [(0.0, [1.0, 2.0, 3.0, 4.0]), (0.01, [1.0, 2.2, 3.4, 4.6]), (1.0, [1.0, 22.0, 43.0, 64.0])],
)
def test_the_less_the_load_the_sooner_a_token_is_written(
    level: float, written_at: list[float]
) -> None:
    """One of 20 streams, which write once a second together under full load."""

    async def scenario() -> None:
        now, load = asyncio.get_running_loop().time, FixedLoad(level)
        pacer, written = Pacer(1, load), list[float]()
        request = parse_completion(
            json.dumps({"prompt": "a", "max_tokens": 4, "stream": True}).encode()
        )
        answer = await prepare_completion(MODEL, request, 0.0)
        changes = answer.generation.stream(EverySecond())
        pacer.num_streams = 19
        async for chunk in sse_events(pacer, answer, await anext(changes), changes, "r"):
            written += [now()] * chunk.data.count(b"data: {")
        assert written == pytest.approx(written_at)
        assert pacer.num_streams == 19
        assert load.counts == [1, 0], "it is measured while there are streams"

    run_in_virtual_time(scenario())
