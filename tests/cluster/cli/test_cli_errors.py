"""Bad input: one clear line on standard error, exit code 2, nothing on standard output."""

import errno
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn

import pytest
import ray
import typer
from tiny_models import random_model, tiny_args, write_checkpoint, write_tokenizer
from typer.testing import CliRunner

from tramontane.cluster.cli import main as cli
from tramontane.cluster.cli.chat import chat
from tramontane.cluster.cli.generate import generate
from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.pipeline import engine as launch
from tramontane.cluster.pipeline import ray_cluster as ray_address
from tramontane.cluster.planning.hardware import Hardware
from tramontane.cluster.serving import server as serving
from tramontane.llm import SamplingParams
from tramontane.proto.errors import ConfigError, PipelineError
from tramontane.router.openai.completion_request import CompletionRequest

VOCAB = 300
ARGS = replace(tiny_args(n_layers=4, max_seq_len=128), vocab_size=VOCAB)

Refused = Callable[..., str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole checkpoint with a tokenizer. What breaks it is in test_broken_folders."""
    folder = write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", ARGS, random_model(ARGS))
    return write_tokenizer(folder, VOCAB)


# ---- parameters


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--max-tokens", "0"], ["--max-tokens is 0"]),
        (["--max-tokens=-3"], ["--max-tokens is -3"]),
        (["--max-tokens", "many"], ["--max-tokens is 'many'; it must be a whole number"]),
        (["--max-tokens", "1.5"], ["--max-tokens is '1.5'; it must be a whole number"]),
        (["--max-tokens"], ["--max-tokens", "requires"]),
        (["--temperature=-0.5"], ["temperature", "-0.5"]),
        (["--temperature", "nan"], ["temperature", "nan"]),
        (["--temperature", "inf"], ["temperature", "inf"]),
        (["--temperature", "warm"], ["--temperature is 'warm'; it must be a number"]),
        (["--top-p", "0"], ["--top-p is 0.0"]),
        (["--top-p", "1.01"], ["--top-p is 1.01"]),
        (["--top-p=-1"], ["--top-p is -1"]),
        (["--top-p", "nan"], ["--top-p is nan"]),
        (["--top-k=-2"], ["--top-k is -2"]),
        (["--top-k", "ten"], ["--top-k is 'ten'; it must be a whole number"]),
        (["--seed", str(2**63)], ["seed", str(2**63), "64 bits"]),
        (["--seed", "x"], ["--seed is 'x'; it must be a whole number"]),
        (["--stages", "0"], ["--stages is 0; it must be at least 1"]),
        (["--stages", "16385"], ["--stages is 16385; it must be at most 16384"]),
        (["--page-size", "7000"], ["--page-size is 7000; it must be at most 1024"]),
        (["--step-timeout", "0"], ["--step-timeout is 0.0; it must be above 0"]),
        (["--stages=-2"], ["--stages", "-2"]),
        (["--stages", "two"], ["--stages is 'two'; it must be a whole number"]),
        (["--max-model-len", "0"], ["--max-model-len", "0"]),
        (["--max-num-seqs", "0"], ["--max-num-seqs", "0"]),
        (["--max-num-batched-tokens=-1"], ["--max-num-batched-tokens", "-1"]),
        (["--page-size", "0"], ["--page-size", "0"]),
        (["--threads-per-stage", "0"], ["--threads-per-stage", "0"]),
        (["--kv-cache-memory", "much"], ["--kv-cache-memory", "much"]),
        (["--kv-cache-memory=-5"], ["--kv-cache-memory", "-5"]),
        (["--dtype", "int8"], ["--dtype", "int8", "bfloat16"]),
        (["--load-format", "pickle"], ["--load-format is 'pickle'; it must be 'auto' or 'dummy'"]),
        (["--quantize", "int4"], ["--quantize is 'int4'; it must be 'int8', 'w8a8' or 'fp8'"]),
        (["--link", "pigeons"], ["--link", "pigeons", "object-store"]),
        (["--link", "direct"], ["--local", "--link direct"]),
        (["--address", "127.0.0.1:6379"], ["--local", "--address"]),
        (["--nonsense"], ["--nonsense"]),
        (["--stages", "0", "--dtype", "int8"], ["--stages", "--dtype"]),
    ],
)
def test_a_parameter_that_is_wrong_is_named(
    refused: Refused, model: Path, flags: list[str], named: list[str]
) -> None:
    message = refused("generate", "--model", model, "--local", "The", *flags)
    for part in named:
        assert part in message


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_option_that_is_a_number_names_what_it_was_given(refused: Refused, name: str) -> None:
    command = cli.LazyCommands()[name]
    prefixes = (
        {(name, sub): each for sub, each in command.commands.items()}
        if hasattr(command, "commands")
        else {(name,): command}
    )
    for prefix, each in prefixes.items():
        for option in each.params:
            if (kind := option.type_descriptor.annotation) in (int, float):
                [flag] = option.opts
                expected = "a whole number" if kind is int else "a number"
                assert refused(*prefix, flag, "22x") == f"{flag} is '22x'; it must be {expected}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate", "--stages", "0"], "--stages is '0'; it must be at least 1"),
        (["simulate", "--noise", "1.5"], "--noise is '1.5'; it must be at most 1"),
        (
            ["simulate", "--max-num-seqs", "16385"],
            "--max-num-seqs is '16385'; it must be at most 16384",
        ),
        (["make-random", "--scale", "big"], "--scale: 'big' is not one of 'full', 'small'"),
    ],
)
def test_a_value_outside_the_range_of_an_option_is_named(
    refused: Refused, arguments: list[str], message: str
) -> None:
    assert refused(*arguments) == message


@pytest.mark.parametrize("layer", [-1, 4])
def test_a_layer_without_experts_to_show_is_refused(
    refused: Refused, model: Path, layer: int
) -> None:
    message = refused("generate", "--model", model, "--local", "The", "--show-experts", layer)
    assert (
        message
        == f"--show-experts {layer}: that layer has no experts; the model's layers 0 to 3 have some"
    )


def test_a_model_without_experts_has_none_to_show(refused: Refused, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "dense", tiny_args(n_layers=4, moe=False))
    message = refused("generate", "--model", folder, "--local", "The", "--show-experts", "0")
    assert message == "--show-experts 0: the model dense has no experts"


def test_a_command_that_does_not_exist_is_named(refused: Refused) -> None:
    assert "serf" in refused("serf")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "No such command 'nothing'; see tramontane --help"),
        (["plan"], "Missing option '--model'; see tramontane plan --help"),
        (["batch"], "Missing command; see tramontane batch --help"),
        (["batch", "status"], "Missing argument 'ID'; see tramontane batch status --help"),
        (["chat", "hello"], "Got unexpected extra argument(s) (hello); see tramontane chat --help"),
        (
            ["serve", "--locale"],
            "No such option: --locale; did you mean --log-level?; see tramontane serve --help",
        ),
        (["serve", "--no-locale"], "No such option: --no-locale; see tramontane serve --help"),
        (
            ["serve", "--no-prefix-caching"],
            (
                "No such option: --no-prefix-caching; did you mean --no-enable-prefix-caching?; see"
                " tramontane serve --help"
            ),
        ),
        (["serve", "--no-quantize"], "No such option: --no-quantize; see tramontane serve --help"),
        (
            ["serve", "--prefix-caching"],
            (
                "No such option: --prefix-caching; did you mean --enable-prefix-caching?; see"
                " tramontane serve --help"
            ),
        ),
        (["drain", "--local"], "No such option: --local; see tramontane drain --help"),
        (["serve", "--no-"], "No such option: --no-; see tramontane serve --help"),
        (["config", "--no-markdwn"], "No such option: --no-markdwn; see tramontane config --help"),
        (
            ["serve", "--hepl"],
            "No such option: --hepl; did you mean --help?; see tramontane serve --help",
        ),
        (["plan", "--model"], "Option '--model' requires an argument."),
    ],
)
def test_a_wrong_command_line_is_answered_with_where_to_look(
    refused: Refused, arguments: list[str], message: str
) -> None:
    assert refused(*arguments) == message


NEVER_LOCAL = (
    "serve always runs on a Ray cluster, so {} cannot be used with it; leave that out, or use"
    " generate, chat or bench, which can run in one process"
)


def test_serve_is_never_local(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it was given. A file for other commands may have it, and --no-local overrides
    that.
    """
    file = tmp_path / "file.yaml"
    file.write_text("local: true\n")
    assert refused("serve", "--local") == NEVER_LOCAL.format("--local")
    assert refused("serve", "--config", file) == NEVER_LOCAL.format(f"local (in {file})")
    configs = list[EngineConfig]()
    monkeypatch.setattr(
        "tramontane.cluster.cli.serve.run_server", lambda config, *_: configs.append(config)
    )
    assert (
        CliRunner().invoke(cli.app, ["serve", "--config", str(file), "--no-local"]).exit_code == 0
    )
    assert [config.local for config in configs] == [False]
    assert not re.search("--(no-)?local", CliRunner().invoke(cli.app, ["serve", "--help"]).stdout)


@pytest.mark.parametrize("words", [(), ("plan",), ("batch",), ("batch", "list")], ids=" ".join)
def test_help_has_a_short_form(words: tuple[str, ...]) -> None:
    long, short = (CliRunner().invoke(cli.app, [*words, form]) for form in ("--help", "-h"))
    assert (short.exit_code, short.stdout) == (0, long.stdout)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--stages", "99"], "--stages is 99"),
        (["--model", "{folder}"], ""),
        (["--replicas", "0"], "--replicas is "),
        (
            ["--host", "999.1.1.1"],
            "--host 999.1.1.1 is no address, and no name of one; give an address of this machine",
        ),
        (["--host", ""], "--host is ''"),
        (["--served-model-name", ""], "--served-model-name is ''"),
        (
            ["--served-model-name", "a,,b"],
            "--served-model-name is 'a,,b'; it must be names, all different, with commas",
        ),
        (
            ["--served-model-name", "a,b,a"],
            "--served-model-name is 'a,b,a'; it must be names, all different",
        ),
    ],
)
def test_serve_refuses_what_it_cannot_serve_before_it_starts_ray(
    refused: Refused, tmp_path: Path, flags: list[str], named: str
) -> None:
    assert refused("serve", *(flag.format(folder=tmp_path) for flag in flags)).startswith(named)


