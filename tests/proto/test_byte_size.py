import pytest

from tramontane.proto.units import format_bytes, format_bytes_flag


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1 KiB"),
        (1.5 * 2**20, "1.5 MiB"),
        (2**30 - 1, "1,024 MiB"),
        (14.49e9, "13.5 GiB"),
        (93.4e9, "87 GiB"),
        (2**50, "1,048,576 GiB"),
    ],
)
def test_sizes_for_people_have_three_digits_or_all_of_them(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0B"), (100, "100B"), (20481, "21KiB"), (10 * 2**20, "10MiB"), (10 * 2**30 + 1, "11GiB")],
)
def test_sizes_for_flags_are_never_less(num_bytes: int, text: str) -> None:
    assert format_bytes_flag(num_bytes) == text
