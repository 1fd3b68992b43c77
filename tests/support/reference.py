"""The oracle of the equivalence tests: full attention with the window's mask, recomputed at every
token.

Written against the checkpoint's weights by name, without any of the engine's layers or caches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tramontane.proto.model_args import ModelArgs
from tramontane.workers.attention.backend import causal_window_mask

CLOSE_CALL = 1e-4  # two best logits closer than this may swap their order with the shape of a batch


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _rotate(x: Tensor, theta: float) -> Tensor:
    """Rotate pairs (i, i + d/2) as complex numbers."""
    tokens, _, d = x.shape
    angles = torch.arange(tokens)[:, None] * theta ** (-torch.arange(0, d, 2).float() / d)[None, :]
    turned = (
        torch.complex(x[..., : d // 2], x[..., d // 2 :])
        * torch.polar(torch.ones_like(angles), angles)[:, None, :]
    )
    return torch.cat((turned.real, turned.imag), dim=-1)


def _swiglu(x: Tensor, w: dict[str, Tensor], prefix: str) -> Tensor:
    gate, up = (x @ w[f"{prefix}.w13.weight"].T).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up) @ w[f"{prefix}.w2.weight"].T


def _mixture(x: Tensor, w: dict[str, Tensor], args: ModelArgs, layer: int) -> Tensor:
    """Apply every expert to every token, weighted by the softmax over the chosen ones and 0 for the
    rest.
    """
    assert args.moe is not None
    scores = x @ w[f"layers.{layer}.gate.scores.weight"].T
    best = scores.topk(args.moe.num_experts_per_tok, dim=-1).values[:, -1:]
    weights = scores.masked_fill(scores < best, -torch.inf).softmax(-1)
    outs = [_swiglu(x, w, f"experts.layers.{layer}.{e}") for e in range(args.moe.num_experts)]
    return sum(weights[:, e, None] * out for e, out in enumerate(outs))  # type: ignore[return-value]


def reference_logits(
    w: dict[str, Tensor], args: ModelArgs, token_ids: list[int], gates: list[Tensor] | None = None
) -> Tensor:
    """Return the logits [T, V] of every position. Each layer's expert scores [T, E] are appended to
    ``gates``.
    """
    h = w["tok_embeddings.weight"][token_ids]
    tokens = len(token_ids)
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)[None, :]
    for layer in range(args.n_layers):
        p = f"layers.{layer}"
        x = _norm(h, w[f"{p}.attention_norm.weight"], args.norm_eps)
        heads = (x @ w[f"{p}.attention.wqkv.weight"].T).view(tokens, -1, args.head_dim)
        q, k, v = heads.split((args.n_heads, args.n_kv_heads, args.n_kv_heads), dim=1)
        q, k = _rotate(q, args.rope_theta), _rotate(k, args.rope_theta)
        k, v = (t.repeat_interleave(args.n_heads // args.n_kv_heads, dim=1) for t in (k, v))
        window = args.windows[layer] or tokens
        hidden_keys = (distance < 0) | (distance >= window)
        scores = torch.einsum("thd,shd->hts", q, k) / args.head_dim**0.5
        out = torch.einsum(
            "hts,shd->thd", scores.masked_fill(hidden_keys, -torch.inf).softmax(-1), v
        )
        h = h + out.reshape(tokens, -1) @ w[f"{p}.attention.wo.weight"].T
        x = _norm(h, w[f"{p}.ffn_norm.weight"], args.norm_eps)
        if gates is not None:
            gates.append(x @ w[f"{p}.gate.scores.weight"].T)
        h = h + (_mixture(x, w, args, layer) if args.moe else _swiglu(x, w, f"{p}.feed_forward"))
    return _norm(h, w["norm.weight"], args.norm_eps) @ w["output.weight"].T


def assert_best_experts(
    w: dict[str, Tensor], args: ModelArgs, token_ids: list[int], chosen: dict[int, list[list[int]]]
) -> None:
    """Check that ``chosen``, experts of each token by layer, are those with the best scores, best
    first, up to a close call.
    """
    gates: list[Tensor] = []
    reference_logits(w, args, token_ids, gates)
    for layer, expert_ids in chosen.items():
        best_Tk = gates[layer].topk(len(expert_ids[0]), dim=-1).values
        chosen_Tk = gates[layer].gather(1, torch.tensor(expert_ids))
        assert chosen_Tk.shape == best_Tk.shape
        assert (chosen_Tk - best_Tk).abs().max() < CLOSE_CALL, f"layer {layer}"
        assert all(len(set(ids)) == len(ids) for ids in expert_ids)


@dataclass(frozen=True)
class Expected:
    """A greedy continuation, and for each step the second best token and the gap between the two
    logits.
    """

    token_ids: list[int]
    seconds: list[int]
    gaps: list[float]


close_calls: list[str] = []  # listed at the end of the run (conftest.py)


def greedy(
    w: dict[str, Tensor],
    args: ModelArgs,
    prompt_ids: list[int],
    num_tokens: int,
    guess: Sequence[int] = (),
) -> Expected:
    """Return the greedy continuation of a prompt.

    ``guess`` is a likely continuation: the model runs once for all of its tokens that are right,
    instead of once for each.
    """
    found: list[int] = []
    seconds, gaps = [], []
    while len(found) < num_tokens:
        ahead = (
            list(guess[len(found) : num_tokens - 1]) if list(guess[: len(found)]) == found else []
        )
        rows = reference_logits(w, args, [*prompt_ids, *found, *ahead])[
            len(prompt_ids) + len(found) - 1 :
        ]
        for row, guessed in zip(rows, [*ahead, None], strict=True):
            top = row.topk(2)
            found.append(int(top.indices[0]))
            seconds.append(int(top.indices[1]))
            gaps.append(float(top.values[0] - top.values[1]))
            if found[-1] != guessed:  # the rest of the guess follows another token
                break
    return Expected(found, seconds, gaps)


def assert_same_tokens(name: str, got: list[int], expected: Expected) -> None:
    """Check that the tokens are equal, or equal up to a close call: the second best token, almost
    as good as the best.

    Close calls are listed at the end of the test run.
    """
    for step, (ours, theirs) in enumerate(zip(got, expected.token_ids, strict=False)):
        if ours != theirs:
            gap = expected.gaps[step]
            text = (
                f"{name}: token {step} is {ours}, expected {theirs}; the best two logits were"
                f" {gap:.2e} apart"
            )
            assert gap < CLOSE_CALL, text
            assert ours == expected.seconds[step], text
            close_calls.append(text)
            return
    assert len(got) == len(expected.token_ids)


def reference_attention(q_THd: Tensor, k_SGd: Tensor, v_SGd: Tensor, window: int | None) -> Tensor:
    """Compute masked softmax(q k / sqrt(d)) v of one sequence, its last T positions against all S,
    [T, H, d].

    The definition that tests compare kernels with.
    """
    groups = q_THd.shape[1] // k_SGd.shape[1]
    k_SHd, v_SHd = (x.repeat_interleave(groups, dim=1) for x in (k_SGd, v_SGd))
    scores_HTS = (
        torch.einsum("thd,shd->hts", q_THd.float(), k_SHd.float()) * q_THd.shape[-1] ** -0.5
    )
    mask = causal_window_mask(q_THd.shape[0], k_SGd.shape[0], window, q_THd.device)
    weights_HTS = scores_HTS.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", weights_HTS, v_SHd.float()).to(q_THd.dtype)
