"""Bounds of time fit each other: what waits for an answer waits longer than the answer may take."""

from itertools import pairwise

import pytest

from tramontane.cluster.actors import hang_detector, stage_control, supervisor, supervisor_client
from tramontane.cluster.common import node_watch
from tramontane.cluster.console import batch_client, server_client
from tramontane.cluster.deploy import k8s_overlay
from tramontane.cluster.http import failover
from tramontane.cluster.pipeline import stage_chain
from tramontane.cluster.serving import (
    app,
    draining,
    pipeline_client,
    retry_policy,
    router_queries,
    router_streams,
    server,
    token_channel,
)
from tramontane.router.batch import claims, submissions
from tramontane.router.engine import in_flight

RENEWAL_S = supervisor_client.RENEW_INTERVAL_S + supervisor_client.LEASE_CALL_TIMEOUT_S
# Ray Serve replaces it after three checks
DEAD_REPLICA_S = 3 * (app.HEALTH_CHECK_INTERVAL_S + app.HEALTH_CHECK_TIMEOUT_S)

# Seconds, in ascending order.
ASCENDING: dict[str, list[float]] = {
    "a lease outlives a renewal that is lost, and stages answer within one": [
        stage_control.LEASE_TIMEOUT_S,
        supervisor_client.LEASE_CALL_TIMEOUT_S,
        2 * RENEWAL_S,
        supervisor.LEASE_TTL_S,
        supervisor_client.RETRY_TIMEOUT_S,
    ],
    "a pipeline is abandoned only after its lease, and later where another router may come": [
        supervisor.WATCH_INTERVAL_S,
        supervisor.LEASE_TTL_S,
        supervisor.ABANDONED_AFTER_S,
        supervisor.UNCLAIMED_AFTER_S,
    ],
    "a stream of tokens is silent after several missing signs of life, and before its router is": [
        2 * token_channel.KEEPALIVE_INTERVAL_S,
        token_channel.SILENCE_TIMEOUT_S,
        pipeline_client.ACCEPT_TIMEOUT_S,
    ],
    "an ingress sends a sign of life before its stream counts as idle": [
        token_channel.KEEPALIVE_INTERVAL_S,
        token_channel.IDLE_TIMEOUT_S,
        token_channel.SILENCE_TIMEOUT_S,
    ],
    "a request can ask several silent routers before it is refused": [
        retry_policy.RETRY_INTERVAL_S,
        3 * pipeline_client.ACCEPT_TIMEOUT_S,
        retry_policy.ADMISSION_TIMEOUT_S,
        retry_policy.NEW_VERSION_TIMEOUT_S,
        stage_chain.LOAD_TIMEOUT_S,
    ],
    "a silent router is avoided for longer than it took to notice": [
        pipeline_client.ACCEPT_TIMEOUT_S,
        router_streams.SILENT_ROUTER_TTL_S,
    ],
    "a dead replica is replaced before requests are given up": [
        DEAD_REPLICA_S,
        retry_policy.ADMISSION_TIMEOUT_S,
    ],
    "another ingress is asked only if one refuses before it has tried for long by itself": [
        failover.QUICK_FAILURE_S,
        failover.MAX_ATTEMPT_S,
        retry_policy.ADMISSION_TIMEOUT_S,
    ],
    "stages are asked for less time than their router, and that for less than a client waits": [
        stage_chain.HEALTH_TIMEOUT_S,
        router_queries.READY_TIMEOUT_S,
        app.HEALTH_CHECK_TIMEOUT_S,
        server_client.TIMEOUT_S,
    ],
    "a stage is interrupted before a fence ends, and the router waits longer than its supervisor": [
        stage_control.INTERRUPT_TIMEOUT_S,
        stage_control.FENCE_TIMEOUT_S,
        2 * stage_control.FENCE_TIMEOUT_S,
        stage_chain.SUPERVISOR_TIMEOUT_S,
    ],
    "a hung process can be checked and killed in the time of a rescue": [
        stage_chain.HEALTH_TIMEOUT_S + hang_detector.KILL_TIMEOUT_S,
        stage_chain.RESCUE_TIMEOUT_S,
    ],
    "a hang is looked for more often than it can occur": [
        in_flight.WATCH_INTERVAL_S,
        hang_detector.START_TIMEOUT_S,
    ],
    "the cause of a death is waited for as long as Ray needs to report it": [
        1.6,
        stage_chain.CAUSE_POLLS * stage_chain.CAUSE_POLL_S,
        stage_chain.UNREACHABLE_TIMEOUT_S,
    ],
    "a drained server ends within the grace of a pod": [
        draining.POLL_INTERVAL_S,
        draining.BROADCAST_TIMEOUT_S,
        draining.END_TIMEOUT_S,
        server.DEFAULT_DRAIN_S + app.HAND_OVER_S + draining.END_TIMEOUT_S,
        k8s_overlay.TERMINATION_GRACE_S,
        app.DRAIN_S,
    ],
    "a dead node is announced while requests may still be sent to it": [
        node_watch.POLL_INTERVAL_S,
        node_watch.ACK_TIMEOUT_S,
        node_watch.RECENT_DEATH_S,
    ],
    "lines are added long before a submission counts as dead": [
        2 * submissions.ADD_INTERVAL_S,
        submissions.TAKEOVER_TIMEOUT_S,
    ],
    "a runner's lease is renewed while a router that has gone silent is noticed": [
        token_channel.SILENCE_TIMEOUT_S,
        claims.LEASE_S,
        submissions.TAKEOVER_TIMEOUT_S,
    ],
    "a client of batch jobs makes many attempts": [
        batch_client.MIN_WAIT_S,
        batch_client.MAX_WAIT_S,
        server_client.TIMEOUT_S,
        batch_client.RETRY_TIMEOUT_S,
    ],
}


@pytest.mark.parametrize("reason", ASCENDING)
def test_bounds_of_time_ascend(reason: str) -> None:
    bounds_s = ASCENDING[reason]
    assert bounds_s[0] > 0
    assert all(shorter < longer for shorter, longer in pairwise(bounds_s)), bounds_s
    assert bounds_s[-1] <= 600, (
        "nothing is waited for longer than for weights to load, or for a server to drain"
    )


def test_pauses_between_ingresses_grow() -> None:
    assert list(failover.PAUSES_S) == sorted(set(failover.PAUSES_S))
    assert failover.PAUSES_S[-1] < failover.MAX_ATTEMPT_S
