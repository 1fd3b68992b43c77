"""The gate of a mixture of experts: selects the experts of a token, and the weights of their
outputs.

Shape letters: T tokens, D model width, E experts, k experts of each token, n groups of experts.
"""

import torch
from torch import Tensor, nn

from tramontane.proto.model_args import GateScores, MoeArgs
from tramontane.workers.kernels.linear import Linear

TINY = 1e-20  # added to sums of weights that they are divided by


def sigmoid(logits_TE: Tensor) -> Tensor:
    """Return 1 / (1 + e^-x) of each logit, as the first number of the softmax of x and 0.

    PyTorch's own function rounds the last elements of a tensor otherwise on CPUs: a token's scores
    would depend on where in the micro-batch it stands. Softmax is computed row by row.
    """
    pairs_TE2 = torch.stack((logits_TE, torch.zeros_like(logits_TE)), dim=-1)
    return torch.softmax(pairs_TE2, dim=-1)[..., 0]


class Gate(nn.Module):
    """The gate of one layer, see ``GateScores``. ``bias`` is added to the scores that select
    experts, not to weights.
    """

    bias: Tensor | None
    in_float32: frozenset[str]  # matrices in float32, regardless of the model's dtype

    def __init__(self, dim: int, moe: MoeArgs) -> None:
        super().__init__()
        self.moe, self.num_experts, self.top_k = moe, moe.num_experts, moe.num_experts_per_tok
        self.scores = Linear(dim, moe.num_experts)
        self.in_float32 = frozenset({"scores"} if moe.float32_gate else ())
        self.register_buffer(
            "bias", torch.empty(moe.num_experts) if moe.scores is GateScores.SIGMOID else None
        )

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return expert ids [T, k] and weights [T, k]."""
        logits_TE = self.logits(x_TD)
        if self.moe.scores is GateScores.LOGITS:
            logits_Tk, expert_ids_Tk = torch.topk(logits_TE, self.top_k, dim=-1)
            return expert_ids_Tk, torch.softmax(logits_Tk, dim=-1, dtype=torch.float32).to(
                x_TD.dtype
            )
        is_sigmoid = self.moe.scores is GateScores.SIGMOID
        scores_TE = (
            sigmoid(logits_TE.float())
            if is_sigmoid
            else torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
        )
        expert_ids_Tk = self._choose(scores_TE if self.bias is None else scores_TE + self.bias)
        weights_Tk = scores_TE.gather(1, expert_ids_Tk)
        if self.moe.norm_topk_prob:
            weights_Tk = weights_Tk / (weights_Tk.sum(dim=-1, keepdim=True) + TINY)
        return expert_ids_Tk, (weights_Tk * self.moe.routed_scaling_factor).to(x_TD.dtype)

    def logits(self, x_TD: Tensor) -> Tensor:
        """Return the inputs of the scores, [T, E]."""
        logits_TE: Tensor = self.scores(x_TD.float() if self.in_float32 else x_TD)
        return logits_TE

    def select_small_products(
        self, x_TD: Tensor, is_padding_T: Tensor | None, total_ends_E: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return expert ids [T, k], E for padding, and weights [T, k], for a few tokens on a GPU
        with Triton.

        The choices are counted too: to ``total_ends_E`` (int64) is added where the experts' groups
        end, see ``ExpertTokenCounter``. Scores of logits are computed by one kernel.
        """
        if self.moe.scores is GateScores.LOGITS:
            # Triton comes with torch for CUDA only
            from tramontane.workers.kernels.triton_moe import choose_experts

            return choose_experts(
                self.logits(x_TD), self.top_k, x_TD.dtype, is_padding_T, total_ends_E
            )
        expert_ids_Tk, weights_Tk = self(x_TD)
        if is_padding_T is not None:
            expert_ids_Tk = expert_ids_Tk.masked_fill(is_padding_T[:, None], self.num_experts)
        experts_E = torch.arange(self.num_experts, device=x_TD.device)
        total_ends_E.add_((expert_ids_Tk.reshape(-1, 1) <= experts_E).sum(dim=0))
        return expert_ids_Tk, weights_Tk

    def _choose(self, scores_TE: Tensor) -> Tensor:
        """Return the ids [T, k] of the experts with the highest scores, in the groups with the best
        pairs of experts.

        Scores .1 .2 | .4 .4 | .7 0, two groups: the pairs have .3, .8 and .7, so experts 2 to 5 may
        be chosen.
        """
        if self.moe.n_group > 1:
            scores_TnE = scores_TE.view(len(scores_TE), self.moe.n_group, -1)
            sums_Tn = scores_TnE.topk(2, dim=-1).values.sum(dim=-1)
            groups_T = sums_Tn.topk(self.moe.topk_group, dim=-1).indices
            is_open_Tn = torch.zeros_like(sums_Tn, dtype=torch.bool).scatter_(
                1, groups_T, value=True
            )
            scores_TE = scores_TnE.masked_fill(~is_open_Tn[..., None], -torch.inf).flatten(1)
        return torch.topk(scores_TE, self.top_k, dim=-1).indices
