"""``tramontane chat --local`` from what is said to what is answered."""

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
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
from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.console.display import sanitize
from tramontane.cluster.pipeline.engine import Engine, Report, open_engine
from tramontane.router.tokenization.chat import ChatMessage
from tramontane.router.tokenization.loader import load_chat_template, require_tokenizer
from tramontane.workers.model.transformer import StageModel

ARGS = replace(tiny_args(n_layers=2, window=None, max_seq_len=160), vocab_size=300)
SLOW = """
import time
from tramontane.cluster.cli import main as cli
from tramontane.cluster.console.display import sanitize
from tramontane.workers.stage.stage_worker import StageWorker
step = StageWorker.step
StageWorker.step = lambda *given: (time.sleep(0.1), step(*given))[1]
cli.main()
"""  # 100 tokens take ten seconds, so that there is an answer to interrupt
EDITED = b"\x1b[?2004l"
PROMPT = b"\x1b[?2004h"  # from here on a terminal marks what is pasted, because a line is being edited
Chat = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def weights() -> StageModel:
    return random_model(ARGS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, weights: StageModel) -> Path:
    return write_tokenizer(write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", ARGS, weights), 300)


@pytest.fixture
def chat(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chat:
    """Exit code, standard output and standard error of a conversation in this process."""

    def run(*lines: str | bytes, flags: tuple[str, ...] = ()) -> tuple[int, str, str]:
        said = b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines)
        given = ["--model", str(model), "--local", "--max-tokens", "8", "--temperature", "0", *flags]
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
    code, out, err = chat("The quick", "", "brown fox", flags=("--json", *(("--system", system) if system else ())))
    assert code == 0, err
    tokenizer = require_tokenizer(model, 300)
    prompt = load_chat_template(model, tokenizer)
    messages = [ChatMessage("system", system)] if system else []
    for said, answer in zip(("The quick", "brown fox"), _answers(out), strict=True):
        messages.append(ChatMessage("user", said))
        ids = prompt.encode(messages)
        tokens = greedy(dict(weights.state_dict()), ARGS, list(ids), 8).token_ids[: answer["completion_tokens"]]
        decoder = tokenizer.decoder(is_text_start=True)
        assert answer["text"] == "".join(map(decoder.push, tokens)) + decoder.finish()
        assert (answer["prompt_tokens"], answer["completion_tokens"]) == (len(ids), len(tokens))
        messages.append(ChatMessage("assistant", answer["text"]))


def test_without_json_the_answers_alone_are_printed(chat: Chat) -> None:
    answers = _answers(chat("The", "It", flags=("--json",))[1])
    assert chat("The", "It")[1] == "\n".join(f"{answer['text']}\n" for answer in answers), "a blank line is between them"


def test_help_lists_the_commands_and_is_not_sent_to_the_model(chat: Chat) -> None:
    code, out, err = chat("/help", "The", "/help", flags=("--json",))
    assert (code, len(_answers(out))) == (0, 1)
    notes = [line for line in err.splitlines() if line.startswith("note: Ctrl-D")]
    assert len(notes) == 2
    assert all(command in notes[0] for command in ("/exit", "/reset", "/help"))
    assert _answers(out) == _answers(chat("The", flags=("--json",))[1])


@pytest.mark.parametrize("line", ["/clear", "/set temperature 0", "/?", "/", "/Exit", "/exit now"])
def test_an_unknown_command_is_answered_with_those_that_exist(chat: Chat, line: str) -> None:
    """By pipe it ends the conversation, as every message does that cannot be answered."""
    code, out, err = chat("The", line, "The", flags=("--json",))
    assert (code, len(_answers(out))) == (2, 1)
    assert err.splitlines()[-1] == (
        f"error: there is no command {line!r}; commands are /exit, /reset and /help; "
        "to send such a line as a message, begin it with a space"
    )


@pytest.mark.parametrize("line", ["/usr/bin is a folder", " /clear", "a /clear", "//", "/2+2"])
def test_a_message_may_begin_with_a_slash(chat: Chat, line: str) -> None:
    code, out, err = chat(line, flags=("--json",))
    assert (code, len(_answers(out))) == (0, 1), err


def test_reset_forgets_what_was_said(chat: Chat) -> None:
    _, out, _ = chat("The", "/reset", "The", "The", flags=("--json",))
    first, again, third = _answers(out)
    assert first == again
    assert third["prompt_tokens"] > first["prompt_tokens"]


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


@pytest.mark.parametrize(("line", "why"), [("/clear", "there is no command '/clear'"), (b"\xff", "line 1 of standard input")])
def test_the_error_stands_before_what_is_reported_while_the_command_ends(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, line: str | bytes, why: str
) -> None:
    """As over Ray, where the stages are removed."""

    @asynccontextmanager
    async def open_and_report(config: EngineConfig, report: Report, **more: Any) -> AsyncIterator[Engine]:  # noqa: ANN401
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


def test_exit_ends_it_and_an_invalid_system_message_is_refused_before_anything_starts(chat: Chat) -> None:
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
    command = [sys.executable, "-c", SLOW, "chat", "--model", str(model), "--local", "--max-tokens", "100"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, preexec_fn=_heed_ctrl_c) as process:
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


def test_in_a_terminal_ctrl_c_ends_an_answer_and_ctrl_d_the_conversation(model: Path) -> None:
    command = ["chat", "--model", str(model), "--local", "--max-tokens", "100", "--temperature", "0"]
    child, terminal = pty.fork()
    if child == 0:
        os.execve(sys.executable, [sys.executable, "-c", SLOW, *command], os.environ | {"PROMPT_TOOLKIT_NO_CPR": "1"})
    screen = b""

    def wait_for(text: bytes) -> None:
        nonlocal screen
        while text not in screen:
            select.select([terminal], [], [])
            screen += os.read(terminal, 4096)
        screen = screen[screen.index(text) + len(text) :]

    wait_for(PROMPT)
    os.write(terminal, b"The quick\r")
    wait_for(EDITED)
    select.select([terminal], [], [])  # the first token
    os.write(terminal, b"\x03")
    wait_for(PROMPT)
    os.write(terminal, b"/reset\r")
    wait_for(PROMPT)
    os.write(terminal, b"/clear\r")
    wait_for(b"there is no command")
    wait_for(PROMPT)
    os.write(terminal, b"\x04")
    try:
        while os.read(terminal, 4096):
            pass
    except OSError:  # it has gone
        pass
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
