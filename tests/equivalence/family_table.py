"""What Lockstep does with every family of causal language models, measured on tiny random models: docs/models.md.

`PYTHONPATH=tests python -m equivalence.family_table` writes the page; test_families.py compares it, row by row.
"""

from __future__ import annotations

import functools
import logging
import warnings
from dataclasses import astuple, dataclass
from typing import Any

import tiny
import torch
import transformers
from equivalence.families import NAMES, build, in_float64
from equivalence.family_layouts import PAGE, stored_section
from equivalence.plain import make_batch, plain_loss, scale_of
from torch import nn

from lockstep.backend.torch_backend import TorchBackend
from lockstep.config import LoraConfig
from lockstep.inference.engine import LocalEngine
from lockstep.model.experts import expert_parameters, noisy_routers, split_problem
from lockstep.model.lora import add_lora, measure_coverage
from lockstep.model.policy import PackedTokens, Policy, causal_lm, headless, tensor_plan
from lockstep.model.stages import Stage, check_divisible, layer_costs
from lockstep.parallel.group import ProcessGroup
from lockstep.parallel.tensor import plan_problem
from lockstep.types import LossSpec, SamplingParams

ONE = ProcessGroup(0, 1, torch.device("cpu"))
TOLERANCE = 1e-10
WRONG = "WRONG"


@dataclass(frozen=True)
class Row:
    family: str
    full: str
    lora: str = ""
    documents: str = ""
    prompts: str = ""
    layouts: str = ""
    sampling: str = ""

    def __str__(self) -> str:
        return "| " + " | ".join(value.replace("|", "/").replace("\n", " ") for value in astuple(self)) + " |"


def measure(name: str) -> Row:
    """Trains a step in full and with adapters, and samples; in float64, beside the plain loop over single documents."""
    with in_float64(), _quiet():
        try:
            model = build(name)
        except Exception as error:
            return Row(name, f"transformers does not build it: {_sentence(error)}")
        try:
            backend = _train(model)
        except ValueError as error:
            return Row(name, f"refused: {_sentence(error)}")
        except RuntimeError as error:
            return Row(name, f"its own code fails: {_sentence(error)}")
        full = _compare(backend, plain_gradients(name))
        policy = backend.policy
        documents = "packed" if policy.packs else "one at a time"
        if policy.mixers.parts:
            documents = f"packed but for {', '.join(policy.mixers.names)}"
        prompts = "shared" if policy.shares_prompts else "not shared"
        layouts = _layouts(name, policy)
        backend.close()
        return Row(name, full, _adapters(name), documents, prompts, layouts, _sampling(name))


@functools.cache
def plain_gradients(name: str, *, lora: bool = False) -> dict[str, torch.Tensor]:
    model, batch = _with_adapters(build(name)) if lora else build(name), make_batch(rows=5)
    model.train()  # no dropout, but some models compute in another way
    for router in noisy_routers(model):
        router.eval()
    plain_loss(model, batch, scale_of(batch)).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _train(model: nn.Module) -> TorchBackend:
    batch = make_batch(rows=5)
    backend = TorchBackend(model, micro_batch_tokens=96, precision="fp64", group=ONE)
    backend.forward_backward(batch, LossSpec(scale=scale_of(batch)))
    return backend


def _compare(backend: TorchBackend, expected: dict[str, torch.Tensor]) -> str:
    parameters = backend.parameters()
    found = {n: p.grad for n, p in parameters.items() if p.grad is not None}
    if found.keys() != expected.keys():
        return f"{WRONG}: other parameters have gradients"
    size = torch.stack([g.square().sum() for g in expected.values()]).sum().sqrt()
    difference = torch.stack([(found[n] - g).square().sum() for n, g in expected.items()]).sum().sqrt() / size
    if not difference <= TOLERANCE:
        return f"{WRONG}: gradients differ by {difference:.1e}"
    unused = sum(p.numel() for n, p in parameters.items() if n not in found)
    return "exact" if not unused else "exact; not all of it computes text"


def _with_adapters(model: Any) -> Any:
    adapted = add_lora(model, LoraConfig(rank=2, alpha=4))
    generator = torch.Generator().manual_seed(2)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # zero at first, which would hide the gradient of lora_A
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1
    return adapted.double().eval()


def _adapters(name: str) -> str:
    try:
        model = _with_adapters(build(name))
        coverage = measure_coverage(model)
        backend = _train(model)
    except ValueError as error:
        return f"refused: {_sentence(error)}"
    verdict = _compare(backend, plain_gradients(name, lora=True))
    assert coverage is not None
    return f"{coverage.share:.0%} of the layers" if verdict.startswith("exact") else verdict


def _layouts(name: str, policy: Policy) -> str:
    found = ["context"] if policy.attends_packed and not policy.mixers.parts else []
    checks: dict[str, Any] = {"tensor": lambda: _check_plan(build(name))}
    if policy.packs:
        checks["pipeline"] = lambda: _check_stages(policy)
    for layout, check in checks.items():
        try:
            check()
            found.append(layout)
        except ValueError:
            pass
        except Exception as error:
            found.append(f"{WRONG} ({layout}: {type(error).__name__})")
    return ", ".join(["data", *sorted(found)])


def _check_plan(model: Any) -> None:
    """What divides a model over the tensor axis must know all that its plan asks for."""
    experts = [part for part in model.modules() if expert_parameters(part)]
    problem = plan_problem(tensor_plan(model)) or next(filter(None, map(split_problem, experts)), "")
    if problem:
        raise ValueError(problem)


