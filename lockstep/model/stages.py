"""A model cut into pipeline stages of consecutive layers.

Layers of other stages become pass-throughs, so every parameter keeps its name. Layers are found from the model's own
pipeline plan; a model whose forward does more than its layers is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lockstep.model.parts import sizes_of
from lockstep.model.policy import PackedTokens, Policy, causal_lm

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PassThrough(nn.Module):
    """Replaces a module of another stage. It has that module's plain attributes, which models read."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        plain = {k: v for k, v in vars(original).items() if isinstance(v, (bool, int, float, str)) and k != "training"}
        self.__dict__.update(plain)

    def forward(self, hidden_states: Tensor, *arguments: object, **options: object) -> Tensor:
        return hidden_states


class Stage(nn.Module):
    """Consecutive layers of a policy: the first stage also embeds, the last also has norm and head.

    Parameters are shared with the policy. Set before a pass: `micro_batches`, and `finish`, which the last stage calls
    with a micro-batch's number and hidden states.
    """

    def __init__(self, policy: Policy, layers: range, num_layers: int) -> None:
        super().__init__()
        self.layers = layers
        self.is_first, self.is_last = layers.start == 0, layers.stop == num_layers
        self.body = _body_of(policy, layers, num_layers)
        causal = causal_lm(policy.model)
        self.head = causal.get_output_embeddings() if self.is_last else None
        # Beside a head that shares its matrix, so that both are replaced together.
        self.tied = causal.get_input_embeddings() if self.is_last and _is_tied(causal) else None
        self._policy = [policy]  # in a list, so that it is no submodule
        self.micro_batches: Sequence[PackedTokens] = ()
        self.finish: Callable[[int, Tensor], Tensor] | None = None

    def forward(self, hidden: Tensor, number: Tensor) -> Tensor:
        """[1, T, H] hidden states in and out; the first stage ignores its input, the last one returns `finish`'s."""
        (policy,) = self._policy
        packed = self.micro_batches[int(number)]
        inputs = {"input_ids": packed.tokens[None]} if self.is_first else {"inputs_embeds": hidden}
        hidden = policy.run_layers(self.body, packed, inputs)
        if not self.is_last:
            return hidden
        assert self.finish is not None
        return self.finish(int(number), hidden[0])


def keep_layers(policy: Policy, kept: Sequence[range], num_layers: int) -> None:
    """Keep only these layers on this rank, with the embedding for the first stage and the head for the last."""
    causal = causal_lm(policy.model)
    base, names = causal.base_model, pipeline_names(causal)
    tied = _is_tied(causal)
    mine = {i for layers in kept for i in layers}
    layers = getattr(base, names["layers"])
    for i, layer in enumerate(layers):
        if i not in mine:
            layers[i] = PassThrough(layer)
    # A tied embedding stays beside the head: both are saved under its name.
    if 0 not in mine and not (tied and num_layers - 1 in mine):
        setattr(base, names["embedding"], PassThrough(getattr(base, names["embedding"])))
    if num_layers - 1 not in mine:
        setattr(base, names["norm"], PassThrough(getattr(base, names["norm"])))
        causal.set_output_embeddings(PassThrough(causal.get_output_embeddings()))


def layer_costs(policy: Policy) -> tuple[list[float], float]:
    """(of each layer, of the head), in parameters, to which the compute per token is proportional."""
    causal = causal_lm(policy.model)
    layers = getattr(causal.base_model, pipeline_names(causal)["layers"])
    costs = [float(sum(sizes_of(layer).values())) for layer in layers]
    return costs, float(causal.get_output_embeddings().weight.numel())


def head_alone(policy: Policy) -> PreTrainedModel:
    """The model with every layer passed through: its head, and what it does to logits after that."""
    causal = causal_lm(policy.model)
    alone = copy.copy(causal)
    num_layers = len(getattr(causal.base_model, pipeline_names(causal)["layers"]))
    alone._modules = {**causal._modules, causal.base_model_prefix: _body_of(policy, range(0), num_layers)}
    return alone


