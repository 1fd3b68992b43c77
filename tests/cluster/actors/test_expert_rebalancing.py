"""A server whose experts move to other actors while it streams. Over Ray Serve, by the command."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from serve_cluster import URL, complete, events, running_application, wait_until_idle

from tramontane.cluster.cli.main import app
from tramontane.cluster.pipeline.ray_cluster import local_ray_cluster
from tramontane.proto.errors import ConfigError

pytestmark = [
    pytest.mark.ray,
    pytest.mark.serve,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]

BODY = {"prompt": "ROMEO:", "max_tokens": 40, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module", autouse=True)
def _app() -> Iterator[None]:
    with (
        local_ray_cluster(num_cpus=3),
        running_application(
            dtype="float32", stages=1, threads_per_stage=1, expert_actors=2, move_experts=True
        ),
    ):
        yield


def _write(path: Path, tokens: list[list[int]]) -> Path:
    path.write_text(json.dumps({"tokens_per_expert": tokens}))
    return path


def test_experts_move_while_a_stream_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = complete(**BODY)["choices"][0]["text"]
    hot = [[1000, 1, 1000, 1, 1000, 1, 1, 1]] * 8
    load = _write(tmp_path / "load.json", hot)
    outcomes: list[str] = []
    has_begun = threading.Event()

    def stream() -> None:
        with httpx.stream(
            "POST", f"{URL}/v1/completions", json=BODY | {"stream": True}, timeout=120
        ) as response:
            text = ""
            for line in response.iter_lines():
                text += line + "\n"
                has_begun.set()
        outcomes.append(
            "".join(choice["text"] for event in events(text) for choice in event["choices"])
        )

    streams = [threading.Thread(target=stream) for _ in range(3)]
    for each in streams:
        each.start()
    has_begun.wait()
    app(["experts", "--url", URL, "--adopt", str(load)], standalone_mode=False)
    assert not outcomes, "or nothing was requested while experts moved"
    first = capsys.readouterr().out
    assert "experts were loaded on further actors, in 1 pipeline" in first
    assert not first.startswith("0 ")
    for each in streams:
        each.join()
    assert outcomes == [expected] * 3
    app(["experts", "--url", URL, "--adopt", str(load)], standalone_mode=False)
    assert capsys.readouterr().out.startswith("0 experts were loaded"), (
        "the plan for this load is followed already"
    )
    wait_until_idle()


def test_a_load_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="load"):
        app(
            ["experts", "--url", URL, "--adopt", str(_write(tmp_path / "load.json", [[1, 2]]))],
            standalone_mode=False,
        )
