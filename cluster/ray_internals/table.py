"""The private names of Ray and Ray Serve that Tramontane uses: why each is needed, and what breaks
without it.

No other package imports them (``tests/test_walls.py``), and every row is used
(``tests/cluster/ray_internals``).
"""

from tramontane.cluster.ray_internals.symbol import RAY_VERSION, PrivateSymbol, describe_changes
from tramontane.proto.errors import ConfigError


def assert_supported(*tables: tuple[PrivateSymbol, ...]) -> None:
    """Raise ConfigError, in one line that names every change, unless this version of Ray has all
    symbols of ``tables``.

    To be called before Ray is started or joined, and in Ray Serve's proxies.
    """
    if changes := [change for table in tables for symbol in table if (change := symbol.change())]:
        raise ConfigError(describe_changes(changes))


_ray: list[PrivateSymbol] = []
_join: list[PrivateSymbol] = []
_serve: list[PrivateSymbol] = []
_monitoring: list[PrivateSymbol] = []


def _add(
    table: list[PrivateSymbol], module: str, *names: str, needed_for: str, breaks: str
) -> tuple[PrivateSymbol, ...]:
    """Add one symbol per name; ``put(key, value)`` is the name ``put`` with the parameters that we
    pass.

    Returns the symbols in the module itself. ``Queue.length`` is an attribute of objects that Ray
    hands out.
    """
    symbols = []
    for each in names:
        name, _, parameters = each.rstrip(")").partition("(")
        passed = tuple(parameters.split(", ")) if parameters else ()
        symbols.append(PrivateSymbol(f"{module}:{name}", passed, RAY_VERSION, needed_for, breaks))
    table += symbols
    return tuple(symbol for symbol in symbols if not symbol.is_attribute)


