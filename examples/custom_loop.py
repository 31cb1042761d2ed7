"""A training loop of your own: bring a model and token sequences, Lockstep does the step.

A tiny Llama with random weights learns to write a word backwards, in seconds. The same file on two processes:
torchrun --nproc-per-node 2 examples/custom_loop.py
"""

import os
import random

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lockstep import Completion, Datum, LossSpec, OptimStep, TorchBackend

LETTERS = "abcdefgh"
SEPARATOR, END = len(LETTERS), len(LETTERS) + 1


def make_datum(word: str) -> Datum:
    """`abc|` asks for `cba` and an end: only what follows the prompt is supervised."""
    ids = [LETTERS.index(letter) for letter in word]
    answer = [*reversed(ids), END]
    return Datum(prompt=[*ids, SEPARATOR], completions=[Completion(answer, weights=[1.0] * len(answer))])


def make_batch(rng: random.Random, size: int) -> list[Datum]:
    return [make_datum("".join(rng.choices(LETTERS, k=rng.randint(2, 5)))) for _ in range(size)]


def say(text: str) -> None:
    """Every process knows the same numbers; one of them is enough to tell."""
    if os.environ.get("RANK", "0") == "0":
        print(text)


def build_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=END + 1,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
    )


def main(num_steps: int = 300) -> float:
    backend = TorchBackend(build_model(), micro_batch_tokens=2048)
    rng = random.Random(0)  # every process draws the same global batch; the backend takes its share
    for step in range(1, num_steps + 1):
        batch = make_batch(rng, size=64)
        # Losses are sums: dividing by the supervised tokens of the whole batch makes this one a mean.
        num_supervised = sum(datum.num_supervised for datum in batch)
        result = backend.forward_backward(batch, LossSpec("cross_entropy", scale=1 / num_supervised))
        learning_rate = 3e-3 * min(1.0, step / 20, (num_steps + 1 - step) / 100)
        optim = backend.optim_step(OptimStep(learning_rate=learning_rate, max_grad_norm=1.0))
        if step % 50 == 0 or step == 1:
            say(f"step {step:3d}  loss {result.loss:.4f}  gradient norm {optim.grad_norm:.3f}")
    fresh = make_batch(random.Random(1), size=256)
    logprobs = [value for (completion,) in backend.forward(fresh) for value in completion]
    loss = -sum(logprobs) / len(logprobs)
    say(f"loss on fresh words: {loss:.4f}")
    backend.close()
    return loss


if __name__ == "__main__":
    assert main() < 0.1, "it did not learn to reverse a word"
