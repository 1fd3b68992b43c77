"""``tramontane chat --local`` from what is said to what is answered."""

import io
import json
import math
import os
import pty
import select
import signal
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reference import greedy
from tiny_models import random_model, tiny_args, write_checkpoint, write_tokenizer

from tramontane.cluster.cli import chat as chat_command
from tramontane.cluster.cli import main as cli
from tramontane.cluster.cli.chat import ChatReply
from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.console.display import sanitize
from tramontane.cluster.pipeline.engine import Engine, Report, open_engine
from tramontane.proto.plan import PipelinePlan
from tramontane.router.tokenization.chat import ChatMessage
from tramontane.router.tokenization.loader import load_chat_template, require_tokenizer
from tramontane.router.tokenization.mistral_chat import MistralChatTemplate
from tramontane.router.tokenization.reasoning_parser import ReasoningFormat, ReasoningParser, Split
from tramontane.workers.model.transformer import StageModel
from tramontane.workers.sampling.token_sampler import TokenSampler

ARGS = replace(tiny_args(n_layers=2, window=None, max_seq_len=160), vocab_size=300)
# the leader of a session gets the first terminal that it opens, and its Ctrl-C
CONTROLLED = "import os\nos.close(os.open(os.ttyname(0), os.O_RDWR))\n"
SLOW = """
import time
from tramontane.cluster.cli import main as cli
from tramontane.cluster.console.display import sanitize
from tramontane.workers.stage.stage_worker import StageWorker
step = StageWorker.step
StageWorker.step = lambda *given: (time.sleep(0.1), step(*given))[1]
cli.main()
"""  # 100 tokens take ten seconds, so that there is an answer to interrupt
# The tokenizer is read once something is typed, or after two seconds: else its name may be gone
# before the screen shows it.
READING = SLOW.replace(
    "cli.main()",
    "import select\n"
    "from tramontane.cluster.cli import chat\n"
    "read = chat.require_tokenizer\n"
    "chat.require_tokenizer = lambda *given: (select.select([0], [], [], 2), read(*given))[1]\n"
    "cli.main()",
)
STUCK = """
import time
from contextlib import asynccontextmanager
from tramontane.cluster.cli import chat, main as cli
from tramontane.cluster.common.signals import defer_signals
@asynccontextmanager
async def open_engine(*_, **__):
    with defer_signals("once more"):
        print("Ray starts", flush=True)
        time.sleep(600)
    yield
chat.open_engine = open_engine
cli.main()
"""
EDITED = b"\x1b[?2004l"
# from here on a terminal marks what is pasted, because a line is being edited
PROMPT = b"\x1b[?2004h"
Chat = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def weights() -> StageModel:
    return random_model(ARGS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, weights: StageModel) -> Path:
    return write_tokenizer(
        write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", ARGS, weights), 300
    )


@pytest.fixture
def chat(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chat:
    """Exit code, standard output and standard error of a conversation in this process."""

    def run(*lines: str | bytes, flags: tuple[str, ...] = ()) -> tuple[int, str, str]:
        said = b"".join(
            (line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines
        )
        given = [
            "--model",
            str(model),
            "--local",
            "--max-tokens",
            "8",
            "--temperature",
            "0",
            *flags,
        ]
        monkeypatch.setattr(sys, "argv", ["tramontane", "chat", *given])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(said), encoding="utf-8"))
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        out, err = capsys.readouterr()
        assert isinstance(exit_.value.code, int)
        return exit_.value.code, out, err

    return run


