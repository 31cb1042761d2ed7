"""Faults in optimizers and in the biases of routers; see tests/mutation/faults.py."""

from __future__ import annotations

from mutation.faults import OPTIMIZERS, Fault

STEPS = "tests/unit/backend/test_optimizers.py"
PLAIN = "tests/unit/verification/test_plain_optimizers.py"
LAYOUTS = "tests/equivalence/test_adapter_layouts.py::test_a_layout_makes_the_same_step"
BALANCE, ROUTERS = "backend/router_balance.py", "tests/unit/backend/test_router_balance.py"

STEPPED = (
    Fault(
        "Muon makes each rank's rows orthogonal by themselves",
        OPTIMIZERS,
        "if isinstance(parameter, DTensor) and not _has_whole_matrices(parameter):",
        "if False:",
        (LAYOUTS,),
        ("muon", "shard=2"),
    ),
    Fault(
        "Muon does not look ahead",
        OPTIMIZERS,
        "ahead = gradient.lerp(mean, self._momentum)",
        "ahead = mean.clone()",
        (PLAIN,),
        ("muon", "shard=2"),
    ),
    Fault(
        "Muon takes the embedding for a matrix of a layer",
        OPTIMIZERS,
        '"orthogonal": id(p) in matrices,',
        '"orthogonal": p.ndim >= 2,',
        (STEPS, PLAIN),
        ("muon", "shard=2"),
    ),
    Fault(
        "Adafactor scales small steps up",
        OPTIMIZERS,
        "change.div_((change.norm() / math.sqrt(change.numel())).clamp(min=1.0))",
        "change.div_(change.norm() / math.sqrt(change.numel()))",
        (STEPS, PLAIN),
        ("adafactor", "shard=2"),
    ),
    Fault(
        "blocks of eight bits share the largest value of all",
        OPTIMIZERS,
        "largest.copy_(blocks.abs().amax(dim=2))",
        "largest.copy_(blocks.abs().amax())",
        (STEPS, PLAIN),
        ("eight bits", "shard=2"),
    ),
    Fault(
        "second matrices of adapters learn like the first",
        OPTIMIZERS,
        '"rate": settings.lora_b_ratio if is_second else 1.0,',
        '"rate": 1.0,',
        (STEPS, PLAIN),
        ("lora plus", "replicate=2"),
    ),
    Fault(
        "biases of routers move with the load",
        BALANCE,
        "torch.sign(load[place].mean() - load[place])",
        "torch.sign(load[place] - load[place].mean())",
        (ROUTERS,),
        ("router biases", "shard=2"),
    ),
    Fault(
        "biases of routers follow a rank's own load",
        BALANCE,
        "RouterCounts.unpack(self._group.sum(mine), *shape)",
        "RouterCounts.unpack(mine, *shape)",
        ("tests/equivalence/test_mixtures.py",),
        ("router biases", "shard=2"),
    ),
    Fault(
        "a resume forgets the biases of routers",
        BALANCE,
        'return {f"{self._routers.names[place]}.{BIAS}": bias for place, bias in self._biases.items()}',
        "return {}",
        (ROUTERS,),
        ("router biases", "shard=2"),
    ),
    Fault(
        "replicas leave out buckets with a parameter that no text reaches",
        "backend/build.py",
        "    return {name for name, p in policy.named_parameters() if p.requires_grad and id(p) not in used}",
        "    return set()",
        ("tests/equivalence/test_family_layouts.py",),
    ),
)
