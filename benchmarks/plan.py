"""What `lockstep plan` predicts beside what a GPU does: memory and time of the real backend's steps, case by case.

    python benchmarks/plan.py measure --out measured.json [--seconds 400]     # on the GPU; calibrates in the same run
    python benchmarks/plan.py compare measured.json                          # anywhere: predicted, measured, error
    python benchmarks/plan.py published                                      # anywhere: beside torchtitan's 8B runs

Weights are random and made on the device. A case takes a few steps on rows of fixed lengths, through the same backend,
losses and sampler that a run uses; memory is read for each phase of a step, time from CUDA events.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "model_type": "qwen3", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40960, "tie_word_embeddings": True,
    },
    "qwen3-1.7b": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40960, "tie_word_embeddings": True,
    },
    "qwen3-4b": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40960, "tie_word_embeddings": True,
    },
    "llama-8b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "tie_word_embeddings": False,
    },
}  # fmt: skip
LORA = {"rank": 16, "alpha": 32}


@dataclass(frozen=True)
class Case:
    """`rows` rows a step, each a prompt and completions of these lengths."""

    name: str
    shape: str
    kind: str = "sft"
    lora: bool = False
    budget: int = 8192
    rows: int = 8
    prompt: int = 256
    completions: tuple[int, ...] = (768,)
    model: dict[str, Any] = field(default_factory=dict)

    def tree(self, folder: str) -> dict[str, Any]:
        """Its run configuration."""
        algorithm: dict[str, Any] = {"kind": self.kind}
        if self.kind == "dpo":
            algorithm["reference"] = "adapter_off" if self.lora else "copy"
        if self.kind == "grpo":
            algorithm |= {"reward": "length", "group_size": len(self.completions), "max_tokens": self.completions[0]}
        return {
            "model": {"path": folder, "precision": "bf16", "compile": False, **self.model},
            "lora": LORA if self.lora else None,
            "data": {"train": ["rows.jsonl"], "max_length": self.prompt + max(self.completions)},
            "algorithm": algorithm,
            "batch": {"samples": self.rows, "micro_batch_tokens": self.budget},
        }


COMPILED: dict[str, Any] = {"compile": True}
FULL, SELECTIVE = {"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}
SMALL_LOGITS = {"logits_gib": 0.5}
PAIR, GROUP = (384, 384), (128,) * 8
CASES = [
    Case("0.6B", "qwen3-0.6b", budget=4096, rows=4),
    Case("0.6B 16k", "qwen3-0.6b", budget=16384, rows=16),
    Case("0.6B 16k full", "qwen3-0.6b", budget=16384, rows=16, model=FULL),
    Case("0.6B 16k selective", "qwen3-0.6b", budget=16384, rows=16, model=SELECTIVE),
    Case("0.6B 4 x 4k", "qwen3-0.6b", budget=4096, rows=16),
    Case("0.6B 16k long", "qwen3-0.6b", budget=16384, rows=2, prompt=512, completions=(7680,)),
    Case("0.6B lora 16k", "qwen3-0.6b", lora=True, budget=16384, rows=16),
    Case("0.6B dpo", "qwen3-0.6b", "dpo", budget=8192, rows=8, completions=PAIR),
    Case("0.6B dpo small logits", "qwen3-0.6b", "dpo", budget=8192, rows=8, completions=PAIR, model=SMALL_LOGITS),
    Case("0.6B grpo", "qwen3-0.6b", "grpo", budget=16384, rows=8, prompt=128, completions=GROUP),
    Case("1.7B 8k", "qwen3-1.7b", budget=8192),
    Case("1.7B lora 16k", "qwen3-1.7b", lora=True, budget=16384, rows=16),
    Case("1.7B dpo lora", "qwen3-1.7b", "dpo", lora=True, budget=8192, rows=8, completions=PAIR),
    Case("1.7B grpo lora", "qwen3-1.7b", "grpo", lora=True, budget=16384, rows=8, prompt=128, completions=GROUP),
    Case("4B 4k", "qwen3-4b", budget=4096, rows=4),
    Case("4B 8k full", "qwen3-4b", budget=8192, model=FULL),
    Case("4B lora 8k", "qwen3-4b", lora=True, budget=8192),
    Case("8B lora 4k", "llama-8b", lora=True, budget=4096, rows=4),
    Case("8B lora 16k full", "llama-8b", lora=True, budget=16384, rows=16, model=FULL),
    Case("0.6B 16k compiled", "qwen3-0.6b", budget=16384, rows=16, model=COMPILED),
    Case("0.6B 4 x 4k compiled", "qwen3-0.6b", budget=4096, rows=16, model=COMPILED),
    Case("0.6B dpo compiled", "qwen3-0.6b", "dpo", budget=8192, rows=8, completions=PAIR, model=COMPILED),
    Case("1.7B 8k compiled", "qwen3-1.7b", budget=8192, model=COMPILED),
    Case("1.7B 8k compiled full", "qwen3-1.7b", budget=8192, model={**COMPILED, **FULL}),
    Case("4B 4k compiled", "qwen3-4b", budget=4096, rows=4, model=COMPILED),
    Case("8B lora 8k compiled", "llama-8b", lora=True, budget=8192, model=COMPILED),
    Case("4B lora 8k compiled", "qwen3-4b", lora=True, budget=8192, model=COMPILED),
    Case("8B lora 16k", "llama-8b", lora=True, budget=16384, rows=16),
]
TINY = [
    Case("tiny", "tiny", budget=64, rows=4, prompt=8, completions=(24,)),
    Case("tiny dpo", "tiny", "dpo", budget=128, rows=4, prompt=8, completions=(24, 24)),
    Case("tiny grpo lora", "tiny", "grpo", lora=True, budget=128, rows=2, prompt=8, completions=(8, 8)),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--out", type=Path, required=True)
    measuring.add_argument("--seconds", type=float, default=400.0, help="no case is begun later")
    measuring.add_argument("--steps", type=int, default=8)
    measuring.add_argument("--case", nargs="+", help="some of them, by name")
    measuring.add_argument("--into", type=Path, help="a file of measurements to which these are added, not calibrated")
    measuring.add_argument("--tiny", action="store_true", help="a tiny model, to try this program on a CPU")
    comparing = commands.add_parser("compare")
    comparing.add_argument("measured", type=Path)
    commands.add_parser("published")
    arguments = parser.parse_args()
    if arguments.command == "measure":
        measure(arguments)
    elif arguments.command == "compare":
        compare(arguments.measured)
    else:
        compare_published()


def workload(case: Case) -> Any:
    """What the batch of a case is to a plan."""
    from lockstep.plan.work import Sampling, Workload

    length, prompts = case.prompt + sum(case.completions), len(case.completions)
    rows = max(1, min(case.rows, case.budget // length))
    keys = prompts * case.prompt + sum(case.completions)
    pairs = case.prompt**2 / 2 + sum(n * (case.prompt + n / 2) for n in case.completions)
    sampling = Sampling(case.rows * prompts, case.prompt, case.completions[0], case.rows)
    reference = "none" if case.kind != "dpo" else "adapter_off" if case.lora else "copy"
    return Workload(
        micro_batches=-(-case.rows // rows),
        tokens=rows * length,
        targets=rows * sum(case.completions),
        pairs=rows * pairs,
        texts=rows * prompts,
        keys=rows * keys,
        linear=case.kind == "sft",
        reference=reference,
        reference_passes=int(case.kind == "dpo"),
        sampling=sampling if case.kind == "grpo" else None,
        step_tokens=case.rows * length,
    )


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace) -> None:
    import torch

    from lockstep.plan.calibrate import calibrate

    device = "cpu" if arguments.tiny else "cuda"
    started = time.monotonic()
    if arguments.into is not None:
        found: dict[str, Any] = json.loads(arguments.into.read_text(encoding="utf-8"))
    else:
        found = {"torch": torch.__version__, "calibration": asdict(calibrate(device)), "cases": {}}
        print(f"calibrated after {time.monotonic() - started:.0f} s", flush=True)
    chosen = [case for case in CASES if not arguments.case or case.name in arguments.case]
    for case in TINY if arguments.tiny else chosen:
        if time.monotonic() - started > arguments.seconds:
            print(f"no time for {case.name}", flush=True)
            continue
        begun = time.monotonic()
        try:
            found["cases"][case.name] = result = measure_case(case, device, arguments.steps)
            shown = {k: result[k] for k in ("peak_gib", "reserved_gib", "step_s")}
        except Exception as error:  # one case must not cost the others
            found["cases"][case.name] = shown = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(f"{case.name}: {json.dumps(shown)} in {time.monotonic() - begun:.0f} s", flush=True)
        arguments.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
        release(device)


def measure_case(case: Case, device: str, steps: int) -> dict[str, Any]:
    from lockstep.backend.torch_backend import TorchBackend
    from lockstep.config import resolve_config

    config = resolve_config(case.tree("random"))
    memory = Memory(device)
    reference = "none" if case.kind != "dpo" else config.algorithm.reference  # type: ignore[union-attr]
    backend = TorchBackend(
        random_model(case, device),
        micro_batch_tokens=config.batch.micro_batch_tokens,
        precision="bf16" if device == "cuda" else "fp32",
        activation_checkpointing=config.model.activation_checkpointing,
        compile=config.model.compile,
        logits_gib=config.model.logits_gib,
        reference=reference,
        device=device,
    )
    memory.end("build")
    batch, loss = make_batch(case, config)
    sampler = make_sampler(case, backend) if case.kind == "grpo" else None
    backend.balance.before_backward = memory.note_forward  # called between the passes; does nothing for dense models
    steps_marks = []
    for number in range(steps):
        # The first compiles and makes the optimizer's state. Reading memory waits for the device: not in timed steps.
        end = memory.end if number < 3 else lambda phase: None
        marks = [Mark(device)]
        if sampler is not None:
            sampler()
            end("sample")
        marks.append(Mark(device))
        backend.forward_backward(batch, loss)
        end("forward_backward")
        marks.append(Mark(device))
        backend.optim_step(optim_step(config))
        end("optim_step")
        marks.append(Mark(device))
        steps_marks.append(marks)
    wait(device)
    times = [[b.seconds_since(a) for a, b in itertools.pairwise(marks)] for marks in steps_marks]
    kept = times[3:]
    peaks = memory.peaks
    backend.close()
    return {
        "compiler": compiler_counts(),
        "peak_gib": max(peaks.values()),
        "reserved_gib": memory.reserved_gib(),
        "peaks_gib": peaks,
        "held_gib": memory.held,
        "forward_gib": memory.forward_gib,
        "step_s": statistics.median(map(sum, kept)),
        "parts_s": [statistics.median(part) for part in zip(*kept)],
        "all_s": times,
        "tokens": sum(case.prompt + sum(case.completions) for _ in range(case.rows)),
    }


class Memory:
    """Of the device, by phase: the peak in it, and what is held after it."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"
        self.peaks: dict[str, float] = {}
        self.held: dict[str, float] = {}
        self.forward_gib = 0.0
        """Held between a forward and its backward pass, at most."""
        self._reset()

    def note_forward(self) -> None:
        if self._on_gpu:
            import torch

            self.forward_gib = max(self.forward_gib, torch.cuda.memory_allocated() / 2**30)

    def end(self, phase: str) -> None:
        if not self._on_gpu:
            self.peaks[phase] = self.held[phase] = 0.0
            return
        import torch

        torch.cuda.synchronize()
        self.peaks[phase] = max(self.peaks.get(phase, 0.0), torch.cuda.max_memory_allocated() / 2**30)
        self.held[phase] = torch.cuda.memory_allocated() / 2**30
        self._reset()

    def reserved_gib(self) -> float:
        if not self._on_gpu:
            return 0.0
        import torch

        return torch.cuda.memory_reserved() / 2**30

    def _reset(self) -> None:
        if self._on_gpu:
            import torch

            torch.cuda.reset_peak_memory_stats()


