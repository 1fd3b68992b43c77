"""Fixtures of tests of the kernels in C: they need a compiler, and another one stands for other
processors.
"""

import os
from collections.abc import Iterator

import pytest
from native_attention import OTHER_PROCESSORS

from tramontane.workers.attention.native_backend import NativeDecode
from tramontane.workers.device.native_library import CompilerError, compile_library


@pytest.fixture
def compiler() -> None:
    """Skip without a compiler."""
    try:
        NativeDecode(8, 1, 16, "float32")
    except CompilerError as error:
        pytest.skip(f"kernels in C need a compiler: {error}")


@pytest.fixture(params=OTHER_PROCESSORS)
def other_processor(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Compile as for another processor; returns the dtype to try there."""
    options, dtype = OTHER_PROCESSORS[request.param]
    monkeypatch.setenv("CC", f"{os.environ.get('CC', 'cc')} {options}")
    compile_library.cache_clear()
    try:
        NativeDecode(8, 1, 16, dtype)
        yield dtype
    except CompilerError as error:
        pytest.skip(f"the compiler has no {request.param}: {error}")
    finally:
        compile_library.cache_clear()
