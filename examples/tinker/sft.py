"""Supervised fine-tuning with Tinker's own client, on a server of yours.

    pip install 'lockstep[tinker]' tinker==0.36.0
    lockstep serve --tinker HuggingFaceTB/SmolLM2-135M-Instruct &
    python examples/tinker/sft.py [MODEL] [URL]

The loop is here and the model is there: every line between the two is Tinker's API.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import tinker

MODEL = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
URL = sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:8322"
ROWS = Path(__file__).parents[1] / "data" / "short_answers_train.jsonl"
STEPS, BATCH = 12, 8


def as_datum(tokenizer, messages) -> tinker.Datum:
    """Learn the answer, given the question."""
    question = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=True, return_dict=False)
    answer = tokenizer.encode(messages[1]["content"] + tokenizer.eos_token, add_special_tokens=False)
    tokens = [*question, *answer]
    weights = [0.0] * (len(question) - 1) + [1.0] * len(answer)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


def main() -> None:
    # Any key that begins with tml- will do, unless the server has a token file: then it is tml- and a token.
    service = tinker.ServiceClient(base_url=URL, api_key="tml-local")
    training = service.create_lora_training_client(base_model=MODEL, rank=16)
    tokenizer = training.get_tokenizer()
    rows = [json.loads(line)["messages"] for line in ROWS.read_text(encoding="utf-8").splitlines()]
    data = [as_datum(tokenizer, messages) for messages in rows]

    for step in range(STEPS):
        batch = [data[(step * BATCH + number) % len(data)] for number in range(BATCH)]
        count = sum(sum(datum.loss_fn_inputs["weights"].tolist()) for datum in batch)
        # Both are sent at once: the server keeps their order.
        learned = training.forward_backward(batch, "cross_entropy")
        stepped = training.optim_step(tinker.AdamParams(learning_rate=1e-3))
        loss = learned.result().metrics["loss:sum"] / count
        print(f"step {step:2}  loss {loss:.3f}  gradient {stepped.result().metrics['grad_norm']:.1f}")

    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Why do cats purr?"}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    sampler = training.save_weights_and_get_sampling_client()
    params = tinker.SamplingParams(max_tokens=60, temperature=0.0)
    answer = sampler.sample(tinker.ModelInput.from_ints(prompt), num_samples=1, sampling_params=params).result()
    print(tokenizer.decode(answer.sequences[0].tokens, skip_special_tokens=True))
    print("saved as", training.save_state("short-answers").result().path)


if __name__ == "__main__":
    main()
