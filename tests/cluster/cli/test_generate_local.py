"""``tramontane generate --local`` from the command line to the text, with a tiny checkpoint and
tokenizer.
"""

import io
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from reference import assert_best_experts, assert_same_tokens, greedy
from rich.console import Console
from tiny_models import random_model, tiny_args, write_checkpoint, write_tokenizer
from torch import Tensor
from typer.testing import CliRunner

from tramontane.cluster.cli import generate as generate_command
from tramontane.cluster.cli import main as cli
from tramontane.cluster.config.engine_config import DEMO_MODEL
from tramontane.cluster.console import prompts
from tramontane.cluster.console.display import STRIP_CONTROL, Display
from tramontane.cluster.console.run_summary import TokenColors
from tramontane.proto.model_folder import Layout
from tramontane.proto.plan import PipelinePlan
from tramontane.router.tokenization.backends import SentencePieceTokenizer
from tramontane.router.tokenization.loader import require_tokenizer
from tramontane.workers.sampling.token_sampler import SampledRows, SampledTokens, TokenSampler
from tramontane.workers.weights.random_checkpoint import write_random_checkpoint

VOCAB = 300
ARGS = replace(tiny_args(n_layers=4, window=24, max_seq_len=128), vocab_size=VOCAB)
PROMPTS = [
    "The quick brown fox",
    "It",
    "the worst of times, it was the best of times, the lazy dog jumps over",
    "é 😀",
]
NUM_TOKENS = 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", ARGS, random_model(ARGS))
    return write_tokenizer(folder, VOCAB)


@dataclass(frozen=True)
class Run:
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(self.out)
        return parsed

    @property
    def token_ids(self) -> list[list[int]]:
        return [completion["token_ids"] for completion in self.json["completions"]]


Generate = Callable[..., Run]


@pytest.fixture
def generate(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Generate:
    """Runs ``tramontane generate --local`` in this process and asserts that it succeeds."""

    def run(*arguments: str, stdin: str = "", terminal: bool = False) -> Run:
        flags = [
            "--model",
            str(model),
            "--local",
            "--threads-per-stage",
            "1",
            "--max-tokens",
            str(NUM_TOKENS),
        ]
        monkeypatch.setattr(sys, "argv", ["tramontane", "generate", *flags, *arguments])
        monkeypatch.setattr(
            sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8")
        )
        monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        out, err = capsys.readouterr()
        assert exit_.value.code == 0, err
        return Run(out, err)

    return run


def _blocks(run: Run) -> str:
    """What standard output should hold for the completions of a run with --json."""
    texts = [completion["prompt"] + completion["text"] for completion in run.json["completions"]]
    return "\n".join(f"{text}\n" for text in texts)


def test_standard_output_is_each_prompt_with_its_continuation_in_input_order(
    generate: Generate,
) -> None:
    expected = generate("--json", *PROMPTS)
    got = generate(*PROMPTS)
    assert [completion["prompt"] for completion in expected.json["completions"]] == PROMPTS
    assert got.out == _blocks(expected)
    assert expected.json["system_fingerprint"].startswith("fp_")
    assert (
        expected.json["system_fingerprint"]
        == generate("--json", "--stages", "2", PROMPTS[0]).json["system_fingerprint"]
    )
    assert "bubble" in got.err
    assert "stage" in got.err


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), (4, 0)),
        (("--max-num-seqs", "2"), (2, 0)),
        (("--max-model-len", "100"), (4, 100)),
        (("--max-tokens", "5000"), (4, 128)),
    ],
)
def test_the_cache_is_what_the_prompts_and_their_answers_can_fill(
    generate: Generate,
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
    flags: tuple[str, ...],
    expected: tuple[int, int],
) -> None:
    """Sequences and positions; 0 stands for the longest prompt with its answer."""
    plans: list[PipelinePlan] = []
    monkeypatch.setattr(generate_command, "cache_note", lambda plan: plans.append(plan) or "")
    generate(*flags, *PROMPTS)
    tokenizer = require_tokenizer(model, VOCAB)
    longest = max(len(tokenizer.encode(prompt)) for prompt in PROMPTS)
    assert (plans[0].max_num_seqs, plans[0].max_model_len) == (
        expected[0],
        expected[1] or longest + NUM_TOKENS,
    )


