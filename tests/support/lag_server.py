"""An API server over HTTP and gRPC in this process, without Ray, that measures how long its event
loop does not run.

    python tests/support/lag_server.py PORT GRPC_PORT FOLDER

``GET /lag`` returns the longest time, in seconds, for which the loop has been late since the last
call.
"""

import asyncio
import gc
import sys
from pathlib import Path

import grpc
import uvicorn
from batch_jobs import new_batch_harness
from hostile_bodies import MAX_BODY
from large_answers import LARGE_MODEL, LargeAnswerSource
from scripted_token_source import http_app_for
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tramontane.cluster.config.measurements import ExpertLoad
from tramontane.cluster.http.batch_endpoints import BatchEndpoints
from tramontane.router.grpc.handlers import add_inference
from tramontane.router.grpc.servicer import GrpcServicer

TICK_S = 0.002


class LagMeter:
    """Sleeps for one tick after the other and keeps the largest delay."""

    def __init__(self) -> None:
        self._worst_s = 0.0

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due = clock() + TICK_S
            await asyncio.sleep(TICK_S)
            self._worst_s = max(self._worst_s, clock() - due)

    async def take(self, _request: Request) -> Response:
        worst, self._worst_s = self._worst_s, 0.0
        return JSONResponse({"worst_s": worst})


async def _move(_load: ExpertLoad) -> tuple[int, int]:
    return 0, 1


async def serve(port: int, grpc_port: int, folder: Path) -> None:
    source, meter = LargeAnswerSource(), LagMeter()
    batches = BatchEndpoints(new_batch_harness(folder).service())
    routes = [Route("/lag", meter.take), *batches.routes()]
    app = http_app_for(
        source, LARGE_MODEL, max_body_bytes=MAX_BODY, move_experts=_move, extra_routes=routes
    ).app()
    server = grpc.aio.server()
    add_inference(GrpcServicer(LARGE_MODEL, source), server)
    server.add_insecure_port(f"127.0.0.1:{grpc_port}")
    await server.start()
    gc.collect()
    gc.freeze()  # as an ingress does
    measuring = asyncio.create_task(meter.run())
    await uvicorn.Server(uvicorn.Config(app, "127.0.0.1", port, log_level="warning")).serve()
    measuring.cancel()
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
