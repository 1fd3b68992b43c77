"""Lines typed into a terminal. Input typed between prompts waits, hidden, for the next prompt."""

import sys
import termios
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from pathlib import Path
from subprocess import list2cmdline
from typing import Any

import psutil
import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from tramontane.cluster.common.signals import undone_at_end
from tramontane.cluster.ray_internals.accessors import set_process_title
from tramontane.proto.errors import ConfigError, TramontaneError

IFLAG, LFLAG, CC = 0, 3, 6  # indices of the result of tcgetattr


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
    """Hide input typed into standard input during the block, except at prompts, which receive all
    of it.

    The terminal's own line editing is off too: a later prompt does it. Ctrl-C is still a signal.
    The terminal is restored after the block, however that ends. No effect if standard input is not
    a terminal.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    quiet = termios.tcgetattr(terminal)
    quiet[LFLAG] &= ~(termios.ECHO | termios.ICANON)
    quiet[IFLAG] &= ~termios.ICRNL  # prompts distinguish Enter from Ctrl-J
    quiet[CC][termios.VMIN], quiet[CC][termios.VTIME] = 1, 0

    def restore() -> None:
        with suppress(termios.error):  # the terminal was closed
            termios.tcsetattr(terminal, termios.TCSANOW, before)  # keeps typed input

    with undone_at_end(restore):
        termios.tcsetattr(terminal, termios.TCSANOW, quiet)
        yield


# Secrets on the command line, which every user of the machine can read, and which Ray shows on its
# dashboard.

FLAGS = ("--api-key", "--jobs-database", "--jobs-storage")
# Options that may have several words behind them, as in vLLM: --api-key KEY KEY.
API_KEY, NAMES = "--api-key", "--served-model-name"
HIDDEN = "***"


def hide_secrets_in_title(arguments: Sequence[str]) -> None:
    """Set a process title without secrets, before Ray reads it. Until then they are visible."""
    if redact_arguments(arguments) == list(arguments):
        return
    set_process_title(list2cmdline(redact_arguments(psutil.Process().cmdline())))


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the values of ``FLAGS`` hidden: ``--api-key KEY``,
    ``--api-key=KEY``, and all words behind ``--api-key``, which may be keys.
    """
    shown: list[str] = []
    last = ""  # the flag before these words
    for argument in arguments:
        flag, mark, _ = argument.partition("=")
        is_value = bool(shown) and dashes(shown[-1]) in FLAGS
        if is_value or (last == API_KEY and not argument.startswith("-")):
            shown.append(HIDDEN)
            continue
        last = dashes(flag)
        shown.append(f"{flag}={HIDDEN}" if mark and last in FLAGS else argument)
    return shown


def dashes(name: str) -> str:
    """Return the name of an option or a command with dashes in the place of underscores, which
    vLLM's command line allows, too.
    """
    return name.replace("_", "-")


# Files written by commands: never over a file of another origin, and with errors that name the
# option.


def check_replaceable(file: Path, mark: str, option: str) -> None:
    """Raise ConfigError unless the file may be replaced: it does not exist, is empty or begins with
    ``mark``, as our own do.
    """
    if not file.parent.is_dir():
        raise ConfigError(f"{option} {file}: there is no folder {file.parent}")
    if not file.exists():
        return
    try:
        with file.open("rb") as opened:
            is_own = opened.read(len(mark.encode())) in (b"", mark.encode())
    except OSError as error:
        raise ConfigError(f"{option} {file} cannot be read: {error.strerror}") from error
    if not is_own:
        raise ConfigError(f"{file} was not written by this command; choose another {option}")


@contextmanager
def writing(path: Path, option: str) -> Iterator[None]:
    """Raise ConfigError if the block cannot write to the path."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be written: {error.strerror}") from error


# Classes of commands whose help does not cut option names, and shows ``--help`` without a value;
# exits with errors.


def print_error(message: str) -> None:
    """Print the error that has ended the command, in one line."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)


@contextmanager
def print_errors_at_once() -> Iterator[None]:
    """Print an error of the block before the reports of the clean-up, such as the removal of
    stages.
    """
    try:
        yield
    except TramontaneError as error:
        print_error(str(error))
        raise typer.Exit(error.exit_code) from error


