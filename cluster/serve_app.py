"""The Ray Serve application: Ingress (any number) -> Router (one per pipeline)."""

import asyncio
import os
from pathlib import Path
from typing import Any

import psutil
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from tramontane.cluster.config import EngineConfig
from tramontane.cluster.http_door import HttpDoor
from tramontane.cluster.router_replica import RouterReplica
from tramontane.cluster.serve_ports import keep_internal_port_on_node_address
from tramontane.cluster.token_channel import LeastLoaded, RemoteRouters
from tramontane.proto.errors import CheckpointError
from tramontane.proto.model_args import ModelArgs
from tramontane.router.completions import ServedModel
from tramontane.router.tokenizer import FILE_NAME, Tokenizer

APPLICATION = "tramontane"
UNBOUNDED = 1_000_000  # our own bounds are reached first, and answer in OpenAI's words
READY_TIMEOUT_S = 5.0
WRITES_PER_CORE, MAX_WRITES = 50, 1500  # a second, of one ingress replica; README says why


def build(args: dict[str, Any]) -> Application:
    """For ``serve deploy`` and ``serve build``: ``args`` are the keys of the configuration."""
    return application(EngineConfig.build(None, args))


def application(config: EngineConfig, launched: bool = False, owns_serve: bool = False) -> Application:
    """``launched`` and ``owns_serve`` are those of ``supervisor.Application``."""
    config = config.model_copy(update={"model": config.model.resolve()})  # replicas run in other directories
    quiet = {"log_level": "WARNING", "enable_access_log": False}
    router = serve.deployment(
        name="Router",
        num_replicas=config.replicas,
        max_constructor_retry_count=1,  # what keeps a pipeline from loading is reported, not tried again
        max_ongoing_requests=UNBOUNDED,
        ray_actor_options={"num_cpus": 0},
        request_router_config=RequestRouterConfig(request_router_class=LeastLoaded),  # type: ignore[arg-type]
        graceful_shutdown_wait_loop_s=0.5,
        logging_config=quiet,
    )(RouterReplica)
    ingress = serve.deployment(
        name="Ingress",
        num_replicas=config.ingress_replicas,
        max_ongoing_requests=UNBOUNDED,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_wait_loop_s=0.5,
        logging_config=quiet,
    )(serve.ingress()(IngressReplica))
    return ingress.bind(config, router.bind(config, launched, owns_serve))


class IngressReplica:
    """Parses, bounds, tokenizes and streams; keeps nothing between requests."""

    def __init__(self, config: EngineConfig, router: "DeploymentHandle[Any]") -> None:
        keep_internal_port_on_node_address()
        self._router = router
        self._routers = RemoteRouters(router)
        self._door = HttpDoor(
            served_model(config),
            self._routers,
            self._is_ready,
            config.max_body_bytes,
            config.stream_writes_per_s or min(WRITES_PER_CORE * (os.cpu_count() or 1), MAX_WRITES),
        )

    def __serve_build_asgi_app__(self) -> Starlette:
        return self._door.app()

    async def __del__(self) -> None:
        self._routers.close()

    async def stats(self) -> dict[str, Any]:
        """What is held at this moment."""
        return {
            "requests": self._routers.num_requests,
            "tasks": len(asyncio.all_tasks()),
            "rss": psutil.Process().memory_info().rss,
            "pid": os.getpid(),
        }

    async def _is_ready(self) -> bool:
        try:
            return bool(await asyncio.wait_for(self._router.is_ready.remote(), READY_TIMEOUT_S))
        except Exception:  # whatever keeps the router from answering
            return False


def served_model(config: EngineConfig) -> ServedModel:
    args = ModelArgs.from_folder(config.model)
    return ServedModel(
        name=config.model_name,
        tokenizer=_tokenizer(config.model, args),
        max_model_len=config.max_model_len or args.max_seq_len,
        max_sequences=config.max_num_seqs + config.max_queued_requests,
    )


def _tokenizer(folder: Path, args: ModelArgs) -> Tokenizer | None:
    if not (folder / FILE_NAME).exists():
        return None
    tokenizer = Tokenizer(folder)
    if tokenizer.vocab_size > args.vocab_size:
        raise CheckpointError(
            f"the tokenizer of {folder} has {tokenizer.vocab_size} pieces, more than the model's vocabulary of {args.vocab_size}"
        )
    return tokenizer
