"""LoRA through PEFT: which layers and experts get an adapter is read from the model itself."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from lockstep.config import LoraConfig
from lockstep.model.experts import ExpertAdapter, compute_experts, expert_parameters, follows_transformers, is_divided
from lockstep.model.parts import kind_of, sizes_of
from lockstep.model.pissa import start_from_principal_parts
from lockstep.model.policy import CausalLM, causal_lm, decoder_layers
from lockstep.model.vision import blind_to, vision_parameters


def add_lora(model: nn.Module, config: LoraConfig, vision: str = "auto", *, with_weights: bool = True) -> CausalLM:
    """Freeze the model and put adapters on its linear layers and experts. Adapter weights are float32 or wider.

    `vision` is model.vision: whether what a model sees with gets adapters as well. `with_weights`: otherwise the
    model's memory is not initialised, and rank 0 has what adapters begin with.
    """
    import peft

    targets = _all_targets(model) if config.targets == "all-linear" else _named_targets(model, config.targets)
    _refuse_on_parameters(targets, config)
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type] # any positive number works
        lora_dropout=config.dropout,
        target_modules=targets.modules,
        target_parameters=targets.parameters or None,
        exclude_modules=blind_to(causal_lm(model), vision),
        use_dora=config.dora,
        use_rslora=config.rslora,
        modules_to_save=_modules_to_save(model, config.modules_to_save),
    )
    try:
        adapted = peft.get_peft_model(model, settings, autocast_adapter_dtype=True)
    except ValueError as error:
        if "No modules were targeted" not in str(error):
            raise
        wanted = config.targets if isinstance(config.targets, str) else ", ".join(config.targets)
        raise ValueError(
            f"lora.targets {wanted} finds no layer of {type(causal_lm(model)).__name__} that computes text and takes "
            "an adapter: name layers that it has, or remove lora and train in full"
        ) from error
    _refuse_untouched_connector(adapted, vision)
    _compute_narrowly(adapted)
    if config.init == "pissa" and with_weights and not next(model.parameters()).is_meta:
        start_from_principal_parts(adapted, torch.device("cuda") if torch.cuda.is_available() else None)
    return adapted


def _refuse_untouched_connector(adapted: nn.Module, vision: str) -> None:
    """Gemma 3's is a matrix and no layer: it takes no adapter."""
    causal = causal_lm(adapted)
    parts = [(name, p) for name, kind, p in vision_parameters(causal) if kind == "connector"]
    if vision not in ("connector", "trained") or not parts or any(p.requires_grad for _, p in parts):
        return
    inside = {name.removeprefix("model.").split(".")[0] for name, _ in parts}
    raise ValueError(
        f"model.vision {vision}: the layers between tower and language model of {type(causal).__name__} take no "
        f"adapter: set lora.modules_to_save to [{', '.join(sorted(inside))}], which trains them whole, or "
        "model.vision to frozen"
    )


def _modules_to_save(model: nn.Module, wanted: Sequence[str]) -> list[str] | None:
    for name in wanted:
        if not _matches(name, _module_names(model)):
            kind = type(causal_lm(model)).__name__
            ends = sorted({known.rpartition(".")[2] for known in _module_names(model)} - {""})
            raise ValueError(
                f"lora.modules_to_save {name!r} matches no module of {kind}: its modules end in "
                f"{', '.join(end for end in ends if not end.isdigit())}"
            )
    return list(wanted) or None


@dataclass(frozen=True)
class _Targets:
    """Ends of names: of linear layers, and of parameters that PEFT adapts without their module."""

    modules: list[str]
    parameters: list[str]


def _all_targets(model: nn.Module) -> _Targets:
    experts = _expert_names(model)
    linear = _linear_names(model)
    modules = sorted({*linear, *_vision_linear_names(model)} - _refused_by_peft(model, linear))
    if not modules and not experts:
        kind = type(causal_lm(model)).__name__
        raise ValueError(f"{kind} has no linear layer inside its decoder layers: name some in lora.targets")
    return _as_peft_keeps_them(model, _Targets(modules, experts))