class PlainCommand(TyperCommand):
    """A command; typer itself shows ``--help <bool>``, and cuts long names in a narrow terminal."""

    # typer's classes of contexts and options are private
    def get_help_option(self, ctx: Any) -> Any:
        """Return typer's own option, shown without a value."""
        return _without_value(super().get_help_option(ctx))

    def make_parser(self, ctx: Any) -> Any:
        """Return typer's parser, which also accepts the other names of keys. Help and errors show
        only the first name.
        """
        from tramontane.cluster.config.engine_config import OTHER_NAMES  # slow to import
        from tramontane.cluster.config.vllm_flags import SHORT_NAMES

        parser = super().make_parser(ctx)
        params = {each.name: each for each in self.params}
        others = {as_flag(other): name for other, name in OTHER_NAMES.items()} | SHORT_NAMES
        for other, name in others.items():
            if name in params:
                twin = copy(params[name])
                twin.opts = [other]
                twin.add_to_parser(parser, ctx)
        return parser

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, in which some options may have several words. Warns of former names
        of keys.
        """
        from tramontane.cluster.config.engine_config import (
            FORMER_NAMES,
            OTHER_NAMES,
            describe_former_name,
        )

        end = args.index("--") if "--" in args else len(args)
        given = {dashes(argument.partition("=")[0]) for argument in args[:end]}
        own = {each.name for each in self.params}
        for former in sorted(FORMER_NAMES):
            if as_flag(former) not in given or OTHER_NAMES[former] not in own:
                continue
            words = describe_former_name(as_flag(former), as_flag(OTHER_NAMES[former]))
            print(f"warning: {words}", file=sys.stderr)
        return super().parse_args(ctx, self._with_one_word_each(args))

    def _with_one_word_each(self, args: list[str]) -> list[str]:
        from tramontane.cluster.config.engine_config import OTHER_NAMES
        from tramontane.cluster.config.vllm_flags import SHORT_NAMES

        options = [each for each in self.params if isinstance(each, TyperOption)]
        names = {name for each in options if not each.is_flag for name in each.opts}
        if NAMES not in names:  # other commands have arguments behind one --api-key
            return args
        names |= {*map(as_flag, OTHER_NAMES), *SHORT_NAMES}
        return with_one_word_each(args, names, has_argument=len(options) < len(self.params))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Show typer's help with each option's long names and its value in one column, which is
        wrapped between them.

        Typer has a column for each, and cuts all of them if their sum is too wide:
        ``--max-queued-reque…``.
        """
        shown = copy(self)
        shown.params = [
            _in_one_column(each, ctx) if isinstance(each, TyperOption) else each
            for each in self.params
        ]
        super(PlainCommand, shown).format_help(ctx, formatter)


def with_one_word_each(
    arguments: Sequence[str], with_value: Collection[str], *, has_argument: bool
) -> list[str]:
    """Return ``--api-key A --api-key B`` for ``--api-key A B``, and ``--served-model-name A,B`` for
    two names. ``with_value``: the options that have a value.

    Without ``--model``, and where no other word is before it, the last of several words is the
    argument MODEL, if the command ``has_argument``.
    """
    made, rest, is_free = list[str](), list(arguments), has_argument
    is_free &= all(dashes(each.partition("=")[0]) not in ("--model", "--") for each in rest)
    while rest and (word := rest.pop(0)) != "--":
        made.append(word)
        is_free &= word.startswith("-")
        if dashes(word) not in with_value or not rest:
            continue
        words = [rest.pop(0)]
        while dashes(word) in (API_KEY, NAMES) and rest and not rest[0].startswith("-"):
            words.append(rest.pop(0))
        if is_free and len(words) > 1:
            rest.insert(0, words.pop())
        made.append(",".join(words) if dashes(word) == NAMES else words[0])
        made += [each for key in words[1:] for each in (API_KEY, key) if dashes(word) == API_KEY]
    return [*made, "--", *rest] if rest else made


def as_flag(key: str) -> str:
    """Return ``--page-size`` for ``page_size``."""
    return f"--{key.replace('_', '-')}"


class PlainGroup(TyperGroup):
    """A group of commands of this kind."""

    def get_help_option(self, ctx: Any) -> Any:
        """Return typer's own option, shown without a value."""
        return _without_value(super().get_help_option(ctx))


def _without_value(help_option: Any) -> Any:
    if help_option is not None:
        help_option.metavar = ""
    return help_option


def _in_one_column(option: TyperOption, context: Any) -> TyperOption:
    shown = copy(option)
    long = [name for name in option.opts if name.startswith("--")]
    words = [*long, *option.secondary_opts, _describe_value(option, context)]
    shown.opts = [
        " ".join(filter(None, words)),
        *(name for name in option.opts if name not in long),
    ]
    shown.secondary_opts, shown.metavar, shown.min, shown.max = [], "", None, None
    return shown


def _describe_value(option: TyperOption, context: Any) -> str:
    """Return ``<int> [1<=x<=64]`` where typer has ``<int range>`` and a separate column for the
    range.
    """
    kind = (option.display_type_rich(context) or "").replace(" range>", ">")
    match option.min, option.max:
        case None, None:
            return kind
        case None, high:
            return f"{kind} [x<={high}]"
        case low, None:
            return f"{kind} [x>={low}]"
        case low, high:
            return f"{kind} [{low}<=x<={high}]"