# ---- the configuration file


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (
            "stagez: 2\nportt: 1\n",
            [
                "stagez (in ",
                "no such key; did you mean stages?; portt (in ",
                "; did you mean port?",
            ],
        ),
        ("qqqq: 2\n", ["qqqq (in ", "file.yaml): no such key; tramontane config prints all keys"]),
        ("stages: [1\n", ["file.yaml", "not valid YAML", "line 2"]),
        (
            "stages: 2\nport: 1\nstages: 3\n",
            ["file.yaml has stages (again in line 3) twice; remove one of them"],
        ),
        (
            "max-num-seqs: 2\nmax_num_seqs: 3\n",
            ["file.yaml has max_num_seqs (again in line 2) twice"],
        ),
        (
            "stage_times: [{first: 0, last: 1, busy: 1, busy: 2}]\n",
            ["file.yaml has busy (again in line 1) twice"],
        ),
        ("- 1\n- 2\n", ["file.yaml", "keys and values"]),
        ("just words\n", ["file.yaml", "keys and values"]),
        ("stages: none\n", ["stages (in ", "file.yaml) is 'none'; it must be a whole number"]),
        ("stages: [2]\n", ["stages (in ", "file.yaml) is [2]; it must be a whole number"]),
        (
            "move_experts: perhaps\n",
            ["move_experts (in ", "file.yaml) is 'perhaps'; it must be true or false"],
        ),
        (
            "placement_timeout: .inf\n",
            ["placement_timeout (in ", "file.yaml) is inf; it must be at most 86400"],
        ),
        ("host: ''\n", ["host (in ", "file.yaml) is ''; it must be a text that is not empty"]),
        ("max-num-seqs: -3\n", ["max_num_seqs (in ", "file.yaml) is -3"]),
        ("max_in_flight: 0\n", ["max_in_flight (in ", "file.yaml) is 0"]),
        (
            "kv_cache_memory: much\n",
            ["kv_cache_memory (in ", "file.yaml) is 'much'; it must be a size"],
        ),
        ("model: [a, b]\n", ["model (in "]),
        ("local: true\naddress: auto\n", ["local (in ", "address (in "]),
        (
            "stage_times: [{first: 0, last: 1, busy: 1}, {first: 2, lst: 3, busy: 1}]\n",
            [
                "stage_times[1].last (in ",
                "file.yaml) is missing; stage_times[1].lst (in ",
                "a stage's time; did you mean last?",
            ],
        ),
        (
            "stage_times: [{first: 0, last: 1, busy: 1, stages: 2}]\n",
            ["stage_times[0].stages (in ", "; its keys are first, last, busy"],
        ),
        (
            "stage_times: [{first: 0, last: 1, busy: x}]\n",
            ["stage_times[0].busy (in ", "file.yaml) is 'x'; it must be a number"],
        ),
        (
            "expert_load: [[1, x]]\n",
            ["expert_load[0][1] (in ", "file.yaml) is 'x'; it must be a whole number"],
        ),
        (b"\xff\xfe\xfa", ["file.yaml", "not valid YAML"]),
    ],
)
def test_a_broken_configuration_file_is_refused(
    refused: Refused, tmp_path: Path, text: str | bytes, named: list[str]
) -> None:
    (tmp_path / "file.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    message = refused("generate", "--config", tmp_path / "file.yaml", "The")
    for part in named:
        assert part in message
    assert not re.search("--(?!config)", message), "it was no flag"


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        *(
            ("stagse", "stages"),
            ("quantze", "quantize"),
            ("max_num_sequences", "max_num_seqs"),
            ("modle", "model"),
        ),
        *(
            ("api-key-fil", "api_key_file"),
            ("kv_cache_mem", "kv_cache_memory"),
            ("Stages", "stages"),
            ("dtpye", "dtype"),
        ),
    ],
)
def test_a_misspelt_key_gets_the_suggestion_of_a_misspelt_flag(
    refused: Refused, tmp_path: Path, misspelt: str, meant: str
) -> None:
    (tmp_path / "file.yaml").write_text(f"{misspelt}: 1\n")
    key, flag, option = (
        misspelt.replace("-", "_"),
        f"--{misspelt.replace('_', '-')}",
        f"--{meant.replace('_', '-')}",
    )
    assert refused("config", "--config", tmp_path / "file.yaml").endswith(
        f"{key} (in {tmp_path / 'file.yaml'}): no such key; did you mean {meant}?"
    )
    assert (
        refused("config", flag, "1")
        == f"No such option: {flag}; did you mean {option}?; see tramontane config --help"
    )
    with pytest.raises(
        ConfigError, match=f"{key} is not a key of the configuration; did you mean {meant}\\?"
    ):
        EngineConfig.build(None, {key: 1})  # as of a Ray Serve config, or of LLM


