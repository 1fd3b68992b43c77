"""The number of ingress replicas, by the events of a machine's sequences and by its cores. Pure
arithmetic.
"""

import math
from typing import TYPE_CHECKING

from tramontane.cluster.common.load_meter import BUSY, HAS_TIME
from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.proto.plan import PipelinePlan

if TYPE_CHECKING:
    from tramontane.cluster.planning.hardware import Hardware

# time between two tokens of a sequence, with many on a GPU; 64 of Mistral 7B on an H100: 0.019
TOKEN_S = 0.02
# Processor time that an event of a stream costs an ingress replica, and Ray Serve's proxy: see
# decision 0080.
INGRESS_EVENT_S, PROXY_EVENT_S = 160e-6, 150e-6
CORES_PER_INGRESS = 4  # stages, routers and the proxy need some, too


def choose_num_ingresses(config: EngineConfig, plan: PipelinePlan, hardware: "Hardware") -> int:
    """Return the number of ingress replicas: the configured one, or without GPUs, where stages need
    all cores, the default.

    On GPUs the number that can write each token when it comes, if all sequences decode: an ingress
    has time for 0.5 s of events a second, and a node's proxy, which cannot be started twice, for
    0.7 s. 256 sequences make 12800 events a second; the proxy carries 4666 of them, and an ingress
    3125, so 2. On 4 cores 1.
    """
    least = config.num_ingresses
    if config.ingress_replicas is not None or not hardware.gpus:
        return least
    num_proxies = len(hardware.node_cpus)
    events_per_s = min(events_of_all(config, plan), num_proxies * BUSY / PROXY_EVENT_S)
    most = sum(cores // CORES_PER_INGRESS for cores in hardware.node_cpus)
    return max(least, min(math.ceil(events_per_s * INGRESS_EVENT_S / HAS_TIME), most))


def events_of_all(config: EngineConfig, plan: PipelinePlan) -> float:
    """Return the events per second while all sequences of all pipelines decode: 64 make 3200."""
    return config.max_pipelines * plan.max_num_seqs / TOKEN_S


def describe_ingresses(config: EngineConfig, plan: PipelinePlan, num_ingresses: int) -> str:
    """Return a readable reason for this number of ingress replicas."""
    return (
        f"the planner has chosen {num_ingresses} ingress replicas (key ingress_replicas):"
        f" {events_of_all(config, plan):.0f} tokens per second are to be expected, one replica"
        f" writes {HAS_TIME / INGRESS_EVENT_S:.0f} of them when they come, and the proxy of a"
        f" machine passes on {BUSY / PROXY_EVENT_S:.0f}"
    )
