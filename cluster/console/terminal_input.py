"""Lines typed into a terminal. What is typed while none is asked for waits, unseen, for the next
prompt.
"""

import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tramontane.cluster.common.signals import undone_at_end

IFLAG, LFLAG, CC = 0, 3, 6  # indices of what tcgetattr returns


class TerminalInput:
    """Lines typed into a terminal, with editing and history; Ctrl-C at the prompt is Ctrl-D."""

    def __init__(self) -> None:
        from prompt_toolkit import PromptSession  # slow to import, and only terminals need it

        self._session: PromptSession[str] = PromptSession()

    def __aiter__(self) -> "TerminalInput":
        return self

    async def __anext__(self) -> str:
        line = ""
        while not line.strip():
            try:
                line = await self._session.prompt_async("> ", handle_sigint=False)
            except (EOFError, KeyboardInterrupt):
                raise StopAsyncIteration from None
        return line


@contextmanager
def without_echo() -> Iterator[None]:
    """Do not show what is typed into standard input during the block, except at prompts, which get
    all of it.

    The terminal's own editing of lines is off too: a prompt that comes later edits. Ctrl-C is still
    a signal. The terminal is as before after the block, however that ends. Nothing happens if
    standard input is no terminal.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    quiet = termios.tcgetattr(terminal)
    quiet[LFLAG] &= ~(termios.ECHO | termios.ICANON)
    quiet[IFLAG] &= ~termios.ICRNL  # prompts tell Enter from Ctrl-J
    quiet[CC][termios.VMIN], quiet[CC][termios.VTIME] = 1, 0

    def restore() -> None:
        with suppress(termios.error):  # the terminal was closed
            termios.tcsetattr(terminal, termios.TCSANOW, before)  # discards nothing that was typed

    with undone_at_end(restore):
        termios.tcsetattr(terminal, termios.TCSANOW, quiet)
        yield
