"""``tramontane experts --of``: which experts texts choose, by a real router and model over HTTP,
and counted by hand.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient
from tiny_models import random_model, split_model, tiny_args, tiny_plan

from tramontane.cluster.cli import experts as experts_command
from tramontane.cluster.cli import main as cli
from tramontane.cluster.config.engine_config import DEMO_MODEL
from tramontane.cluster.config.measurements import MeasuredLoad
from tramontane.cluster.console.expert_domains import (
    Choices,
    DomainChoices,
    count_choices,
    fetch_choices,
    piece_size,
    repetition_if_uniform,
    split_text,
)
from tramontane.cluster.http.app import HttpApp, HttpAppConfig
from tramontane.cluster.http.sse import Pacer
from tramontane.cluster.pipeline.local_chain import LocalStageChain
from tramontane.proto.errors import ConfigError
from tramontane.router.engine.health import PipelineHealth
from tramontane.router.engine.router import Router
from tramontane.router.openai.served_model import ServedModel
from tramontane.router.scheduling.policy import FixedInFlightPolicy
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.scheduling.waiting_queue import SchedulerLimits
from tramontane.router.tokenization.backends import SentencePieceTokenizer
from tramontane.workers.model.transformer import StageModel

pytestmark = pytest.mark.filterwarnings(
    "ignore:You should not use the 'timeout' argument with the TestClient"
)
TOKENIZER = SentencePieceTokenizer(DEMO_MODEL / "tokenizer.model")
ARGS = replace(tiny_args(n_layers=3, window=None, max_seq_len=512), vocab_size=TOKENIZER.vocab_size)
NUM_EXPERTS = [4] * ARGS.n_layers  # of which a token chooses 2
BIASED_LAYER, PREFERRED = 1, (3, 1)


def _model(*, biased: bool) -> StageModel:
    """Tokens keep their embeddings, whose gates are unit vectors: every expert is as likely. Or one
    layer prefers two.
    """
    model = random_model(ARGS)
    with torch.no_grad():
        for layer in model.layers.values():
            layer.attention.wo.weight.zero_()
            layer.gate.scores.weight.copy_(torch.eye(ARGS.dim)[1 : 1 + 4])
        assert model.experts is not None
        for name, weight in model.experts.named_parameters():
            if "w2" in name:
                weight.zero_()
        if biased:
            model.tok_embeddings.weight[:, 0] = 10
            gate = model.layers[str(BIASED_LAYER)].gate.scores.weight.zero_()
            gate[PREFERRED[0], 0], gate[PREFERRED[1], 0] = 2, 1
    return model


@contextmanager
def _served(model: StageModel) -> Iterator[httpx.Client]:
    """A client of the whole API server, which runs in a thread."""
    plan = tiny_plan(ARGS, num_stages=1, max_num_seqs=8)
    chain = LocalStageChain(split_model(model, plan))
    limits = SchedulerLimits(8, 128, ARGS.max_seq_len, ARGS.vocab_size)
    router = Router(Scheduler(plan.cache, limits, FixedInFlightPolicy(2, 128)), chain)

    async def health() -> PipelineHealth:
        return PipelineHealth("ready")

    async def expert_load() -> MeasuredLoad:
        return MeasuredLoad(tuple((0,) * number for number in NUM_EXPERTS), 1)

    served = ServedModel(
        "tiny",
        TOKENIZER,
        ARGS.max_seq_len,
        16,
        ARGS.vocab_size,
        ARGS.moe_layers,
        experts_per_token=2,
    )
    config = HttpAppConfig(
        model=served,
        source=router,
        health=health,
        expert_load=expert_load,
        max_body_bytes=2**20,
        pacer=Pacer(10**9),
    )
    with TestClient(HttpApp(config).app(), base_url="http://ingress") as client:
        assert client.portal is not None
        running = client.portal.start_task_soon(router.run)
        try:
            yield client
        finally:
            running.cancel()
            chain.close()


def _words(seed: int, number: int) -> str:
    """Nonsense of many different tokens: words that have one of their own."""
    texts = [TOKENIZER.decode((token_id,)).strip() for token_id in range(TOKENIZER.vocab_size)]
    words = [text for text in texts if text.isalpha() and len(TOKENIZER.encode(text)) == 2]
    return " ".join(random.Random(seed).choices(words, k=number))


def _shares(domain: DomainChoices, layer: int) -> list[float]:
    return [count / sum(domain.tokens[layer]) for count in domain.tokens[layer]]


def test_a_model_without_preference_is_uniform_within_the_error_of_sampling() -> None:
    texts = {"one": _words(0, 800), "two": _words(1, 800)}
    seen: list[tuple[int, int]] = []
    with _served(_model(biased=False)) as client:
        domains = fetch_choices(client, texts, NUM_EXPERTS, lambda *done: seen.append(done))
    assert seen == [(number, len(seen)) for number in range(1, len(seen) + 1)]
    for domain, text in zip(domains, texts.values(), strict=True):
        pieces = split_text(text, piece_size(ARGS.max_seq_len))
        ids = [TOKENIZER.encode(piece)[1:] for piece in pieces]
        assert domain.num_tokens == sum(map(len, ids)) > 500
        assert domain.num_pairs == domain.num_tokens - len(pieces)
        # a token always chooses the same
        counts = Counter(token_id for each in ids for token_id in each)
        num_independent = domain.num_tokens**2 / sum(count**2 for count in counts.values())
        assert num_independent > 150
        for layer in range(ARGS.n_layers):
            assert sum(domain.tokens[layer]) == 2 * domain.num_tokens
            error = (0.25 * 0.75 / num_independent) ** 0.5
            assert all(abs(share - 0.25) < 4 * error for share in _shares(domain, layer))
            assert abs(domain.first_repeated[layer] / domain.num_pairs - 0.25) < 4 * error


def test_a_model_with_a_preference_shows_it_in_its_layer() -> None:
    with _served(_model(biased=True)) as client:
        [domain] = fetch_choices(
            client, {"text": _words(0, 300)}, NUM_EXPERTS, lambda _done, _total: None
        )
    assert _shares(domain, BIASED_LAYER) == [0, 0.5, 0, 0.5]
    assert (
        domain.first_repeated[BIASED_LAYER] == domain.any_repeated[BIASED_LAYER] == domain.num_pairs
    )
    assert all(0.1 < share < 0.4 for share in _shares(domain, 0))
    assert domain.first_repeated[0] < domain.num_pairs / 2


# ---- counting


@given(
    st.lists(
        st.lists(st.permutations(range(5)).map(lambda ids: ids[:2]), min_size=1, max_size=6),
        max_size=4,
    )
)
def test_counts_are_those_of_the_definition(pieces: list[list[list[int]]]) -> None:
    choices: list[Choices] = [{"0": piece, "1": [ids[::-1] for ids in piece]} for piece in pieces]
    domain = count_choices("x", choices, [5, 5])
    kept = [piece[1:] for piece in pieces]
    pairs = [(a, b) for piece in kept for a, b in pairwise(piece)]
    assert domain.num_tokens == sum(map(len, kept))
    assert domain.num_pairs == len(pairs)
    assert domain.tokens[0] == domain.tokens[1]
    assert domain.tokens[0] == tuple(
        sum(ids.count(expert) for piece in kept for ids in piece) for expert in range(5)
    )
    assert domain.first_repeated == (
        sum(a[0] == b[0] for a, b in pairs),
        sum(a[1] == b[1] for a, b in pairs),
    )
    assert domain.any_repeated == (sum(bool({*a} & {*b}) for a, b in pairs),) * 2


@pytest.mark.parametrize(
    ("num_experts", "num_chosen", "expected"),
    [(8, 2, (1 / 8, 13 / 28)), (4, 1, (1 / 4, 1 / 4)), (3, 2, (1 / 3, 1))],
)
def test_repetition_by_chance(
    num_experts: int, num_chosen: int, expected: tuple[float, float]
) -> None:
    assert repetition_if_uniform(num_experts, num_chosen) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("max_model_len", "expected"), [(512, 127), (10**6, 1024), (1, 1), (10, 1)]
)
def test_pieces_fit_into_the_context_whatever_their_characters(
    max_model_len: int, expected: int
) -> None:
    assert piece_size(max_model_len) == expected
    if max_model_len >= 10:
        assert len(TOKENIZER.encode("\U0001f600" * expected)) < max_model_len, (
            "and there is room for a new token"
        )


def test_blank_pieces_are_left_out() -> None:
    assert split_text("abc   \n\n\ndef", 3) == ["abc", "def"]


# ---- the command

Run = Callable[..., None]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs ``tramontane experts`` against a server that answers as ``answer`` says."""

    def run(answer: Callable[[httpx.Request], httpx.Response], *arguments: str) -> None:
        client = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://ingress")
        monkeypatch.setattr(experts_command, "make_client", lambda _url, _headers: client)
        assert cli.app(["experts", *arguments], standalone_mode=False) is None, (
            "another answer is an exit code"
        )

    return run


