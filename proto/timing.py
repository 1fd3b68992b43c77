"""Time limits whose order matters, and a monotonic clock in wall-clock time.

A caller's timeout is longer than the time limit of the answer: ``ASCENDING`` states each such
order, and ``tests/test_time_limits.py`` checks it. A limit without relation to another is a
constant of the module that uses it.
"""

import time
from collections.abc import Mapping
from types import MappingProxyType

# ---- a pipeline's stages, its supervisor and its router

STAGE_LEASE_TIMEOUT_S = 1.0  # of all stages together, if one is stopped
LEASE_CALL_TIMEOUT_S = 2.0  # the supervisor answers these next to its other work
RENEW_INTERVAL_S = 2.0
LEASE_TTL_S = 10.0
SUPERVISOR_RETRY_TIMEOUT_S = 30.0  # of calls to the supervisor that fail

SUPERVISOR_WATCH_INTERVAL_S = 1.0
# without a heartbeat of the router, or of the process that launched the application
ABANDONED_AFTER_S = 30.0
# without a router, although the application that could claim the pipeline exists
UNCLAIMED_AFTER_S = 300.0

INTERRUPT_TIMEOUT_S = 5.0  # answered at once, unless a process is only starting or hangs
FENCE_TIMEOUT_S = 60.0  # a stage that loads again may take longer: the router then fences again
# of a router; the supervisor waits for stages at most twice as long
SUPERVISOR_FENCE_TIMEOUT_S = 3 * FENCE_TIMEOUT_S
# For reloading stages: this is the timeout of a router (``ObjectStoreStageChain.fence``) and, for
# requests that a router had accepted, of an ingress. If a router and a stage die together, the next
# router does not exist before the weights are loaded.
LOAD_TIMEOUT_S = 600.0

STAGE_HEALTH_TIMEOUT_S = 3.0
KILL_TIMEOUT_S = 10.0  # of a process that hangs
# health checks take up to 3 s, and a process may have to be killed on another node
RESCUE_TIMEOUT_S = 30.0
HANG_WATCH_INTERVAL_S = 0.2
WORKER_START_TIMEOUT_S = 30.0  # a process that imports torch cannot answer
LOAD_STALL_TIMEOUT_S = 300.0  # of a loading worker that reads nothing; it may import torch first
# for an actor whose resources are reserved to get a process: at first, and after repeated attempts
ACTOR_START_TIMEOUT_S, MAX_ACTOR_START_TIMEOUT_S = 30.0, 480.0
# where others of its pipeline have loaded: to make all anew costs their weights
ACTOR_RESTART_TIMEOUT_S = 120.0
RAY_DEATH_REPORT_S = 1.6  # the time that Ray may need to report the death of an actor
CAUSE_POLLS, CAUSE_POLL_S = 60, 0.05
UNREACHABLE_TIMEOUT_S = 5.0  # a restarted stage usually replies by then; a stopped one never does

# ---- between routers and ingress replicas

KEEPALIVE_INTERVAL_S = 1.0
STREAM_IDLE_TIMEOUT_S = 2.0
# then the other machine, or the network to it, counts as lost: no error would show it
SILENCE_TIMEOUT_S = 5.0
# a router answers at once whether it accepts a request, unless its machine is lost
ACCEPT_TIMEOUT_S = 10.0
# how long other routers are preferred to a silent router, which would seem to be the least loaded
SILENT_ROUTER_TTL_S = 30.0
ROUTER_READY_TIMEOUT_S = 5.0

# a request that no router has accepted can still be refused, and may find another server
ADMISSION_TIMEOUT_S = 50.0
ADMISSION_RETRY_INTERVAL_S = 0.2  # bound of the first delay; see ``backoff_delays``
# for a version that was announced, and for an old router if only that could continue a request
NEW_VERSION_TIMEOUT_S = 120.0

# ---- Ray Serve's proxies and replicas

