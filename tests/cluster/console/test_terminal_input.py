"""Lines typed into a terminal, and the terminal while none is asked for. What chat does with both
is in test_chat.
"""

import asyncio
import os
import pty
import select
import signal
import sys
import termios
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TextIO

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from tramontane.cluster.console.terminal import TerminalInput, without_echo

IFLAG, LFLAG, CC = 0, 3, 6


@dataclass
class Terminal:
    """A terminal that is this process's standard input."""

    keyboard: int
    stdin: TextIO

    def settings(self) -> list[Any]:
        return termios.tcgetattr(self.stdin.fileno())

    def type(self, keys: bytes) -> None:
        """Return when the keys have arrived: where the terminal edits lines, with the end of the
        line.
        """
        os.write(self.keyboard, keys)
        select.select([self.stdin], [], [])

    def has_keys(self) -> bool:
        return bool(select.select([self.stdin], [], [], 0)[0])


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    keyboard, end = pty.openpty()
    settings = termios.tcgetattr(end)
    # which a terminal that edits lines does not look at
    settings[CC][termios.VMIN], settings[CC][termios.VTIME] = 0, 7
    termios.tcsetattr(end, termios.TCSANOW, settings)
    stdin = open(end, encoding="utf-8")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdin", stdin)
    yield Terminal(keyboard, stdin)
    os.close(keyboard)
    if not stdin.closed:
        stdin.close()


def _lines(keys: str) -> list[str]:
    async def read() -> list[str]:
        return [line async for line in TerminalInput()]

    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        pipe.send_text(keys)
        return asyncio.run(read())


# ---- lines


@pytest.mark.parametrize("end", ["\x03", "\x04"], ids=["Ctrl-C", "Ctrl-D"])
def test_lines_are_read_until_ctrl_c_or_ctrl_d(end: str) -> None:
    assert _lines(f"hello\r  two words \r{end}never\r") == ["hello", "  two words "]


def test_blank_lines_are_asked_for_again() -> None:
    assert _lines("\r \t \rhello\r\r\x04") == ["hello"]


def test_a_prompt_leaves_the_handler_of_ctrl_c_to_the_program() -> None:
    """Which ends an answer by it; prompt_toolkit would put its own in the place, and remove
    that.
    """

    async def read() -> bool:
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, lambda: None)
        assert await anext(TerminalInput()) == "hello"
        return asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)

    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        pipe.send_text("hello\r")
        assert asyncio.run(read()), "it is still there"


# ---- the terminal while no line is asked for


def test_the_terminal_neither_shows_nor_edits_during_the_block_and_is_as_before_after_it(
    terminal: Terminal,
) -> None:
    before = terminal.settings()
    assert before[IFLAG] & termios.ICRNL
    with without_echo():
        during = terminal.settings()
    assert before[LFLAG] & ~during[LFLAG] == termios.ECHO | termios.ICANON, (
        "Ctrl-C is still a signal"
    )
    assert before[IFLAG] & ~during[IFLAG] == termios.ICRNL, "Enter is not Ctrl-J"
    assert (during[CC][termios.VMIN], during[CC][termios.VTIME]) == (1, 0), "a key is there at once"
    assert (during[LFLAG] & ~before[LFLAG], during[IFLAG] & ~before[IFLAG]) == (0, 0)
    assert terminal.settings() == before


def test_the_terminal_is_as_before_after_an_error(terminal: Terminal) -> None:
    before = terminal.settings()
    with pytest.raises(ZeroDivisionError), without_echo():
        raise ZeroDivisionError
    assert terminal.settings() == before


def test_what_was_typed_before_the_block_is_there_in_it(terminal: Terminal) -> None:
    terminal.type(b"early\n")
    with without_echo():
        assert terminal.has_keys()
        assert os.read(terminal.stdin.fileno(), 100) == b"early\n"
        terminal.type(b"\r")
        assert os.read(terminal.stdin.fileno(), 100) == b"\r"


def test_what_was_typed_in_the_block_is_there_after_it(terminal: Terminal) -> None:
    with without_echo():
        terminal.type(b"x")
    assert terminal.has_keys()
    assert os.read(terminal.stdin.fileno(), 100) == b"x"


def test_a_terminal_that_was_closed_in_the_block_is_no_error(terminal: Terminal) -> None:
    with without_echo():
        terminal.stdin.close()


def test_without_a_terminal_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(termios, "tcsetattr", lambda *_: pytest.fail("it is no terminal"))
    done = []
    with open(os.devnull, encoding="utf-8") as empty:
        for stdin in (None, empty):
            monkeypatch.setattr(sys, "stdin", stdin)
            with without_echo():
                done.append(stdin)
    assert done == [None, empty]