@torch.no_grad()
def check_divisible(policy: Policy) -> None:
    """With every layer passed through, the model must return its input: nothing happens between layers. Nor may layers
    share parameters."""
    causal = causal_lm(policy.model)
    layers = getattr(causal.base_model, pipeline_names(causal)["layers"])
    held = [p for layer in layers for p in {id(p): p for p in layer.parameters()}.values()]
    if len(held) > len({id(p) for p in held}):
        raise ValueError(
            f"layers of {type(causal).__name__} share parameters, so it cannot be cut into stages: set "
            "parallel.pipeline to 1"
        )
    body = _body_of(policy, range(0), len(layers))
    device = next(p.device for p in causal.parameters())
    size = causal.config.get_text_config().hidden_size
    hidden = torch.linspace(-1, 1, 4 * size, device=device, dtype=next(causal.parameters()).dtype).view(1, 4, size)
    positions = torch.arange(4, device=device)
    packed = PackedTokens(positions, positions, (4,), positions[:0], positions[:0])
    try:
        is_unchanged = torch.equal(policy.run_layers(body, packed, {"inputs_embeds": hidden}), hidden)
    except (TypeError, AttributeError, LookupError, RuntimeError):  # it wants more of its layers than to call them
        is_unchanged = False
    if not is_unchanged:
        raise ValueError(
            f"{type(causal).__name__} changes hidden states outside its layers, so it cannot be cut into stages: "
            "set parallel.pipeline to 1"
        )


def _body_of(policy: Policy, layers: range, num_layers: int) -> nn.Module:
    """The model without its head, sharing modules, with pass-throughs for all that is not in `layers`."""
    causal = causal_lm(policy.model)
    base, names = causal.base_model, pipeline_names(causal)
    body = copy.copy(base)
    body._modules = dict(base._modules)
    own = getattr(base, names["layers"])
    body._modules[names["layers"]] = nn.ModuleList(
        layer if i in layers else PassThrough(layer) for i, layer in enumerate(own)
    )
    if layers.start != 0 or not len(layers):
        body._modules[names["embedding"]] = PassThrough(getattr(base, names["embedding"]))
    if layers.stop != num_layers or not len(layers):
        body._modules[names["norm"]] = PassThrough(getattr(base, names["norm"]))
    return body


def _is_tied(causal: PreTrainedModel) -> bool:
    ends = (causal.get_output_embeddings(), causal.get_input_embeddings())
    head, embedding = (getattr(module, "weight", None) for module in ends)
    return head is not None and head is embedding


def _is_held(part: nn.Module) -> bool:
    """By some stage: one that has nothing to train is in all of them."""
    return isinstance(part, PassThrough) or next(part.parameters(), None) is not None


def pipeline_names(causal: PreTrainedModel) -> dict[str, str]:
    """Attribute names of embedding, layers and final norm: from the model's own plan, or from its parts where it has
    none and they are no more than these three."""
    plan = getattr(causal, "_pp_plan", None) or {}
    prefix = causal.base_model_prefix + "."
    base = causal.base_model
    inner = [name.removeprefix(prefix) for name in plan if name.startswith(prefix)]
    inner = inner or [name for name, part in base.named_children() if _is_held(part)]
    lists = [name for name in inner if isinstance(getattr(base, name, None), nn.ModuleList)]
    others = [name for name in inner if name not in lists]
    embedding = causal.get_input_embeddings()
    if len(lists) != 1 or len(others) != 2 or not any(getattr(base, name, None) is embedding for name in others):
        raise ValueError(
            f"{type(causal).__name__} has no plan for pipeline parallelism, and more parts than an embedding, layers "
            "and a norm: set parallel.pipeline to 1"
        )
    first = next(name for name in others if getattr(base, name) is embedding)
    return {"layers": lists[0], "embedding": first, "norm": next(name for name in others if name != first)}
