"""A router that adopts a pipeline: what it logs of those that it cannot claim."""

import asyncio
import logging
from typing import NoReturn

import pytest
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from tiny_models import tiny_args, tiny_plan

from tramontane.cluster.actors.pipeline_spec import PipelineSpec
from tramontane.cluster.pipeline import adoption, lifecycle
from tramontane.proto.errors import LeaseError, PlanError
from tramontane.proto.model_folder import RandomWeights

SPEC = PipelineSpec("app-0", tiny_plan(tiny_args(n_layers=2)), RandomWeights(), threads_per_stage=1, use_gpus=False)
DRIVEN = RayTaskError("claim", "a traceback", LeaseError("the pipeline is driven by another")).as_instanceof_cause()
UNREACHABLE = ActorUnavailableError("the supervisor is away", None)


@pytest.mark.parametrize(("error", "level"), [(DRIVEN, logging.INFO), (UNREACHABLE, logging.WARNING)])
def test_that_another_router_drives_a_pipeline_is_nothing_to_warn_of(
    error: RayError, level: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is so whenever one more is wanted; a supervisor that does not answer is another matter."""

    async def specification(_name: str) -> PipelineSpec:
        return SPEC

    async def claim(*_: object) -> NoReturn:
        raise error

    def new_spec() -> NoReturn:
        raise PlanError("a new one is wanted")

    async def look() -> None:
        async with adoption.adopt_or_create_pipeline("app", new_spec):
            raise AssertionError("there is none")

    monkeypatch.setattr(adoption, "actor_holder_name", lambda _: "actor@0/me")
    monkeypatch.setattr(adoption, "_pipelines", lambda _: [SPEC.name])
    monkeypatch.setattr(adoption, "_specification", specification)
    monkeypatch.setattr(lifecycle, "create_supervisor", lambda _: None)
    monkeypatch.setattr(lifecycle, "call_or_restart", claim)
    caplog.set_level(logging.INFO, adoption.__name__)
    with pytest.raises(PlanError, match="a new one is wanted"):
        asyncio.run(look())
    (record,) = caplog.records
    assert record.levelno == level
    assert record.getMessage().startswith("the pipeline app-0 cannot be claimed: ")