@pytest.mark.parametrize(
    ("flags", "is_terminal", "is_shown"),
    [((), True, True), (("--json",), True, False), ((), False, False)],
)
def test_in_a_terminal_a_line_about_the_cache_stays(
    generate: Generate,
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
    is_terminal: bool,
    is_shown: bool,
) -> None:
    """Elsewhere it is in the line about loading. With FORCE_COLOR rich takes any stream for a
    terminal.
    """
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    err = generate(*flags, "It").err
    cache = "of key/value cache per stage (--kv-cache-memory)"
    line = (
        rf"note: up to \S+ KiB {re.escape(cache)}, \d+ positions per sequence \(--max-model-len\)\n"
    )
    assert (re.search(line, err) is not None) is is_shown
    assert is_terminal or cache in err


def test_prompts_may_be_lines_of_standard_input(generate: Generate) -> None:
    by_argument = generate("--json", *PROMPTS)
    by_line = generate("--json", stdin="".join(f"{prompt}\n" for prompt in PROMPTS))
    assert by_line.json["completions"] == by_argument.json["completions"]
    assert generate(stdin="\n".join(PROMPTS)).out == _blocks(by_argument)


def test_blank_lines_of_standard_input_are_skipped(generate: Generate) -> None:
    assert generate(stdin="\n\nThe\r\n \t\nIt\n\n").out == generate("The", "It").out


def test_the_summary_has_the_drafts_that_were_accepted(generate: Generate) -> None:
    """Of an answer that repeats itself."""
    speculation = (
        "--speculative-config",
        '{"num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}',
    )
    asked = (
        "--model",
        str(DEMO_MODEL),
        "--max-tokens",
        "48",
        "--temperature",
        "0",
        "ROMEO: my love, my love, my love, my",
    )
    run = generate("--json", *speculation, *asked)
    num_drafted, num_accepted = run.json["draft_tokens"], run.json["accepted_tokens"]
    assert num_drafted >= num_accepted > 0
    assert (
        f"{num_accepted} of {num_drafted} drafted tokens were accepted"
        in generate(*speculation, *asked).err
    )
    assert "drafted" not in generate(*asked).err


