"""The ``tramontane`` command, which imports the module of a command when that command runs."""

import asyncio
import errno
import io
import os
import sys
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import version
from types import MappingProxyType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from tramontane.cluster.common.signals import INTERRUPTED
from tramontane.cluster.console.terminal import (
    PlainCommand,
    PlainGroup,
    dashes,
    hide_secrets_in_title,
    print_error,
)
from tramontane.proto.errors import TramontaneError, did_you_mean

# Examples of each command, which end its ``--help``. Comments behind ``#`` are shown with them.

MAX_WIDTH = 78  # characters: a terminal of 80 has room for them on one line

# By the words after ``tramontane``.
EXAMPLES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "generate": (
            'tramontane generate "ROMEO:" "JULIET:"  # the demo model over Ray, two stages',
            'tramontane generate --local --max-tokens 32 "ROMEO:"  # without Ray',
            "tramontane generate --model /models/Mistral-7B-v0.3 --json < prompts.txt",
        ),
        "serve": (
            "tramontane serve  # the demo model, on http://127.0.0.1:8000",
            "tramontane serve /models/Mixtral-8x7B-v0.1 --stages 4 --quantize int8",
            "tramontane serve --host 0.0.0.0 --api-key-file keys.txt",
            "tramontane serve --address auto --max-replicas 3  # on a running Ray cluster",
        ),
        "chat": (
            "tramontane chat --model /models/Mistral-7B-Instruct-v0.3",
            'tramontane chat --local --system "Answer briefly." --temperature 0',
        ),
        "batch": (
            "tramontane batch submit requests.jsonl",
            "tramontane batch watch batch_1f3a",
            "tramontane batch results batch_1f3a -o results.jsonl",
        ),
        "batch submit": (
            "tramontane batch submit requests.jsonl",
            "tramontane batch submit chats.jsonl --endpoint /v1/chat/completions",
        ),
        "batch results": (
            "tramontane batch results batch_1f3a  # to standard output",
            "tramontane batch results batch_1f3a -o results.jsonl",
        ),
        "plan": (
            "tramontane plan --model mixtral-8x7b --gpus 4 --gpu-memory 48GiB",
            "tramontane plan --model /models/Mixtral-8x7B-v0.1 --quantize int8",
            "tramontane plan --model ministral-8b --gpu-memory 24GiB,24GiB,80GiB",
        ),
        "config": (
            "tramontane config --stages 4 --max-num-seqs 32 > server.yaml",
            "tramontane config --config server.yaml --max-num-seqs 64",
        ),
        "bench": (
            "tramontane bench  # the demo model, over Ray",
            "tramontane bench --model ministral-8b --load-format dummy --stages 2 --json",
            "tramontane bench --url http://127.0.0.1:8000 --request-rate 4  # a server",
        ),
        "simulate": (
            "tramontane simulate --stages 8 --request-rate 5",
            "tramontane simulate --calibrate --input-len 200 --output-len 100",
        ),
        "top": ("tramontane top", "tramontane top --once --json"),
        "trace": ("tramontane trace -o trace.json --seconds 5",),
        "experts": (
            "tramontane experts --watch",
            "tramontane experts --json > load.json",
            "tramontane experts --adopt load.json",
            "tramontane experts --of verse.txt --of code.txt",
        ),
        "drain": ("tramontane drain --address auto", "tramontane drain --address auto --undo"),
        "k8s": (
            "tramontane k8s --stages 2 --cpu --gpu-memory 4GiB --helm -o chart",
            "tramontane k8s --stages 2 --cpu --gpu-memory 4GiB --base . -o demo",
        ),
        "cluster-yaml": (
            "tramontane cluster-yaml --provider aws --model mixtral-8x7b --stages 4",
            "tramontane cluster-yaml --provider local --cpu --stages 2 --gpu-memory 8GiB",
        ),
        "monitoring": ("tramontane monitoring --out monitoring",),
        "make-random": ("tramontane make-random --like mixtral-8x7b --scale small --out tiny",),
    }
)


def epilog(command: str) -> str | None:
    """Return the examples of a command in the format of typer's epilog; None if it has none."""
    lines = EXAMPLES.get(command)
    return None if lines is None else "\n".join(("Examples:", *lines))


OFF = "--no-"  # beginning of options that turn something off

# The help of each command. The command make-random is the function make_random of the module
# make_random; MODULES has the commands whose module has another name.
COMMANDS = MappingProxyType(
    {
        "generate": "Continue prompts, all of them at once, and print how busy the stages were.",
        "serve": "Serve an OpenAI-compatible HTTP API, and gRPC, until interrupted.",
        "chat": "Hold a conversation: each line of standard input is a message.",
        "batch": "Submit and follow batch jobs of a running server.",
        "plan": "Show how a model would be split over GPUs, from its configuration alone.",
        "config": (
            "Print the configuration that options, a --config file and the defaults result in."
        ),
        "bench": (
            "Measure tokens per second, latencies and how busy the stages are, on random prompts."
        ),
        "simulate": "Compare scheduling policies: the real scheduler on a modelled pipeline.",
        "top": "Show what the pipelines of a running server do, until interrupted.",
        "trace": (
            "Record what the stages of a running server do for some seconds, as a trace for"
            " Perfetto."
        ),
        "experts": "Show how the tokens of a running server are distributed over its experts.",
        "drain": (
            "Let the application on a running cluster finish its requests and refuse new ones."
        ),
        "k8s": (
            "Write a kustomize overlay or a Helm chart that serves a model by the KubeRay operator,"
            " one pod for each stage."
        ),
        "cluster-yaml": (
            "Write a file for ray up: a cluster that serves a model, one machine for each stage."
        ),
        "monitoring": (
            "Write files with which Ray's own dashboard shows the stages, through Prometheus and"
            " Grafana."
        ),
        "make-random": (
            "Write a checkpoint of random weights (without a tokenizer), for benchmarks and tests."
        ),
    }
)
MODULES = MappingProxyType({"drain": "serve", "k8s": "deploy", "cluster-yaml": "deploy"})

