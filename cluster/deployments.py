"""Which deployment of an application is the newest, in the cluster's key-value store: routers of older ones make way."""

from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put


def note_deployment(application: str, deployed_at: int) -> None:
    """``deployed_at`` is when the application was built, in nanoseconds; nothing happens where a newer one is known."""
    if deployed_at > newest_deployment(application):
        _internal_kv_put(_key(application), str(deployed_at).encode())


def newest_deployment(application: str) -> int:
    """0 where none is known."""
    found: bytes | None = _internal_kv_get(_key(application))
    return int(found or 0)


def _key(application: str) -> str:
    return f"tramontane-deployment-{application}"
