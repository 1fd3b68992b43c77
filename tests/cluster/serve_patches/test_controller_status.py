"""The status of a deployment names what its routers wait for, in place of Ray Serve's guess."""

from unittest.mock import patch

from ray.serve._private import common, deployment_state

from tramontane.cluster.serve_patches import controller
from tramontane.cluster.serve_patches.controller import name_wait, name_waits

SLOW = (
    "Deployment 'Router' in application 'tramontane' has 1 replicas that have taken more than 30s"
    " to initialize.\nThis may be caused by a slow __init__ or reconfigure method."
)
WAIT = "waiting for 1 of 2 stages: 1 CPU, offered by no node, for 42 s"


def test_the_wait_takes_the_place_of_the_guess() -> None:
    asked: list[str] = []

    def read(application: str) -> str:
        asked.append(application)
        return WAIT

    assert name_wait(SLOW, read) == (
        "Deployment 'Router' in application 'tramontane' has 1 replicas that have taken more than"
        f" 30s to initialize: {WAIT}"
    )
    assert asked == ["tramontane"]


def test_other_messages_stay_and_ask_nothing() -> None:
    def read(application: str) -> str:
        raise AssertionError(application)

    for message in ("", "Deployment 'Router' in application 'tramontane' failed.", SLOW[:-1]):
        assert name_wait(message, read) == message


def test_what_is_not_known_stays() -> None:
    def fail(_: str) -> str:
        raise ConnectionError("the head node is away")

    assert name_wait(SLOW, fail) == SLOW


def test_replicas_that_wait_for_nothing_are_being_started() -> None:
    assert name_wait(SLOW, lambda _: "").endswith(
        "initialize: their processes start and import the server, which takes long on a busy node"
    )
    ingress = SLOW.replace("Router", "Ingress")
    assert "Ingress" in name_wait(ingress, lambda _: WAIT)
    assert name_wait(ingress, lambda _: WAIT).endswith("long on a busy node"), "it needs no stage"


def test_ray_serves_status_has_it() -> None:
    """Ray Serve writes the message that we look for, and updates its status by the replaced
    method.
    """
    source = deployment_state.DeploymentState._check_and_update_transitioning_replicas
    texts = [text for text in source.__code__.co_consts if isinstance(text, str)]
    assert any("slow __init__ or reconfigure method." in text for text in texts), texts
    assert any("in application " in text for text in texts), texts
    before = common.DeploymentStatusInfo(
        name="Router",
        status=common.DeploymentStatus.UPDATING,
        status_trigger=common.DeploymentStatusTrigger.CONFIG_UPDATE_STARTED,
    )
    status = common.DeploymentStatusInfo
    with (
        patch.object(status, "update_message", status.update_message),
        patch.object(controller.name_wait, "__defaults__", (lambda _: WAIT,)),
    ):
        name_waits()
        after = before.update_message(SLOW)
    assert after.message.endswith(f"initialize: {WAIT}")
    assert after.status == before.status
