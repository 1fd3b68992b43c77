"""Settings of Ray and Ray Serve. Imports no Ray, for the commands that only write the settings to
files.
"""

from types import MappingProxyType

# bytes from a client; Ray Serve forwards it in its own messages, of up to 4 MiB
MAX_GRPC_MESSAGE = 4 * 2**20 - 2**16
# Ray Serve on fewer threads, over gRPC, and with a controller that runs its loop less often than
# ten times a second: about 1.25 times the streamed tokens on two cores. The proxy ignores Ray
# Serve's headers if clients send them. A proxy whose start takes longer than Ray Serve's 5 s, on a
# busy node, would be replaced, and the start of Ray Serve refused.
SERVE_SETTINGS = {
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_PROXY_USE_GRPC": "1",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
    # otherwise a hanging router would keep its pipeline
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(MAX_GRPC_MESSAGE),
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": (
        "tramontane.cluster.serve_patches.proxy:proxy_middlewares"
    ),
    # what a router waits for is renewed in the status of its deployment (and of the RayService)
    "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH": (
        "tramontane.cluster.serve_patches.controller:name_waits"
    ),
    "RAY_SERVE_SLOW_STARTUP_WARNING_S": "10",
    "RAY_SERVE_SLOW_STARTUP_WARNING_PERIOD_S": "10",
}
# Of a pod, in addition.
POD_SETTINGS = MappingProxyType(
    {
        "RAY_USAGE_STATS_ENABLED": "0",  # Ray would send figures about the cluster to its makers
        # the output of the pod's first process also gets our log; see ``logging.CONTAINER_LOG``
        "TRAMONTANE_CONTAINER_LOG": "/proc/1/fd/1",
    }
)
# results of this size and above are put into the object store
INLINE_LIMIT = "max_direct_call_object_size"
RAY_SETTINGS = MappingProxyType(  # of a cluster: the head passes them to all other nodes
    {
        INLINE_LIMIT: 2**20,  # hidden states below 1 MiB are sent inline
        "timeout_ms_task_wait_for_death_info": 0,  # a dead stage is reported at once
        # Ray's figures of its own event loops. While a placement group waits for a node, the GCS
        # counts 100,000 events in a second, and the head's agent would take a core to add them up.
        "event_stats": False,
        # a dead node is reported after 2 s, one that is silent after 12; one that was late by 10 s,
        # on a busy machine, lives: see docs/decisions/0089
        "health_check_initial_delay_ms": 1000,
        "health_check_period_ms": 500,
        "health_check_timeout_ms": 2500,
        "health_check_failure_threshold": 4,
    }
)
# Of a cluster on one machine: the death of its only raylet is seen by its sockets, and one that is
# late on a busy machine must not be declared dead, which ends every process of the cluster. A
# worker that has not imported Ray after 60 s, Ray's own limit, would be replaced, again and again.
ONE_MACHINE_SETTINGS = MappingProxyType(
    {
        **RAY_SETTINGS,
        "health_check_failure_threshold": 30,
        "worker_register_timeout_seconds": 240,
    }
)

# Of Ray's Core dashboard for Grafana with our row, see ``deploy/monitoring_files.py``.
CORE_DASHBOARD_UID, CORE_DASHBOARD_TITLE = "tramontane-ray-core", "Ray Core with Tramontane"
PROMETHEUS, GRAFANA = "http://localhost:9090", "http://localhost:3000"  # Ray's own defaults


def monitoring_settings(
    prometheus: str = PROMETHEUS, grafana: str = GRAFANA, grafana_of_browsers: str = ""
) -> dict[str, str]:
    """Return the environment of a head node whose dashboard shows the stages, with addresses as
    seen from the head.

    ``grafana_of_browsers``: Grafana's address as seen from a user's browser, if different.
    """
    return {
        "RAY_PROMETHEUS_HOST": prometheus,
        "RAY_GRAFANA_HOST": grafana,
        "RAY_GRAFANA_IFRAME_HOST": grafana_of_browsers or grafana,
        "RAY_GRAFANA_DEFAULT_DASHBOARD_UID": CORE_DASHBOARD_UID,
    }
