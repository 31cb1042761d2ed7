"""Draws what digits.yaml learns from: pictures of digits, rows that ask for them, and a small model that has seen none.

    python examples/vision/draw_digits.py /tmp/digits

The model has the shape of SmolVLM: a tower that sees an image in tiles, a connector, and a Llama; with random weights.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Idefics3Config, Idefics3ForConditionalGeneration, PreTrainedTokenizerFast, set_seed

TILE = 24  # pixels; each digit is somewhere in one
SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<end_of_utterance>", "<image>", "<fake_token_around_image>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}<end_of_utterance>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


def draw(digits: str, chance: random.Random) -> Image.Image:
    paper, ink = chance.randint(200, 255), chance.randint(0, 60)
    image = Image.new("RGB", (TILE * 6, TILE), (paper,) * 3)
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(size=18)
    for place, digit in enumerate(digits):
        corner = (place * TILE + chance.randint(5, 7), chance.randint(0, 2))
        pen.text(corner, digit, fill=(ink,) * 3, font=font)
    return image


def write_rows(folder: Path, name: str, count: int, lengths: list[int], chance: random.Random) -> None:
    (folder / name).mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
        for number in range(count):
            digits = "".join(chance.choices("0123456789", k=chance.choice(lengths)))
            draw(digits, chance).save(folder / name / f"{number}.png")
            question = [{"type": "image", "path": f"{name}/{number}.png"}, {"type": "text", "text": "?"}]
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": digits}]
            file.write(json.dumps({"messages": turns}) + "\n")


def write_model(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE({token: i for i, token in enumerate([*SPECIAL, *alphabet])}, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, eos_token="<end_of_utterance>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    width = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "initializer_range": 0.08}
    config = Idefics3Config(
        vision_config={**width, "num_hidden_layers": 2, "image_size": TILE, "patch_size": 6},
        text_config={**width, "model_type": "llama", "num_hidden_layers": 2, "vocab_size": 304},
        image_token_id=SPECIAL.index("<image>"),
        scale_factor=4,  # sixteen patches to a token: one token for a tile
        initializer_range=0.08,
        pad_token_id=0,
    )
    set_seed(0)
    Idefics3ForConditionalGeneration(config).save_pretrained(folder)
    processor = {"image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 6 * TILE}}
    processor["max_image_size"] = {"longest_edge": TILE}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_len": 1}))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    target, chance = Path(sys.argv[1]), random.Random(0)
    # Few digits are easier to find one's way in: the tower learns from these first.
    write_rows(target, "train", 6000, [1, 1, 1, 1, 2, 3, 4, 5, 6, 6], chance)
    write_rows(target, "validation", 200, [6], chance)
    write_model(target / "model")
    print(f"wrote 6,200 pictures and a model to {target}")