class Mark:
    """A moment on the device."""

    def __init__(self, device: str) -> None:
        self._event: Any = None
        self._time = time.perf_counter()
        if device == "cuda":
            import torch

            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def seconds_since(self, other: Mark) -> float:
        return self._time - other._time if self._event is None else other._event.elapsed_time(self._event) / 1000


def random_model(case: Case, device: str) -> Any:
    import torch
    import transformers

    from lockstep.config import LoraConfig
    from lockstep.model.lora import add_lora

    settings = dict(SHAPES[case.shape])
    torch.manual_seed(0)
    with torch.device(device):
        shape = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
        model = transformers.AutoModelForCausalLM.from_config(
            shape, dtype=torch.bfloat16 if case.lora and device == "cuda" else torch.float32
        )
        return add_lora(model, LoraConfig(**LORA)) if case.lora else model


def make_batch(case: Case, config: Any) -> tuple[list[Any], Any]:
    import random

    from lockstep.rollouts.batch import loss_scale
    from lockstep.train import dpo, grpo
    from lockstep.types import Completion, Datum, LossSpec

    draw = random.Random(0)
    top = min(SHAPES[case.shape]["vocab_size"], 50000)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(3, top) for _ in range(count)]

    def completion(length: int) -> Completion:
        values = {"advantages": [1.0] * length, "behaviour_logprobs": [-1.0] * length} if case.kind == "grpo" else {}
        return Completion(tokens(length), [1.0] * length, values)

    batch = [Datum(tokens(case.prompt), [completion(n) for n in case.completions]) for _ in range(case.rows)]
    if case.kind == "dpo":
        return dpo.prepare(config, None, batch)  # type: ignore[arg-type,return-value]
    if case.kind == "grpo":
        options = grpo.policy_options(config.algorithm, on_policy=True)
        return batch, LossSpec("policy_gradient", loss_scale(batch, config.algorithm), options)
    return batch, LossSpec("cross_entropy", 1.0 / sum(d.num_supervised for d in batch))


