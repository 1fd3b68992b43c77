"""Where a replica's own words go."""

import logging

from ray.serve._private.constants import SERVE_LOGGER_NAME


def log_beside_ray_serve() -> None:
    """Call in a replica's constructor: what we log goes where Ray Serve's own lines go, which is the replica's log.

    Nothing else takes it there: Python would write it to the process's standard error, without a time.
    """
    own = logging.getLogger("tramontane")
    for handler in logging.getLogger(SERVE_LOGGER_NAME).handlers:
        own.addHandler(handler)