def _refused_by_peft(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Of linear layers, those that PEFT takes no adapter on, nor loads one: out_proj in Mamba, whose weight a fused
    kernel may read (see `adapted_mixers`)."""
    import peft
    from peft.tuners import tuners_utils

    check = getattr(tuners_utils, "_check_lora_target_modules_mamba", lambda *_: None)

    def is_refused(name: str) -> bool:
        try:
            check(peft.LoraConfig(target_modules=[name]), causal_lm(model), name)
        except ValueError:
            return True
        return False

    return {name for name in names if is_refused(name)}


def _named_targets(model: nn.Module, targets: Sequence[str]) -> _Targets:
    """As the user named them: modules, or the stacked matrices of experts."""
    _refuse_unmatched(model, targets)
    stacked = [f"{name}.{key}" for name, m in model.named_modules() for key in expert_parameters(m)]
    parameters = [target for target in targets if _matches(target, stacked)]
    modules = [target for target in targets if target not in parameters or _matches(target, _module_names(model))]
    return _as_peft_keeps_them(model, _Targets(modules, parameters))


def _as_peft_keeps_them(model: nn.Module, targets: _Targets) -> _Targets:
    """PEFT takes some names of linear layers (gate_proj in a DeepSeek) for those that experts had in older versions of
    transformers, and then adapts no layer of that name: named by their weight, they stay what they are."""
    import peft
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    def is_kept(name: str) -> bool:
        trial: Any = peft.LoraConfig(target_modules=[name])
        try:
            convert_peft_config_for_transformers(trial, causal_lm(model), None)
        except ValueError:  # of fused ones it refuses one without the others
            return False
        return name in trial.target_modules

    lost = [name for name in targets.modules if not is_kept(name)]
    kept = [name for name in targets.modules if name not in lost]
    return _Targets(kept, [*targets.parameters, *(f"{name}.weight" for name in lost)])


def _refuse_on_parameters(targets: _Targets, config: LoraConfig) -> None:
    others = f", such as {targets.modules[0]}" if targets.modules else ""
    for key in ("dropout", "dora", "init"):
        if targets.parameters and getattr(config, key) not in (0.0, False, "default"):
            raise ValueError(
                f"lora.{key} is not possible on {', '.join(targets.parameters)}, where adapters change the matrix "
                f"itself: remove it, or name other layers in lora.targets{others}"
            )


_ADAPTER_PARTS = (
    "lora_A",
    "lora_B",
    "lora_magnitude_vector",
    "lora_embedding_A",
    "lora_embedding_B",
    "original_module",  # of a module that is trained whole, whose copy counts
)


@dataclass(frozen=True)
class AdapterCoverage:
    """Weights in the decoder layers with and without an adapter, counted by the end of their names."""

    adapted: Counter[str]
    others: Counter[str]
    refused: tuple[str, ...] = ()
    """Of the others, linear layers that PEFT takes no adapter on."""

    @property
    def share(self) -> float:
        return self.adapted.total() / max(self.adapted.total() + self.others.total(), 1)

    def __str__(self) -> str:
        total = self.adapted.total() + self.others.total()
        left = [(name, count / total) for name, count in self.others.most_common() if count >= total / 100]
        names = ", ".join(f"{name} ({share:.0%})" for name, share in left[:6])
        return (
            f"LoRA adapts {self.share:.0%} of the weights in the decoder layers: {', '.join(sorted(self.adapted))}. "
            f"Without an adapter: {names}"
            + (f". PEFT takes none on {', '.join(self.refused)} here" if self.refused else "")
        )

    @property
    def is_partial(self) -> bool:
        """Whether a person should know: the most is left out, or something that all-linear names."""
        return self.share < 0.5 or bool(self.refused)


def measure_coverage(model: nn.Module) -> AdapterCoverage | None:
    """None without adapters. Of a whole model, before it is split over ranks."""
    if not hasattr(model, "peft_config"):
        return None
    from peft.tuners.lora.layer import ParamWrapper
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = decoder_layers(model)
    wrapped = {id(m.get_param()) for layer in layers for m in layer.modules() if isinstance(m, ParamWrapper)}
    coverage = AdapterCoverage(Counter(), Counter())
    left: set[str] = set()  # linear layers without an adapter
    for layer in layers:
        modules, sizes = dict(layer.named_modules()), sizes_of(layer)
        for name, parameter in layer.named_parameters():
            *_, holder, key = ("layer", *name.replace(".base_layer", "").split("."))
            tuner = modules.get(name.rpartition(".base_layer.")[0])
            if any(f".{part}." in name for part in _ADAPTER_PARTS):
                continue
            if ".modules_to_save." in name:
                coverage.adapted[holder] += sizes[id(parameter)]
                continue
            if id(parameter) in wrapped:
                coverage.adapted[holder if key == "weight" else f"{holder}.{key}"] += sizes[id(parameter)]
            elif isinstance(tuner, BaseTunerLayer) and not isinstance(tuner, ParamWrapper):
                coverage.adapted[holder] += sizes[id(parameter)]
            else:
                coverage.others[f"{holder}.{key}"] += sizes[id(parameter)]
                left |= {holder} if _is_linear(modules[name.rpartition(".")[0]]) else set()
    # Whoever leaves out others as well has named what is to be adapted.
    return replace(coverage, refused=tuple(sorted(left))) if left == _refused_by_peft(model, left) else coverage


def _refuse_unmatched(model: nn.Module, targets: Sequence[str]) -> None:
    names = [
        *_module_names(model),
        *(f"{name}.{key}" for name, m in model.named_modules() for key in expert_parameters(m)),
    ]
    for target in targets:
        if not _matches(target, names):
            raise ValueError(
                f"lora.targets {target!r} matches no module of {type(causal_lm(model)).__name__}; "
                f"its linear layers are {', '.join(_linear_names(model))}"
                + (f", its experts {', '.join(_expert_names(model))}" if _expert_names(model) else "")
            )


def _module_names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules()]


def _matches(target: str, names: Iterable[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for name in names)


def _compute_narrowly(model: nn.Module) -> None:
    """Adapters on parameters as products of their narrow matrices: PEFT would add them to the whole weight in every
    pass, for all experts, and have a gradient of that size. Same numbers, but for the order of sums.

    Kinds of their own and no functions of each layer, for which the compiler would compile every layer anew.
    """
    from peft.tuners.lora.layer import ParamWrapper

    of_linear, of_experts = _narrow_kinds()
    for layer in model.modules():
        if not isinstance(layer, ParamWrapper):
            continue
        base = layer.get_base_layer()
        if type(base) is nn.Linear and layer.parameter_name == "weight":
            layer.__class__ = of_linear
        elif follows_transformers(base):
            # Of several around one module the outermost is called, and computes with all of them.
            layer.__class__ = of_experts


@functools.cache
def _narrow_kinds() -> tuple[type[Any], type[Any]]:
    from peft.tuners.lora.layer import ParamWrapper

    class NarrowLinear(ParamWrapper):
        forward = _narrow_linear

    class NarrowExperts(ParamWrapper):
        forward = _narrow_experts  # type: ignore[assignment] # called like the experts themselves

    return NarrowLinear, NarrowExperts


def _peft_forward(layer: Any, *arguments: Any) -> Tensor:
    from peft.tuners.lora.layer import ParamWrapper

    return ParamWrapper.forward(layer, *arguments)


def _active_adapter(layer: Any) -> str | None:
    """The one adapter to compute with; None: PEFT's own way, which knows all cases."""
    adapters = [name for name in layer.active_adapters if name in layer.lora_A]
    return adapters[0] if len(adapters) == 1 and not layer.disable_adapters and not layer.merged else None


def _narrow_linear(layer: Any, x: Tensor) -> Tensor:
    adapter = _active_adapter(layer)
    if adapter is None:
        return _peft_forward(layer, x)
    narrow = layer.lora_A[adapter](x.to(layer.lora_A[adapter].weight.dtype))
    return layer.base_layer(x) + (layer.lora_B[adapter](narrow) * layer.scaling[adapter]).to(x.dtype)


def _narrow_experts(outermost: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    experts, layer, found = outermost.get_base_layer(), outermost, {}
    while layer is not experts:
        if (adapter := _active_adapter(layer)) is None:
            return _peft_forward(outermost, hidden, chosen, weights)
        found[layer.parameter_name] = expert_adapter(layer, adapter)
        layer = layer.base_layer
    if is_divided(experts):
        return experts(hidden, chosen, weights, found)  # called, for what else happens around it
    return compute_experts(experts, hidden, chosen, weights, found)


def expert_adapter(layer: Any, adapter: str) -> ExpertAdapter:
    """From PEFT's layout: of its first matrix the rows go by expert and then rank, of its second the columns by rank
    and then expert."""
    first, second = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    into = first.unflatten(0, (layer.num_experts, -1))  # [experts, rank, in]
    out_of = second.unflatten(1, (-1, layer.num_experts)).permute(2, 1, 0)  # [experts, rank, out]
    missing = -into.shape[1] % 8 if first.device.type == "cuda" else 0  # kernels take rows of whole 16 bytes
    if missing:
        into, out_of = (F.pad(half, (0, 0, 0, missing)) for half in (into, out_of))
    return ExpertAdapter(into.transpose(1, 2), out_of.contiguous(), layer.scaling[adapter])


def speed_up_eager(model: nn.Module) -> None:
    """Fewer passes over memory in plain LoRA layers, with the same results. Not for compiled models."""
    if "peft" not in sys.modules:  # then nobody has made a layer of it, and to import it takes most of a second
        return
    from peft.tuners.lora import Linear
    from peft.tuners.lora.layer import ParamWrapper

    for layer in model.modules():
        if isinstance(layer, (Linear, ParamWrapper)) and type(layer.base_layer) is nn.Linear and not layer.lora_variant:
            layer.forward = functools.partial(_lean_forward, layer)  # type: ignore[method-assign]


def is_sped_up(layer: nn.Module) -> bool:
    """By `speed_up_eager`."""
    forward = layer.__dict__.get("forward")
    return isinstance(forward, functools.partial) and forward.func is _lean_forward


def _lean_forward(layer: Any, x: Tensor, *arguments: object, **options: object) -> Tensor:
    adapters = layer.active_adapters
    plain = len(adapters) == 1 and adapters[0] in layer.lora_A and not layer.disable_adapters and not layer.merged
    if arguments or options or not plain:
        return type(layer).forward(layer, x, *arguments, **options)
    (name,) = adapters
    base, down, up = layer.base_layer, layer.lora_A[name].weight, layer.lora_B[name].weight
    known = not base.weight.requires_grad and layer.lora_B[name].bias is None
    if not known or not base.weight.dtype == down.dtype == x.dtype:
        return type(layer).forward(layer, x)
    tokens = x.flatten(0, -2)
    dropout = layer.lora_dropout[name]
    dropped = dropout(tokens) if layer.training and not isinstance(dropout, nn.Identity) else None
    product = _LoraProduct.apply(tokens, dropped, base.weight, base.bias, down, up, layer.scaling[name])
    return product.view(*x.shape[:-1], -1)


class _Context(FunctionCtx):
    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]
    scaling: float


class _LoraProduct(torch.autograd.Function):
    """[T, in] -> [T, out] of a frozen layer and its adapter. Sums are taken inside the products, forward and backward.

    `dropped`: the adapter's input, where it is not `x`.
    """

    @staticmethod
    def forward(
        ctx: _Context,
        x: Tensor,
        dropped: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        down: Tensor,
        up: Tensor,
        scaling: float,
    ) -> Tensor:
        adapter_input = x if dropped is None else dropped
        narrow = (adapter_input @ down.T).mul_(scaling)
        ctx.save_for_backward(adapter_input, weight, down, up, narrow)
        ctx.scaling = scaling
        return F.linear(x, weight, bias).addmm_(narrow, up.T)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        adapter_input, weight, down, up, narrow = ctx.saved_tensors
        needs_x, needs_dropped, _, needs_bias = ctx.needs_input_grad[:4]
        d_narrow = (grad @ up).mul_(ctx.scaling)
        d_x = grad @ weight if needs_x else None
        d_dropped = None
        if needs_dropped:
            d_dropped = d_narrow @ down
        elif d_x is not None:
            d_x.addmm_(d_narrow, down)
        d_bias = grad.sum(0) if needs_bias else None  # PEFT's `bias` setting trains the frozen layer's
        return d_x, d_dropped, None, d_bias, d_narrow.T @ adapter_input, grad.T @ narrow, None


def _linear_names(model: nn.Module) -> list[str]:
    """Name endings of every linear layer inside the decoder layers but routers, long enough to be of nothing else: PEFT
    would put an adapter on whatever ends so, and layers of a list are called 0, 1, 2 like those of a Sequential."""
    routers = {id(module) for layer in decoder_layers(model) for module in _linear_routers(layer)}
    inside = {id(module) for layer in decoder_layers(model) for module in layer.modules() if _is_linear(module)}
    paths = {f".{name}": id(module) for name, module in model.named_modules()}
    others = [path for path, module in paths.items() if module not in inside]
    routing = [path for path, module in paths.items() if module in routers]

    def is_taken(end: str) -> bool:
        beside = routing + (others if end[1:].split(".")[0].isdigit() else [])
        return any(path.endswith(end) for path in beside)

    names = set()
    for path in (path for path, module in paths.items() if module in inside - routers):
        end = path[path.rindex(".") :]
        while is_taken(end):
            end = path[path.rindex(".", 0, len(path) - len(end)) :]
        names.add(end[1:])
    return sorted(names)


def targets_by_kind(model: nn.Module, *, attention: bool, mlp: bool, head: bool) -> tuple[str, ...]:
    """What `all-linear` adapts, but for the parts that are not wanted, and the head. For LoraConfig.targets.

    `attention`: whatever mixes tokens, states and convolutions too. `mlp`: everything else, experts included.
    """
    kinds = {
        name: kind_of(layer, f"{name}.weight") in ("attention", "mixer")
        for layer in decoder_layers(model)
        for name, module in layer.named_modules()
        if _is_linear(module)
    }
    wanted = {True: attention, False: mlp}
    found = [
        end
        for end in sorted(set(_linear_names(model)) - _refused_by_peft(model, _linear_names(model)))
        if any(wanted[mixes] for name, mixes in kinds.items() if _matches(end, [name]))
    ]
    unwanted = [
        name for name, mixes in kinds.items() if not wanted[mixes] and any(_matches(end, [name]) for end in found)
    ]
    if unwanted:  # one ending for both: only whole names tell them apart
        inside = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
        named = [(name, module) for name, module in causal_lm(model).named_modules() if id(module) in inside]
        found = [name for name, m in named if _is_linear(m) and not any(name.endswith(f".{end}") for end in unwanted)]
    found += _expert_names(model) if mlp else []
    if head:
        output = causal_lm(model).get_output_embeddings()
        found += [name for name, module in causal_lm(model).named_modules() if module is output]
    if not found:
        raise ValueError("an adapter needs at least one of attention, MLP and head to be on")
    return tuple(found)


def _linear_routers(layer: nn.Module) -> list[nn.Module]:
    """Linear layers that choose among experts, in a decoder layer that has some (AFMoE, DBRX)."""
    if not any("expert" in type(module).__name__.lower() for module in layer.modules()):
        return []
    linear = [(name, module) for name, module in layer.named_modules() if _is_linear(module)]
    return [module for name, module in linear if kind_of(layer, f"{name}.weight") == "router"]


def _vision_linear_names(model: nn.Module) -> list[str]:
    """Full names, of what model.vision trains."""
    causal = causal_lm(model)
    trained = {id(parameter) for _, _, parameter in vision_parameters(causal) if parameter.requires_grad}
    return [name for name, m in causal.named_modules() if _is_linear(m) and id(m.weight) in trained]


def _expert_names(model: nn.Module) -> list[str]:
    """Name endings of the stacked matrices of experts inside the decoder layers: their module's and their own."""
    names = set()
    for layer in decoder_layers(model):
        for name, module in layer.named_modules():
            names |= {f"{name.rsplit('.', 1)[-1]}.{key}" for key in expert_parameters(module)}
    return sorted(names)


def _is_linear(module: nn.Module) -> bool:
    """GPT-2's Conv1D is a transposed linear layer; a router may be a linear layer that returns more than a product."""
    from transformers.pytorch_utils import Conv1D

    if not isinstance(module, (nn.Linear, Conv1D)):
        return False
    kind: Any = type(module)
    return kind.forward in (nn.Linear.forward, Conv1D.forward) or _multiplies(kind)


@functools.cache
def _multiplies(kind: Any) -> bool:
    """Whether a kind of linear layer computes the product by code of its own (Falcon): seen on a small one."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        try:
            small, x = kind(3, 2).double(), torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.0, -1.0]], dtype=torch.float64)
            found = small(x)
        except Exception:  # it is made in another way
            return False
        return isinstance(found, Tensor) and torch.allclose(found, F.linear(x, small.weight, small.bias))