KV_GET, KV_PUT, KV_DELETE = _add(
    _ray,
    "ray.experimental.internal_kv",
    *("_internal_kv_get(key)", "_internal_kv_put(key, value, overwrite)", "_internal_kv_del(key)"),
    needed_for=(
        "state that outlives actors: deployments, drained applications, expert plans, load"
        " attempts, speeds of GPUs"
    ),
    breaks="rolling updates, draining, moved experts and the limit of load attempts",
)
(ACTORS,) = _add(
    _ray,
    "ray._private.state",
    "actors(actor_id)",
    needed_for="the process id and the node of an actor that does not answer",
    breaks="the replacement of hung stages",
)
_add(
    _ray,
    "ray.actor",
    "ActorHandle._actor_id",
    needed_for="the key under which Ray's table of actors has an actor",
    breaks="the replacement of hung stages",
)
(GLOBAL_STATE,) = _add(
    _ray,
    "ray._private.state",
    "state",
    needed_for="the settings with which the head node was started",
    breaks="the count of hidden states by transport",
)
_holders = {
    "needed_for": "who holds the resources that a pipeline lacks",
    "breaks": "errors of clusters that are full",
}
_add(
    _ray,
    "ray._private.state",
    "GlobalState._connect_and_get_accessor",
    "GlobalState.available_resources_per_node",
    **_holders,
)
_add(_ray, "ray._raylet", "GlobalStateAccessor.get_actor_table", **_holders)
(ACTOR_ROW,) = _add(_ray, "ray.core.generated.gcs_pb2", "ActorTableData", **_holders)
_ends = {
    "needed_for": "how the process of an actor ended that has a new one",
    "breaks": "the reason for which a stage has a new process, in its log",
}
_add(
    _ray,
    "ray._raylet",
    *("GlobalStateAccessor.get_actor_info", "GlobalStateAccessor.get_worker_info"),
    **_ends,
)
ACTOR_ID, WORKER_ID = _add(_ray, "ray._raylet", "ActorID", "WorkerID", **_ends)
(WORKER_ROW,) = _add(_ray, "ray.core.generated.gcs_pb2", "WorkerTableData", **_ends)
(WORKER_LOGS,) = _add(
    _ray,
    "ray._private.worker",
    "_worker_logs_enabled",
    needed_for="commands whose standard output has only their own lines",
    breaks=(
        "the output of commands, between whose lines Ray would print errors of the whole cluster"
    ),
)
(RAY_CLUSTERS_POSSIBLE,) = _add(
    _ray,
    "ray._private.ray_constants",
    "ENABLE_RAY_CLUSTER",
    needed_for="a local cluster that listens on 127.0.0.1 only",
    breaks="the protection of a local cluster's ports, which would be open on all interfaces",
)
(SET_SIGTERM_HANDLER,) = _add(
    _ray,
    "ray._private.utils",
    "set_sigterm_handler(sigterm_handler)",
    needed_for="our own handling of SIGTERM",
    breaks="the removal of pipelines when a command gets SIGTERM",
)
(START_DAEMON,) = _add(
    _ray,
    "ray._private.services",
    "ConsolePopen",
    needed_for=(
        "Ray's daemons in process groups of their own, which a signal to the group of the command"
        " does not reach"
    ),
    breaks="draining when timeout, systemd or a terminal ends serve, because Ray ends first",
)
_daemons = {
    "needed_for": "the death of a daemon of the cluster that this process has started",
    "breaks": "the end of a server whose raylet has died, which would run on without an answer",
}
(LOCAL_NODE,) = _add(_ray, "ray._private.worker", "_global_node", **_daemons)
_add(_ray, "ray._private.node", "Node.dead_processes", **_daemons)
_slow_start = {
    "needed_for": "a local cluster that starts slowly on a machine with other work",
    "breaks": "the start of a local cluster there, which Ray gives up after 15 or 30 s",
}
_add(_ray, "ray._raylet", "InnerGcsClient.check_alive", **_slow_start)
_add(
    _ray,
    "ray._private.node",
    "Node.__init__(ray_params)",
    "Node.start_ray_processes",
    "Node.kill_all_processes(check_alive)",
    "Node._node_id",
    "Node._ray_params",
    "Node._session_dir",
    **_slow_start,
)
PERSIST_PORT, LISTEN_PORT = _add(
    _ray, "ray._raylet", "persist_port", "DASHBOARD_AGENT_LISTEN_PORT_NAME", **_slow_start
)
_add(
    _ray,
    "ray._private.parameter",
    "RayParams.metrics_agent_port",
    "RayParams.dashboard_agent_listen_port",
    "RayParams.metrics_export_port",
    "RayParams.runtime_env_agent_port",
    **_slow_start,
)
_no_dashboard = {
    "needed_for": "a local cluster without the daemons of a dashboard that is not wanted",
    "breaks": "the start of a local cluster, which would take two seconds longer",
}
(NODE,) = _add(_ray, "ray._private.node", "Node", "Node.get_gcs_client", **_no_dashboard)
DASHBOARD_KEY, DASHBOARD_KEYS = _add(
    _ray,
    "ray._private.ray_constants",
    "DASHBOARD_ADDRESS",
    "KV_NAMESPACE_DASHBOARD",
    **_no_dashboard,
)
(DASHBOARD_PACKAGES,) = _add(
    _ray,
    "ray._private.utils",
    "get_dashboard_dependency_error",
    needed_for=(
        "a start of Ray that does not import the dashboard's packages into the command to see"
        " whether they are there"
    ),
    breaks="the start of a local cluster, which would take half a second longer",
)
(SET_PROCESS_TITLE,) = _add(
    _ray,
    "ray._raylet",
    "setproctitle",
    needed_for="a process title without API keys",
    breaks="the protection of keys on a command line, which Ray's dashboard would show",
)
(JSON_FORMATTER,) = _add(
    _ray,
    "ray._common.formatters",
    "JSONFormatter",
    needed_for="JSON logs of actors and commands with the fields that Ray Serve's logs have",
    breaks="--log-format json",
)
(IMPORT_ATTRIBUTE,) = _add(
    _ray,
    "ray._common.utils",
    "import_attr(full_path)",
    needed_for="checking --tracing-exporter as Ray Serve will read it",
    breaks="tracing",
)