@torch.no_grad()
def _check_stages(policy: Policy) -> None:
    """Two stages, one after the other, must be the whole model."""
    check_divisible(policy)
    num_layers = len(layer_costs(policy)[0])
    tokens, places = torch.tensor([5, 17, 30, 8, 4, 61]), torch.arange(6)
    packed = PackedTokens(tokens, places, (6,), places[:-1], tokens[1:])
    whole = policy.run_layers(headless(causal_lm(policy.model)), packed, {"input_ids": tokens[None]})
    hidden = torch.zeros(0)
    for layers in (range(num_layers // 2), range(num_layers // 2, num_layers)):
        stage = Stage(policy, layers, num_layers)
        stage.micro_batches, stage.finish = [packed], lambda _number, hidden: hidden
        hidden = stage(hidden, torch.tensor(0))
    assert torch.allclose(hidden, whole[0], rtol=0, atol=1e-10 * float(whole.abs().max())), "stages differ"


def _sampling(name: str) -> str:
    """Greedy answers to prompts of several lengths beside those of the plain model."""
    said: list[str] = []
    engine = LocalEngine(build(name), tiny.build_tokenizer(), batch_size=2, report=said.append)
    prompts = [[5, 17, 30, 8, 4], [61, 3]]
    try:
        answers = engine.sample(prompts, SamplingParams(max_tokens=8))
    except ValueError as error:
        return f"refused: {_sentence(error)}"
    except Exception as error:
        return f"{WRONG} ({type(error).__name__}: {_sentence(error)})"
    model = build(name)
    for prompt, (answer,) in zip(prompts, answers, strict=True):
        if not _is_greedy(model, prompt, answer.tokens):
            return f"{WRONG}: not the likeliest tokens"
    return "engine" if engine.decodes else "generate"


@torch.no_grad()
def _is_greedy(model: Any, prompt: list[int], answer: Any) -> bool:
    tokens = torch.tensor([*prompt, *answer])
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    best = logits.max(dim=-1).values
    chosen = logits.gather(1, tokens[len(prompt) :, None])[:, 0]
    return bool((best - chosen).max() <= 1e-6)


def _sentence(error: BaseException) -> str:
    """The first one."""
    return " ".join(str(error).split()).split(". ")[0][:160]


class _quiet(warnings.catch_warnings):
    def __enter__(self) -> Any:
        super().__enter__()
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        logging.getLogger("transformers").setLevel(logging.ERROR)


_INTRODUCTION = """# Models

Every family that transformers {version} registers as a causal language model, measured: as a tiny random model it
trains one step in full and one with LoRA, in float64, on packed documents and answers that share a prompt, beside a
plain loop over single documents; and it answers two prompts. Of {total} families {exact} train exactly, {packed} of
them packed; the other {refused} rows say why not. `PYTHONPATH=tests python -m equivalence.family_table` writes this;
the sweep compares it.

- **full**, **LoRA**: `exact` is a gradient within 1e-10 of the plain loop's. The share is that of the decoder
  layers' weights that `lora.targets: all-linear` adapts.
- **documents**: `packed` computes the documents of a row together. Packed *but for* some parts: these take each
  document by itself, those of similar lengths as one batch where they can, because they carry a state from token to
  token or have an attention of their own; all else is packed. `one at a time`: each document is a pass of its own. A
  run says so before its first step, with what it costs (`slow` in `status.json`). For ALiBi and its like
  this beats one call with a mask that keeps documents apart, which is as exact: a row of 2,048 tokens, 8 to 13 rows of
  alpaca, through four layers of a Bloom of width 512, forward and backward on one CPU core, took 7.0 s against 12.9 s;
  with 512 tokens both took 1.0 s.
- **prompts**: whether the answers to one prompt share its computation, in DPO and GRPO.
- **layouts**: which the code accepts besides data parallelism, as far as it shows on one process; of `pipeline`, two
  stages one after the other compute what the whole model does.
- **sampling**: `engine` is Lockstep's own; `generate` is transformers', which is slower: a run says by how much.
  The engine keeps windows whole (attention looks no further), and states of convolutions and recurrent layers once for
  each row, forked for the samples of a prompt. Prompts of models with states are computed one by one, and on a GPU
  their steps are no CUDA graphs.

On CUDA the same parts call the kernels that transformers finds (`mamba-ssm`, `causal-conv1d`, `fla-core`), with the
same batches of documents; that is not tested here.

{layouts}
## Every family

| family | full | LoRA | documents | prompts | layouts | sampling |
|---|---|---|---|---|---|---|
"""


def render(rows: list[Row]) -> str:
    exact = [row for row in rows if row.full.startswith("exact")]
    counts = {
        "version": transformers.__version__,
        "total": len(rows),
        "exact": len(exact),
        "packed": sum(row.documents.startswith("packed") for row in exact),
        "refused": len(rows) - len(exact),
        "layouts": stored_section(),  # written by family_layouts.py
    }
    return _INTRODUCTION.format(**counts) + "".join(f"{row}\n" for row in rows)


def stored_rows() -> dict[str, str]:
    """Lines of the page, by family."""
    _, _, table = PAGE.read_text(encoding="utf-8").partition("\n## Every family\n")
    lines = table.splitlines()
    return {line.split("|")[1].strip(): line for line in lines if line.startswith("| ")}


if __name__ == "__main__":
    torch.set_num_threads(1)
    PAGE.write_text(render([measure(name) for name in NAMES]), encoding="utf-8")
