"""What Triton's kernels are launched with, without a GPU."""

from collections.abc import Callable

from torch import Tensor

from tramontane.workers.device.alignment import ALIGNMENT


class Launches:
    """Stands for a kernel, and keeps the numbers and options of each launch.

    Asserts that all tensors are aligned but for the arguments whose alignment does not count, by
    their places.
    """

    def __init__(self, *unaligned: int) -> None:
        self._unaligned = unaligned
        self.numbers: list[tuple[object, ...]] = []
        self.options: list[dict[str, object]] = []

    def __getitem__(self, _grid: tuple[int, ...]) -> Callable[..., None]:
        """Return the function that launches it on a grid of programs."""
        return self._launch

    def _launch(self, *given: object, **options: object) -> None:
        tensors = [
            each
            for place, each in enumerate(given)
            if isinstance(each, Tensor) and place not in self._unaligned
        ]
        assert all(each.data_ptr() % ALIGNMENT == 0 for each in tensors)
        self.numbers.append(tuple(each for each in given if not isinstance(each, Tensor)))
        self.options.append(options)


def unspecialized(kernel: object) -> set[str]:
    """Return the arguments of a kernel that is compiled once for all their values, also for 1 and
    for multiples of 16.
    """
    return {each.name for each in kernel.params if each.do_not_specialize}  # type: ignore[attr-defined]
