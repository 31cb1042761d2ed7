"""Preference pairs, a DPO job and its result, through a Llama Stack server and its own client.

    llama stack run examples/llama_stack/inline.yaml --port 8321 &
    python examples/llama_stack/dpo.py [MODEL] [URL]

MODEL is a name of the Hub or a folder that the provider allows. The pairs prefer one short sentence to a long list.
"""

from __future__ import annotations

import sys
import time
import uuid

from llama_stack_client import APIConnectionError, LlamaStackClient

FACTS = {
    "What is the capital of France?": "Paris.",
    "How many legs does a spider have?": "Eight.",
    "Which planet is the largest?": "Jupiter.",
    "What do bees make?": "Honey.",
    "What colour is a ruby?": "Red.",
    "How many days are in a week?": "Seven.",
    "What is water made of?": "Hydrogen and oxygen.",
    "Who wrote Hamlet?": "William Shakespeare.",
    "What is frozen water called?": "Ice.",
    "Which animal barks?": "A dog.",
    "What is the opposite of hot?": "Cold.",
    "How many sides does a triangle have?": "Three.",
    "What gas do plants take in?": "Carbon dioxide.",
    "Which ocean is the largest?": "The Pacific.",
    "What do you call a baby cat?": "A kitten.",
    "What metal is liquid at room temperature?": "Mercury.",
}


def wordy(answer: str) -> str:
    return f"That is a great question! Let me explain.\n\n1. First of all: {answer}\n2. In summary: {answer}"


def connect(url: str) -> LlamaStackClient:
    """A server that has just been started takes a while to answer."""
    client = LlamaStackClient(base_url=url)
    for _ in range(60):
        try:
            client.inspect.version()
            break
        except APIConnectionError:
            time.sleep(1)
    return client


def main(model: str = "HuggingFaceTB/SmolLM2-135M-Instruct", url: str = "http://127.0.0.1:8321") -> int:
    client = connect(url)
    name = f"short-answers-{uuid.uuid4().hex[:6]}"
    pairs = [{"prompt": q, "chosen": a, "rejected": wordy(a)} for q, a in FACTS.items()]
    client.datasets.register(purpose="post-training/messages", dataset_id=name, source={"type": "rows", "rows": pairs})
    client.post_training.preference_optimize(
        job_uuid=name,
        finetuned_model=model,
        # Newer versions write {"beta": 0.1, "loss_type": "sigmoid"}; both are understood.
        algorithm_config={"reward_scale": 0.1, "reward_clip": 5.0, "epsilon": 0.1, "gamma": 1.0},
        training_config={
            "n_epochs": 3,
            "max_steps_per_epoch": 4,
            "gradient_accumulation_steps": 1,
            "data_config": {"dataset_id": name, "batch_size": 4, "shuffle": True, "data_format": "instruct"},
            "optimizer_config": {"optimizer_type": "adamw", "lr": 5e-5, "weight_decay": 0.0, "num_warmup_steps": 1},
        },
        hyperparam_search_config={},
        logger_config={},
        # Whatever Llama Stack has no field for: here adapters instead of all weights, and short rows.
        extra_body={"provider_config": {"lora": {"rank": 8}, "data": {"max_length": 256}}},
    )
    return follow(client, name)


def follow(client: LlamaStackClient, job: str) -> int:
    shown = None
    while True:
        status = client.post_training.job.status(job_uuid=job)
        progress = status.progress
        line = f"{status.status}: {progress['phase'] or ''} {progress['step'] or 0}/{progress['total_steps'] or '?'}"
        if line != shown:
            print(line, flush=True)
            shown = line
        if status.status in ("completed", "failed", "cancelled"):
            break
        time.sleep(1)
    for warning in status.warnings:
        print(f"note: {warning}")
    if status.status != "completed":
        print(status.error or status.status)
        return 1
    last = status.metrics["train"]
    print("last step:", ", ".join(f"{key} {last[key]:.3f}" for key in ("loss", "accuracy", "margin")))
    for checkpoint in client.post_training.job.artifacts(job_uuid=job).checkpoints:
        print(f"{checkpoint['format']} in {checkpoint['path']}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
