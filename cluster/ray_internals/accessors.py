"""Private parts of Ray and Ray Serve, each behind a named accessor. Importing this module does not
import Ray.
"""

import asyncio
import json
import logging
import warnings
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import Context
from typing import TYPE_CHECKING, Any

from tramontane.cluster.ray_internals import table

if TYPE_CHECKING:
    import grpc
    from ray.actor import ActorHandle
    from ray.serve.handle import DeploymentHandle

NODE_TYPE_LABEL = "ray.io/node-group"


def kv_get(key: str) -> bytes | None:
    """Read from the cluster's key-value store; None if the key does not exist."""
    value: bytes | None = table.KV_GET.value(key)
    return value


def kv_put(key: str, value: bytes, *, overwrite: bool = True) -> None:
    """Write to the cluster's key-value store; with ``overwrite=False`` an existing value stays."""
    table.KV_PUT.value(key, value, overwrite=overwrite)


def kv_delete(key: str) -> None:
    """Remove a key from the cluster's key-value store, if it is there."""
    table.KV_DELETE.value(key)


def cluster_settings() -> dict[str, Any]:
    """Return the settings of ``--system-config`` of the head node."""
    settings: dict[str, Any] = table.GLOBAL_STATE.value.get_system_config()
    return settings


def actor_state(actor: "ActorHandle[Any]") -> dict[str, Any]:
    """Return the entry of an actor in Ray's table: ``State``, ``Pid`` and ``Address``; empty if it
    is unknown.
    """
    state: dict[str, Any] = table.ACTORS.value(actor._actor_id.hex())
    return state


def free_resources() -> dict[str, dict[str, float]]:
    """Return the free resources of each living node, by Ray's id of the node."""
    free: dict[str, dict[str, float]] = table.GLOBAL_STATE.value.available_resources_per_node()
    return free


def living_actors() -> list[Any]:
    """Return Ray's rows of the living actors, also of other namespaces; ``required_resources`` are
    the resources that one holds.
    """
    rows = table.GLOBAL_STATE.value._connect_and_get_accessor().get_actor_table(None, "ALIVE")
    return [table.ACTOR_ROW.value.FromString(row) for row in rows]


def end_of_last_process(actor_id: str) -> str | None:
    """Describe how the process of an actor ended before it got its present one, in the first line
    of Ray's words; "" if Ray does not know, None if the actor has its first process.
    """
    import ray

    state = table.GLOBAL_STATE.value._connect_and_get_accessor()
    row = state.get_actor_info(table.ACTOR_ID.value(bytes.fromhex(actor_id)))
    before = table.ACTOR_ROW.value.FromString(row or b"").previous_incarnations
    if not before:
        return None
    worker = state.get_worker_info(table.WORKER_ID.value(before[-1].worker_id))
    words: str = table.WORKER_ROW.value.FromString(worker or b"").exit_detail
    if not words:  # no worker exit is recorded for a node that died
        nodes = {each["NodeID"]: each for each in ray.nodes()}  # type: ignore[no-untyped-call]
        node = nodes.get(before[-1].node_id.hex())
        if node is not None and not node["Alive"]:
            words = f"its node {node['NodeManagerAddress']} died: {node['DeathReasonMessage']}"
    return words.strip().partition("\n")[0]


def has_autoscaler() -> bool:
    """Return whether Ray's autoscaler may add nodes to the cluster that this process has joined.

    Every head node has a monitor. With an autoscaler it reports node types by the names of a
    configuration; without one ``node_`` and the id of the node. The autoscaler's version 2 does not
    report types: there the type is a label of the node.
    """
    if table.IS_AUTOSCALER_2.value(fetch_from_server=True):
        import ray

        return any(NODE_TYPE_LABEL in node["Labels"] for node in ray.nodes() if node["Alive"])  # type: ignore[no-untyped-call]
    status = json.loads(kv_get(table.AUTOSCALER_STATUS.value) or b"{}")
    types: dict[str, str] = (status.get("autoscaler_report") or {}).get("node_type_mapping") or {}
    return any(name != table.TYPE_WITHOUT_AUTOSCALER.value(node) for node, name in types.items())


