"""Training of the built-in demo model: a small Mixtral on Shakespeare, with the engine's own
layers.

    python tests/demo_model/train.py --text tinyshakespeare.txt --out cluster/demo_model

The last tenth of the text is held out: it is used for the final measurement only, not for training
or for any choice. Training takes about an hour on two cores.
"""

import argparse
import datetime
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import sentencepiece as spm
import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from tramontane.proto.hf_config import from_hf_config
from tramontane.proto.model_args import ModelArgs
from tramontane.workers.model.rotary import rotary_tables
from tramontane.workers.model.transformer import StageModel
from tramontane.workers.weights.tensor_specs import stage_tensors

CONFIG = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 128,
    "intermediate_size": 208,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 64,
    "max_position_embeddings": 2048,
    "vocab_size": 1000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
BOS = 1
SEQ_LEN = 256
BALANCE_LOSS_WEIGHT = 0.01
console = Console(stderr=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=16, help="sequences of 256 tokens per step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def train_tokenizer(text: str, folder: Path) -> spm.SentencePieceProcessor:
    """Train byte-pair pieces with byte fallback, as in Llama's and Mistral's v1 tokenizers (newline
    is a byte piece).
    """
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=CONFIG["vocab_size"],
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        character_coverage=1.0,
        minloglevel=2,
    )
    (folder / "tokenizer.vocab").unlink()
    return spm.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


def line_starts(ids: list[int], newline: int) -> list[int]:
    return [0] + [i + 1 for i, token in enumerate(ids) if token == newline and i + 1 < len(ids)]


class WindowAttention:
    """Full attention over rows of equal length, masked to the window: the training-time
    ``Attend``.
    """

    def __init__(self, batch: int, length: int, window: int) -> None:
        self.batch, self.length = batch, length
        position = torch.arange(length)
        distance = position[:, None] - position[None, :]
        self.mask = (distance >= 0) & (distance < window)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (
            x.view(self.batch, self.length, -1, x.shape[-1]).transpose(1, 2) for x in (q, k, v)
        )
        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        return out.transpose(1, 2).reshape(self.batch * self.length, -1, out.shape[-1])


class GateRecorder:
    """Records every gate's logits, for the balance loss and for the count of tokens per expert."""

    def __init__(self, model: StageModel) -> None:
        self.logits: list[Tensor] = []
        for block in model.layers.values():
            block.gate.scores.register_forward_hook(lambda _m, _i, out: self.logits.append(out))

    def take(self) -> list[Tensor]:
        taken, self.logits = self.logits, []
        return taken


def balance_loss(gate_logits: list[Tensor], top_k: int) -> Tensor:
    """Return Switch Transformer's load-balancing loss (arXiv 2101.03961, eq. 4), mean over layers;
    1 means even load.
    """
    losses = []
    for logits in gate_logits:
        chosen = F.one_hot(logits.topk(top_k, dim=-1).indices, logits.shape[-1]).float().sum(1)
        losses.append(
            (chosen.mean(0) / top_k * logits.softmax(-1).mean(0)).sum() * logits.shape[-1]
        )
    return torch.stack(losses).mean()


def logits_of(
    model: StageModel, ids: Tensor, args: ModelArgs, attend: WindowAttention, dropout: float
) -> Tensor:
    batch, length = ids.shape
    rotary = rotary_tables(torch.arange(length).repeat(batch), args, torch.float32)
    hidden = F.dropout(model.embed(ids.reshape(-1)), dropout, training=dropout > 0)
    for layer in range(args.n_layers):
        before = hidden
        attended, normalized = model.block(layer)(hidden, None, rotary, attend)
        hidden = attended + model.feed_forward(layer, normalized)
        if dropout:
            hidden = before + F.dropout(hidden - before, dropout)
    return model.head(hidden)


@torch.no_grad()
def held_out_bits_per_byte(
    model: StageModel, args: ModelArgs, ids: list[int], num_bytes: int
) -> float:
    """Return the bits per byte over the held-out ids, in contexts of the full 2,048 positions."""
    nats = 0.0
    for first in range(0, len(ids), args.max_seq_len - 1):
        part = [BOS, *ids[first : first + args.max_seq_len - 1]]
        attend = WindowAttention(1, len(part) - 1, int(CONFIG["sliding_window"]))
        logits = logits_of(model, torch.tensor([part[:-1]]), args, attend, dropout=0.0)
        nats += F.cross_entropy(logits, torch.tensor(part[1:]), reduction="sum").item()
    return nats / num_bytes / math.log(2)


def batches(ids: list[int], starts: list[int], batch: int, seed: int) -> Iterator[Tensor]:
    """Yield rows of BOS and SEQ_LEN tokens from the start of a random line."""
    data = torch.tensor(ids)
    good = torch.tensor([s for s in starts if s + SEQ_LEN <= len(ids)])
    generator = torch.Generator().manual_seed(seed)
    while True:
        chosen = good[torch.randint(len(good), (batch,), generator=generator)]
        rows = data[chosen[:, None] + torch.arange(SEQ_LEN)]
        yield torch.cat((torch.full((batch, 1), BOS), rows), dim=1)


def learning_rate(step: int, steps: int, peak: float) -> float:
    warmup = min(100, max(1, steps // 10))
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))))