HEALTH_CHECK_INTERVAL_S = 1.0  # Ray Serve finds dead replicas by it, and replaces them
# three missed checks replace a replica, before ingresses give up its requests
HEALTH_CHECK_TIMEOUT_S = 10.0
# before another attempt, after an ingress that was soon lost and sent no update
ATTEMPT_PAUSES_S = (0.1, 0.5, 2.0, 10.0, 30.0)
QUICK_FAILURE_S = 5.0  # an ingress that had the request for longer was healthy until then
# an ingress that refuses after longer has retried by itself, and the next one could do no more
MAX_ATTEMPT_S = 40.0

DRAIN_POLL_INTERVAL_S = 0.1
BROADCAST_TIMEOUT_S = 5.0  # an ingress replica that does not answer is queried again
# for the remaining streams to receive their error before the server is removed
END_TIMEOUT_S = 15.0
# after a router's grace: ingresses move its requests to another router, and it stops
HAND_OVER_S = 15.0
DEFAULT_DRAIN_S = 30.0  # of ``tramontane serve``
# in which ``tramontane serve`` ends requests and removes all after its drain time: as long as that
# was, within these bounds; longer on a cluster of others, whose processes it cannot end by itself
MIN_STOP_S, MAX_STOP_S, JOINED_STOP_S = 5.0, 30.0, 120.0
RAY_STOP_S = 3.0  # of that for the end of Ray's daemons
# where pipelines are scaled and updated in place; a command that is interrupted waits less
DRAIN_S = 600.0
# for which a terminating pod finishes streams; the Service sends it no new requests
TERMINATION_GRACE_S = 120

# ---- clients, and batch jobs

CLIENT_TIMEOUT_S = 20.0  # an ingress waits five seconds for its routers
JOB_MIN_WAIT_S, JOB_MAX_WAIT_S = 0.5, 10.0  # of a client of jobs, between attempts
# since the first failure, or the last time that the server asked to retry
JOB_RETRY_TIMEOUT_S = 600.0
JOB_LEASE_S = 15.0  # of a runner
ADD_INTERVAL_S = 10.0  # of a slow submission
# a submission without progress for this time is replaced if its request is repeated
TAKEOVER_TIMEOUT_S = 30.0

_RENEWAL_S = RENEW_INTERVAL_S + LEASE_CALL_TIMEOUT_S
# Ray Serve replaces it after three checks
_DEAD_REPLICA_S = 3 * (HEALTH_CHECK_INTERVAL_S + HEALTH_CHECK_TIMEOUT_S)

