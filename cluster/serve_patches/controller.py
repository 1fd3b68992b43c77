"""What starting routers wait for, in the status that Ray Serve's controller has of their
deployment, which the RayService of Kubernetes shows.
"""

import logging
import re
from collections.abc import Callable

from tramontane.cluster.common.ray_api import read_wait_now
from tramontane.cluster.ray_internals.table import (
    DEPLOYMENT_STATUS,
    SERVE_SYMBOLS,
    assert_supported,
)

# the end of Ray Serve's message about replicas whose constructor has not returned
GUESS = re.compile(r"\.\s*This may be caused by a slow __init__ or reconfigure method\.$")
REPLICAS_OF = re.compile(r"Deployment '([^']+)' in application '([^']+)'")
ROUTER = "Router"  # the deployment whose constructor waits for stages
STARTING = "their processes start and import the server, which takes long on a busy node"

logger = logging.getLogger(__name__)


def name_waits() -> None:
    """Let the status of a deployment name what its routers wait for.

    Ray Serve's controller calls this by name when it starts: see ``ray_settings.SERVE_SETTINGS``.
    Raises ConfigError if this version of Ray lacks a private name that we need.
    """
    assert_supported(SERVE_SYMBOLS)
    status = DEPLOYMENT_STATUS.value
    update = status.update_message

    def update_message(self: object, message: str) -> object:
        return update(self, name_wait(message))

    status.update_message = update_message


def name_wait(message: str, read: Callable[[str], str] = read_wait_now) -> str:
    """Return a status with what the application's routers wait for in the place of Ray Serve's
    guess, ``... more than 30s to initialize: waiting for 1 of 2 stages: 1 CPU, offered by no node,
    for 42 s``. Replicas that wait for nothing are still being started. A status without such a
    guess, or if what routers wait for cannot be read, is returned as it is.
    """
    named = REPLICAS_OF.search(message)
    if named is None or not GUESS.search(message):
        return message
    deployment, application = named.groups()
    try:
        wait = read(application) if deployment == ROUTER else ""
    except Exception as error:  # of Ray, whose key-value store may be unreachable
        logger.debug("it is not known what routers wait for: %s", error)
        return message
    return GUESS.sub(lambda _: f": {wait or STARTING}", message)
