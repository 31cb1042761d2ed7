"""Images of a batch: read and prepared for the documents that this rank computes, and for no others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lockstep.backend.batching import Document, MicroBatch, no_branch
from lockstep.config.parallel import Degrees
from lockstep.data.images import prepare_image, read_image_bytes
from lockstep.model.image_inputs import Arrays, ImageForward
from lockstep.model.policy import PackedTokens, Policy, causal_lm, headless
from lockstep.model.vision import vision_parameters
from lockstep.types import Datum, ImageProcessor, ImageRef

_NUM_READERS = 4  # threads: reading and resizing images leaves Python's lock


class BatchImages:
    """`policy` must see; it is told how images enter its model."""

    def __init__(self, policy: Policy, processor: ImageProcessor) -> None:
        causal = causal_lm(policy.model)
        self.processor, self._policy = processor, policy
        self._forward = policy.image_forward = ImageForward(headless(causal), processor.token_id)
        self._trains = any(parameter.requires_grad for _, _, parameter in vision_parameters(causal))
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="images")
        self.cost_per_token = image_cost(causal)

    def make(
        self,
        documents: tuple[Document, ...],
        batch: Sequence[Datum],
        make: Callable[[tuple[Document, ...]], MicroBatch],
    ) -> MicroBatch:
        """The micro-batch of these documents, with their images. `make` gives it without."""
        documents = self._with_blank(documents, batch)
        return self._add(make(documents), documents, batch)

    def _with_blank(self, documents: tuple[Document, ...], batch: Sequence[Datum]) -> tuple[Document, ...]:
        """With one more where none has an image and something between images and text is trained: it then gets a
        gradient in every pass of every rank, here of zero, and all ranks make the same collectives."""
        if not self._trains or any(batch[d.datum].images for d in documents if d.datum >= 0):
            return documents
        return (*documents, self._blank[0])

    def _add(self, micro_batch: MicroBatch, documents: tuple[Document, ...], batch: Sequence[Datum]) -> MicroBatch:
        images = [self._arrays_of(document, batch) for document in documents]
        if not any(images):
            return micro_batch
        packed = micro_batch.packed
        rows = [np.concatenate([d.prompt, *(b.tokens for b in d.branches)]) for d in documents]
        found = [self._forward.positions(row, own) for row, own in zip(rows, images, strict=True)]
        positions = packed.positions
        if all(p is not None for p in found):
            joined = torch.from_numpy(np.concatenate([p for p in found if p is not None], axis=1)).to(positions)
            padding = positions.new_zeros(len(joined), len(positions) - joined.shape[1])
            positions = torch.cat([joined, padding], dim=1)
        inputs = self._forward.arrange([image for own in images for image in own], np.concatenate(rows))
        return replace(micro_batch, packed=replace(packed, positions=positions, images=inputs))

    def inputs_of(self, datum: Datum, tokens: Sequence[int], device: torch.device) -> dict[str, Tensor]:
        """What the model's own forward takes beside the first tokens of a text, up to and with its last whole image."""
        left, images = list(tokens).count(self.processor.token_id), list[Arrays]()
        for image in datum.images:
            left -= image.num_tokens
            if left >= 0:
                images.append(self._read(image, datum.origin))
        if not images:
            return {}
        token_ids = torch.tensor(tokens, device=device)
        dtype = self._policy.tower_dtype
        inputs = self._forward.inputs(self._forward.arrange(images, np.asarray(tokens)), device, dtype)
        return {**inputs, **self._forward.token_types(token_ids)}

    def _arrays_of(self, document: Document, batch: Sequence[Datum]) -> list[Arrays]:
        if document is self._blank_or_none:
            return [self._blank[1]]
        if document.datum < 0:
            return []
        datum = batch[document.datum]
        return list(self._readers.map(lambda image: self._read(image, datum.origin), datum.images))

    def _read(self, image: ImageRef, origin: str) -> Arrays:
        where = f"{origin}: image {image.name}"
        return prepare_image(self.processor, read_image_bytes(image, origin), where).inputs

    @property
    def _blank_or_none(self) -> Document | None:
        return self._blank[0] if self._trains else None

    @cached_property
    def _blank(self) -> tuple[Document, Arrays]:
        document, arrays = self._example(0)
        return Document(-1, document, (no_branch(),)), arrays

    def pack_examples(self, seeds: Sequence[int], device: torch.device) -> PackedTokens:
        """Texts with an image each, whose every token is a target."""
        texts = [self._example(seed, around=[11 + 7 * seed + 3 * i for i in range(6)]) for seed in seeds]
        rows, arrays = [tokens for tokens, _ in texts], [arrays for _, arrays in texts]
        lengths = tuple(map(len, rows))
        tokens, starts = np.concatenate(rows), np.cumsum([0, *lengths])
        predictors = np.concatenate([np.arange(n - 1) + start for n, start in zip(lengths, starts, strict=False)])
        found = [self._forward.positions(row, [own]) for row, own in zip(rows, arrays, strict=True)]
        plain = [np.arange(n) for n in lengths]
        positions = np.concatenate([p if f is None else f for p, f in zip(plain, found, strict=True)], axis=-1)
        token_ids, places, before = (torch.from_numpy(a).to(device) for a in (tokens, positions, predictors))
        inputs = self._forward.arrange(arrays, tokens)
        return PackedTokens(token_ids, places, lengths, before, token_ids[before + 1], images=inputs)

    def _example(self, seed: int, around: Sequence[int] = (0,)) -> tuple[np.ndarray, Arrays]:
        """(tokens, arrays) of a text with a small image of noise in it."""
        from PIL import Image

        noise = np.random.default_rng(seed).integers(0, 256, (24 + 8 * seed, 32, 3), dtype=np.uint8)
        prepared = self.processor.prepare(Image.fromarray(noise))
        count = prepared.num_tokens
        tokens = [*around[: len(around) // 2], *([self.processor.token_id] * count), *around[len(around) // 2 :]]
        return np.asarray(tokens, dtype=np.int64), prepared.inputs

    def close(self) -> None:
        self._readers.shutdown(wait=False)


def image_costs(
    documents: Sequence[Document], batch: Sequence[Datum], images: BatchImages | None
) -> Sequence[float] | None:
    """What each document's images cost beside its tokens, in the unit of tokens. None: nothing."""
    if images is None:
        return None
    return [images.cost_per_token * sum(image.num_tokens for image in batch[d.datum].images) for d in documents]


def refuse_layouts(degrees: Degrees) -> None:
    for axis in ("tensor", "context", "pipeline"):
        if getattr(degrees, axis) > 1:
            raise ValueError(f"images are not learned from with parallel.{axis} above 1: set it to 1")


def image_cost(causal: torch.nn.Module) -> float:
    """What an image's token costs beside what every token does, relative to that: the tower's share.

    By parameters that each sees, four patches to a token. A frozen tower has no backward pass.
    """
    parts = list(vision_parameters(causal))
    tower = sum(parameter.numel() for _, _, parameter in parts)
    text = sum(parameter.numel() for parameter in causal.parameters()) - tower
    passes = 1.0 if any(parameter.requires_grad for _, _, parameter in parts) else 1 / 3
    return 4 * tower / max(text, 1) * passes
