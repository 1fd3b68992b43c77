"""Analysis of the experts that a running server chooses for texts of several kinds, and how often
consecutive tokens share one.

The shares by kind of text are figure 7 of the Mixtral paper (arXiv 2401.04088), the repetitions its
table 5.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from rich.table import Table

from tramontane.cluster.config.measurements import ExpertLoad
from tramontane.cluster.console.server_client import request
from tramontane.proto.errors import ConfigError, PipelineUnavailableError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_PIECE_CHARS = 1024  # of a text, in one request
CHARS_PER_TOKEN = 0.25  # at least: a character that no token contains takes up to four tokens
NUM_REQUESTS = 8  # at once

# experts of each token, the heaviest first, by layer
Choices = Mapping[str, Sequence[Sequence[int]]]


@dataclass(frozen=True, slots=True)
class DomainChoices:
    """The experts chosen for the tokens of one text. The first token of each piece, which may begin
    every text, is left out.
    """

    name: str
    num_tokens: int
    tokens: ExpertLoad  # by layer and expert
    num_pairs: int  # of consecutive tokens
    first_repeated: tuple[int, ...]  # by layer: pairs whose heaviest expert is the same
    any_repeated: tuple[int, ...]  # by layer: pairs that share an expert


def count_choices(
    name: str, pieces: Iterable[Choices], num_experts: Sequence[int]
) -> DomainChoices:
    """Count the choices of a text's pieces. ``num_experts``: by layer.

    One layer, tokens [0, 1], [0, 2], [2, 1], [3, 0]: the last three are counted, of two pairs the
    first shares expert 2.
    """
    tokens = [[0] * number for number in num_experts]
    first_repeated, any_repeated = [0] * len(tokens), [0] * len(tokens)
    num_tokens = num_pairs = 0
    for piece in pieces:
        for layer, counts in enumerate(tokens):
            if not counts:  # a layer without experts
                continue
            chosen = piece[str(layer)][1:]
            for expert_ids in chosen:
                for expert_id in expert_ids:
                    counts[expert_id] += 1
            for one, next_one in pairwise(chosen):
                first_repeated[layer] += one[0] == next_one[0]
                any_repeated[layer] += bool({*one} & {*next_one})
        num_tokens += len(chosen)
        num_pairs += max(len(chosen) - 1, 0)
    rows = tuple(map(tuple, tokens))
    return DomainChoices(
        name, num_tokens, rows, num_pairs, tuple(first_repeated), tuple(any_repeated)
    )


def repetition_if_uniform(num_experts: int, num_chosen: int) -> tuple[float, float]:
    """Return how often the heaviest expert, and any, would be repeated by chance. 2 of 8: 0.125 and
    1 - 15/28 = 0.464.
    """
    others = math.comb(num_experts - num_chosen, num_chosen)
    return 1 / num_experts, 1 - others / math.comb(num_experts, num_chosen)


def read_text(path: Path) -> str:
    """Read a file of ``--of``. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--of {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--of {path} is not UTF-8 text, by byte {error.start}") from error
    if not text.strip():
        raise ConfigError(f"--of {path} has no text")
    return text


def split_text(text: str, max_chars: int) -> list[str]:
    """Split a text into pieces of at most ``max_chars`` characters that are not blank."""
    pieces = (text[start : start + max_chars] for start in range(0, len(text), max_chars))
    return [piece for piece in pieces if piece.strip()]


def piece_size(max_model_len: int) -> int:
    """Return the characters of a piece whose tokens fit into the context, after two of the
    tokenizer's own. Of 512: 127.
    """
    return max(min(int((max_model_len - 3) * CHARS_PER_TOKEN), MAX_PIECE_CHARS), 1)


def fetch_choices(
    client: httpx.Client,
    texts: Mapping[str, str],
    num_experts: Sequence[int],
    on_piece: Callable[[int, int], None],
) -> list[DomainChoices]:
    """Let the server compute every text, and count the experts. ``on_piece`` gets the numbers of
    finished and of all pieces.

    Raises the errors of ``request``, ConfigError if it is another server, PipelineUnavailableError
    if it cannot compute now.
    """
    size = piece_size(_max_model_len(client))
    pieces = {name: split_text(text, size) for name, text in texts.items()}
    total, done = sum(map(len, pieces.values())), 0
    layers = [layer for layer, number in enumerate(num_experts) if number]

    def counted(results: Iterator[Choices]) -> Iterator[Choices]:
        nonlocal done
        for result in results:
            done += 1
            on_piece(done, total)
            yield result

    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        try:
            return [
                count_choices(
                    name,
                    counted(pool.map(lambda piece: _choices(client, piece, layers), own)),
                    num_experts,
                )
                for name, own in pieces.items()
            ]
        finally:
            pool.shutdown(cancel_futures=True)


def _max_model_len(client: httpx.Client) -> int:
    answer = request(client, "GET", "/v1/models")
    try:
        return int(answer.json()["data"][0]["max_model_len"])
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"--url {client.base_url} does not list its model; is it Tramontane?"
        ) from error


