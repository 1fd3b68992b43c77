"""The calls to a draft model, one after the other, next to the micro-batches."""

import asyncio
import logging
from collections.abc import Callable

from tramontane.proto.errors import PipelineError
from tramontane.proto.ports import DraftPort
from tramontane.router.engine.router import Router
from tramontane.router.speculation.model_drafter import DraftQueue

RETRY_S = 1.0  # after a call that has failed

logger = logging.getLogger(__name__)


async def run_draft_model(
    model: DraftPort, queue: DraftQueue, on_drafts: Callable[[], None]
) -> None:
    """Get what sequences wait for until cancelled; ``on_drafts`` is called whenever drafts have
    come.

    Sequences do not need drafts, so an error is logged, and the model is tried again. It then has
    no sequence any more.
    """
    requested = asyncio.Event()
    queue.on_request = requested.set
    while True:
        await requested.wait()
        requested.clear()
        drafters, ended = queue.take()
        try:
            answers = await model.draft([drafter.request() for drafter in drafters], ended)
            if len(answers) != len(drafters):
                raise PipelineError(
                    f"the draft model has answered {len(answers)} of {len(drafters)} requests"
                )
        except Exception as error:  # also a defect: requests are answered without drafts
            is_expected = isinstance(error, PipelineError)
            logger.warning(
                "The draft model failed, and is called again in %g s: %s",
                RETRY_S,
                error,
                exc_info=not is_expected,
            )
            await asyncio.sleep(RETRY_S)
            answers = [None] * len(drafters)
        for drafter, drafts in zip(drafters, answers, strict=True):
            drafter.receive(drafts)
        on_drafts()


async def run_with_drafts(router: Router, model: DraftPort | None) -> None:
    """Run a router, and next to it the calls to its draft model, if it has one."""
    if model is None:
        await router.run()
        return
    drafting = asyncio.create_task(
        run_draft_model(model, router.scheduler.draft_queue, router.wake.set)
    )
    try:
        await router.run()
    finally:
        drafting.cancel()