def test_a_value_is_named_where_it_was_given(refused: Refused, model: Path, tmp_path: Path) -> None:
    """Also in what is found out later, and in advice; a flag that overrides the file is what
    counts.
    """
    file = tmp_path / "file.yaml"
    file.write_text(f"local: true\nmodel: {model}\nstages: 9\nkv-cache-memory: 1\n")
    command = ["generate", "--config", file, "The"]
    assert (
        refused(*command)
        == f"stages (in {file}) is 9, but the model has only 4 layers; no stage may be empty"
    )
    assert refused(*command, "--stages", "5").startswith("--stages is 5, but")
    assert refused(*command, "--stages", "1", "--max-model-len", "16").endswith(
        f"give kv_cache_memory (in {file}) 8192B or more, or lower --max-model-len"
    )
    assert refused(*command, "--stages", "0", "--kv-cache-memory", "much").count("(in ") == 0
    assert refused(*command, "--address", "auto").startswith(
        f"local (in {file}) runs without Ray, so --address cannot"
    )


def test_a_configuration_file_that_cannot_be_read_is_named(
    refused: Refused, tmp_path: Path
) -> None:
    missing = tmp_path / "missing.yaml"
    assert f"{missing} cannot be read: No such file" in refused(
        "generate", "--config", missing, "The"
    )
    assert f"{tmp_path} cannot be read: Is a directory" in refused(
        "generate", "--config", tmp_path, "The"
    )