def _choices(client: httpx.Client, piece: str, layers: list[int]) -> Choices:
    body = {"prompt": piece, "max_tokens": 1, "temperature": 0, "return_experts": layers}
    answer = request(client, "POST", "/v1/completions", json=body, timeout=None)
    if answer.status_code in (httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.TOO_MANY_REQUESTS):
        raise PipelineUnavailableError(
            f"--url {client.base_url} cannot compute texts now; try again soon"
        )
    try:
        data = answer.json()
        if answer.status_code == httpx.codes.OK:
            choices: Choices = data["choices"][0]["prompt_experts"]
            return {str(layer): choices[str(layer)] for layer in layers}
        message = str(data["error"]["message"])
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"--url {client.base_url} answers without expert choices; is it Tramontane?"
        ) from error
    raise ConfigError(f"--url {client.base_url}: {message}")


def num_chosen(domain: DomainChoices) -> int:
    """Return how many experts a token chooses. 120 choices of 60 tokens: 2."""
    return sum(domain.tokens[0]) // max(domain.num_tokens, 1)


def repetition_table(domains: Sequence[DomainChoices]) -> Table:
    """Render how often consecutive tokens share experts: a row for each layer, and one for
    chance.
    """
    table = Table(
        "layer", *(f"{domain.name}: {kind}" for domain in domains for kind in ("heaviest", "any"))
    )
    for layer in range(len(domains[0].tokens)):
        shares = (
            count[layer] / max(d.num_pairs, 1)
            for d in domains
            for count in (d.first_repeated, d.any_repeated)
        )
        table.add_row(str(layer), *(f"{share:.1%}" for share in shares))
    by_chance = repetition_if_uniform(len(domains[0].tokens[0]), num_chosen(domains[0]))
    table.add_row("chance", *(f"{share:.1%}" for _ in domains for share in by_chance))
    return table


def as_data(domains: Sequence[DomainChoices]) -> dict[str, Any]:
    """Return everything as JSON has it; shares of repetition are by layer."""
    first, any_ = repetition_if_uniform(len(domains[0].tokens[0]), num_chosen(domains[0]))
    files = [
        {
            "name": domain.name,
            "tokens": domain.num_tokens,
            "tokens_per_expert": [list(layer) for layer in domain.tokens],
            "heaviest_repeated": [
                count / max(domain.num_pairs, 1) for count in domain.first_repeated
            ],
            "any_repeated": [count / max(domain.num_pairs, 1) for count in domain.any_repeated],
        }
        for domain in domains
    ]
    return {"files": files, "by_chance": {"heaviest_repeated": first, "any_repeated": any_}}


def draw(domains: Sequence[DomainChoices]) -> "Figure":
    """Draw the share of every expert by text, for the first layer, the one in the middle and the
    last; a line is uniform.
    """
    from matplotlib.figure import Figure

    with_experts = [layer for layer, tokens in enumerate(domains[0].tokens) if tokens]
    layers = sorted({with_experts[0], with_experts[len(with_experts) // 2], with_experts[-1]})
    figure = Figure(figsize=(10, 2.5 * len(layers)), layout="constrained")
    width = 0.8 / len(domains)
    for axes, layer in zip(figure.subplots(len(layers), squeeze=False)[:, 0], layers, strict=True):
        for number, domain in enumerate(domains):
            tokens = domain.tokens[layer]
            places = [
                expert + (number - (len(domains) - 1) / 2) * width for expert in range(len(tokens))
            ]
            axes.bar(
                places,
                [100 * count / max(sum(tokens), 1) for count in tokens],
                width,
                label=domain.name,
            )
        axes.axhline(
            100 / len(domains[0].tokens[layer]), color="gray", linestyle="--", label="uniform"
        )
        axes.set_ylabel(f"layer {layer}: % of choices")
        axes.set_xticks(range(len(domains[0].tokens[layer])))
    axes.set_xlabel("expert")
    figure.axes[0].legend(fontsize="small")
    return figure
