"""The tests that each module of checks of Triton kernels has: by the interpreter, and on a GPU."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from interpreted_checks import Check, run_interpreted, some


def checks_as_tests(module: str, checks: Mapping[str, Check]) -> tuple[Any, Any, Any]:
    """Return the fixture ``failures``, ``test_interpreted`` and ``test_on_a_gpu`` for the checks of
    a module of this folder, to be bound to these names. ``make test`` interprets some of them.
    """
    by_interpreter = some(checks)

    @pytest.fixture(scope="module")
    def failures() -> dict[str, str]:
        return run_interpreted(module, *by_interpreter)

    @pytest.mark.interpreted
    @pytest.mark.parametrize("name", by_interpreter)
    def test_interpreted(failures: dict[str, str], name: str) -> None:
        assert not failures[name], failures[name]

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
    @pytest.mark.parametrize("name", checks)
    def test_on_a_gpu(name: str) -> None:
        if "float8" in name and torch.cuda.get_device_capability() < (8, 9):
            pytest.skip("this GPU has no fp8")
        checks[name]("cuda")

    return failures, test_interpreted, test_on_a_gpu