# ---- prompts


def test_blank_lines_alone_are_no_prompt(refused: Refused, model: Path) -> None:
    assert "no prompt" in refused("generate", "--model", model, "--local", stdin=b"\n \n\r\n\t\n")


def test_a_line_of_standard_input_is_named_by_its_number(refused: Refused, model: Path) -> None:
    """Blank lines count, other separators than the line feed do not."""
    long = b"The\x0cfox\xe2\x80\xa8\r\n\n \n" + b"x" * 128 + b"\n"
    message = refused("generate", "--model", model, "--local", stdin=long)
    assert message.startswith("line 4 of standard input is too long: 130 tokens > 127 maximum")


def test_no_prompt_at_all_is_refused(refused: Refused, model: Path) -> None:
    assert "no prompt" in refused("generate", "--model", model, "--local", stdin=b"")


def test_no_standard_input_at_all_is_no_prompt(
    refused: Refused, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in ``tramontane generate <&-``: Python has no sys.stdin then."""
    monkeypatch.setattr(sys, "stdin", None)
    assert "no prompt" in refused("generate", "--model", model, "--local", stdin=None)


def test_standard_input_that_is_no_text_is_refused(refused: Refused, model: Path) -> None:
    message = refused("generate", "--model", model, "--local", stdin=b"The\n\nfox \xff\n")
    assert message == "line 3 of standard input is not valid UTF-8"


def test_an_argument_that_is_no_text_is_refused(refused: Refused, model: Path) -> None:
    """A lone byte 0xff on the command line reaches Python as a surrogate."""
    message = refused("generate", "--model", model, "--local", "The", os.fsdecode(b"fox \xff"))
    assert message == "prompt 2: the text is not valid Unicode"


@pytest.mark.parametrize(("flags", "context"), [([], 128), (["--max-model-len", "20"], 20)])
def test_a_prompt_past_the_context_is_refused_with_the_numbers(
    refused: Refused, model: Path, flags: list[str], context: int
) -> None:
    message = refused("generate", "--model", model, "--local", *flags, "The", "x" * context)
    assert message.startswith("prompt 2 is too long: ")
    assert f" > {context - 1} maximum" in message
    assert f"maximum context length is {context} tokens" in message


def test_a_tokenizer_of_another_model_is_refused(
    refused: Refused, model: Path, tmp_path: Path
) -> None:
    """Pieces that the model has no embedding for are refused before the pipeline is started."""
    folder = write_checkpoint(tmp_path / "small", tiny_args(n_layers=4))
    shutil.copy(model / "tokenizer.model", folder)
    message = refused("generate", "--model", folder, "--local", "The quick brown fox")
    assert str(folder) in message
    assert "vocabulary of 96" in message


def test_a_published_geometry_is_no_checkpoint(refused: Refused, tmp_path: Path) -> None:
    message = refused("generate", "--model", "mixtral-8x7b", "The")
    assert (
        message == "--model is mixtral-8x7b, a published geometry without weights; "
        "give a checkpoint's folder, or --load-format dummy for random weights"
    )
    file = tmp_path / "file.yaml"
    file.write_text("model: mixtral-8x7b\n")
    assert refused("generate", "--config", file, "The").startswith(
        f"model (in {file}) is mixtral-8x7b, a published"
    )


def test_a_published_geometry_has_no_tokenizer(refused: Refused) -> None:
    assert (
        refused("generate", "--model", "mixtral-8x7b", "--load-format", "dummy", "The")
        == "--model mixtral-8x7b is a geometry without a tokenizer, so text cannot be turned into"
        " tokens; give a folder with one, or use serve or LLM.generate, which take token ids as"
        " well"
    )


# ---- plans


@pytest.mark.parametrize("local", [["--local"], []])
def test_more_stages_than_layers(refused: Refused, model: Path, local: list[str]) -> None:
    """Without --local as well: no Ray is started for a plan that cannot be."""
    message = refused("generate", "--model", model, *local, "--stages", "5", "The")
    assert "--stages is 5" in message
    assert "only 4 layers" in message


@pytest.mark.parametrize("local", [["--local"], []])
def test_too_little_memory_for_the_plan(
    refused: Refused, model: Path, local: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        launch, "probe_local", lambda: Hardware(node_cpus=(2,), node_memory=(200_000,))
    )
    message = refused("generate", "--model", model, *local, "The")
    assert "too little memory for stage 1/2 (layers 0-1)" in message
    assert "may use 87.9 KiB" in message  # 0.9 of half of 200,000 bytes


def test_a_cache_that_is_too_large_for_the_machine(refused: Refused, model: Path) -> None:
    message = refused(
        "generate", "--model", model, "--local", "--kv-cache-memory", "1024TiB", "The"
    )
    assert "too little memory for stage 1/2" in message
    assert "1,048,576 GiB of cache" in message


def test_a_cache_that_is_too_small_for_one_sequence(refused: Refused, model: Path) -> None:
    """A ring of three pages holds the window of 24: 48 positions of 128 bytes, in four layers."""
    message = refused(
        "generate", "--model", model, "--local", "--stages", "1", "--kv-cache-memory", "1", "The"
    )
    assert (
        message
        == "--kv-cache-memory is 1B, but one sequence of 128 positions takes 24KiB on stage 1/1"
        " (layers 0-3); give --kv-cache-memory 24KiB or more, or lower --max-model-len"
    )


def test_a_context_past_the_checkpoints(refused: Refused, model: Path) -> None:
    message = refused("generate", "--model", model, "--local", "--max-model-len", "129", "The")
    assert message == "--max-model-len is 129; the checkpoint's context is 128 positions"


def test_more_threads_than_can_be_counted(refused: Refused, model: Path) -> None:
    message = refused(
        "generate", "--model", model, "--local", "--threads-per-stage", str(10**13), "The"
    )
    assert "--threads-per-stage" in message


@pytest.mark.parametrize("local", [["--local"], []])
def test_more_threads_than_cores(
    refused: Refused, model: Path, local: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would believe any number of cores that it is given."""
    monkeypatch.setattr(
        launch, "probe_local", lambda: Hardware(node_cpus=(2,), node_memory=(2**30,))
    )
    message = refused("generate", "--model", model, *local, "--threads-per-stage", "3", "The")
    assert (
        message
        == "--threads-per-stage is 3, but no machine here has more cores than 2; use at most 2, or"
        " leave it out"
    )


# ---- Ray


@pytest.mark.parametrize("error", [ConnectionError, ValueError, RuntimeError])
def test_a_cluster_that_cannot_be_joined_is_named(
    refused: Refused, model: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """Ray explains itself on many lines; ours is one."""

    def fail(**_options: object) -> NoReturn:
        raise error("not from here\nand many\nmore lines")

    monkeypatch.setattr(ray_address, "check_ray_address", lambda *_: None)
    monkeypatch.setattr(ray, "init", fail)
    assert (
        refused("generate", "--model", model, "--address", "auto", "The")
        == "the Ray cluster at --address auto cannot be joined: not from here; "
        "this machine must be one of its nodes, with the same Python and Ray"
    )


def test_a_port_without_a_listener_is_named(refused: Refused, model: Path) -> None:
    message = refused("generate", "--model", model, "--address", "127.0.0.1:1", "The")
    assert "127.0.0.1:1" in message
    assert "refused" in message
    assert message.endswith("or leave --address out to start Ray on this machine")


def test_a_command_that_starts_no_ray_does_not_advise_to(refused: Refused) -> None:
    assert refused("drain", "--address", "127.0.0.1:1").endswith(
        "; give the host:port of a cluster's head node"
    )


def test_ray_serve_says_nothing_of_itself_while_a_server_drains(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_ray_serve = logging.getLogger("ray.serve")
    monkeypatch.setattr(of_ray_serve, "level", logging.DEBUG)
    refused("drain", "--address", "127.0.0.1:1")
    assert of_ray_serve.level == logging.WARNING


@pytest.mark.parametrize("address", ["ray://127.0.0.1:1", "nowhere", "127.0.0.1:port", ":1"])
def test_an_address_that_is_none(refused: Refused, model: Path, address: str) -> None:
    assert refused("generate", "--model", model, "--address", address, "The").endswith(
        "it must be auto or host:port"
    )


def test_a_ray_that_does_not_start_is_no_fault_of_the_users(
    refused: Refused, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_options: object) -> NoReturn:
        raise PipelineError("Ray could not\nbe started")

    monkeypatch.setattr(launch, "local_ray_cluster", fail)
    assert refused("generate", "--model", model, "The", code=1) == "Ray could not be started"


# ---- as a user runs it


@pytest.mark.parametrize(
    ("arguments", "stdin", "expected"),
    [
        (["--max-tokens", "0", "The"], b"", "--max-tokens is 0; it must be at least 1"),
        (
            ["--model", "nowhere", "The"],
            b"",
            "model folder nowhere does not exist, and no published geometry has this name; --model",
        ),
        (
            ["--model", "./mixtral-8x7", "The"],
            b"",
            "model folder mixtral-8x7 does not exist, and no published geometry has",
        ),
        ([], b"", "there is no prompt"),
    ],
)
def test_in_a_process_of_its_own(
    arguments: list[str], stdin: bytes, expected: str, tmp_path: Path
) -> None:
    command = [
        sys.executable,
        "-c",
        "from tramontane.cluster.cli.main import main; main()",
        "generate",
        *arguments,
    ]
    done = subprocess.run(
        command, input=stdin, cwd=tmp_path, capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr.decode().count("\n") == 1
    assert done.stderr.decode().startswith(f"error: {expected}")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--jobs-database", "mysql://host/jobs"], ["kind mysql"]),
        (
            ["--jobs-database", "sqlite:///{folder}/file/deep/jobs.sqlite"],
            ["--jobs-database", "file/deep cannot be made"],
        ),
        (["--jobs-database", "sqlite:///{folder}"], ["--jobs-database", "is a folder"]),
        (["--jobs-storage", "nonsense://x"], ["the jobs' storage", "nonsense"]),
        (["--jobs-storage", "{folder}/file/deep"], ["--jobs-storage", "cannot be made"]),
        (["--jobs-url-prefixes", "/data"], ["is not a prefix of URLs"]),
    ],
)
def test_where_jobs_cannot_be_stored_is_reported_before_anything_starts(
    tmp_path: Path,
    refused: Refused,
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    named: list[str],
) -> None:
    def checked(_config: object) -> NoReturn:
        raise AssertionError("the checkpoint is looked at")

    monkeypatch.setattr(serving, "validate_model", checked)
    (tmp_path / "file").touch()
    complaint = refused("serve", *(flag.format(folder=tmp_path) for flag in flags))
    assert all(word in complaint for word in named), complaint


def _options(command: Any) -> list[Any]:  # a command or a group
    below = [
        option for each in getattr(command, "commands", {}).values() for option in _options(each)
    ]
    return [*command.params, *below]


def test_help_shows_no_value_where_there_is_none_to_give() -> None:
    flags = [
        option
        for option in _options(typer.main.get_command(cli.app))
        if getattr(option, "is_flag", False)
    ]
    assert {"json", "as_json", "any_order", "watch", "local", "move_experts", "calibrate"} <= {
        each.name for each in flags
    }
    assert [each.name for each in flags if each.metavar != ""] == []


@pytest.mark.parametrize(
    "words", [(), *((name,) for name in cli.COMMANDS), ("batch", "list")], ids=" ".join
)
def test_help_shows_no_type_of_a_switch(words: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(cli.app, [*words, "--help"], env={"COLUMNS": "200"}).stdout
    assert "--help" in shown
    assert "bool" not in shown


@pytest.mark.parametrize(
    ("words", "choices"),
    [
        (
            "generate",
            {
                "load-format": "auto|dummy",
                "dtype": "auto|bfloat16|float16|float32",
                "quantize": "int8|w8a8|fp8",
            },
        ),
        (
            "plan",
            {
                "dtype": "auto|bfloat16|float16|float32",
                "quantize": "int8|w8a8|fp8",
                "expert-replicas": "N|auto",
            },
        ),
        (
            "serve",
            {
                "link": "object-store|direct",
                "log-format": "text|json",
                "log-level": "debug|info|warning|error",
            },
        ),
        ("make-random", {"scale": "full|small", "layout": "hf|mistral"}),
    ],
)
def test_help_shows_the_choices_of_an_option(words: str, choices: dict[str, str]) -> None:
    shown = CliRunner().invoke(cli.app, [*words.split(), "--help"], env={"COLUMNS": "200"}).stdout
    found = dict(re.findall(r"--([a-z-]+) +<?([^ >]+)>? ", shown.partition("Examples:")[0]))
    assert {name: found[name] for name in choices} == choices


# too long for one line of the column of names
def test_help_names_the_endpoints_of_batch_jobs_in_words() -> None:
    shown = (
        CliRunner().invoke(cli.app, ["batch", "submit", "--help"], env={"COLUMNS": "200"}).stdout
    )
    assert "--endpoint PATH " in shown
    words = (
        "Endpoint of the requests: /v1/completions, /v1/chat/completions, /v1/fim/completions or"
        " /v1/responses. [default: /v1/completions]"
    )
    assert words in " ".join(shown.split())


def test_help_and_documentation_have_the_same_defaults_of_sampling_as_the_code() -> None:
    page = (Path(__file__).parents[3] / "docs/cli.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith("| ")
    ]
    table = {row[0]: row[1:] for row in rows if len(row) == 4}
    shown = {}
    for name, command in (("generate", generate), ("chat", chat)):
        defaults = {
            parameter.name: parameter.default
            for parameter in signature(command).parameters.values()
        }
        assert table[f"`tramontane {name}`"][:2] == [
            f"{defaults['temperature']:g}",
            str(defaults["max_tokens"]),
        ]
        assert table[f"`tramontane {name}`"][2].startswith(
            f"{EngineConfig().seed}: every run gives the same tokens"
        )
        text = CliRunner().invoke(cli.app, [name, "--help"], env={"COLUMNS": "300"}).stdout
        shown[name] = dict(
            re.findall(r"--([a-z-]+) .*?(?:\[default: |Default: )([\w.]+?)\.?\]? *│", text)
        )
        assert float(shown[name]["temperature"]) == defaults["temperature"]
        assert int(shown[name]["max-tokens"]) == defaults["max_tokens"]
    llm, http = SamplingParams(), CompletionRequest.model_validate({"prompt": "x"})
    assert table["`LLM` ([Python](python.md))"][:2] == [f"{llm.temperature:g}", str(llm.max_tokens)]
    assert llm.seed is None
    assert table["[HTTP](http-api.md) and [gRPC](grpc.md) completions"][:2] == [
        f"{http.temperature:g}",
        str(http.max_tokens),
    ]
    assert http.seed is None
    assert (
        "Over HTTP the default is 1."
        in CliRunner().invoke(cli.app, ["chat", "--help"], env={"COLUMNS": "300"}).stdout
    )


@pytest.mark.parametrize(("switch", "expected"), [("--no-local", "false"), ("--local", "true")])
def test_a_switch_overrides_a_file_in_either_direction(
    tmp_path: Path, switch: str, expected: str
) -> None:
    (file := tmp_path / "file.yaml").write_text(
        f"local: {'false' if expected == 'true' else 'true'}\n"
    )
    shown = CliRunner().invoke(cli.app, ["config", "--config", str(file), switch]).stdout
    assert re.search(f"^local: {expected} +# {switch}$", shown, re.MULTILINE), shown


# ---- output that cannot be written


def _run_with_output(stdout: int, *arguments: str) -> tuple[int, str]:
    """Run the command in a process of its own, with a buffer for its output; return its status and
    standard error.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "tramontane.cluster.cli", *arguments]
    done = subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment, check=False
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["config", "--json"], ["config", "--markdown"]])
def test_a_reader_who_has_closed_the_pipe_sees_no_traceback(arguments: list[str]) -> None:
    """Little output is in the buffer until the command ends, and much is not."""
    reader, writer = os.pipe()
    os.close(reader)
    assert _run_with_output(writer, *arguments) == (1, "")
    os.close(writer)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
@pytest.mark.parametrize("arguments", [["--help"], ["config", "--json"], ["config", "--markdown"]])
def test_a_full_disk_behind_standard_output_is_one_line(arguments: list[str]) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    assert _run_with_output(full, *arguments) == (
        1,
        "error: the output cannot be written: No space left on device\n",
    )
    os.close(full)


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "--model"],
        ["generate", "--local", "--model"],
        ["serve", "--model"],
        ["serve", "--config"],
        ["serve", "--api-key-file"],
        ["monitoring", "--out"],
        ["batch", "submit"],
        ["batch", "results", "x", "--output"],
        ["make-random", "--like", "mistral-7b-v0.1", "--out"],
        ["experts", "--of"],
    ],
)
def test_a_path_that_cannot_even_be_asked_about_is_one_line(
    refused: Refused, command: list[str]
) -> None:
    """Not even whether it exists: a name has 255 bytes at most."""
    assert "File name too long" in refused(*command, "x" * 300)


def test_a_folder_that_cannot_be_searched_is_one_line(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of another user; the user of the tests may be root."""

    def denied(path: Path, **_: object) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", denied)
    assert (
        refused("batch", "submit", "theirs/requests.jsonl")
        == "theirs/requests.jsonl cannot be used: Permission denied"
    )