def grafana_dashboards() -> dict[str, dict[str, Any]]:
    """Return the dashboards that Ray generates for Grafana, by name; ``core`` is the default
    dashboard in Ray's code.
    """
    symbols = {
        "core": table.CORE_DASHBOARD,
        "serve": table.SERVE_DASHBOARD,
        "serve_deployment": table.DEPLOYMENT_DASHBOARD,
        "serve_llm": table.LLM_DASHBOARD,
        "data": table.DATA_DASHBOARD,
        "train": table.TRAIN_DASHBOARD,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # Ray leaves the file of a dashboard open
        return {name: json.loads(symbol.value()[0]) for name, symbol in symbols.items()}


def mute_worker_logs() -> AbstractContextManager[None]:
    """Keep Ray from printing errors of the cluster's processes to our standard output while the
    block runs.

    Ray also prints errors that it recovers from by itself.
    """
    return table.WORKER_LOGS.replaced(False)


def keep_sigterm_handler() -> AbstractContextManager[None]:
    """Keep Ray from handling SIGTERM while the block runs: it would end the process before the
    clean-up.
    """
    return table.SET_SIGTERM_HANDLER.replaced(lambda sigterm_handler: None)


def set_process_title(title: str) -> None:
    """Set the title under which the system and Ray's dashboard show this process."""
    table.SET_PROCESS_TITLE.value(title)


def json_formatter(fields: tuple[str, ...]) -> logging.Formatter:
    """Create the formatter of Ray Serve's JSON logs, with these attributes of a record in addition
    to Ray's.
    """
    formatter = table.JSON_FORMATTER.value()
    formatter.set_additional_log_standard_attrs(list(fields))
    return formatter  # type: ignore[no-any-return]


def import_attribute(path: str) -> Any:  # any object
    """Import ``module:name`` or ``module.name`` as Ray does. Raises ImportError, AttributeError or
    ValueError.
    """
    return table.IMPORT_ATTRIBUTE.value(path)


def resolve_cluster_address(address: str) -> str | None:
    """Return host:port for ``auto`` or host:port. Raises ConnectionError or ValueError."""
    resolved: str | None = table.RESOLVE_ADDRESS.value(address)
    return resolved


@contextmanager
def head_channel(address: str) -> "Iterator[grpc.Channel]":
    """Open a gRPC channel to the head process at host:port."""
    with table.OPEN_CHANNEL.value(address) as channel:
        yield channel


def ping_head(
    channel: "grpc.Channel", timeout_s: float, metadata: tuple[tuple[str, str], ...]
) -> None:
    """Ask a head process whether it is alive, as Ray's nodes do. Raises grpc.RpcError, or Ray's
    AuthenticationError.
    """
    table.HEAD_SERVICE.value(channel).CheckAlive(
        table.CHECK_ALIVE.value(), timeout=timeout_s, metadata=metadata
    )


def stored_token_headers() -> tuple[tuple[str, str], ...]:
    """Return the headers with the token that Ray finds in the environment or the user's home,
    regardless of RAY_AUTH_MODE.
    """
    loader = table.TOKEN_LOADER.value.instance()
    if not loader.has_token(ignore_auth_mode=True):
        return ()
    return tuple(loader.get_token_for_http_header(ignore_auth_mode=True).items())


def serve_controller() -> Any:  # an actor handle
    """Return the handle of Ray Serve's controller. Raises ValueError if it does not exist."""
    import ray

    return ray.get_actor(table.CONTROLLER_NAME.value, table.CONTROLLER_NAMESPACE.value)


def running_serve_options() -> tuple[Any, Any]:
    """Return the HTTP and the gRPC options that the cluster's Ray Serve was started with."""
    import ray

    client = table.CLIENT.value()
    return client.http_config, ray.get(client._controller.get_grpc_config.remote())


def is_ha_proxy_enabled() -> bool:
    """Return whether Ray Serve's HAProxy mode is on, which opens ports on all interfaces."""
    return bool(table.IS_HA_PROXY.value)


def serve_logger() -> logging.Logger:
    """Return the logger of Ray Serve in this process."""
    return logging.getLogger(table.SERVE_LOGGER.value)


def current_request_id() -> str:
    """Return the id of the request that this task works on: a gRPC client's ``request_id``, or one
    that Ray Serve made.
    """
    return str(table.REQUEST_CONTEXT.value().request_id)


def internal_request_id() -> str:
    """Return the id by which Ray Serve finds the calls of this task's request; empty before it has
    a replica.
    """
    return str(table.REQUEST_CONTEXT.value()._internal_request_id)


def bind_request_id(context: Context, request_id: str) -> None:
    """Assign calls that are made in ``context`` to this request, for logs of other replicas."""
    context.run(table.CURRENT_CONTEXT.value.set, table.MAKE_CONTEXT.value(request_id=request_id))


def cancel_calls(internal_id: str) -> None:
    """Cancel the calls of a request, by its internal id, that have not ended, in any state of the
    proxy.

    Ray Serve itself cancels the call of a client that disconnects only if the proxy waits for the
    replica at that moment. It forgets the call if the proxy is writing to the client, or has just
    made the call: the replica then works for no client, and its output stays in gRPC's buffers, in
    pieces of 64 KiB, until the proxy ends.
    """
    if internal_id:
        for call in tuple(table.IN_FLIGHT.value(internal_id).values()):
            call.cancel()


def is_tracing_enabled() -> bool:
    """Return whether Ray Serve makes spans in this process."""
    return bool(table.IS_TRACING.value())


def bind_trace(context: Context) -> None:
    """Assign calls that are made in ``context`` to the trace of the current request, if there is
    one.
    """
    if is_tracing_enabled() and (trace := table.TRACE_CONTEXT.value()) is not None:
        context.run(table.SET_TRACE_CONTEXT.value, trace)


def set_proxy_tracing(exporter_path: str, sampling_ratio: float) -> None:
    """Set the exporter and the ratio of a proxy's tracing, in place of its environment
    variables.
    """
    table.TRACING_EXPORTER.replace(exporter_path)
    table.TRACING_RATIO.replace(sampling_ratio)


def configure_handle(
    handle: "DeploymentHandle[Any]", *, by_reference: bool, **options: Any
) -> "DeploymentHandle[Any]":
    """Return the handle with public options of Ray Serve, for calls that use Ray objects, or gRPC
    between replicas.

    Answers are plain values; cloudpickle, Ray Serve's default, makes a pickler in Python for each
    of them.
    """
    return handle.options(_by_reference=by_reference, response_serialization="pickle", **options)


def connect_handle(handle: Any) -> None:  # DeploymentHandle, whose types lack this
    """Connect a deployment handle from a process that is not a replica, unless it is connected.

    There its router has its own event loop, regardless of ``ray_settings.SERVE_SETTINGS`` for
    replicas.
    """
    if not handle.is_initialized:  # Ray Serve returns the same handle again
        handle._init(_run_router_in_separate_loop=True)


async def broadcast_results(response: Any) -> list[Any]:  # DeploymentBroadcastResponse
    """Return one pending result per replica, with ``get_async`` and ``cancel``; ``results_async``
    would fail if any does.
    """
    results: list[Any] = await response._fetch_replica_results_async()
    return results


def replace_response_queues(on_new: Callable[[Callable[[], int]], object]) -> None:
    """Replace Ray Serve's response queues in this process by queues that do not create a task for
    each message.

    ``on_new`` is called for each queue with a function that returns its length. Ray Serve waits for
    a task that waits for a message, and for the call. Here the end of the call is a message, too.
    """
    queue: Any = table.MESSAGE_QUEUE.value

    class ResponseQueue(queue):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            on_new(self._message_queue.__len__)

        async def fetch_messages_from_queue(
            self, call_fut: "asyncio.Future[Any]"
        ) -> AsyncGenerator[list[Any], None]:
            """Yield the messages in the queue until the call that fills it has ended; raise the
            call's error.
            """
            call_fut.add_done_callback(lambda _: self._new_message_event.set())
            try:
                is_done = False
                while not is_done:
                    await self._new_message_event.wait()
                    is_done = call_fut.done()
                    if messages := self.get_messages_nowait():
                        yield messages
                if (error := call_fut.exception()) is not None:
                    raise error from None
            finally:
                call_fut.cancel()

    table.MESSAGE_QUEUE.replace(ResponseQueue)


def replace_response_generators() -> None:
    """Replace the reader of responses in a proxy by one that does not create a task for each
    message.

    To be called before the proxy takes requests. Ray Serve waits for a task that reads and one that
    ends when the client disconnects. Here the latter cancels the call, which ends its reader. The
    first message is awaited as Ray Serve does: a call that is assigned to a replica in the same
    event loop iteration in which its client disconnects could not be cancelled.
    """
    from ray.serve.exceptions import RequestCancelledError

    generator: Any = table.RESPONSE_GENERATOR.value
    if generator.__module__ == __name__:  # it has been replaced in this process
        return

    class ResponseGenerator(generator):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.has_begun = False
            if self._disconnected_task is not None:
                self._disconnected_task.add_done_callback(self.cancel_call)

        def cancel_call(self, _: object) -> None:
            if self._disconnected_task is not None:  # else the response is complete
                self._response.cancel()

        async def _get_next_streaming_result(self) -> Any:
            try:
                if self.has_begun and self._timeout_s is None:
                    return await self._await_response_anext()
                message = await super()._get_next_streaming_result()
            except RequestCancelledError:
                if not self._response.cancelled():  # it is the replica's own error
                    raise
                raise asyncio.CancelledError from None
            self.has_begun = True
            return message

    table.RESPONSE_GENERATOR.replace(ResponseGenerator)


def is_streaming(streaming_type: Any) -> bool:  # gRPCStreamingType
    """Return whether a gRPC method of this type answers with a stream."""
    kinds = table.GRPC_STREAMING_TYPE.value
    return streaming_type in (kinds.UNARY_STREAM, kinds.STREAM_STREAM)