def test_standard_input_is_not_read_where_there_are_arguments(
    generate: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a pipe that is never closed, as under cron or ssh. The help says so."""

    def refuse() -> NoReturn:
        raise AssertionError("standard input was read")

    monkeypatch.setattr(prompts, "_lines_of_stdin", refuse)
    assert generate(PROMPTS[0], stdin="something\n").out.startswith(PROMPTS[0])
    help_text = " ".join(
        CliRunner().invoke(cli.app, ["generate", "--help"], env={"COLUMNS": "300"}).output.split()
    )
    assert (
        "each line of standard input is one, except blank lines; with any, it is not read"
        in help_text
    )


def test_one_prompt_streams_to_the_same_text(generate: Generate) -> None:
    assert generate(PROMPTS[0]).out == _blocks(generate("--json", PROMPTS[0]))


def test_json_has_everything(generate: Generate) -> None:
    run = generate("--json", "--stages", "2", *PROMPTS)
    assert run.out.count("\n") == 1, "one line"
    figures = {"bubble", "tokens_per_s", "ready_after_s", "first_token_after_s"}
    assert set(run.json) == {"completions", "stages", "system_fingerprint", *figures}
    for completion in run.json["completions"]:
        assert set(completion) == {"prompt", "text", "token_ids", "finish_reason"}
        assert len(completion["token_ids"]) == NUM_TOKENS
        assert completion["finish_reason"] == "length"
    assert [stage["layers"] for stage in run.json["stages"]] == [[0, 1], [2, 3]]
    assert all(0 < stage["busy_share"] <= 1 for stage in run.json["stages"])
    assert len({(stage["tokens"], stage["micro_batches"]) for stage in run.json["stages"]}) == 1, (
        "all stages see all tokens"
    )
    busy = [stage["busy_share"] for stage in run.json["stages"]]
    assert run.json["bubble"] == pytest.approx(1 - sum(busy) / 2)
    assert run.json["tokens_per_s"] > 0
    assert run.json["ready_after_s"] <= run.json["first_token_after_s"]


def test_the_documentation_names_all_fields_of_json(generate: Generate) -> None:
    page = (Path(__file__).parents[3] / "docs" / "cli.md").read_text(encoding="utf-8")
    table = page.split("### JSON output")[1].split("\n## ")[0]
    reported = generate("--json", "It").json
    for name in (*reported, *reported["completions"][0], *reported["stages"][0]):
        assert f"`{name}`" in table


def test_the_stages_count_every_token_once(generate: Generate, model: Path) -> None:
    """A prompt's tokens and all of its new ones but the last, which is never fed back."""
    tokenizer = SentencePieceTokenizer(model / "tokenizer.model")
    expected = sum(len(tokenizer.encode(prompt)) + NUM_TOKENS - 1 for prompt in PROMPTS)
    assert [
        stage["tokens"] for stage in generate("--json", "--stages", "3", *PROMPTS).json["stages"]
    ] == [expected] * 3


def test_the_text_is_that_of_the_tokens(generate: Generate, model: Path) -> None:
    """Also where a continuation ends in the middle of a character, which some of these must do."""
    tokenizer, cut = SentencePieceTokenizer(model / "tokenizer.model"), 0
    for num_tokens in range(1, 9):
        for completion in generate("--json", "--max-tokens", str(num_tokens), *PROMPTS).json[
            "completions"
        ]:
            decoder = tokenizer.decoder()
            whole = "".join(map(decoder.push, completion["token_ids"]))
            rest = decoder.finish()
            assert completion["text"] == whole + rest
            cut += bool(rest)
    assert cut > 0


def test_a_seed_decides_everything(generate: Generate) -> None:
    first = generate("--json", "--seed", "1", *PROMPTS)
    again = generate("--json", "--seed", "1", *PROMPTS)
    other = generate("--json", "--seed", "2", *PROMPTS)
    assert first.json["completions"] == again.json["completions"]
    assert all(a != b for a, b in zip(first.token_ids, other.token_ids, strict=True))


def test_the_number_of_stages_changes_nothing(generate: Generate) -> None:
    outputs = [generate("--json", "--stages", str(n), *PROMPTS).token_ids for n in (1, 2, 4)]
    assert outputs[0] == outputs[1] == outputs[2]


def test_random_weights_need_only_the_configuration_and_the_tokenizer(
    generate: Generate, model: Path, tmp_path: Path
) -> None:
    """Their loading is reported, as that of any others."""
    stored, bare = tmp_path / "stored", tmp_path / "bare"
    # Mistral's would end answers at its end of sequence
    write_random_checkpoint(stored, ARGS, Layout.HUGGING_FACE)
    bare.mkdir()
    for folder, file in (
        (stored, model / "tokenizer.model"),
        (bare, model / "tokenizer.model"),
        (bare, model / "config.json"),
    ):
        shutil.copy(file, folder)
    expected = generate("--json", "--model", str(stored), *PROMPTS)
    runs = [
        generate("--json", "--load-format", "dummy", "--model", str(bare), "--stages", n, *PROMPTS)
        for n in "124"
    ]
    for run in runs:
        assert run.token_ids == expected.token_ids
        *quarters, last = [line for line in run.err.splitlines() if line.startswith("loaded ")]
        assert [line[:10] for line in quarters] == ["loaded 25%", "loaded 50%", "loaded 75%"]
        assert last.endswith(": choosing kernels ...")


@pytest.mark.parametrize(
    "flags",
    [["--stages", "1"], ["--stages", "3", "--max-num-batched-tokens", "5", "--page-size", "4"]],
)
def test_greedy_is_the_references(generate: Generate, model: Path, flags: list[str]) -> None:
    weights = random_model(ARGS).state_dict()
    run = generate("--json", "--temperature", "0", *flags, *PROMPTS)
    for prompt, token_ids in zip(PROMPTS, run.token_ids, strict=True):
        prompt_ids = list(SentencePieceTokenizer(model / "tokenizer.model").encode(prompt))
        assert_same_tokens(
            prompt, token_ids, greedy(weights, ARGS, prompt_ids, NUM_TOKENS, token_ids)
        )


def test_a_context_ends_a_continuation(generate: Generate, model: Path) -> None:
    num_tokens = len(SentencePieceTokenizer(model / "tokenizer.model").encode("It"))
    run = generate("--json", "--max-model-len", str(num_tokens + 3), "It")
    assert run.json["completions"][0]["finish_reason"] == "length"
    assert len(run.token_ids[0]) == 3
    context = f"the context of {num_tokens + 3} positions"
    assert (
        run.err.splitlines()[-1]
        == f"note: the answer ends at {context}: 3 new tokens fit after the prompt, and"
        f" --max-tokens is {NUM_TOKENS}"
    )


def test_answers_that_the_context_ends_are_counted(generate: Generate) -> None:
    """On one line, however narrow the terminal; an answer that is as long as was requested is none
    of them.
    """
    run = generate("--json", "--max-model-len", "64", "--max-tokens", "60", *PROMPTS)
    short = sorted(map(len, run.token_ids))
    assert short.pop() == 60
    notes = [line for line in run.err.splitlines() if line.startswith("note: ")]
    assert notes == [
        f"note: 3 of 4 answers end at the context of 64 positions: {short[0]} to {short[-1]} new"
        " tokens fit after the prompt, and --max-tokens is 60"
    ]
    assert "note: " not in generate(*PROMPTS).err


def test_pipes_carry_text_and_nothing_else(generate: Generate, model: Path) -> None:
    """The same bytes from a process of its own, standard input and output piped."""
    run = "from tramontane.cluster.cli.main import main; main()"
    flags = [
        "--model",
        str(model),
        "--local",
        "--threads-per-stage",
        "1",
        "--max-tokens",
        str(NUM_TOKENS),
    ]
    command = [sys.executable, "-X", "utf8", "-c", run, "generate", *flags]
    done = subprocess.run(
        command, input="\n".join(PROMPTS).encode(), capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == generate(*PROMPTS).out
    assert "Traceback" not in done.stderr.decode()


# ---- experts


def test_json_has_the_experts_of_a_layer(generate: Generate, model: Path) -> None:
    """Those of the prompts and of all new tokens but the last, which never goes into the model."""
    weights = random_model(ARGS).state_dict()
    run = generate(
        "--json", "--show-experts", "2", "--stages", "2", "--max-num-batched-tokens", "5", *PROMPTS
    )
    assert run.json["completions"] != generate("--json", *PROMPTS).json["completions"], (
        "no other pipeline uses it"
    )
    for completion in run.json["completions"]:
        prompt_ids = list(
            SentencePieceTokenizer(model / "tokenizer.model").encode(completion["prompt"])
        )
        assert len(completion["prompt_experts"]["2"]) == len(prompt_ids)
        reported = {2: completion["prompt_experts"]["2"] + completion["experts"]["2"]}
        assert_best_experts(weights, ARGS, prompt_ids + completion["token_ids"][:-1], reported)


def test_without_a_terminal_the_text_is_plain_and_a_note_says_so(generate: Generate) -> None:
    for given in (PROMPTS, PROMPTS[:1]):
        run = generate("--show-experts", "2", *given)
        assert run.out == generate(*given).out
        assert "layer 2, the heaviest expert of each token:  0  1  2  3 \n" in run.err
        assert (
            "note: standard output is not a terminal, so its text is not colored; --json lists the"
            " experts\n" in run.err
        )


# ---- what a person sees

CONTROL = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\r|\n|[^\x1b\r\n]+")


def _screen(output: str) -> list[str]:
    """The lines that a terminal shows after this output: enough of one for what rich writes."""
    lines, row, column = [""], 0, 0
    for match in CONTROL.finditer(output):
        number, what = match[1], match[2]
        if what == "A":
            row -= int(number or 1)
        elif what == "K":
            assert number == "2"
            lines[row] = ""
        elif match[0] == "\r":
            column = 0
        elif match[0] == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif what is None:
            text = match[0]
            lines[row] = lines[row][:column].ljust(column) + text + lines[row][column + len(text) :]
            column += len(text)
    while lines and not lines[-1]:
        lines.pop()
    return lines


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "200", "LINES": "60"}.items():
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("terminal")
def test_a_terminal_ends_with_the_whole_texts(generate: Generate) -> None:
    expected = _blocks(generate("--json", *PROMPTS)).translate(STRIP_CONTROL)
    live = generate(*PROMPTS, terminal=True)
    assert "\x1b[" in live.out, "it was live"
    assert live.out.endswith(expected)
    assert _screen(live.out) == _screen(expected)


@pytest.mark.usefixtures("terminal")
def test_one_prompt_in_a_terminal_is_plain_text(generate: Generate) -> None:
    assert generate("It", terminal=True).out == generate("It").out.translate(STRIP_CONTROL)


SGR = re.compile(r"\x1b\[([0-9;]*)m")


def _colored(text: str) -> list[tuple[str, str | None]]:
    """Every character, with its colors."""
    characters: list[tuple[str, str | None]] = []
    plain, *rest = re.split(SGR, text)
    characters += [(char, None) for char in plain]
    for codes, part in zip(rest[::2], rest[1::2], strict=True):
        characters += [(char, None if codes == "0" else codes) for char in part]
    return characters


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("given", [PROMPTS, PROMPTS[3:], ["two\n\tlines\n"]])
def test_in_a_terminal_every_token_has_its_experts_color(
    generate: Generate, model: Path, monkeypatch: pytest.MonkeyPatch, given: list[str]
) -> None:
    """A character of several tokens that of the last; the last token none. Otherwise it is the
    text, character by character.
    """
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("COLUMNS", "30")
    tokenizer = SentencePieceTokenizer(model / "tokenizer.model")
    colors = TokenColors(3, 4)
    expected: list[tuple[str, str | None]] = []
    for completion in generate("--json", "--show-experts", "3", *given).json["completions"]:
        expected += [("\n", None)] * bool(expected)
        decoders = [tokenizer.decoder(is_text_start=True), tokenizer.decoder()]
        parts = tokenizer.encode(completion["prompt"]), completion["token_ids"]
        pieces = [
            decoder.push(token_id)
            for decoder, ids in zip(decoders, parts, strict=True)
            for token_id in ids
        ]
        for piece, ids in zip(
            pieces, completion["prompt_experts"]["3"] + completion["experts"]["3"], strict=False
        ):
            codes = _colored(colors.style(ids[0]).render("x"))[0][1]
            expected += [
                (char, None if char == "\n" else codes) for char in piece.translate(STRIP_CONTROL)
            ]
        expected += [
            (char, None)
            for char in (pieces[-1] + decoders[1].finish()).translate(STRIP_CONTROL) + "\n"
        ]
    run = generate("--show-experts", "3", *given, terminal=True)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Zhl]|\x1b\[2K", "", run.out)
    assert _colored(shown)[-len(expected) :] == expected
    assert _screen(run.out) == _screen("".join(char for char, _ in expected))
    assert len({codes for _, codes in expected}) > 2


def test_every_expert_has_a_color_of_its_own() -> None:
    for num_experts in (1, 2, 8, 64):
        colors = TokenColors(0, num_experts)
        assert len({colors.style(expert) for expert in range(num_experts)}) == num_experts


def _forced_terminal(display: Display) -> Display:
    display.stdout = Console(force_terminal=True, width=40, height=12, highlight=False)
    return display


@pytest.mark.usefixtures("terminal")
def test_live_text_is_replaced_by_the_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """Texts far longer than the screen, with what rich takes for markup, grow and end out of
    order.
    """
    display = _forced_terminal(Display(live=True))
    prompts = ["[bold]one[/bold]", "two\n\nlines", "[/oops] :smile: 😀"]
    display.start(prompts)
    for step in range(200):
        for index in range(3):
            display.add(index, f" w{step}")
    for index in (2, 0, 1):
        display.end(index)
    display.stop()
    display.stop()
    words = "".join(f" w{step}" for step in range(200))
    texts = "\n".join(f"{prompt}{words}\n" for prompt in prompts)
    out = capsys.readouterr().out
    assert out.endswith(texts)
    assert _screen(out) == _screen(texts)


def test_blocks_come_in_input_order_each_as_soon_as_it_can(
    capsys: pytest.CaptureFixture[str],
) -> None:
    display = Display(live=False)
    display.start(["a", "b", "c"])
    shown = []
    for index in (1, 0, 2):
        display.add(index, str(index))
        display.end(index)
        shown.append(capsys.readouterr().out)
    display.stop()
    assert shown == ["", "a0\n\nb1\n", "\nc2\n"]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.usefixtures("terminal")
def test_a_failure_leaves_what_there_was(capsys: pytest.CaptureFixture[str], live: bool) -> None:
    """Display.stop promises "the whole text on the screen, also after a failure"."""
    display = _forced_terminal(Display(live=live))
    display.start(["one", "two"])
    display.add(0, " begun")
    display.add(1, " done")
    display.end(1)
    display.stop()
    assert _screen(capsys.readouterr().out) == ["one begun", "", "two done"]


def test_silence_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(live=True, silent=True)
    display.start(["one", "two"])
    display.add(0, " more")
    display.end(0)
    display.end(1)
    display.stop()
    assert capsys.readouterr() == ("", "")


def test_a_prompt_that_overflows_says_so_and_the_others_are_as_they_are(
    generate: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, sample = generate("--json", "--temperature", "0", *PROMPTS), TokenSampler.sample
    num_rows = dict[int, int]()

    def overflow(sampler: TokenSampler, logits_SV: Tensor, rows: SampledRows) -> SampledTokens:
        for row, seq_id in enumerate(rows.seq_ids):
            num_rows[seq_id] = num_rows.get(seq_id, 0) + 1
            if seq_id == 2 and num_rows[seq_id] == 4:
                logits_SV[row] = math.nan
        return sample(sampler, logits_SV, rows)

    monkeypatch.setattr(TokenSampler, "sample", overflow)
    for flags in ((), ("--json",)):
        num_rows.clear()
        run = generate("--temperature", "0", *flags, *PROMPTS)
        if not flags:
            assert (
                "prompt 3: the answer cannot be continued: the logits of its next token are not"
                " finite" in run.err
            )
    found = run.json["completions"]
    assert found.pop(2)["error"].startswith("the answer cannot be continued")
    assert found == [
        each for number, each in enumerate(expected.json["completions"]) if number != 2
    ]
    [failed] = [each for number, each in enumerate(run.json["completions"]) if number == 2]
    assert (failed["finish_reason"], len(failed["token_ids"])) == ("error", 3)