# Seconds, in ascending order.
ASCENDING: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {
        "a lease outlives a renewal that is lost, and stages answer within one": (
            STAGE_LEASE_TIMEOUT_S,
            LEASE_CALL_TIMEOUT_S,
            2 * _RENEWAL_S,
            LEASE_TTL_S,
            SUPERVISOR_RETRY_TIMEOUT_S,
        ),
        "a pipeline is abandoned only after its lease, and later where another router may come": (
            SUPERVISOR_WATCH_INTERVAL_S,
            LEASE_TTL_S,
            ABANDONED_AFTER_S,
            UNCLAIMED_AFTER_S,
        ),
        "a stream is silent after several missing signs of life, and before a call is given up": (
            2 * KEEPALIVE_INTERVAL_S,
            SILENCE_TIMEOUT_S,
            ACCEPT_TIMEOUT_S,
        ),
        "a stream without requests ends before it would count as silent": (
            KEEPALIVE_INTERVAL_S,
            STREAM_IDLE_TIMEOUT_S,
            SILENCE_TIMEOUT_S,
        ),
        "a request can ask several silent routers before it is refused": (
            ADMISSION_RETRY_INTERVAL_S,
            3 * ACCEPT_TIMEOUT_S,
            ADMISSION_TIMEOUT_S,
            NEW_VERSION_TIMEOUT_S,
            LOAD_TIMEOUT_S,
        ),
        "a silent router is avoided for longer than it took to notice that it is silent": (
            SILENCE_TIMEOUT_S,
            ACCEPT_TIMEOUT_S,
            SILENT_ROUTER_TTL_S,
        ),
        "a dead replica is replaced before requests are given up": (
            _DEAD_REPLICA_S,
            ADMISSION_TIMEOUT_S,
        ),
        "another ingress is asked only if one refuses before it has tried for long by itself": (
            QUICK_FAILURE_S,
            MAX_ATTEMPT_S,
            ADMISSION_TIMEOUT_S,
        ),
        "pauses between ingresses grow, and an attempt may take longer": (
            *ATTEMPT_PAUSES_S,
            MAX_ATTEMPT_S,
        ),
        "stages are asked for less time than their router, that for less than a client waits": (
            STAGE_HEALTH_TIMEOUT_S,
            ROUTER_READY_TIMEOUT_S,
            HEALTH_CHECK_TIMEOUT_S,
            CLIENT_TIMEOUT_S,
        ),
        "a stage is interrupted before a fence ends; the router outwaits its supervisor": (
            INTERRUPT_TIMEOUT_S,
            FENCE_TIMEOUT_S,
            2 * FENCE_TIMEOUT_S,
            SUPERVISOR_FENCE_TIMEOUT_S,
        ),
        "a hung process can be checked and killed in the time of a rescue": (
            STAGE_HEALTH_TIMEOUT_S + KILL_TIMEOUT_S,
            RESCUE_TIMEOUT_S,
        ),
        "a hang is looked for many times while a process may start": (
            HANG_WATCH_INTERVAL_S,
            WORKER_START_TIMEOUT_S,
        ),
        "the cause of a death is waited for as long as Ray needs to report it": (
            RAY_DEATH_REPORT_S,
            CAUSE_POLLS * CAUSE_POLL_S,
            UNREACHABLE_TIMEOUT_S,
        ),
        "workers that do not start or load are made again before a router gives up": (
            ACTOR_START_TIMEOUT_S,
            ACTOR_RESTART_TIMEOUT_S,
            LOAD_STALL_TIMEOUT_S,
            MAX_ACTOR_START_TIMEOUT_S,
            LOAD_TIMEOUT_S,
        ),
        "a drained server ends within the grace of a pod, or in the longer time of an update": (
            DRAIN_POLL_INTERVAL_S,
            BROADCAST_TIMEOUT_S,
            END_TIMEOUT_S,
            DEFAULT_DRAIN_S + HAND_OVER_S + END_TIMEOUT_S,
            TERMINATION_GRACE_S,
            DRAIN_S,
        ),
        "a server that stops has time to end its requests": (
            RAY_STOP_S,
            MIN_STOP_S,
            END_TIMEOUT_S,
            MAX_STOP_S,
            JOINED_STOP_S,
        ),
        "lines are added long before a submission counts as dead": (
            2 * ADD_INTERVAL_S,
            TAKEOVER_TIMEOUT_S,
        ),
        "a runner's lease is renewed while a router that has gone silent is noticed": (
            SILENCE_TIMEOUT_S,
            JOB_LEASE_S,
            TAKEOVER_TIMEOUT_S,
        ),
        "a client of batch jobs makes many attempts": (
            JOB_MIN_WAIT_S,
            JOB_MAX_WAIT_S,
            CLIENT_TIMEOUT_S,
            JOB_RETRY_TIMEOUT_S,
        ),
    }
)

# ---- the clock

# Computed once, when the process first imports this module. The wall clock may be set at any time,
# by an hour too: it is read only here where times are compared. Differences within a process are
# exact, as they come from the monotonic clock; between processes they are as accurate as their wall
# clocks agreed at the start. A process that starts later on a machine whose clock was set has
# another offset, so times of two processes are for display, and code that decides by their
# differences clips them.
_OFFSET_S = time.time() - time.monotonic()


def steady_time() -> float:
    """Return the seconds since 1970, by the wall clock at the start of the process: it never goes
    back, regardless of changes to the machine's clock.
    """
    return _OFFSET_S + time.monotonic()
