"""Faults that a maintainer could make: one replaced text each, and where it should be noticed.

`tests` are arguments of pytest, the likeliest first; `verify` is a case of tests/mutation/cases.py with the layouts
that show the fault, where `lockstep verify` claims to notice it.
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    name: str
    file: str  # below lockstep/
    old: str
    new: str
    tests: tuple[str, ...]
    verify: tuple[str, str] | None = None  # (case, layouts)


# Named suites: pytest arguments.
RANKS = "tests/equivalence/test_ranks_in_step.py"
STEPS = "tests/unit/backend/test_dropout.py tests/unit/backend/test_resumed_backend.py"
LAYOUTS = "tests/equivalence/test_layouts.py"
FAMILIES = f"{LAYOUTS}::test_every_model_family_makes_the_plain_step"
LAYOUT = f"{LAYOUTS}::test_a_layout_makes_the_same_step"
PAIRS = "tests/equivalence/test_preference.py"
POLICY = "tests/equivalence/test_policy_model.py"
LOSSES = "tests/unit/algorithms"
BATCHING = "tests/unit/backend/test_batching.py"
NARROW = "tests/unit/backend/test_narrow_copies.py"
HEAD = "tests/unit/model/test_head.py"
MODEL = "tests/unit/model/test_policy.py"
MIXERS = "tests/unit/model/test_mixers.py"
MIXTURES = "tests/equivalence/test_mixtures.py"
EXPERTS = "tests/equivalence/test_expert_parallel.py"
REPLAY = "tests/unit/backend/test_router_replay.py"
LORA = "tests/unit/model/test_lora.py"
ORDER = "tests/unit/data/test_data_order.py"
PACKING = "tests/unit/data/test_packing.py"
SFT, DPO, GRPO = "tests/loops/test_sft.py", "tests/loops/test_dpo.py", "tests/loops/test_grpo.py"
SCHEDULE = "tests/unit/train/test_schedule.py"
SCALE = "tests/unit/parallel/test_loss_scale.py"
RUNDIR = "tests/unit/test_rundir.py"
REFERENCE = "tests/unit/train/test_reference.py"
DATASET = "tests/unit/data/test_data_dataset.py"
MASKS = "tests/unit/data/test_data_masks.py"
TRUNCATION = "tests/unit/data/test_data_truncation.py"
WEIGHTS = "tests/unit/backend/test_read_weights.py"
WINDOWS = "tests/unit/model/test_attention_windows.py"
COPY = "tests/unit/backend/test_reference_copy.py"
BACKEND_TESTS = "tests/unit/backend/test_torch_backend.py"

TORCH, LOSS, BATCH = "backend/torch_backend.py", "backend/loss_step.py", "backend/batching.py"
STATE, BUILD, KEPT = "backend/state.py", "backend/build.py", "backend/reference.py"
OPTIMIZERS, STAGING = "backend/optimizers.py", "backend/staging.py"

NAMED = (
    Fault(
        "every rank draws the same dropout",
        TORCH,
        "state.seed_rank(seed, self.group.dropout_rank)",
        "state.seed_rank(seed, 0)",
        (RANKS, LORA),
        ("dropout", "replicate=2"),
    ),
    Fault(
        "evaluation has dropout",
        TORCH,
        "        self.policy.eval()\n        try:",
        "        try:",
        (STEPS, LORA, "tests/unit/backend/test_torch_backend.py"),
        ("dropout", "replicate=2"),
    ),
    Fault(
        "recomputation draws another dropout",
        BUILD,
        "checkpoint, use_reentrant=False,",
        "checkpoint, use_reentrant=False, preserve_rng_state=False,",
        (STEPS, f"{LAYOUTS}::test_activations_that_are_not_kept_give_the_same_step"),
        ("recomputed dropout", "replicate=2"),
    ),
    Fault(
        "buffers stay with rank 0",
        BUILD,
        "[*module.named_parameters(), *module.named_buffers()]",
        "[*module.named_parameters()]",
        (RANKS, f"{LAYOUT} -k ddp-2", "tests/distributed/test_resume.py"),
        ("sft", "replicate=2"),
    ),
    Fault(
        "dpo's learning rate is one step behind",
        "train/dpo.py",
        "learning_rate_at(progress.step,",
        "learning_rate_at(max(progress.step - 1, 0),",
        (DPO,),
    ),
    Fault(
        "the loss scale counts twice for losses that are not linear",
        LOSS,
        'return total * scale, {**metrics, "loss": total.detach()}',
        'return total * scale * scale, {**metrics, "loss": total.detach()}',
        (STEPS, SCALE),
    ),
    Fault(
        "the reference is copied anew at a resume",
        TORCH,
        "        self._reference_mixed = bool(loaded & kept.keys())\n",
        "        self._reference_mixed = bool(loaded & kept.keys())\n        kept and self._reference.mix(1.0)\n",
        (STEPS, PAIRS),
        ("dpo copy", "replicate=2"),
    ),
    Fault(
        "FSDP2 adds gradients in bf16",
        "parallel/shard.py",
        "reduce_dtype=torch.float32",
        "reduce_dtype=compute_dtype",
        (RANKS, NARROW),
    ),
    Fault(
        "the norm of a hybrid layout counts replicas",
        "parallel/gradients.py",
        "for i, place in enumerate(tensor.placements) if not place.is_replicate()]",
        "for i, place in enumerate(tensor.placements)]",
        (RANKS, "tests/unit/parallel"),
        ("sft", "replicate=2,shard=2"),
    ),
    Fault(
        "context ranks ignore a sliding window",
        "model/attention.py",
        "        query, key, value = packed_split.gather(query, key, value)",
        "        query, key, value = packed_split.gather(query, key, value)\n        sliding_window = None",
        (RANKS, f"{LAYOUT} -k context-2", MODEL),
        ("window", "context=2"),
    ),
    Fault(
        "context ranks repeat grouped heads in the wrong order",
        "parallel/context.py",
        "t.repeat_interleave(copies, dim=1)",
        "t.repeat(1, copies, 1, 1)",
        (RANKS, f"{LAYOUT} -k context-2"),
        ("window", "context=4"),
    ),
    Fault(
        "clipping also lengthens",
        "parallel/gradients.py",
        "torch.clamp(max_norm / (norm + 1e-6), max=1.0)",
        "torch.clamp(max_norm / (norm + 1e-6), min=0.0)",
        (STEPS, "tests/unit/parallel", "tests/unit/backend/test_torch_backend.py", NARROW),
        ("sft", "replicate=2"),
    ),
    Fault(
        "grpo's learning rate is one step ahead",
        "train/grpo.py",
        "learning_rate_at(progress.step,",
        "learning_rate_at(progress.step + 1,",
        (GRPO,),
    ),
    Fault(
        "LoRA is scaled twice behind dropout",
        "model/lora.py",
        "down, up, layer.scaling[name])",
        "down, up, layer.scaling[name] * (1 if dropped is None else layer.scaling[name]))",
        (LORA,),
        ("dropout", "replicate=2"),
    ),
    Fault(
        "every rank resumes with rank 0's generator",
        STATE,
        'return f"rng.{layout}.{group.rank}", f"rng_cuda.{layout}.{group.rank}"',
        'return f"rng.{layout}.0", f"rng_cuda.{layout}.0"',
        (RANKS, "tests/distributed/test_resume.py"),
        ("dropout", "replicate=2"),
    ),
    Fault(
        "a skipped step leaves its gradient",
        TORCH,
        "        self._optimizer.zero_grad(set_to_none=True)",
        "        if math.isfinite(numbers.result()[0]):\n            self._optimizer.zero_grad(set_to_none=True)",
        (STEPS, SCALE, NARROW),
    ),
    Fault(
        "kto's estimate takes answers that match",
        "train/preference_data.py",
        "(answer,) = rows[partner].completions",
        "(answer,) = row.completions",
        ("tests/unit/train/test_preference_run.py", DPO, PAIRS),
    ),
)

BACKEND = (
    Fault(
        "a target is predicted by itself",
        BATCH,
        "predictors.append(starts + branch.supervised - 1)",
        "predictors.append(starts + branch.supervised - (branch.supervised == 0))",
        (BATCHING,),
        ("sft", "replicate=2"),
    ),
    Fault(
        "a second answer starts behind the first",
        BATCH,
        "starts = np.where(branch.supervised <= 0, len(self.prompt), end)",
        "starts = end",
        (BATCHING, PAIRS),
        ("dpo", "replicate=2"),
    ),
    Fault(
        "a second answer continues the first one's positions",
        BATCH,
        "positions.append(len(self.prompt) + np.arange(len(branch.tokens)))",
        "positions.append(end + np.arange(len(branch.tokens)))",
        (BATCHING, PAIRS),
        ("dpo", "replicate=2"),
    ),
    Fault(
        "pairs that are cut count as whole",
        BATCH,
        "sum(map(len, data)) == len({d.datum for d in documents})",
        "sum(map(len, data)) >= len({d.datum for d in documents})",
        (BATCHING, PAIRS),
        ("dpo", "replicate=2"),
    ),
    Fault(
        "an empty micro-batch counts as an answer",
        BATCH,
        "    if is_padding:\n        inputs = LossInputs(",
        "    if is_padding and multiple_of < 0:\n        inputs = LossInputs(",
        (BATCHING, PAIRS),
        ("dpo", "replicate=4"),
    ),
    Fault(
        "shared prompts are those of the first document",
        BATCH,
        "[(start, len(document.prompt))]",
        "[(0, len(document.prompt))]",
        (BATCHING, PAIRS),
        ("dpo", "replicate=2"),
    ),
    Fault(
        "a target at the seam belongs to two context ranks",
        BATCH,
        "(predictors >= here.start) & (predictors < here.stop)",
        "(predictors >= here.start) & (predictors <= here.stop)",
        (BATCHING, f"{LAYOUT} -k context-2"),
        ("sft", "context=2"),
    ),
    Fault(
        "side values start with the answer",
        BATCH,
        "values[branch.supervised] if completion",
        "values[: len(branch.supervised)] if completion",
        (BATCHING, PAIRS, POLICY),
    ),
    Fault(
        "tensor ranks take different rows",
        "backend/rank_batches.py",
        "rank=self.group.data_rank if",
        "rank=self.group.rank % self.group.degrees.data if",
        (RANKS, f"{LAYOUT} -k shard-2-tensor-2"),
        ("sft", "replicate=2,tensor=2"),
    ),
    Fault(
        "the gradient of a coupled loss has the wrong sign",
        LOSS,
        "torch.where(real, -grad_logprobs[micro_batch.indices], 0.0)",
        "torch.where(real, grad_logprobs[micro_batch.indices], 0.0)",
        (PAIRS,),
        ("dpo", "replicate=2"),
    ),
    Fault(
        "tensor ranks add their log-probs up",
        LOSS,
        "zip(rank_batch.micro_batches, values) if group.counts else ():",
        "zip(rank_batch.micro_batches, values):",
        (RANKS, "tests/distributed/test_verify_policy.py"),
        ("sft", "tensor=2"),
    ),
    Fault(
        "the second pass scales again",
        LOSS,
        "weights=weights.to(micro_batch.inputs.weights.dtype), scale=1.0)",
        "weights=weights.to(micro_batch.inputs.weights.dtype))",
        (PAIRS,),
        ("dpo", "replicate=2"),
    ),
    Fault(
        "a loss of whole answers is taken from parts of them",
        LOSS,
        "together and num_parts == 1",
        "together",
        (RANKS, "tests/equivalence/test_preference_layouts.py"),
        ("dpo", "context=2"),
    ),
    Fault(
        "norms decay",
        OPTIMIZERS,
        '"decays": p.ndim >= 2,',
        '"decays": p.ndim >= 1,',
        (FAMILIES,),
        ("sft", "replicate=2"),
    ),
    Fault(
        "AdamW's betas are swapped",
        OPTIMIZERS,
        "(step.beta1, step.beta2)",
        "(step.beta2, step.beta1)",
        (FAMILIES,),
        ("sft", "replicate=2"),
    ),
    Fault(
        "AdamW keeps its own eps",
        OPTIMIZERS,
        'group["lr"], group["eps"] = step.learning_rate * group["rate"], step.eps',
        'group["lr"] = step.learning_rate * group["rate"]',
        (FAMILIES,),
        ("sft", "replicate=2"),
    ),
    Fault(
        "every rank counts the metrics of a whole batch",
        TORCH,
        "sums += loss_step.stack(known, names) * (self.group.rank == 0)",
        "sums += loss_step.stack(known, names)",
        (RANKS, "tests/equivalence/test_preference_layouts.py"),
        ("dpo", "replicate=2"),
    ),
    Fault(
        "tensor ranks all count their metrics",
        TORCH,
        "sums += loss_step.stack(metrics, names) * self.group.counts",
        "sums += loss_step.stack(metrics, names)",
        (RANKS, f"{LAYOUT} -k shard-2-tensor-2"),
        ("sft", "tensor=2"),
    ),
    Fault(
        "a row that is padding is named as not finite",
        LOSS,
        "nonfinite = ~torch.isfinite(part).cpu().numpy() & (micro_batch.rows >= 0)",
        "nonfinite = ~torch.isfinite(part).cpu().numpy()",
        (BATCHING, "tests/unit/train/test_bad_input.py", NARROW),
    ),
    Fault(
        "DDP communicates after every micro-batch",
        TORCH,
        "last=i == last)",
        "last=True)",
        (f"{LAYOUT} -k ddp-2",),
        ("sft", "replicate=2"),
    ),
    Fault(
        "the norm is that of the scaled gradient",
        TORCH,
        "norm = gradient_norm(counted, self.group) / self._loss_scale",
        "norm = gradient_norm(counted, self.group)",
        (STEPS, SCALE, NARROW),
    ),
    Fault(
        "gradients are not scaled back",
        TORCH,
        "step.max_grad_norm or math.inf, scale=1 / self._loss_scale)",
        "step.max_grad_norm or math.inf)",
        (SCALE, NARROW),
    ),
    Fault(
        "a tied weight counts twice in the norm of a pipeline",
        "backend/pipelined.py",
        "        if 0 in self._stages:\n            return list(parameters)",
        "        if self._stages:\n            return list(parameters)",
        (f"{LAYOUT} -k pipeline-2",),
        ("tied", "pipeline=2"),
    ),
    Fault(
        "a reference that has moved is not saved again after a resume",
        TORCH,
        "self._reference_mixed = bool(loaded & kept.keys())",
        "self._reference_mixed = False",
        (STEPS, PAIRS, DPO),
    ),
    Fault(
        "published weights change while training goes on",
        STATE,
        'return tensor.to(dtype, copy=True) if tensor.device.type == "cpu"',
        'return tensor.to(dtype) if tensor.device.type == "cpu"',
        (WEIGHTS,),
    ),
    Fault(
        "log-probs are not those of the sampling temperature",
        TORCH,
        "self.policy.use_temperature(temperature)",
        "self.policy.use_temperature(1.0)",
        ("tests/equivalence/test_policy_temperature.py",),
        ("grpo", "replicate=2"),
    ),
    Fault(
        "an evaluation leaves stale gathered weights",
        TORCH,
        "                reshard(root)\n            self.policy.train()",
        "                pass\n            self.policy.train()",
        (f"{LAYOUT} -k fsdp-2",),
        ("sft", "shard=2"),
    ),
    Fault(
        "an evaluation leaves the model in evaluation mode",
        TORCH,
        "                reshard(root)\n            self.policy.train()",
        "                reshard(root)",
        (STEPS, "tests/unit/backend/test_torch_backend.py"),
        ("dropout", "replicate=2"),
    ),
    Fault(
        "the reference takes the policy's share of itself",
        KEPT,
        "lerp_(local(parameter.detach()), share)",
        "lerp_(local(parameter.detach()), 1 - share)",
        (COPY, PAIRS),
        ("dpo follows", "replicate=2"),
    ),
    Fault(
        "the policy stays in the reference's place",
        KEPT,
        "            yield\n        finally:\n            self._exchange()",
        "            yield\n        finally:\n            pass",
        (PAIRS,),
        ("dpo copy", "replicate=2"),
    ),
    Fault(
        "the reference is the policy itself",
        KEPT,
        "self._kept = {name: p.detach().clone() for",
        "self._kept = {name: p.detach() for",
        (STEPS, PAIRS),
        ("dpo copy", "replicate=2"),
    ),
    Fault(
        "a frozen weight is wide",
        BUILD,
        "wanted = wide if parameter.requires_grad else compute",
        "wanted = wide",
        ("tests/unit/backend/test_torch_backend.py", NARROW),
    ),
)

CHECKPOINTS = (
    Fault(
        "a checkpoint changes while it is written",
        STAGING,
        '.detach().to("cpu", copy=True)',
        '.detach().to("cpu")',
        (STEPS, "tests/distributed/test_resume.py"),
    ),
    Fault(
        "a resume does not restore the generator",
        STATE,
        "        torch.set_rng_state(tensors[host])",
        "        pass",
        (STEPS, RANKS, "tests/distributed/test_resume.py"),
        ("dropout", "replicate=2"),
    ),
    Fault(
        "a resume forgets loss scale and reference",
        STATE,
        "{**rng, **(numbers or {})}.items() if name in stored}",
        "rng.items() if name in stored}",
        (STEPS, SCALE, PAIRS),
        ("dpo follows", "replicate=2"),
    ),
    Fault(
        "a resume reads moments into copies",
        STATE,
        'tensors[f"optimizer.{name}.{key}"] = value',
        'tensors[f"optimizer.{name}.{key}"] = value.clone()',
        (STEPS, "tests/distributed/test_resume.py"),
        ("sft", "replicate=2"),
    ),
    Fault(
        "a damaged file of a checkpoint is read",
        "rundir.py",
        'return None if digest_file(file) == expected["sha256"] else "does not match its digest"',
        "return None",
        (RUNDIR,),
    ),
    Fault(
        "one checkpoint too few is kept",
        "train/checkpoints.py",
        "prune_checkpoints(keep_last=self._config.keep_last,",
        "prune_checkpoints(keep_last=max(1, self._config.keep_last - 1),",
        ("tests/loops/test_sft_survival.py", SFT),
    ),
    Fault(
        "a checkpoint has the score of an earlier evaluation",
        "train/checkpoints.py",
        "score = progress.validation_loss if progress.validation_step == progress.step else None",
        "score = progress.validation_loss",
        (SFT, "tests/loops/test_sft_survival.py", DPO),
    ),
    Fault(
        "other data than before is trained on after a resume",
        "train/run.py",
        "if digest != data_digest:",
        "if digest is None:",
        ("tests/distributed/test_resume.py", "tests/unit/train"),
    ),
    Fault(
        "patience begins again at a resume",
        "train/run.py",
        'progress, digest = Progress(**checkpoint.extra["progress"]), ',
        'progress, digest = replace(Progress(**checkpoint.extra["progress"]), evaluations_without_improvement=0), ',
        (SFT, "tests/loops/test_sft_survival.py", "tests/unit/train", "tests/distributed/test_resume.py"),
    ),
)