def make_sampler(case: Case, backend: Any) -> Any:
    """The run's own: the model in training, its cache kept between steps where it is small."""
    import torch

    from lockstep.rollouts.source import ColocatedEngine
    from lockstep.types import SamplingParams

    on_gpu = backend.device.type == "cuda"
    engine = ColocatedEngine(
        lambda: backend.lend_model(stable=on_gpu),
        tiny_tokenizer(),
        backend.group.gather_objects,
        max_kept_bytes=torch.cuda.get_device_properties(0).total_memory // 20 if on_gpu else 0,
    )
    prompts = [[3 + (i * 7 + j) % 200 for j in range(case.prompt)] for i in range(case.rows)]
    params = SamplingParams(
        max_tokens=case.completions[0], temperature=1.0, num_samples=len(case.completions), logprobs=True
    )
    return lambda: engine.sample(prompts, params)


def tiny_tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"t{i}": i for i in range(256)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, "t0")), pad_token="t0")


def optim_step(config: Any) -> Any:
    from lockstep.train.steps import optim_step as step

    return step(config, 1e-6)


def compiler_counts() -> dict[str, Any]:
    """Graphs that were compiled, and why there are several."""
    from torch._dynamo.utils import counters

    return {name: {str(k)[:200]: v for k, v in counters[name].items()} for name in ("stats", "graph_break", "frames")}


