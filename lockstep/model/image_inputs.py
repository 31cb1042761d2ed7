"""Images on their way into a model: their arrays for several documents together, and their tokens' positions."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Arrays = Mapping[str, np.ndarray]
# What a model wants to know of each token: whether it is an image's.
_TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")


@dataclass(frozen=True)
class ImageInputs:
    """The images of a row of packed documents, in the order of their tokens."""

    arrays: Mapping[str, Tensor]  # on the host
    blocks: tuple[tuple[int, int], ...]  # [start, stop) of each run of image tokens in the row


class ImageForward:
    """How a model's own forward takes images. `body` is the model without its head."""

    def __init__(self, body: nn.Module, token_id: int) -> None:
        self._body: Any = body
        self.token_id = token_id
        self._taken = inspect.signature(body.forward).parameters.keys()
        self.sees_whole_images = False
        """Whether the tokens of an image attend to those of it that follow them."""

    def arrange(self, images: Sequence[Arrays], tokens: np.ndarray) -> ImageInputs:
        """`tokens`: of the row that all these images are in."""
        merged = merge_arrays([{key: a for key, a in image.items() if key in self._taken} for image in images])
        arrays = {key: torch.from_numpy(np.ascontiguousarray(array)) for key, array in merged.items()}
        return ImageInputs(arrays, find_runs(tokens == self.token_id))

    def positions(self, tokens: np.ndarray, images: Sequence[Arrays]) -> np.ndarray | None:
        """[axes, T] of one document where the model places images in more than one dimension; None: it does not."""
        if not hasattr(self._body, "get_rope_index"):
            return None
        ids = torch.from_numpy(tokens)[None]
        merged = merge_arrays(images) if images else {}
        grids = {"image_grid_thw": torch.from_numpy(merged["image_grid_thw"])} if images else {}
        types = (ids == self.token_id).to(torch.int32)
        wanted = inspect.signature(self._body.get_rope_index).parameters
        told = {"mm_token_type_ids": types} if "mm_token_type_ids" in wanted else {}
        found: Tensor = self._body.get_rope_index(ids, **told, **grids)[0]
        return found[:, 0].numpy()

    def inputs(self, images: ImageInputs, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        return {
            key: array.to(device, dtype if array.is_floating_point() else array.dtype, non_blocking=True)
            for key, array in images.arrays.items()
        }

    def token_types(self, tokens: Tensor) -> dict[str, Tensor]:
        """[1, T] for a forward that finds positions and masks by itself."""
        types = (tokens == self.token_id).to(torch.int64)[None]
        return {key: types for key in _TOKEN_TYPES if key in self._taken}


def merge_arrays(images: Sequence[Arrays]) -> dict[str, np.ndarray]:
    """Of several images, those of one array after those of the other.

    Some processors give each text a row of its own, [texts, images, ...]: there they are joined in one row.
    """
    if not images:
        return {}
    in_rows = images[0].get("pixel_values", np.empty(0)).ndim == 5
    sizes = {
        key: {array.shape[2 if in_rows else 1 :] for array in (image[key] for image in images)} for key in images[0]
    }
    for key, shapes in sizes.items():
        if len(shapes) > 1:
            raise ValueError(
                f"images of several sizes ({sorted(shapes)} of {key}) do not fit into one row of this model"
            )
    return {key: np.concatenate([image[key] for image in images], axis=1 if in_rows else 0) for key in images[0]}


def find_runs(mask: np.ndarray) -> tuple[tuple[int, int], ...]:
    """[start, stop) of every run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return tuple((int(a), int(b)) for a, b in edges.reshape(-1, 2))
