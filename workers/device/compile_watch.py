"""Reports kernels that are compiled after a stage is ready: a request waits for each, which takes a
tenth of a second or more.
"""

import logging

logger = logging.getLogger(__name__)


def report_compilations(label: str) -> None:
    """Log a WARNING for every kernel of Triton's that this process compiles from now on, or loads
    from its cache on the disk.
    """
    try:
        from triton import knobs  # Triton is not on every platform
    except ImportError:
        return

    def report(*, fn: object, **_about: object) -> None:
        kernel = f"{getattr(fn, 'module', '?')}.{getattr(fn, 'name', '?')}"
        logger.warning(
            "%s compiled the kernel %s after it was ready; a request has waited for it",
            label,
            kernel,
        )

    knobs.runtime.jit_post_compile_hook = report
