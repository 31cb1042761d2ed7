"""Reinforcement learning with Tinker's own client: groups of answers, rewards of your own, importance sampling.

    lockstep serve --tinker HuggingFaceTB/SmolLM2-135M-Instruct &
    python examples/tinker/rl.py [MODEL] [URL]

The reward is the share of digits in an answer: easy to learn in a few minutes on two cores, and easy to see.
"""

from __future__ import annotations

import statistics
import sys

import tinker

MODEL = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
URL = sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:8322"
QUESTIONS = [
    "How many legs does a spider have?",
    "What is seven times eight?",
    "When was Rome founded?",
    "Count to ten.",
]
STEPS, GROUP = 10, 8


def reward(text: str) -> float:
    return sum(letter.isdigit() for letter in text) / max(len(text), 1)


def as_datum(prompt: list[int], sampled: tinker.SampledSequence, advantage: float) -> tinker.Datum:
    tokens, before = [*prompt, *sampled.tokens], len(prompt) - 1
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [0.0] * before + list(sampled.logprobs),
            "advantages": [0.0] * before + [advantage] * len(sampled.tokens),
        },
    )


def main() -> None:
    service = tinker.ServiceClient(base_url=URL, api_key="tml-local")
    training = service.create_lora_training_client(base_model=MODEL, rank=8)
    tokenizer = training.get_tokenizer()
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for question in QUESTIONS
    ]
    params = tinker.SamplingParams(max_tokens=16, temperature=1.0)
    for step in range(STEPS):
        sampler = training.save_weights_and_get_sampling_client()
        # All at once: the server decodes them in one batch.
        asked = [sampler.sample(tinker.ModelInput.from_ints(prompt), GROUP, params) for prompt in prompts]
        batch, rewards = [], []
        for prompt, answers in zip(prompts, asked, strict=True):
            group = answers.result().sequences
            scores = [reward(tokenizer.decode(sampled.tokens, skip_special_tokens=True)) for sampled in group]
            mean = statistics.fmean(scores)
            batch += [as_datum(prompt, sampled, score - mean) for sampled, score in zip(group, scores, strict=True)]
            rewards += scores
        learned = training.forward_backward(batch, "importance_sampling")
        training.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
        learned.result()
        print(f"step {step:2}  reward {statistics.fmean(rewards):.2f}")


if __name__ == "__main__":
    main()
