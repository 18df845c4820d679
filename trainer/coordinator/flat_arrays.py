"""Arrays of different lengths, end to end in one: how checkpoints keep responses.

Legend: `R` responses.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyppo_async.types import Int16Array


def flat(arrays: Sequence[NDArray[Any] | None], dtype: type[np.generic]) -> NDArray[Any]:
    """All elements, in order; None counts as none."""
    present = [array.reshape(-1) for array in arrays if array is not None]
    return np.concatenate([np.zeros(0, dtype), *present])


def routed_shapes(arrays: Sequence[Int16Array | None]) -> NDArray[np.int64]:
    """[R, 3]; zeros for None."""
    shapes = [(0, 0, 0) if array is None else array.shape for array in arrays]
    return np.array(shapes, dtype=np.int64).reshape(-1, 3)


def routed_of(elements: NDArray[Any], shapes: NDArray[Any]) -> list[Int16Array | None]:
    """What `flat` and `routed_shapes` were made of."""
    sizes = shapes.prod(axis=1)
    ends = np.cumsum(sizes)
    return [
        elements[end - size : end].reshape(shape) if size else None
        for end, size, shape in zip(ends, sizes, shapes, strict=True)
    ]
