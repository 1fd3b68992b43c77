"""vLLM's command lines: ``tramontane serve MODEL`` and the flags of ``vllm serve``."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from tiny_models import tiny_args, write_checkpoint

from tramontane.cluster.cli.main import LazyCommands, app
from tramontane.cluster.config.engine_config import OTHER_NAMES, EngineConfig
from tramontane.cluster.config.vllm_flags import ANY, FLAGS, OFF, ON, SHORT_NAMES, VllmFlag
from tramontane.cluster.http.metrics_endpoint import COUNTERS, GAUGES, HISTOGRAMS

PAGE = Path(__file__).parents[3] / "docs" / "from-vllm.md"

Served = Callable[..., EngineConfig]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    """Runs ``tramontane serve`` up to the point where its configuration is complete."""

    def run(*arguments: object) -> EngineConfig:
        seen: list[EngineConfig] = []
        monkeypatch.setattr(
            "tramontane.cluster.cli.serve.run_server", lambda config, *_: seen.append(config)
        )
        app(["serve", *map(str, arguments)], standalone_mode=False)
        [config] = seen
        return config

    return run


# The model


def test_the_model_may_be_an_argument(served: Served, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", tiny_args(n_layers=2))
    for given in ([folder], ["--model", folder], [folder, "--model", f"{folder}/"]):
        assert served(*given).model == folder
        assert served("--stages", 2, *given, "--port", 80).model == folder


def test_the_argument_overrides_a_file(served: Served, tmp_path: Path) -> None:
    (tmp_path / "server.yaml").write_text("model: elsewhere\nstages: 3\n")
    config = served("here", "--config", tmp_path / "server.yaml")
    assert (config.model, config.stages) == (Path("here"), 3)


def test_two_models_are_refused(refused: Callable[..., str]) -> None:
    assert refused("serve", "a", "--model", "b") == "MODEL is a and --model is b; give one of them"


def test_a_second_argument_is_refused(refused: Callable[..., str]) -> None:
    assert "unexpected extra argument(s) (b)" in refused("serve", "a", "b")


# Values of options in vLLM's notations


@pytest.mark.parametrize(
    "given",
    [
        "m --served-model-name a b --api-key k1 k2 --port 80",
        "--served_model_name a b m --api_key k1 k2",
        "--model m --api-key k1 k2 --served-model-name a b",
        "--api-key k1 k2 --served-model-name a b --model=m",
        "--served-model-name=a,b --api-key k1 --api-key k2 m",
        "--api-key k1 k2 m --served-model-name a b",
        "--port 80 -pp 2 --no-dashboard --api-key k1 k2 m --served-model-name a b",
        "--served-model-name a b --api-key k1 k2 -- m",
    ],
)
def test_several_words_are_names_or_keys(served: Served, given: str) -> None:
    config = served(*given.split())
    assert config.model == Path("m")
    assert config.model_names == ("a", "b")
    assert [key.get_secret_value() for key in config.api_key] == ["k1", "k2"]


def test_one_word_behind_a_name_or_a_key_is_the_model(served: Served) -> None:
    for option in ("--served-model-name", "--api-key"):
        config = served(option, "a", "m")
        assert config.model == Path("m")
    assert served("--served-model-name", "a", "--", "m").model == Path("m")
    with pytest.raises(typer.TyperException, match="requires an argument"):
        served("m", "--served-model-name")


def test_a_file_may_have_lists_and_notations(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("served-model-name: [a, b]\nmax-model-len: 32K\ndtype: half\n")
    config = served("--config", file)
    assert config.model_names == ("a", "b")
    assert (config.max_model_len, config.dtype) == (32_768, "float16")
    assert served("--config", file, "--max-model-len", "auto").max_model_len is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4096", 4096),
        ("32k", 32_000),
        ("32K", 32_768),
        ("1.5k", 1500),
        ("1.5K", 1536),
        ("1.5m", 1_500_000),
        ("1.5M", 3 * 2**19),
        ("0.001g", 1_000_000),
        ("0.0078125G", 2**23),
        ("auto", None),
        ("-1", None),
    ],
)
def test_lengths_have_vllms_notations(served: Served, text: str, number: int | None) -> None:
    assert served("--max-model-len", text).max_model_len == number
    if number is not None:
        assert served("--max-num-batched-tokens", text).max_num_batched_tokens == number


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("32q", "'32q'; it must be a whole number"),
        ("1.5", "'1.5'; it must be a whole number"),
        ("-2", "'-2'; it must be at least 1"),
        ("1G", "1073741824; it must be at most 16777216"),
        ("9" * 5000, "it must be a whole number"),
    ],
)
def test_a_length_that_is_none_is_refused(
    refused: Callable[..., str], text: str, message: str
) -> None:
    shown = refused("serve", "--max-model-len", text)
    assert shown.startswith("--max-model-len is ")
    assert message in shown


def test_data_types_have_vllms_names(served: Served, refused: Callable[..., str]) -> None:
    assert served("--dtype", "half").dtype == "float16"
    assert served("--dtype", "float").dtype == "float32"
    assert refused("serve", "--dtype", "double").startswith(
        "--dtype is 'double'; it must be 'auto'"
    )


# Flags of vLLM


def test_values_are_compared_without_case(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    served("--tokenizer-mode", "Mistral")
    assert capsys.readouterr().err.startswith("note: --tokenizer-mode Mistral has no effect: ")


def _arguments(flag: VllmFlag, value: str) -> list[str]:
    return [flag.shown(value)] if flag.is_switch else [flag.name, value]


DONE = [
    (flag, value)
    for flag in FLAGS
    for value in ("anything" if each == ANY else each for each in flag.done)
]
REFUSED = [
    (flag, OFF if ON in flag.done else ON) if flag.is_switch else (flag, "other-value")
    for flag in FLAGS
    if flag.instead and not flag.key
]


def _id(given: object) -> str:
    return given.name if isinstance(given, VllmFlag) else str(given)


@pytest.mark.parametrize(("flag", "value"), DONE, ids=_id)
def test_a_flag_that_asks_for_what_is_done_anyway_is_a_note(
    served: Served, capsys: pytest.CaptureFixture[str], flag: VllmFlag, value: str
) -> None:
    without = served("--stages", 2)
    assert served(*_arguments(flag, value), "--stages", 2) == without
    shown = capsys.readouterr()
    assert shown.err == f"note: {flag.shown(value)} has no effect: {flag.why}\n"
    assert shown.out == ""


@pytest.mark.parametrize(("flag", "value"), REFUSED, ids=_id)
def test_a_flag_that_would_change_what_the_server_does_is_refused(
    refused: Callable[..., str], flag: VllmFlag, value: str
) -> None:
    message = refused("serve", "--trust-remote-code", *_arguments(flag, value))
    assert message == f"{flag.shown(value)} is a flag of vLLM: {flag.instead}"


def test_every_flag_says_why_it_has_no_effect_and_what_takes_its_place() -> None:
    for flag in FLAGS:
        assert bool(flag.done) == bool(flag.why), flag.name
        accepts_all = ANY in flag.done or {*flag.done} == {ON, OFF}
        assert bool(flag.instead) == (not accepts_all), flag.name
        assert flag.name.startswith("--")
    assert len({flag.name for flag in FLAGS}) == len(FLAGS)


def test_options_that_a_refusal_names_exist() -> None:
    serve = LazyCommands()["serve"]
    ours = {name for option in serve.params if not option.hidden for name in option.opts}
    named = {
        name for flag in FLAGS for name in re.findall(r"--[a-z-]+", f"{flag.why} {flag.instead}")
    }
    assert "--stages" in named
    assert named - ours == {"--config"} - ours


def test_the_command_of_mistrals_model_cards_is_understood(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    """With underscores, as the cards have them."""
    flags = "--tokenizer_mode mistral --config_format mistral --load_format mistral"
    flags += " --tool-call-parser mistral --enable-auto-tool-choice --reasoning-parser mistral"
    words = [*flags.split(), "--limit-mm-per-prompt", '{"image":10}']
    config = served("some/folder", *words, "--max_model_len=4096", "-tp", 1)
    assert (config.model, config.load_format, config.max_model_len) == (
        Path("some/folder"),
        "auto",
        4096,
    )
    assert capsys.readouterr().err.count("note: ") == 8


def test_other_load_formats_are_left_to_the_option(
    served: Served, refused: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert served("--load-format", "dummy", "mistral-7b-v0.1").load_format == "dummy"
    assert capsys.readouterr().err == ""
    assert refused("serve", "--load-format", "gguf") == (
        "--load-format is 'gguf'; it must be 'auto' or 'dummy'"
    )


def test_tensor_parallelism_is_answered_with_stages(refused: Callable[..., str]) -> None:
    for given in (["--tensor-parallel-size", "4"], ["-tp", "4"], ["--tensor_parallel_size=4"]):
        message = refused("serve", "some/folder", *given)
        assert message.startswith("--tensor-parallel-size 4 is a flag of vLLM: ")
        assert "--stages N" in message


def test_a_flag_of_vllm_is_not_in_the_help_and_is_no_suggestion(
    capsys: pytest.CaptureFixture[str], refused: Callable[..., str]
) -> None:
    app(["serve", "--help"], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "MODEL" in shown
    assert "--tensor-parallel-size" not in shown
    assert "did you mean --enforce-eager" not in refused("serve", "--enforce-eage")


def test_other_commands_do_not_know_them(refused: Callable[..., str]) -> None:
    assert "No such option: --tensor-parallel-size" in refused("plan", "--tensor-parallel-size", 2)


# Defaults and keys of the environment


def test_the_environment_has_defaults_for_what_flags_and_files_leave_open(
    served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRAMONTANE_HOST", "0.0.0.0")
    monkeypatch.setenv("TRAMONTANE_DRAIN_TIMEOUT", "3")
    (tmp_path / "one.yaml").write_text("drain_timeout: 7")
    found = [
        (config.host, config.drain_timeout)
        for config in (
            served(),
            served("--host", "127.0.0.1", "--drain-timeout", 0),
            served("--config", tmp_path / "one.yaml"),
        )
    ]
    assert found == [("0.0.0.0", 3.0), ("127.0.0.1", 0.0), ("0.0.0.0", 7.0)]


@pytest.mark.parametrize(
    ("variable", "value"), [("TRAMONTANE_HOST", ""), ("TRAMONTANE_DRAIN_TIMEOUT", "soon")]
)
def test_a_wrong_default_of_the_environment_is_named(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert refused("serve").startswith(f"{variable} is {value!r}; it must be ")


def test_keys_of_the_environment_are_the_servers_unless_it_has_others(
    served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def keys(*arguments: object) -> list[str]:
        monkeypatch.setenv("TRAMONTANE_API_KEY", "sk-one, sk-two")
        return [key.get_secret_value() for key in served(*arguments).api_key]

    (tmp_path / "keys").write_text("sk-three")
    assert keys() == ["sk-one", "sk-two"]
    assert keys("--api-key", "sk-four") == ["sk-four"]
    assert keys("--api-key-file", tmp_path / "keys") == []


def test_processes_that_serve_starts_do_not_inherit_the_keys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(
        "tramontane.cluster.cli.serve.run_server", lambda *_: seen.append(dict(os.environ))
    )
    for given in ([], ["--api-key", "sk-four"]):
        monkeypatch.setenv("TRAMONTANE_API_KEY", "sk-one")
        app(["serve", *given], standalone_mode=False)
        assert "TRAMONTANE_API_KEY" not in seen[-1]
    assert "sk-one" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("wrong", ["", ",", "sk-one,", "sk one", "sk-\xe9"])
def test_a_variable_without_a_usable_key_does_not_open_the_server(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setenv("TRAMONTANE_API_KEY", wrong)
    monkeypatch.setattr("tramontane.cluster.cli.serve.run_server", lambda *_: None)
    message = refused("serve")
    assert message.startswith("TRAMONTANE_API_KEY must hold an API key")
    assert "sk-" not in message


# The page


def _cell(values: tuple[str, ...], why: str) -> str:
    if not values:
        return ""
    shown = [f"`{value}`" for value in values if value not in (ANY, ON, OFF)]
    if values == (OFF,):
        shown = ["turned off"]
    return f"{', '.join(shown)}: {why}" if shown else why


def rows() -> list[str]:
    """The rows of the page's table of flags."""
    return [
        f"| `{flag.name}`{f', `{flag.short}`' * bool(flag.short)} | {_cell(flag.done, flag.why)} |"
        f" {flag.instead if flag.instead != flag.why else 'other values'} |"
        for flag in FLAGS
    ]


def test_the_page_has_every_flag_with_its_words() -> None:
    text = PAGE.read_text(encoding="utf-8")
    table = text.partition("<!-- flags: ")[2].partition("<!-- end of flags -->")[0]
    assert table.splitlines()[3:] == rows()


def test_the_page_has_every_name_that_means_the_same() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for other in ("pipeline_parallel_size", "data_parallel_size", "quantization", "block_size"):
        name = OTHER_NAMES[other].replace("_", "-")
        assert re.search(rf"\| `--{other.replace('_', '-')}`.* \| `--{name}` \|", text), other
    for short, name in SHORT_NAMES.items():
        assert re.search(rf"`{short}` \| `--{name.replace('_', '-')}` \|", text), short


def test_the_page_has_every_metric_by_vllms_name() -> None:
    text = PAGE.read_text(encoding="utf-8")
    names = [name for table in (GAUGES, COUNTERS, HISTOGRAMS) for name in table]
    assert [name for name in names if name.startswith("vllm:") and f"`{name}`" not in text] == []
    assert set(re.findall(r"`(vllm:\w+)", text)) <= set(names)


def test_the_page_is_short() -> None:
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) <= 120
