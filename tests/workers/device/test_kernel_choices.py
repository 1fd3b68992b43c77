"""What a machine has chosen is chosen again by the next process, without timing; what it depends on
makes it choose anew.
"""

import json
import logging
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tramontane.workers.device import kernel_choices, native_library, numerics
from tramontane.workers.device.kernel_choices import KeptChoice, KernelChoices, platform_of
from tramontane.workers.device.kernel_selection import Compute, KernelSelector

RIGHT = torch.arange(1.0, 5.0)
SHAPES = "8 x 4 in torch.bfloat16"
FAST_FIRST: Mapping[str, float] = {"a": 1e-6, "b": 2e-6, "c": 3e-6}
FAST_LAST: Mapping[str, float] = {"a": 3e-6, "b": 2e-6, "c": 1e-6}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of kernels, in another temporary folder than the machine's."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return native_library.kernel_folder()


class Process:
    """Stands for a process that starts: its clock has ``seconds`` for each kernel, and it notes
    what is computed and timed.
    """

    def __init__(
        self,
        seconds: Mapping[str, float],
        outs: Mapping[str, Tensor] | None = None,
        choices: KernelChoices | None = None,
    ) -> None:
        self.tried: list[str] = []
        self.timed: list[str] = []
        self._seconds, self._outs = seconds, outs or dict.fromkeys(seconds, RIGHT)
        self._selector = KernelSelector(self._clock, choices or KernelChoices.of_device("cpu"))

    def choose(
        self, job: str = "decode of 4", shapes: str = SHAPES, advantage: float = 1
    ) -> str | None:
        names = {name: name for name in self._outs}
        return self._selector.fastest(
            job, shapes, names, self._prepare, lambda: self._prepare, RIGHT, advantage
        )

    def _prepare(self, name: str) -> Compute:
        def compute() -> Tensor:
            self.tried.append(name)
            return self._outs[name]

        return compute

    def _clock(self, compute: Compute) -> float:
        compute()
        self.timed.append(self.tried.pop())
        return self._seconds[self.timed[-1]]