(RESOLVE_ADDRESS,) = _add(
    _join,
    "ray._private.services",
    "canonicalize_bootstrap_address(addr)",
    needed_for="host:port of --address auto",
    breaks="--address",
)
(OPEN_CHANNEL,) = _add(
    _join,
    "ray._private.gcs_utils",
    "create_gcs_channel(address)",
    needed_for="a quick check that a Ray cluster answers at --address",
    breaks="--address",
)
_head_check = {"needed_for": OPEN_CHANNEL.needed_for, "breaks": OPEN_CHANNEL.breaks}
(CHECK_ALIVE,) = _add(
    _join, "ray.core.generated.gcs_service_pb2", "CheckAliveRequest", **_head_check
)
(HEAD_SERVICE,) = _add(
    _join,
    "ray.core.generated.gcs_service_pb2_grpc",
    "NodeInfoGcsServiceStub(channel)",
    **_head_check,
)
(TOKEN_LOADER,) = _add(
    _join,
    "ray._raylet",
    "AuthenticationTokenLoader",
    needed_for="the token that ray.init shows to the cluster at --address auto",
    breaks="--address auto where the cluster asks for a token",
)
_autoscaler = {
    "needed_for": "whether Ray's autoscaler may add nodes to a cluster that is too small",
    "breaks": "waiting for nodes that an autoscaler adds",
}
(AUTOSCALER_STATUS,) = _add(
    _join, "ray._private.ray_constants", "DEBUG_AUTOSCALING_STATUS", **_autoscaler
)
(TYPE_WITHOUT_AUTOSCALER,) = _add(
    _join, "ray.autoscaler._private.util", "format_readonly_node_type(node_id)", **_autoscaler
)
(IS_AUTOSCALER_2,) = _add(
    _join, "ray.autoscaler.v2.utils", "is_autoscaler_v2(fetch_from_server)", **_autoscaler
)