# Errors of a path that a user gave, which any question about it raises: whether it exists, is a
# folder, may be written.
UNUSABLE_PATH = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ELOOP, errno.EROFS)


class LazyCommands(Mapping[str, Any]):
    """The commands by name; looking one up imports its module."""

    def __getitem__(self, name: str) -> Any:  # typer's class of commands is private
        if name not in COMMANDS:
            raise KeyError(name)
        function_name = name.replace("-", "_")
        module = import_module(f"tramontane.cluster.cli.{MODULES.get(name, function_name)}")
        command = getattr(module, function_name)
        if not isinstance(command, typer.Typer):
            function, command = command, typer.Typer(add_completion=False)
            command.command(name, cls=PlainCommand)(function)
        built = get_command(command)
        built.help, built.epilog = COMMANDS[name], epilog(name)
        for part, each in getattr(built, "commands", {}).items():
            each.epilog = epilog(f"{name} {part}")
        return built

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class LazyGroup(PlainGroup):
    """A group whose help does not import the commands' modules."""

    def __init__(self, **details: Any) -> None:  # typer's own
        super().__init__(**details | {"commands": LazyCommands()})

    def list_commands(self, _ctx: Any) -> list[str]:
        """Return the names, in the order of the help."""
        return list(COMMANDS)

    def format_help(self, ctx: Any, formatter: Any) -> None:  # typer keeps their classes private
        """Show the commands with the words of ``COMMANDS``."""
        shown: list[Any] = [TyperCommand(name, help=text) for name, text in COMMANDS.items()]
        PlainGroup(name=self.name, commands=shown, params=self.params, help=self.help).format_help(
            ctx, formatter
        )


app = typer.Typer(
    cls=LazyGroup,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"], "token_normalize_func": dashes},
)


@app.callback(invoke_without_command=True)
def tramontane(
    context: typer.Context,
    show_version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", is_eager=True, metavar=""),
    ] = False,
) -> None:
    """Serve Mistral-family models as a pipeline of Ray actors."""
    if show_version:
        typer.echo(version("tramontane"))
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Run the command line: a user's mistake is one line and exit code 2, a failed pipeline or a
    silent server 1.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a terminal that lacks a character must not end the run
            stream.reconfigure(errors="replace")
    hide_secrets_in_title(sys.argv)
    try:
        code = app(prog_name="tramontane", standalone_mode=False)
        sys.stdout.flush()  # at exit, the interpreter would report an error of the remaining output
    except typer.TyperException as error:
        print_error(_usage_error(error))
        code = 2
    except TramontaneError as error:
        print_error(str(error))
        code = error.exit_code
    except (typer.Abort, KeyboardInterrupt, asyncio.CancelledError):
        code = INTERRUPTED
    except BrokenPipeError:  # the reader of our output has closed it
        _discard_output()
        code = 1
    except OSError as error:
        code = _report_system_error(error)
    if code == INTERRUPTED:  # typer returns the same for Ctrl-C
        print_error("interrupted")
    sys.exit(code or 0)


def _report_system_error(error: OSError) -> int:
    """Print one line about a path that cannot be used, or a full disk, and return the exit code.
    Raises all other errors.
    """
    if error.errno in UNUSABLE_PATH and error.filename:
        print_error(f"{error.filename} cannot be used: {error.strerror}")
        return 2
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        raise error
    _discard_output()
    print_error(f"{error.filename or 'the output'} cannot be written: {error.strerror}")
    return 1


def _usage_error(error: typer.TyperException) -> str:
    """Return typer's message, and a pointer to the command's help, unless the message describes a
    wrong value.
    """
    # pydantic's
    if (
        isinstance(error, typer.BadParameter)
        and error.param
        and isinstance(error.__cause__, ValueError)
    ):
        # imports pydantic, as typer did for this
        from tramontane.cluster.config.key import describe_wrong_value

        problem = error.__cause__.errors()[0]  # type: ignore[attr-defined]
        return describe_wrong_value(error.param.get_error_hint().replace("'", ""), problem)
    message = error.format_message()
    # typer's class of unknown options is private
    if hasattr(error, "possibilities") and hasattr(error, "option_name"):
        message = (
            "No such option:"
            f" {error.option_name}{did_you_mean(error.option_name, _similar_options(error))}"
        )
    context = getattr(error, "ctx", None)
    if context is None or type(error) is typer.BadParameter:
        return message
    return f"{message.rstrip('.')}; see {context.command_path} --help"


def _similar_options(error: Any) -> list[str]:  # typer's class of unknown options is private
    """Return the similar options that the help shows; for an option that turns something off, only
    options that do the same.

    ``--no-prefix-caching``: ``--no-enable-prefix-caching``, and not ``--enable-prefix-caching``,
    which is the opposite. Only the part after ``--no-`` is compared.
    """
    # --help, too
    shown = [option for option in error.ctx.command.get_params(error.ctx) if not option.hidden]
    names = [name for option in shown for name in (*option.opts, *option.secondary_opts)]
    if error.option_name.startswith(OFF):
        off = [name.removeprefix(OFF) for name in names if name.startswith(OFF)]
        return [
            OFF + each for each in get_close_matches(error.option_name.removeprefix(OFF), off, n=1)
        ]
    return get_close_matches(error.option_name, names)


def _discard_output() -> None:
    """Discard all further standard output, including its buffer."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