def test_the_second_start_times_nothing_and_chooses_the_same(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Though another kernel would be the fastest by its clock."""
    first, second = Process(FAST_FIRST), Process(FAST_LAST)
    assert first.choose() == "a"
    assert first.timed == ["a", "b", "c"]
    with caplog.at_level(logging.INFO):
        assert second.choose() == "a"
    assert second.timed == []
    assert second.tried == ["a"], "it is compared with the reference, and no other is computed"
    assert caplog.messages == ["decode of 4 by a, as chosen before on this machine"]
    assert [path.suffix for path in folder.iterdir()] == [".json"], (
        "no lock and no half of a file is left"
    )


def test_a_choice_that_another_kernel_is_not_much_faster_is_remembered_as_it_was(
    folder: Path,
) -> None:
    assert Process(FAST_LAST).choose(advantage=4) == "a"
    assert Process(FAST_LAST).choose(advantage=1) == "a"


def test_without_choices_each_start_times() -> None:
    for seconds, chosen in ((FAST_FIRST, "a"), (FAST_LAST, "c")):
        process = Process(seconds)
        process._selector = KernelSelector(process._clock)
        assert process.choose() == chosen


def test_what_has_no_alternative_is_tried_and_neither_timed_nor_kept(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = Process({"a": 1.0})
    with caplog.at_level(logging.INFO):
        assert process.choose() == "a"
    assert (process.tried, process.timed) == (["a"], [])
    assert caplog.messages == ["decode of 4 by a (there is no other)"]
    assert [*folder.iterdir()] == []
    assert Process({"a": 1.0}, {"a": RIGHT * 2}).choose() is None


def test_each_job_and_each_shape_has_a_choice_of_its_own(folder: Path) -> None:
    Process(FAST_FIRST).choose()
    for asked in (("decode of 8", SHAPES), ("decode of 4", "8 x 4 in torch.float16")):
        other = Process(FAST_LAST)
        assert other.choose(*asked) == "c"
        assert other.timed
    for asked, chosen in ((("decode of 8", SHAPES), "c"), (("decode of 4", SHAPES), "a")):
        again = Process(FAST_FIRST if chosen == "c" else FAST_LAST)
        assert again.choose(*asked) == chosen
        assert not again.timed


def test_other_candidates_are_a_new_choice(folder: Path) -> None:
    """Also where the chosen one is still among them, and where it is gone."""
    Process(FAST_LAST).choose()
    more = Process({**FAST_FIRST, "d": 1e-9})
    assert more.choose() == "d"
    fewer = Process({"a": 3e-6, "b": 2e-6})
    assert fewer.choose() == "b"
    assert fewer.timed == ["a", "b"]


def _another_gpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(numerics, "device_name", lambda _: "another")


def _another_torch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "__version__", "0.1")


def _another_triton(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(numerics, "version", lambda package: "0.1" if package == "triton" else "1")


def _another_cuda(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.version, "cuda", "0.1")


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "GPU": _another_gpu,
    "torch": _another_torch,
    "Triton": _another_triton,
    "CUDA": _another_cuda,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_another_device_or_library_times_again(
    change: Callable[[pytest.MonkeyPatch], None], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was chosen for this one stays."""
    monkeypatch.setattr(numerics, "device_name", lambda _: "a GPU")
    monkeypatch.setattr(numerics, "version", lambda _: "1")

    def chosen(seconds: Mapping[str, float]) -> tuple[str | None, bool]:
        choices = KernelChoices.of_device("cuda:0")
        process = Process(seconds, choices=choices)
        return process.choose(), bool(process.timed)

    assert chosen(FAST_FIRST) == ("a", True)
    with monkeypatch.context() as patch:
        change(patch)
        assert chosen(FAST_LAST) == ("c", True)
        assert chosen(FAST_FIRST) == ("c", False)
    assert chosen(FAST_LAST) == ("a", False)


@pytest.mark.parametrize(
    "file",
    ["kernels/triton_linear.py", "attention/triton_decode.py", "model/expert_kernels.py"],
)
def test_another_source_times_again(
    file: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "sources"
    shutil.copytree(kernel_choices.SOURCES, sources, ignore=shutil.ignore_patterns("__pycache__"))
    assert Process(FAST_FIRST).choose() == "a"
    monkeypatch.setattr(kernel_choices, "SOURCES", sources)
    assert Process(FAST_LAST).choose() == "a", "wherever they are"
    with (sources / file).open("a", encoding="utf-8") as source:
        source.write("\n")
    assert Process(FAST_LAST).choose() == "c"


def test_a_source_with_another_name_is_another_platform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in kernel_choices.PACKAGES:
        (tmp_path / package).mkdir()
    monkeypatch.setattr(kernel_choices, "SOURCES", tmp_path)
    (tmp_path / "device" / "one.py").write_text("x", encoding="utf-8")
    before = platform_of("cpu")
    (tmp_path / "device" / "one.py").rename(tmp_path / "device" / "two.py")
    assert platform_of("cpu") != before
    (tmp_path / "device" / "two.py").rename(tmp_path / "device" / "one.py")
    (tmp_path / "device" / "one.pyc").write_text("x", encoding="utf-8")
    assert platform_of("cpu") == before, "what is compiled of them does not count"


def test_on_gpus_threads_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages of one GPU may have other numbers of them, and use the same choices."""
    monkeypatch.setattr(kernel_choices, "device_numerics", lambda device: f"numerics of {device}")
    before = platform_of("cuda:0")
    assert before.startswith("numerics of cuda:0, sources ")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert platform_of("cuda:0") == before


def test_a_remembered_kernel_that_is_wrong_is_not_used(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All are tried and timed anew, and the new choice is remembered."""
    Process(FAST_FIRST).choose()
    outs = {"a": RIGHT * 1.1, "b": RIGHT, "c": RIGHT}
    with caplog.at_level(logging.WARNING):
        process = Process(FAST_FIRST, outs)
        assert process.choose() == "b"
    assert process.timed == ["b", "c"]
    assert caplog.messages == [
        "decode of 4: a was chosen before on this machine and is not used, all are tried again:"
        " differs by 0.1"
    ]
    again = Process(FAST_FIRST)
    assert again.choose() == "b"
    assert not again.timed


def test_a_remembered_kernel_that_does_not_run_is_not_used(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Process(FAST_FIRST).choose()
    process = Process(FAST_FIRST)

    def prepare(name: str) -> Compute:
        if name == "a":
            raise NotImplementedError("not built for this GPU")
        return Process._prepare(process, name)

    process._prepare = prepare  # type: ignore[method-assign]
    assert process.choose() == "b"
    assert (
        "a was chosen before on this machine and is not used, all are tried again: not built for"
        " this GPU" in caplog.text
    )


def test_that_none_can_be_used_is_not_remembered(folder: Path) -> None:
    wrong = dict.fromkeys("abc", RIGHT * 2)
    assert Process(FAST_FIRST, wrong).choose() is None
    assert [*folder.iterdir()] == []
    assert Process(FAST_FIRST).choose() == "a"


def _chosen_as(content: bytes, name: str) -> bytes:
    return json.dumps({**json.loads(content), "chosen": name}).encode()


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "its first half": lambda content: content[: len(content) // 2],
    "nothing": lambda content: b"",
    "zeros": lambda content: bytes(len(content)),
    "no text": lambda content: b"\xff" + content,
    "a list": lambda content: b"[1]",
    "an unknown kernel": lambda content: _chosen_as(content, "z"),
    "another question": lambda content: content.replace(b"decode of 4", b"decode of 5"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_a_damaged_file_is_made_again(
    damage: Callable[[bytes], bytes], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Process(FAST_FIRST).choose()
    (path,) = folder.iterdir()
    content = path.read_bytes()
    path.write_bytes(damage(content))
    process = Process(FAST_FIRST)
    assert process.choose() == "a"
    assert process.timed == ["a", "b", "c"]
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert warning.getMessage() == f"the choice of a kernel in {path} is damaged, and is made again"
    assert path.read_bytes() == content
    assert Process(FAST_LAST).choose() == "a"


def test_the_file_says_what_was_asked_and_chosen(folder: Path) -> None:
    Process(FAST_FIRST).choose()
    (path,) = folder.iterdir()
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert kept.pop("platform") == platform_of("cpu")
    assert kept == {
        "job": "decode of 4",
        "shapes": SHAPES,
        "candidates": ["a", "b", "c"],
        "chosen": "a",
    }
    assert path.stat().st_mode & 0o077 == 0 or path.parent.stat().st_mode & 0o077 == 0


WRITER = """
import sys
from pathlib import Path
from tramontane.workers.device.kernel_choices import KernelChoices
choices = KernelChoices("a platform", Path(sys.argv[1]))
print(flush=True)
sys.stdin.readline()
for each in range(int(sys.argv[3])):
    choices.of(f"job {sys.argv[2]} {each}", "", ["a", "b"]).keep("b")
    choices.of("job of all", "", ["a", "b"]).keep("b")
"""


def test_processes_that_write_at_once_keep_all_choices(folder: Path) -> None:
    """Those that no other process makes, and the one that all make."""
    numbers, num_choices = range(2), 40
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), str(number), str(num_choices)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in numbers
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "\n", "it can write"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("now\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    choices = KernelChoices("a platform", folder)
    jobs = [
        *(f"job {number} {each}" for number in numbers for each in range(num_choices)),
        "job of all",
    ]
    assert {choices.of(job, "", ["a", "b"]).recall() for job in jobs} == {"b"}
    assert len([*folder.iterdir()]) == len(jobs)


def test_stages_that_start_together_choose_once_and_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them find that nothing was chosen yet, and by the clock of each another kernel is the
    fastest.
    """
    names, recall, seen = "abc", KeptChoice.recall, set[int]()
    have_looked = threading.Barrier(len(names))

    def look(kept: KeptChoice) -> str | None:
        found = recall(kept)
        if threading.get_ident() not in seen:
            seen.add(threading.get_ident())
            have_looked.wait()
        return found

    def start(fastest: str) -> tuple[str | None, int]:
        process = Process({name: 1e-6 if name == fastest else 2e-6 for name in names})
        return process.choose(), len(process.timed)

    monkeypatch.setattr(KeptChoice, "recall", look)
    with ThreadPoolExecutor(len(names)) as pool:
        found = [*pool.map(start, names)]
    assert len({chosen for chosen, _ in found}) == 1
    assert sorted(num_timed for _, num_timed in found) == [0, 0, 3]


def test_the_folder_is_the_one_of_kernels_of_this_user(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that others can write to is not read, see ``test_native_library``."""
    Process(FAST_FIRST).choose()
    folder.chmod(0o777)
    process = Process(FAST_LAST)
    assert process.choose() == "c"
    assert process.timed
    assert f"{folder} is not a folder that only this user can write to" in caplog.text


def test_where_nothing_can_be_kept_a_line_says_so(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And each start times."""
    nowhere = KernelChoices("a platform", tmp_path / "nowhere")
    for seconds, chosen in ((FAST_FIRST, "a"), (FAST_LAST, "c")):
        process = Process(seconds, choices=nowhere)
        assert process.choose() == chosen
        assert process.timed
    assert "so it is made at each start" in caplog.text
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    caplog.clear()
    assert KernelChoices.of_device("cpu") is None
    assert "Choices of kernels cannot be kept, so each start times kernels again" in caplog.text