def _two_experts(request: httpx.Request) -> httpx.Response:
    if request.url.path == "/experts":
        return httpx.Response(200, json={"tokens_per_expert": [[0, 0, 0]], "pipelines": 1})
    if request.url.path == "/v1/models":
        return httpx.Response(200, json={"data": [{"max_model_len": 100}]})
    body = json.loads(request.content)
    assert body["return_experts"] == [0]
    experts = [[0, 1], *([2, 1] if character == "a" else [0, 2] for character in body["prompt"])]
    return httpx.Response(200, json={"choices": [{"prompt_experts": {"0": experts}}]})


def _files(folder: Path) -> list[str]:
    (folder / "a.txt").write_text("aaaa")
    (folder / "b.txt").write_text("ab" * 20)
    return [str(folder / name) for name in ("a.txt", "b.txt")]


def test_the_table_has_every_text(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = _files(tmp_path)
    run(_two_experts, "--of", a, "--of", b)
    out = capsys.readouterr().out
    assert f"{a}, 4 tokens: % of each layer's choices, * its busiest\n" in out, (
        "in one line, however long the path is"
    )
    assert re.search(r"\n    0   0\.0  50\.0\* 50\.0 *\nbusiest: ", out)
    assert re.search(r"\n    0  25\.0  25\.0  50\.0\* *\nbusiest: ", out)
    assert "\npairs of consecutive tokens" in out
    assert "100.0%" in out
    assert "chance" in out
    assert "33.3%" in out


def test_a_file_that_is_named_twice_is_refused(run: Run, tmp_path: Path) -> None:
    a, _ = _files(tmp_path)
    with pytest.raises(ConfigError, match="--of names a file twice"):
        run(_two_experts, "--of", a, "--of", a)


def test_json_has_every_number(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = _files(tmp_path)
    run(_two_experts, "--of", a, "--of", b, "--json")
    data = json.loads(capsys.readouterr().out)
    assert data["by_chance"] == {"heaviest_repeated": pytest.approx(1 / 3), "any_repeated": 1}
    assert data["files"] == [
        {
            "name": a,
            "tokens": 4,
            "tokens_per_expert": [[0, 4, 4]],
            "heaviest_repeated": [1.0],
            "any_repeated": [1.0],
        },
        {
            "name": b,
            "tokens": 40,
            "tokens_per_expert": [[20, 20, 40]],
            "heaviest_repeated": [0.0],
            "any_repeated": [1.0],
        },
    ]


def test_a_figure_is_written(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    a, b = _files(tmp_path)
    run(_two_experts, "--of", a, "--of", b, "--plot", str(tmp_path / "experts.svg"))
    assert "<svg" in (tmp_path / "experts.svg").read_text()


def _failing(status: int, body: Any) -> Callable[[httpx.Request], httpx.Response]:  # any JSON
    def answer(request: httpx.Request) -> httpx.Response:
        return (
            _two_experts(request) if request.method == "GET" else httpx.Response(status, json=body)
        )

    return answer


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (
            ["--of", "a.txt", "--watch"],
            "--of computes texts, so --watch and --adopt cannot be used with it",
        ),
        (
            ["--of", "a.txt", "--adopt", "x"],
            "--of computes texts, so --watch and --adopt cannot be used with it",
        ),
        (["--plot", "x.png"], "--plot draws the experts of texts; give --of as well"),
        (["--of", "missing.txt"], "--of missing.txt cannot be read: No such file or directory"),
        (["--of", "."], "--of . cannot be read: Is a directory"),
        (["--of", "blank.txt"], "--of blank.txt has no text"),
        (["--of", "latin.txt"], "--of latin.txt is not UTF-8 text, by byte 1"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_computed(
    refused: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    named: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes(b"a\xff")
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert refused("experts", *arguments) == named


@pytest.mark.parametrize(
    ("status", "body", "named", "code"),
    [
        (400, {"error": {"message": "too long"}}, "--url http://ingress: too long", 2),
        (
            200,
            {"choices": [{"prompt_experts": {}}]},
            "answers without expert choices; is it Tramontane?",
            2,
        ),
        (200, {"choices": [{}]}, "answers without expert choices; is it Tramontane?", 2),
        (500, [], "answers without expert choices; is it Tramontane?", 2),
        (503, {}, "cannot compute texts now; try again soon", 1),
        (429, {}, "cannot compute texts now; try again soon", 1),
    ],
)
def test_a_server_that_cannot_is_named(
    refused: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    status: int,
    body: object,
    named: str,
    code: int,
) -> None:
    client = httpx.Client(
        transport=httpx.MockTransport(_failing(status, body)), base_url="http://ingress"
    )
    monkeypatch.setattr(experts_command, "make_client", lambda _url, _headers: client)
    assert named in refused("experts", "--of", _files(tmp_path)[0], code=code)
