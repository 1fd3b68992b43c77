"""What Inductor and Triton make of the fused operations for a Hopper GPU that is not there."""

import pytest

pytest.importorskip("triton", reason="Triton compiles the fused operations, and is for Linux only")

from inductor_kernels import KernelFacts, inductor_kernels

from tramontane.workers.kernels.fused_ops import GPU_TEST_NUM_TOKENS

# That are not replaced by a Triton kernel of this project. All numbers that they read are adjacent
# to others, but those of cos_sin, which reads a position once for all its angles.
OPERATIONS = {"apply_rotary", "silu_and_mul", "cos_sin"}
ADJACENT_LOADS = {"apply_rotary", "silu_and_mul"}
WIDE = 16  # bytes, the most that a thread loads at once


@pytest.fixture(scope="module")
def facts() -> dict[tuple[str, bool], KernelFacts]:
    """Of each operation, for one token and for any number of them."""
    return {(each.operation, each.is_dynamic): each for each in inductor_kernels()}


def test_the_first_number_of_tokens_is_one_and_the_second_stands_for_any() -> None:
    assert GPU_TEST_NUM_TOKENS[0] == 1
    assert len(set(GPU_TEST_NUM_TOKENS)) >= 3, "the third shows that nothing is compiled again"


def test_all_operations_that_are_compiled_are_seen_here(
    facts: dict[tuple[str, bool], KernelFacts],
) -> None:
    assert {name for name, _ in facts} == OPERATIONS


@pytest.mark.parametrize("is_dynamic", [False, True], ids=["one token", "any number"])
@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_each_is_one_launch_without_spills(
    facts: dict[tuple[str, bool], KernelFacts], name: str, is_dynamic: bool
) -> None:
    found = facts[name, is_dynamic]
    assert found.num_launches == 1
    assert found.spilled == 0


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_memory_is_accessed_16_bytes_at_a_time(
    facts: dict[tuple[str, bool], KernelFacts], name: str
) -> None:
    """In one of the configurations that Inductor tries; with small blocks a thread has fewer
    numbers.
    """
    found = facts[name, True]
    accesses = zip(
        found.load_bytes if name in ADJACENT_LOADS else found.store_bytes,
        found.store_bytes,
        strict=True,
    )
    assert any(set(loads) == set(stores) == {WIDE} for loads, stores in accesses), found