def initialize(model: StageModel, args: ModelArgs) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            deep = name.endswith(("wo.weight", "w2.weight"))
            std = 0.05 / math.sqrt(2 * args.n_layers) if deep else 0.05
            torch.nn.init.normal_(parameter, std=std)


def train(
    options: argparse.Namespace, args: ModelArgs, model: StageModel, ids: list[int], newline: int
) -> None:
    gates = GateRecorder(model)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.98),
        fused=True,
    )
    attend = WindowAttention(options.batch, SEQ_LEN, int(CONFIG["sliding_window"]))
    rows = batches(ids, line_starts(ids, newline), options.batch, options.seed)
    started = time.perf_counter()
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options.steps, options.lr)
        row = next(rows)
        logits = logits_of(model, row[:, :-1], args, attend, options.dropout)
        loss = F.cross_entropy(logits, row[:, 1:].reshape(-1))
        (
            loss
            + BALANCE_LOSS_WEIGHT * balance_loss(gates.take(), int(CONFIG["num_experts_per_tok"]))
        ).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0:
            minutes = (time.perf_counter() - started) / 60
            console.print(
                f"step {step}/{options.steps} loss {loss.item():.3f} nats/token, {minutes:.1f} min",
                highlight=False,
            )


@torch.no_grad()
def tokens_per_expert(model: StageModel, args: ModelArgs, ids: list[int]) -> list[list[int]]:
    gates = GateRecorder(model)
    part = torch.tensor([[BOS, *ids[: args.max_seq_len - 1]]])
    logits_of(
        model, part, args, WindowAttention(1, part.shape[1], int(CONFIG["sliding_window"])), 0.0
    )
    top_k, experts = int(CONFIG["num_experts_per_tok"]), int(CONFIG["num_local_experts"])
    return [
        torch.bincount(g.topk(top_k, dim=-1).indices.reshape(-1), minlength=experts).tolist()
        for g in gates.take()
    ]


def save(model: StageModel, args: ModelArgs, folder: Path) -> None:
    state = model.state_dict()
    tensors = {
        spec.name: state[spec.parameter][spec.rows].to(torch.bfloat16)
        for spec in stage_tensors(args, range(args.n_layers))
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")


def card(options: argparse.Namespace, facts: dict[str, str], experts: list[list[int]]) -> str:
    rows = "\n".join(
        f"| {layer} | " + " | ".join(map(str, counts)) + " |"
        for layer, counts in enumerate(experts)
    )
    header = "| layer | " + " | ".join(f"expert {e}" for e in range(len(experts[0]))) + " |\n"
    header += "|---" * (len(experts[0]) + 1) + "|"
    lines = "\n".join(f"* {key}: {value}" for key, value in facts.items())
    return (
        "# The demo model\n\nA small Mixtral that writes mock Shakespeare. It ships so that the"
        " engine can be run and\ntested anywhere; it knows nothing and is good for nothing"
        f" else.\n\n{lines}\n\nTokens per expert over the first 2,048 held-out positions (two"
        f" experts per token):\n\n{header}\n{rows}\n"
    )


def main() -> None:
    options = parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    text = options.text.read_text(encoding="utf-8")
    cut = len(text) * 9 // 10
    kept, held_out = text[:cut], text[cut:]
    tokenizer = train_tokenizer(kept, options.out)
    args = from_hf_config(CONFIG)
    ids, held_out_ids = tokenizer.encode(kept), tokenizer.encode(held_out)
    model = StageModel(args, range(args.n_layers))
    initialize(model, args)
    parameters = sum(p.numel() for p in model.parameters())
    console.print(
        f"{parameters:,} parameters; {len(ids):,} tokens to train on, {len(held_out_ids):,}"
        " held out"
    )
    started = time.perf_counter()
    train(options, args, model, ids, tokenizer.piece_to_id("<0x0A>"))
    minutes = (time.perf_counter() - started) / 60
    save(model, args, options.out)
    for parameter in model.parameters():  # measure the saved weights
        parameter.data = parameter.data.to(torch.bfloat16).float()
    bits = held_out_bits_per_byte(model, args, held_out_ids, len(held_out.encode()))
    experts = tokens_per_expert(model, args, held_out_ids)
    facts = {
        "data": "Tiny Shakespeare (public domain), 1.1 MB; the last tenth held out",
        "parameters": f"{parameters:,}",
        "training": (
            f"{options.steps} steps of {options.batch} x {SEQ_LEN} tokens, {minutes:.0f} minutes "
            f"with --threads {options.threads}"
        ),
        "date": datetime.date.today().isoformat(),
        "command": (
            "python tests/demo_model/train.py --text tinyshakespeare.txt --out OUT --steps"
            f" {options.steps} --batch {options.batch} --lr {options.lr} --dropout"
            f" {options.dropout} --threads {options.threads}"
        ),
        "held out": (
            f"{bits:.3f} bits per byte, by the bfloat16 weights as saved, computed in float32"
        ),
    }
    (options.out / "MODEL_CARD.md").write_text(card(options, facts, experts))
    console.print(f"{bits:.3f} bits per byte held out after {minutes:.1f} min")
    json.dump({"bits_per_byte": bits, "tokens_per_expert": experts}, sys.stdout)


if __name__ == "__main__":
    main()