def wait(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def release(device: str) -> None:
    import torch

    gc.collect()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    if device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


# --- comparing --------------------------------------------------------------------------------------------------------


def compare(path: Path) -> None:
    """A line for each case, and the errors of all."""
    errors: dict[str, list[float]] = {"memory": [], "reserved": [], "time": []}
    print("case, GiB predicted, measured, error; reserved, error; step in ms, measured, error")
    for name, found in comparisons(json.loads(path.read_text(encoding="utf-8"))):
        shown = []
        for kind, (predicted, measured) in found.items():
            errors[kind].append(predicted / measured - 1)
            scale = 1000 if kind == "time" else 1
            shown.append((predicted * scale, measured * scale, predicted / measured - 1))
        (m, mm, me), (r, _, re), (t, tm, te) = shown
        print(f"{name:24} {m:7.2f} {mm:7.2f} {me:+6.1%} {r:9.2f} {re:+6.1%} {t:8.0f} {tm:6.0f} {te:+6.0%}")
    for kind, values in errors.items():
        sizes = [abs(value) for value in values]
        print(f"{kind}: median {statistics.median(sizes):.1%}, worst {max(sizes):.1%} of {len(sizes)}")


def comparisons(data: dict[str, Any]) -> Any:
    """Of each case that was measured: (name, {what: (predicted, measured)})."""
    from lockstep.config import Degrees, resolve_config
    from lockstep.plan.hardware import DEVICES, NETWORKS, GpuCluster, read_calibration
    from lockstep.plan.memory import plan_memory
    from lockstep.plan.time import plan_time
    from lockstep.plan.trace import describe_model
    from lockstep.plan.work import Options, RankLayout

    cluster = GpuCluster(DEVICES["h200"], 1, 1, NETWORKS["ib400"], read_calibration(data["calibration"]))
    models: dict[Any, Any] = {}
    for case in CASES:
        measured = data["cases"].get(case.name, {"error": ""})
        if "error" in measured:
            continue
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(SHAPES[case.shape]), encoding="utf-8")
            config = resolve_config(case.tree(folder))
            key = (case.shape, case.lora, config.model.compile, config.model.activation_checkpointing)
            if key not in models:
                models[key] = describe_model(config, "bf16", compiled=config.model.compile is True)
        layout, options = RankLayout(Degrees()), Options(logits_gib=config.model.logits_gib)
        memory = plan_memory(models[key], layout, workload(case), options)
        step = plan_time(models[key], layout, workload(case), options, cluster)
        yield (
            case.name,
            {
                "memory": (memory.allocated / 2**30, measured["peak_gib"]),
                "reserved": (memory.reserved / 2**30, measured["reserved_gib"]),
                "time": (step.total, measured["step_s"]),
            },
        )