def _answers(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.parametrize("system", [None, "You are a fox."])
def test_answers_are_what_the_model_says_to_the_conversation(
    chat: Chat, model: Path, weights: StageModel, system: str | None
) -> None:
    code, out, err = chat(
        "The quick", "", "brown fox", flags=("--json", *(("--system", system) if system else ()))
    )
    assert code == 0, err
    tokenizer = require_tokenizer(model, 300)
    prompt = load_chat_template(model, tokenizer)
    messages = [ChatMessage("system", system)] if system else []
    for said, answer in zip(("The quick", "brown fox"), _answers(out), strict=True):
        messages.append(ChatMessage("user", said))
        ids = prompt.encode(messages)
        tokens = greedy(dict(weights.state_dict()), ARGS, list(ids), 8).token_ids[
            : answer["completion_tokens"]
        ]
        decoder = tokenizer.decoder(is_text_start=True)
        assert answer["text"] == "".join(map(decoder.push, tokens)) + decoder.finish()
        assert (answer["prompt_tokens"], answer["completion_tokens"]) == (len(ids), len(tokens))
        messages.append(ChatMessage("assistant", answer["text"]))


def test_thoughts_are_apart_from_answers_and_not_in_the_conversation(
    chat: Chat, model: Path, weights: StageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tokens of the answer are taken for markers."""
    tokenizer = require_tokenizer(model, 300)
    prompt = load_chat_template(model, tokenizer)
    ids = prompt.encode([ChatMessage("user", "The quick")])
    tokens = greedy(dict(weights.state_dict()), ARGS, list(ids), 8).token_ids
    begin = next(at for at in range(1, 5) if tokens[at] not in tokens[:at])
    end = next(at for at in range(begin + 2, 8) if tokens[at] not in tokens[:at])
    form = ReasoningFormat("[THINK]", "[/THINK]", tokens[begin], tokens[end])
    monkeypatch.setattr(MistralChatTemplate, "reasoning_format", property(lambda _: form))
    parser = ReasoningParser(form, tokenizer)
    splits = [parser.push(token_id) for token_id in tokens] + [parser.finish()]
    code, out, err = chat("The quick", "brown", flags=("--json",))
    assert code == 0, err
    first, second = _answers(out)
    assert first["reasoning"] == "".join(split.thought for split in splits) != ""
    assert first["text"] == "".join(split.content for split in splits)
    conversation = [
        ChatMessage("user", "The quick"),
        ChatMessage("assistant", first["text"]),
        ChatMessage("user", "brown"),
    ]
    assert second["prompt_tokens"] == len(prompt.encode(conversation))
    assert chat("The quick")[1] == f"{first['text']}\n", (
        "answers alone are printed where there is no terminal"
    )
    # Now the prompt ends inside a thought.
    begin_id = next(token_id for token_id in reversed(ids) if tokenizer.bytes_of(token_id))
    form = ReasoningFormat("[THINK]", "[/THINK]", begin_id, tokens[end])
    monkeypatch.setattr(MistralChatTemplate, "reasoning_format", property(lambda _: form))
    parser = ReasoningParser(form, tokenizer, is_open=True)
    splits = [parser.push(token_id) for token_id in tokens] + [parser.finish()]
    [opened] = _answers(chat("The quick", flags=("--json",))[1])
    assert opened["reasoning"] == "".join(split.thought for split in splits) != ""
    assert opened["text"] == "".join(split.content for split in splits)


@pytest.mark.parametrize(
    ("in_terminal", "shown"),
    [(True, "\x1b[2m17 *\x1b[22m\x1b[2m 23\x1b[22m\n\n391"), (False, "391")],
)
def test_a_terminal_shows_thoughts_dimmed(
    in_terminal: bool, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing: Any = None
    ctrl_c: Any = object() if in_terminal else None
    session, answer = (
        chat_command._Chat(*[nothing] * 4, ctrl_c, nothing, as_json=False),
        ChatReply(thought=""),
    )
    for split in (
        Split("", "17 *", ()),
        Split("", " 23", ()),
        Split("39", "", ()),
        Split("1", "", ()),
    ):
        session._show(split, answer)
    assert capsys.readouterr().out == shown
    assert (answer.thought, answer.text) == ("17 * 23", "391")


def test_the_cache_is_for_one_conversation_of_any_length(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[PipelinePlan] = []
    monkeypatch.setattr(chat_command, "cache_note", lambda plan: plans.append(plan) or "")
    chat("The")
    assert (plans[0].max_num_seqs, plans[0].max_model_len) == (1, ARGS.max_seq_len)


def test_without_json_the_answers_alone_are_printed(chat: Chat) -> None:
    answers = _answers(chat("The", "It", flags=("--json",))[1])
    assert chat("The", "It")[1] == "\n".join(f"{answer['text']}\n" for answer in answers), (
        "a blank line is between them"
    )


def test_help_lists_the_commands_and_is_not_sent_to_the_model(chat: Chat) -> None:
    code, out, err = chat("/help", "The", "/help", flags=("--json",))
    assert (code, len(_answers(out))) == (0, 1)
    notes = [line for line in err.splitlines() if line.startswith("note: Ctrl-D")]
    assert len(notes) == 2
    assert all(command in notes[0] for command in ("/exit", "/reset", "/help"))
    assert _answers(out) == _answers(chat("The", flags=("--json",))[1])


@pytest.mark.parametrize(
    ("line", "likely"),
    [
        *(
            ("/clear", ""),
            ("/set temperature 0", ""),
            ("/?", ""),
            ("/", ""),
            ("/rest", "; did you mean /reset?"),
        ),
        *(
            ("/Exit", "; did you mean /exit?"),
            ("/exit now", "; did you mean /exit?"),
            ("/helpp", "; did you mean /help?"),
        ),
    ],
)
def test_an_unknown_command_is_answered_with_those_that_exist(
    chat: Chat, line: str, likely: str
) -> None:
    """By pipe it ends the conversation, as every message does that cannot be answered."""
    code, out, err = chat("The", line, "The", flags=("--json",))
    assert (code, len(_answers(out))) == (2, 1)
    assert (
        err.splitlines()[-1]
        == f"error: there is no command {line!r}{likely}; commands are /exit, /reset and /help; "
        "to send such a line as a message, begin it with a space"
    )


@pytest.mark.parametrize("line", ["/usr/bin is a folder", " /clear", "a /clear", "//", "/2+2"])
def test_a_message_may_begin_with_a_slash(chat: Chat, line: str) -> None:
    code, out, err = chat(line, flags=("--json",))
    assert (code, len(_answers(out))) == (0, 1), err


def test_reset_forgets_what_was_said(chat: Chat) -> None:
    _, out, _ = chat("The", "/reset", "The", "The", flags=("--json",))
    first, again, third = _answers(out)
    assert again == first | {"cached_tokens": again["cached_tokens"]}
    assert third["prompt_tokens"] > first["prompt_tokens"]


def test_json_says_how_many_tokens_were_cached(chat: Chat) -> None:
    answers = _answers(
        chat("The quick brown fox jumps", "/reset", "The quick brown fox jumps", flags=("--json",))[
            1
        ]
    )
    whole_pages = (answers[0]["prompt_tokens"] - 1) // 16 * 16
    assert whole_pages > 0
    assert [answer["cached_tokens"] for answer in answers] == [0, whole_pages]


def test_a_long_conversation_continues_and_reports_what_it_forgets(chat: Chat) -> None:
    code, out, err = chat(*(["The quick brown fox jumps"] * 6), flags=("--json",))
    assert code == 0, err
    assert max(answer["prompt_tokens"] for answer in _answers(out)) <= 160 - 8
    assert len(_answers(out)) == 6
    assert "outgrown the context" in err


def test_a_line_that_cannot_be_answered_ends_it(chat: Chat) -> None:
    code, out, err = chat("The", "x" * 500)
    assert (code, out.count("\n")) == (2, 1)
    assert "with a context of 160 positions it may take 159" in err.splitlines()[-1]
    code, _, err = chat("The", b"fox \xff")
    assert (code, err.splitlines()[-1]) == (2, "error: line 2 of standard input is not valid UTF-8")


def test_an_answer_that_overflows_ends_it(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = TokenSampler.sample
    monkeypatch.setattr(
        TokenSampler, "sample", lambda own, logits_SV, rows: sample(own, logits_SV * math.inf, rows)
    )
    code, out, err = chat("The quick", "brown fox")
    assert (code, out) == (2, "")
    assert "the logits of its next token are not finite" in err


@pytest.mark.parametrize(
    ("line", "why"),
    [("/clear", "there is no command '/clear'"), (b"\xff", "line 1 of standard input")],
)
def test_the_error_stands_before_what_is_reported_while_the_command_ends(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, line: str | bytes, why: str
) -> None:
    """As over Ray, where the stages are removed."""

    @asynccontextmanager
    async def open_and_report(
        config: EngineConfig, report: Report, **more: Any
    ) -> AsyncIterator[Engine]:
        try:
            async with open_engine(config, report, **more) as engine:
                yield engine
        finally:
            report("removing the stages")

    monkeypatch.setattr(chat_command, "open_engine", open_and_report)
    code, _, err = chat(line)
    *_, error, removal = err.splitlines()
    assert (code, err.count("error: "), removal) == (2, 1, "removing the stages ...")
    assert error.startswith(f"error: {why}")


def test_exit_ends_it_and_an_invalid_system_message_is_refused_before_anything_starts(
    chat: Chat,
) -> None:
    assert len(_answers(chat("The", "/exit", "It", flags=("--json",))[1])) == 1
    code, _, err = chat("The", flags=("--system", "a\udcff"))
    assert (code, err.splitlines()[-1]) == (2, "error: the text is not valid Unicode")
    assert "loading" not in err


def test_the_end_of_the_context_is_said(chat: Chat) -> None:
    _, _, err = chat("The", flags=("--max-tokens", "1000"))
    assert "note: the answer ends at the context of 160 positions" in err


@pytest.mark.parametrize("redirection", ["<&-", "0>/dev/null", "</dev/null"])
def test_where_nothing_can_be_read_nothing_is_said(model: Path, redirection: str) -> None:
    start = "from tramontane.cluster.cli.__main__ import main; main()"
    command = f"{sys.executable} -c '{start}' chat --model {model} --local {redirection}"
    run = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, ""), run.stderr
    assert "Traceback" not in run.stderr


def test_ctrl_c_ends_a_conversation_by_pipe_in_one_line(model: Path) -> None:
    """Also while the thread that reads standard input waits for more."""
    command = [
        sys.executable,
        "-c",
        SLOW,
        "chat",
        "--model",
        str(model),
        "--local",
        "--max-tokens",
        "100",
    ]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, preexec_fn=_heed_ctrl_c
    ) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        errors = process.stderr.read() if process.stderr else b""
    assert (process.returncode, errors.splitlines()[-1]) == (130, b"error: interrupted")


def _heed_ctrl_c() -> None:
    """Where tests run in the background it is ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_terminal_gets_no_orders_from_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "a\x1b]52;c;ZXZpbA==\x07b\x9b2Jc\r\n\td 👩\u200d👩"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert sanitize(said) == "a\ufffd]52;c;ZXZpbA==\ufffdb\ufffd2Jc\n\td 👩\u200d👩"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert sanitize(said) == said


class Terminal:
    """A conversation in a terminal of its own, of which the screen is read."""

    def __init__(self, model: Path, code: str = SLOW) -> None:
        command = [
            "chat",
            "--model",
            str(model),
            "--local",
            "--max-tokens",
            "100",
            "--temperature",
            "0",
        ]
        self.terminal, other_end = pty.openpty()
        # not pty.fork: a process with threads, of gRPC for instance, may hang where it forks
        self.child = subprocess.Popen(
            [sys.executable, "-c", CONTROLLED + code, *command],
            env=os.environ | {"PROMPT_TOOLKIT_NO_CPR": "1"},
            stdin=other_end,
            stdout=other_end,
            stderr=other_end,
            start_new_session=True,
        )
        os.close(other_end)
        self.screen = b""

    def wait_for(self, text: bytes) -> bytes:
        """Return what came before the text."""
        while text not in self.screen:
            self.screen += self.read() or pytest.fail(f"{text!r} never came: {self.screen!r}")
        before, _, self.screen = self.screen.partition(text)
        return before

    def read(self) -> bytes:
        """Return what comes next; nothing after the end."""
        select.select([self.terminal], [], [])
        try:
            return os.read(self.terminal, 4096)
        except OSError:  # it has gone
            return b""

    def type(self, keys: bytes) -> None:
        os.write(self.terminal, keys)

    def local_flags(self) -> int:
        """Return the flags that say what the terminal itself does with what is typed."""
        return int(termios.tcgetattr(self.terminal)[3])

    def exit_code(self) -> int:
        while self.read():
            pass
        return self.child.wait()


def test_in_a_terminal_ctrl_c_ends_an_answer_and_ctrl_d_the_conversation(model: Path) -> None:
    terminal = Terminal(model)
    terminal.wait_for(b"note: up to ")
    terminal.wait_for(
        b" of key/value cache per stage (--kv-cache-memory), 160 positions per sequence"
        b" (--max-model-len)\r\n"
    )
    terminal.wait_for(PROMPT)
    terminal.type(b"The quick\r")
    terminal.wait_for(EDITED)
    select.select([terminal.terminal], [], [])  # the first token
    terminal.type(b"\x03")
    terminal.wait_for(PROMPT)
    terminal.type(b"/reset\r")
    terminal.wait_for(PROMPT)
    terminal.type(b"/clear\r")
    terminal.wait_for(b"there is no command")
    terminal.wait_for(PROMPT)
    terminal.type(b"\x04")
    assert terminal.exit_code() == 0


@pytest.mark.nightly
def test_what_is_typed_before_a_prompt_is_not_shown_and_waits_for_it(model: Path) -> None:
    """While the model is loaded, and while an answer grows. Enter, Ctrl-D and deleted characters
    wait, too.
    """
    terminal = Terminal(model, READING)
    before = terminal.local_flags()
    assert before & termios.ECHO
    terminal.wait_for(b"reading the tokenizer")
    assert not terminal.local_flags() & (termios.ECHO | termios.ICANON)
    terminal.type(b"The quuick\x7f\x7f\x7f\x7fick\r")
    assert b"quu" not in terminal.wait_for(PROMPT)
    assert b"The quick" in terminal.wait_for(EDITED).replace(b"\x1b[?25l", b"")
    terminal.read()  # the first token
    terminal.type(b"/hep")
    terminal.type(b"\x7flp\rzebra\x15\x04")
    answer = terminal.wait_for(PROMPT)
    assert b"/hep" not in answer
    assert b"zebra" not in answer
    terminal.wait_for(b"/help shows this line")
    assert terminal.exit_code() == 0
    assert terminal.local_flags() == before


def test_the_terminal_is_as_before_however_a_conversation_ends(model: Path) -> None:
    for number, expected in ((signal.SIGTERM, 130), (signal.SIGINT, 130)):
        terminal = Terminal(model, READING)
        before = terminal.local_flags()
        terminal.wait_for(b"reading the tokenizer")
        terminal.child.send_signal(number)
        assert (terminal.exit_code(), terminal.local_flags()) == (expected, before)


def test_the_terminal_is_as_before_where_a_second_signal_ends_the_process_at_once(
    model: Path,
) -> None:
    terminal = Terminal(model, STUCK)
    before = terminal.local_flags()
    terminal.wait_for(b"Ray starts")
    assert not terminal.local_flags() & termios.ECHO
    terminal.child.send_signal(signal.SIGINT)
    terminal.wait_for(b"once more")
    terminal.child.send_signal(signal.SIGINT)
    assert (terminal.exit_code(), terminal.local_flags()) == (130, before)