MESSAGE_QUEUE, ADD_PORT = _add(
    _serve,
    "ray.serve._private.replica",
    *("MessageQueue", "MessageQueue._message_queue", "add_port_to_grpc_server(server, address)"),
    *("MessageQueue._new_message_event", "MessageQueue.get_messages_nowait"),
    "MessageQueue.fetch_messages_from_queue(call_fut)",
    needed_for=(
        "the length of a replica's response queue, what an event costs, and the address of its"
        " internal port"
    ),
    breaks=(
        "streams, the bound on what slow clients leave unread, and the protection of the internal"
        " port"
    ),
)
_events = {"needed_for": "what an event costs in a proxy", "breaks": "streams through proxies"}
(RESPONSE_GENERATOR,) = _add(
    _serve,
    "ray.serve._private.proxy",
    *("ProxyResponseGenerator", "ProxyResponseGenerator._get_next_streaming_result"),
    *("ProxyResponseGenerator._await_response_anext", "ProxyResponseGenerator._response"),
    **_events,
)
_add(
    _serve,
    "ray.serve._private.proxy_response_generator",
    *("_ProxyResponseGeneratorBase._timeout_s", "_ProxyResponseGeneratorBase._disconnected_task"),
    **_events,
)
(ADD_GRPC_ADDRESS,) = _add(
    _serve,
    "ray.serve._private.default_impl",
    "add_grpc_address(grpc_server, server_address)",
    needed_for="gRPC on the host that HTTP listens on",
    breaks="the protection of the gRPC port, which would be open on all interfaces",
)
_add(
    _serve,
    "ray.serve._private.grpc_util",
    "gRPCGenericServer.service_handler_factory",
    needed_for="checks around every gRPC handler of the proxy",
    breaks="the end of gRPC calls whose clients have left",
)
(GRPC_STREAMING_TYPE,) = _add(
    _serve,
    "ray.serve._private.proxy_request_response",
    "gRPCStreamingType",
    needed_for="which gRPC methods answer with a stream",
    breaks="the end of gRPC calls whose clients have left",
)
CONTROLLER_NAME, CONTROLLER_NAMESPACE, SERVE_LOGGER, IS_HA_PROXY = _add(
    _serve,
    "ray.serve._private.constants",
    *("SERVE_CONTROLLER_NAME", "SERVE_NAMESPACE", "SERVE_LOGGER_NAME", "RAY_SERVE_ENABLE_HA_PROXY"),
    needed_for="Ray Serve's controller, its log, and whether HAProxy opens ports on all interfaces",
    breaks="gRPC, logs of replicas and the check of --host",
)
_add(
    _serve,
    "ray.serve._private.controller",
    *(
        "ServeController.get_http_config",
        "ServeController.get_grpc_config",
        "ServeController.get_tracing_config",
    ),
    needed_for="the addresses and the tracing that a running Ray Serve was started with",
    breaks="gRPC, tracing and serving on a cluster that has Ray Serve already",
)
(GRPC_SERVER_OPTIONS,) = _add(
    _serve,
    "ray.serve._private.constants",
    "DEFAULT_GRPC_SERVER_OPTIONS",
    needed_for="pings on silent gRPC connections",
    breaks="gRPC streams that wait behind a balancer that closes silent connections",
)
(DEPLOYMENT_STATUS,) = _add(
    _serve,
    "ray.serve._private.common",
    *("DeploymentStatusInfo", "DeploymentStatusInfo.update_message(message)"),
    needed_for="what starting routers wait for, in the status of their deployment",
    breaks="the status of a RayService that waits, which would blame a slow constructor",
)
TRACING_EXPORTER, TRACING_RATIO, TRACE_CONTEXT, SET_TRACE_CONTEXT, IS_TRACING, FILE_EXPORTER = _add(
    _serve,
    "ray.serve._private.tracing_utils",
    *(
        "RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH",
        "RAY_SERVE_TRACING_SAMPLING_RATIO",
        "get_trace_context",
    ),
    *("set_trace_context(trace_context)", "is_tracing_enabled", "default_tracing_exporter"),
    needed_for="spans of proxies, and of calls that belong to no request of Ray Serve's",
    breaks="tracing",
)
CLIENT, REQUEST_CONTEXT, MAKE_CONTEXT, CURRENT_CONTEXT, IN_FLIGHT = _add(
    _serve,
    "ray.serve.context",
    *(
        "_get_global_client",
        "_get_serve_request_context",
        "_RequestContext(request_id)",
        "_RequestContext._internal_request_id",
    ),
    *("_serve_request_context", "_get_in_flight_requests(parent_request_id)"),
    needed_for="request ids in logs, and cancelling the calls of a client that has left",
    breaks="request ids in logs, and the end of calls whose clients have left",
)
_add(
    _serve,
    "ray.serve._private.client",
    "ServeControllerClient._controller",
    needed_for="the gRPC options of a running Ray Serve",
    breaks="serving on a cluster that has Ray Serve already",
)
_add(
    _serve,
    "ray.serve.handle",
    *("DeploymentHandle._init", "DeploymentHandle.options(_by_reference)"),
    "DeploymentBroadcastResponse._fetch_replica_results_async",
    needed_for="calls between replicas over gRPC, and one response per replica of a broadcast",
    breaks="draining, /health and the way of requests to routers",
)
_add(
    _serve,
    "ray.serve._private.handle_options",
    "InitHandleOptions._run_router_in_separate_loop",
    needed_for="calls to deployments from commands",
    breaks="draining when serve stops",
)
_add(
    _serve,
    "ray.serve._private.replica_result",
    *("ReplicaResult.get_async", "ReplicaResult.cancel"),
    needed_for="one replica's response to a broadcast",
    breaks="/health, /activity and /experts",
)
_add(
    _serve,
    "ray.serve._private.common",
    *("RequestMetadata.session_id", "RequestMetadata.internal_request_id"),
    needed_for="choosing the router of a call",
    breaks="the distribution of requests over pipelines",
)

(
    CORE_DASHBOARD,
    SERVE_DASHBOARD,
    DEPLOYMENT_DASHBOARD,
    LLM_DASHBOARD,
    DATA_DASHBOARD,
    TRAIN_DASHBOARD,
) = _add(
    _monitoring,
    "ray.dashboard.modules.metrics.grafana_dashboard_factory",
    *(
        "generate_default_grafana_dashboard",
        "generate_serve_grafana_dashboard",
        "generate_serve_deployment_grafana_dashboard",
    ),
    *(
        "generate_serve_llm_grafana_dashboard",
        "generate_data_grafana_dashboard",
        "generate_train_grafana_dashboard",
    ),
    needed_for=(
        "Grafana dashboards whose panels Ray's dashboard shows, the first of them with our row"
    ),
    breaks="tramontane monitoring",
)

RAY_SYMBOLS = tuple(_ray)  # wherever Ray is
JOIN_SYMBOLS = tuple(_join)  # where a running cluster is joined; they bring gRPC
SERVE_SYMBOLS = tuple(_serve)
MONITORING_SYMBOLS = tuple(_monitoring)  # where Grafana's dashboards are written
