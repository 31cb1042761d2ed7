"""Answers to prompts with images, for `lockstep generate`: one after another, through transformers' own generate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.config import ModelConfig
from lockstep.data.chat_template import load_template
from lockstep.data.formats.conversation import Conversation, TurnNames, read_turns
from lockstep.data.formats.image_parts import gather_images
from lockstep.data.images import ImageReader
from lockstep.data.rendering import Rendered, Variant
from lockstep.data.sources.rows import Row, SourceFile
from lockstep.inference.chat import TextPrompt
from lockstep.inference.image_answers import answer_with_images
from lockstep.model.image_inputs import ImageForward
from lockstep.model.load import load_for_inference, load_processor
from lockstep.model.policy import causal_lm, headless
from lockstep.model.vision import vision_parameters
from lockstep.rundir import RunDir
from lockstep.types import SamplingParams


class ImageAnswers:
    """A model that sees, with what turns prompts into its inputs. `file`: paths of images are relative to it."""

    def __init__(self, source: str, file: Path) -> None:
        path = Path(source).expanduser()
        self._model, self._tokenizer = load_for_inference(path if path.exists() else source)
        is_run = (path / "config.yaml").exists()
        config = RunDir(path).config().model if is_run else ModelConfig(path=str(path) if path.exists() else source)
        processor = load_processor(config, self._tokenizer)
        template = load_template(self._tokenizer, "auto", {}, sees=True)
        if processor is None or template is None:
            lacks = "image processor" if processor is None else "chat template"
            raise ValueError(f"{source} has no {lacks}, which prompts with images need: use a vision-language model")
        causal = causal_lm(self._model)
        self._template, self._reader, self._file = (
            template,
            ImageReader(processor),
            SourceFile(str(file), file, "jsonl"),
        )
        self._forward = ImageForward(headless(causal), processor.token_id)
        self._dtype = next(parameter.dtype for _, _, parameter in vision_parameters(causal))

    def answer(self, prompts: Sequence[TextPrompt], params: SamplingParams) -> Iterator[dict[str, Any]]:
        """One output row per prompt, in order."""
        for prompt in prompts:
            tokens, inputs = self._encode(prompt)
            ((completion,),) = answer_with_images(self._model, self._tokenizer, [tokens], [inputs], params)
            yield {"prompt": prompt.content, "completion": completion.text, "finish_reason": completion.finish_reason}

    def _encode(self, prompt: TextPrompt) -> tuple[list[int], dict[str, Tensor]]:
        plain = isinstance(prompt.content, str)
        row = Row(
            prompt.origin, {"messages": [{"role": "user", "content": prompt.content}] if plain else prompt.content}
        )
        messages, sources = gather_images(row, read_turns(row, "messages", TurnNames(), sees=True))
        conversation = Conversation(prompt.origin, messages, (), prompt.tools, images=sources)
        text = self._template.write(conversation, messages, for_generation=True)
        rendered = Rendered(prompt.origin, (Variant(text, ()),), plain=False, has_prompt=True, written=())
        rendered, images = self._reader.prepare(rendered, sources, self._file)
        tokens = list(self._tokenizer(rendered.variants[0].text, add_special_tokens=False)["input_ids"])
        if not images:
            return tokens, {}
        arranged = self._forward.arrange([image.inputs for image in images], np.asarray(tokens))
        inputs = self._forward.inputs(arranged, self._model.device, self._dtype)
        return tokens, {**inputs, **self._forward.token_types(torch.tensor(tokens, device=self._model.device))}
