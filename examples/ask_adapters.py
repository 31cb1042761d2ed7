"""The same question to everything that a server serves: the base model and each of its adapters.

lockstep chat HuggingFaceTB/SmolLM2-135M-Instruct --serve 8000 --adapter short=runs/short &
python examples/ask_adapters.py "Why is the sky blue?"
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import httpx

SERVER = "http://127.0.0.1:8000/v1"


def ask(model: str, question: str) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 64}
    answer = httpx.post(f"{SERVER}/chat/completions", json=body, timeout=600)
    if answer.status_code != 200:
        raise SystemExit(answer.json()["error"]["message"])
    return str(answer.json()["choices"][0]["message"]["content"])


def main() -> None:
    question = " ".join(sys.argv[1:]) or "Why is the sky blue?"
    models = [model["id"] for model in httpx.get(f"{SERVER}/models").json()["data"]]
    with ThreadPoolExecutor(len(models)) as pool:  # at once: they share the server's batch
        for model, answer in zip(models, pool.map(lambda model: ask(model, question), models), strict=True):
            print(f"--- {model}\n{answer}\n")


if __name__ == "__main__":
    main()
