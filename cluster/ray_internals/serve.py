"""Private parts of Ray Serve, each behind a named accessor."""

import logging
from contextvars import Context
from typing import Any

import ray

from tramontane.cluster.ray_internals import table


def serve_controller() -> Any:  # noqa: ANN401 - an actor handle
    """Return the handle of Ray Serve's controller. Raises ValueError if there is none."""
    return ray.get_actor(table.CONTROLLER_NAME.value, table.CONTROLLER_NAMESPACE.value)


def running_serve_options() -> tuple[Any, Any]:
    """Return the HTTP and the gRPC options that the cluster's Ray Serve was started with."""
    client = table.CLIENT.value()
    return client.http_config, ray.get(client._controller.get_grpc_config.remote())


def is_ha_proxy_enabled() -> bool:
    """Return whether Ray Serve's HAProxy mode is on, which opens ports on all interfaces."""
    return bool(table.IS_HA_PROXY.value)


def serve_logger() -> logging.Logger:
    """Return the logger of Ray Serve in this process."""
    return logging.getLogger(table.SERVE_LOGGER.value)


def current_request_id() -> str:
    """Return the id of the request that this task works on: a gRPC client's ``request_id``, or one that Ray Serve made."""
    return str(table.REQUEST_CONTEXT.value().request_id)


def internal_request_id() -> str:
    """Return the id by which Ray Serve finds the calls of this task's request; empty before it has a replica."""
    return str(table.REQUEST_CONTEXT.value()._internal_request_id)


def bind_request_id(context: Context, request_id: str) -> None:
    """Let calls that are made in ``context`` belong to this request in logs of other replicas."""
    context.run(table.CURRENT_CONTEXT.value.set, table.MAKE_CONTEXT.value(request_id=request_id))


def in_flight_calls(internal_id: str) -> tuple[Any, ...]:
    """Return the calls of a request, by its internal id, that have not ended; each has ``cancel``."""
    return tuple(table.IN_FLIGHT.value(internal_id).values())


def is_tracing_enabled() -> bool:
    """Return whether Ray Serve makes spans in this process."""
    return bool(table.IS_TRACING.value())


def bind_trace(context: Context) -> None:
    """Let calls that are made in ``context`` belong to the trace of the current request, if there is one."""
    if is_tracing_enabled() and (trace := table.TRACE_CONTEXT.value()) is not None:
        context.run(table.SET_TRACE_CONTEXT.value, trace)


def set_proxy_tracing(exporter_path: str, sampling_ratio: float) -> None:
    """Set the exporter and the ratio that a proxy sets its tracing up with, in place of its environment variables."""
    table.TRACING_EXPORTER.replace(exporter_path)
    table.TRACING_RATIO.replace(sampling_ratio)


def connect_handle(handle: Any) -> None:  # noqa: ANN401 - DeploymentHandle, whose types lack this
    """Connect a deployment handle from a process that is no replica, unless it is connected.

    Its router has a loop of its own there, whatever ``ray_settings.SERVE_SETTINGS`` says of replicas.
    """
    if not handle.is_initialized:  # Ray Serve returns the same handle again
        handle._init(_run_router_in_separate_loop=True)


async def broadcast_results(response: Any) -> list[Any]:  # noqa: ANN401 - DeploymentBroadcastResponse
    """Return one pending result per replica, with ``get_async`` and ``cancel``; ``results_async`` would fail if any does."""
    results: list[Any] = await response._fetch_replica_results_async()
    return results


def is_streaming(streaming_type: Any) -> bool:  # noqa: ANN401 - gRPCStreamingType
    """Return whether a gRPC method of this type answers with a stream."""
    kinds = table.GRPC_STREAMING_TYPE.value
    return streaming_type in (kinds.UNARY_STREAM, kinds.STREAM_STREAM)