# --- runs of others ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Published:
    """A run of torchtitan with Llama 3.1 8B, on machines of eight: docs/plan.md names the tables."""

    name: str
    device: str
    machines: int
    length: int
    rows: int  # of each GPU
    recompute: str
    compiled: bool
    tokens_per_s: float  # of each GPU
    gib: float
    context: int = 1


PUBLISHED = [
    Published("FSDP, selective", "h100-96", 1, 8192, 2, "selective", False, 5762, 82.4),
    Published("FSDP, selective, compiled", "h100-96", 1, 8192, 2, "selective", True, 6667, 77.0),
    Published("FSDP, selective, 128 GPUs", "h100-96", 16, 8192, 2, "selective", False, 5605, 67.0),
    Published("FSDP, selective, compiled, 128 GPUs", "h100-96", 16, 8192, 2, "selective", True, 6514, 62.0),
    Published("FP8, full, 32k", "h100-96", 1, 32768, 1, "full", True, 3890, 83.9),
    Published("FP8, full, context 2, 64k", "h100-96", 1, 65536, 1, "full", True, 2540, 84.2, 2),
    Published("FP8, full, context 4, 128k", "h100-96", 1, 131072, 1, "full", True, 1071, 84.0, 4),
    Published("FP8, full, context 8, 256k", "h100-96", 1, 262144, 1, "full", True, 548, 84.5, 8),
    Published("FP8, selective, H200, 32 GPUs", "h200", 4, 8192, 2, "selective", True, 10938, 48.0),
]


def compare_published() -> None:
    """Plans are of our own step in bf16, from data sheets."""
    from lockstep.config import resolve_config
    from lockstep.plan.from_config import assumed_rows, layout_of, task_of
    from lockstep.plan.hardware import DEVICES, NETWORKS, Device, GpuCluster

    narrow = Device("h100-96", 94.5, 989e12, 2400e9, 450e9, 290e12, "96 GB of HBM2e, as torchtitan's page says")
    print("run, tokens/s for each GPU planned, published, difference; GiB planned, published, difference")
    for run in PUBLISHED:
        ranks = 8 * run.machines
        cluster = GpuCluster({**DEVICES, narrow.name: narrow}[run.device], 8, run.machines, NETWORKS["ib400"])
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(SHAPES["llama-8b"]), encoding="utf-8")
            config = resolve_config(
                {
                    "model": {"path": folder, "compile": run.compiled, "activation_checkpointing": run.recompute},
                    "data": {"train": ["rows.jsonl"], "max_length": run.length},
                    "batch": {
                        "samples": ranks * run.rows // run.context,
                        "micro_batch_tokens": run.length * run.rows // run.context,
                    },
                    "parallel": {"context": run.context},
                    "launch": {"procs": ranks},
                }
            )
            plan = task_of(config, cluster, assumed_rows(config)).plan(layout_of(config, cluster))
        speed, gib = plan.time.tokens_per_s / ranks, plan.worst.reserved / 2**30
        print(
            f"{run.name:36} {speed:7,.0f} {run.tokens_per_s:7,.0f} {speed / run.tokens_per_s - 1:+5.0%} "
            f"{gib:7.1f} {run.gib:6.1f} {gib / run.gib - 1:+5.0%}"
        )


if __name__ == "__main__":
    main()
