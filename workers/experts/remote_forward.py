"""The forward pass of a stage whose experts are on actors: a coroutine that yields while they work.

It runs the layers of ``StageModel`` and differs from ``StageModel.forward`` only in who runs the
experts.
"""

from collections.abc import Callable, Generator
from typing import TypeVar

from torch import Tensor

from tramontane.workers.experts.remote_experts import PendingExpertCall, RemoteExperts
from tramontane.workers.model.grouped_query_attention import Attend
from tramontane.workers.model.rotary import RotaryTables
from tramontane.workers.model.transformer import OnChoices, StageModel

T = TypeVar("T")
# computes a T, and yields every call that has no answer yet
StepCoroutine = Generator[PendingExpertCall, None, T]
OnUsage = Callable[[PendingExpertCall], None]  # called when all experts of a layer have answered


def forward_with_remote_experts(
    model: StageModel,
    experts: RemoteExperts,
    hidden_TD: Tensor,
    rotary: RotaryTables,
    attend: Attend,
    on_choices: OnChoices,
    on_usage: OnUsage,
) -> StepCoroutine[Tensor]:
    """Run all layers, [T, D] to [T, D]; yield in every layer once its experts have been called.

    It may be resumed at any time, and yields the same call again until all answers are there.
    Raises PipelineError if an expert is permanently unavailable.
    """
    added_TD: Tensor | None = None
    for layer in model.global_layers:
        hidden_TD, x_TD = model.block(layer)(hidden_TD, added_TD, rotary, attend)
        if model.block(layer).gate is None:
            added_TD = model.feed_forward(layer, x_TD)
            continue
        groups, weights_Tk = model.choose_experts(layer, x_TD, on_choices)
        call = experts.dispatch(layer, groups.permute(x_TD), groups)
        shared_TD = model.run_shared_experts(layer, x_TD)  # while the actors compute
        yield call
        while not call.poll():
            yield call
        on_usage(call)
        added_TD = groups.combine(call.result(), weights_Tk)
        if shared_TD is not None:
            added_TD = added_TD + shared_TD
    assert added_TD is not None
    return hidden_TD + added_TD
