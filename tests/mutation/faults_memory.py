"""Faults in what saves memory and in what foresees it, and in launching; see tests/mutation/faults.py."""

from __future__ import annotations

from mutation.faults import OPTIMIZERS, STAGING, Fault

QUANTISED_TESTS = "tests/unit/model/test_quantised.py"
STEP_TESTS = "tests/equivalence/test_quantised_base.py"
OPTIMIZER_TESTS = "tests/unit/backend/test_optimizers.py"
STAGING_TESTS = "tests/unit/backend/test_staging.py"
PLAN_TESTS = "tests/unit/plan"
IMAGE_TESTS = "tests/unit/data/test_data_images.py"
SLURM_TESTS = "tests/unit/launch/test_slurm_script.py tests/unit/launch/test_slurm_queue.py"

MEMORY = (
    Fault(
        "a router is held in four bits",
        "model/quantised.py",
        'is_own or module.weight.requires_grad or kind_of(layer, f"{name}.weight") == "router"',
        "is_own or module.weight.requires_grad",
        (QUANTISED_TESTS, STEP_TESTS),
    ),
    Fault(
        "scales of blocks lose their mean",
        "model/codebooks.py",
        ".add_(stored.block_mean)",
        "",
        (QUANTISED_TESTS,),
    ),
    Fault(
        "the last block of an odd matrix is scaled as the first",
        "model/codebooks.py",
        "values[whole:].mul_(largest[-1])\n    return values[:num_values]",
        "values[whole:].mul_(largest[0])\n    return values[:num_values]",
        (QUANTISED_TESTS,),
    ),
    Fault(
        "FP8's gradient has no scales of the weight's rows",
        "model/quantised_layers.py",
        "product = rows @ dequantise_rows(codes, scales, grad.dtype)",
        "product = rows @ dequantise_rows(codes, torch.ones_like(scales), grad.dtype)",
        (QUANTISED_TESTS, STEP_TESTS),
    ),
    Fault(
        "optim.lora_b_ratio changes nothing",
        OPTIMIZERS,
        'step.learning_rate * group["rate"]',
        "step.learning_rate",
        ("tests/unit/model/test_adapter_kinds.py",),
    ),
    Fault(
        "a mean square in eight bits is rounded to zero",
        OPTIMIZERS,
        "torch.where(blocks > 0, found.clamp(min=1), found)",
        "found",
        (OPTIMIZER_TESTS,),
    ),
    Fault(
        "Muon's step has the size of a rank's part",
        OPTIMIZERS,
        "max(parameter.shape[-2:])",
        "max(weight.shape[-2:])",
        ("tests/equivalence/test_adapter_layouts.py",),
    ),
    Fault(
        "every step rounds with the same random bits",
        "backend/stochastic_rounding.py",
        'f"{step} {name}"',
        'f"{name}"',
        (OPTIMIZER_TESTS,),
    ),
    Fault(
        "every rank rounds with the random bits of the first rows",
        "backend/stochastic_rounding.py",
        "return row * (parameter.numel() // max(parameter.shape[0], 1))",
        "return 0",
        (OPTIMIZER_TESTS,),
    ),
    Fault(
        "tensors in pinned memory overlap",
        STAGING,
        "used += _aligned(size)",
        "used += size // 2",
        (STAGING_TESTS,),
    ),
    Fault(
        "the plan forgets one of AdamW's two moments",
        "plan/memory.py",
        '_MOMENTS = {"adamw": 2.0,',
        '_MOMENTS = {"adamw": 1.0,',
        (PLAN_TESTS,),
    ),
    Fault(
        "the plan forgets micro-batches in flight",
        "plan/memory.py",
        "others = in_flight - 1.0",
        "others = 0.0",
        (PLAN_TESTS,),
    ),
    Fault(
        "an image may be anywhere on the disk",
        "data/images.py",
        "if path != root and not path.startswith(root.rstrip(os.sep) + os.sep):",
        "if False:",
        (IMAGE_TESTS,),
    ),
    Fault(
        "spans after an image are not moved",
        "data/images.py",
        "Span(move(span.start), move(span.end), span.ends_turn)",
        "Span(span.start, span.end, span.ends_turn)",
        (IMAGE_TESTS,),
    ),
)
LAUNCH = (
    Fault(
        "a mistake in the configuration goes back to the queue",
        "launch/slurm_script.py",
        '"exit_code": (2|3)\'',
        '"exit_code": (9)\'',
        (SLURM_TESTS,),
    ),
    Fault(
        "what a cluster can never give waits in the queue",
        "launch/slurm.py",
        '            ask(["sbatch", "--test-only", str(script)], self._environment, self._working_dir)\n',
        "",
        (SLURM_TESTS,),
    ),
    Fault(
        "held jobs count in the queue",
        "launch/slurm_queue.py",
        'if priority.strip() != "0":',
        "if priority.strip():",
        (SLURM_TESTS,),
    ),
)
