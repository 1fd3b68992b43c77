"""A stage's share of the model: perhaps the embedding, some layers, perhaps norm and head.

Computation that gives way wherever it waits for experts, so that another micro-batch can have its turn.
"""

from collections.abc import Generator
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from tramontane.proto.model_args import ModelArgs
from tramontane.proto.ports import ExpertBackend, PendingExperts
from tramontane.workers.kernels.linear import Linear
from tramontane.workers.model.layers import Attend, RMSNorm, TransformerBlock
from tramontane.workers.model.moe import ExpertPermutation, ExpertTokenCounter, LocalExperts
from tramontane.workers.model.rotary import RotaryTables

T = TypeVar("T")
StepCoroutine = Generator[PendingExperts, None, T]  # computes a T, and yields whatever has not been answered yet


def run_to_completion(waiting: StepCoroutine[T]) -> T:
    """Run it to its end, alone: the thread sleeps where it waits."""
    try:
        while True:
            next(waiting).wait()
    except StopIteration as end:
        value: T = end.value
        return value


class ExpertObserver(Protocol):
    """Whoever wants to know what experts did."""

    def record_choices(self, layer: int, expert_ids_Tk: Tensor) -> None: ...
    def record_usage(self, asked: PendingExperts) -> None: ...


class StageModel(nn.Module):
    """Layers ``layers`` (global numbers) of the model; the whole model is the range of all.

    The first stage owns the embedding, the last one the final norm and the head.
    With tied embeddings the head is the embedding matrix, so both ends hold it.
    """

    def __init__(self, args: ModelArgs, layers: range, experts_inside: bool = True) -> None:
        super().__init__()
        assert len(layers) > 0
        assert layers.start >= 0
        assert layers.stop <= args.n_layers
        self.args = args
        self.global_layers = layers
        self.is_first = layers.start == 0
        self.is_last = layers.stop == args.n_layers
        self.tok_embeddings = _embedding(args) if self.is_first else None
        self.layers = nn.ModuleDict({str(layer): TransformerBlock(args, layer) for layer in layers})
        self.experts: ExpertBackend | None = LocalExperts(args, layers) if experts_inside else None  # None: still to be found
        self._expert_tokens = ExpertTokenCounter(layers, args.moe.num_experts if args.moe else 0)
        self.norm = RMSNorm(args.dim, args.norm_eps) if self.is_last else None
        self.output = Linear(args.dim, args.vocab_size) if self.is_last else None

    def finalize_weights(self, device: torch.device) -> None:
        """Once weights are in place, on this device, and before the first step."""
        self._expert_tokens.to_device(device)
        if isinstance(self.experts, LocalExperts):
            self.experts.finalize_weights()

    @property
    def expert_load(self) -> dict[int, list[int]]:
        """By layer, how many tokens each expert was given. From any thread."""
        return self._expert_tokens.read()

    def embed(self, token_ids_T: Tensor) -> Tensor:
        assert self.tok_embeddings is not None
        hidden_TD: Tensor = self.tok_embeddings(token_ids_T)
        return hidden_TD

    def forward(
        self,
        hidden_TD: Tensor,
        rotary: RotaryTables,
        attend: Attend,
        notes: ExpertObserver | None = None,
        is_padding_T: Tensor | None = None,
    ) -> StepCoroutine[Tensor]:
        """All layers; gives way wherever experts have been asked. Padding is given to no expert."""
        for layer in self.global_layers:
            hidden_TD = yield from self.layer(layer, hidden_TD, rotary, attend, notes, is_padding_T)
        return hidden_TD

    def layer(
        self,
        layer: int,
        hidden_TD: Tensor,
        rotary: RotaryTables,
        attend: Attend,
        notes: ExpertObserver | None = None,
        is_padding_T: Tensor | None = None,
    ) -> StepCoroutine[Tensor]:
        """One of them, by its global number."""
        hidden_TD, x_TD = self.layers[str(layer)](hidden_TD, rotary, attend)
        return hidden_TD + (yield from self.feed_forward(layer, x_TD, notes, is_padding_T))

    def feed_forward(
        self, layer: int, x_TD: Tensor, notes: ExpertObserver | None = None, is_padding_T: Tensor | None = None
    ) -> StepCoroutine[Tensor]:
        """What a layer adds after its attention, [T, D]: by its only network, or by each token's experts. 0 for padding."""
        block = self.layers[str(layer)]
        assert isinstance(block, TransformerBlock)
        if block.gate is None:
            assert block.feed_forward is not None
            dense_TD: Tensor = block.feed_forward(x_TD)
            return dense_TD
        expert_ids_Tk, weights_Tk = block.gate(x_TD)
        if is_padding_T is None:
            return (yield from self._moe(layer, x_TD, expert_ids_Tk, weights_Tk, notes))
        # padding chooses one past the last expert, so it is sorted behind all groups, and gets whatever is in memory there
        expert_ids_Tk = expert_ids_Tk.masked_fill(is_padding_T[:, None], block.gate.num_experts)
        mixed_TD = yield from self._moe(layer, x_TD, expert_ids_Tk, weights_Tk, notes)
        return mixed_TD.masked_fill(is_padding_T[:, None], 0)

    def _moe(
        self, layer: int, x_TD: Tensor, expert_ids_Tk: Tensor, weights_Tk: Tensor, notes: ExpertObserver | None
    ) -> StepCoroutine[Tensor]:
        """What each token's experts make of it, weighted and added."""
        assert self.experts is not None
        assert self.args.moe is not None
        if notes is not None:
            notes.record_choices(layer, expert_ids_Tk)
        by_expert = ExpertPermutation.of(expert_ids_Tk, self.args.moe.num_experts)
        self._expert_tokens.count(layer, by_expert.offsets_E)
        asked = self.experts.dispatch(layer, by_expert.permute(x_TD), by_expert)
        yield asked
        while not asked.poll():
            yield asked
        if notes is not None:
            notes.record_usage(asked)
        return by_expert.combine(asked.result(), weights_Tk)

    def head(self, hidden_SD: Tensor) -> Tensor:
        """Logits [S, V] in float32 for the S rows that want a token."""
        assert self.norm is not None
        assert self.output is not None
        logits_SV: Tensor = self.output(self.norm(hidden_SD))
        return logits_SV.float()


def _embedding(args: ModelArgs) -> nn.Embedding:
    """Without random numbers: on the meta device they make PyTorch import its compiler, 70 MiB and some seconds."""
    return nn.Embedding.from_pretrained(torch.empty(args.vocab_size, args.dim), freeze=False)  # type: ignore[no-untyped-call, no-any-return]
