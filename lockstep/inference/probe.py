"""In which way a decoder calls its model: the fastest that gives the model's own logits, token by token."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch import nn

from lockstep.inference.fused_linear import recorded_groups
from lockstep.inference.kv_cache import UnsupportedModelError
from lockstep.inference.model_call import ModelCall, possible_calls
from lockstep.inference.model_check import FloatsStayWide, ModelCheck, WrongLogitsError
from lockstep.model.policy import CausalLM, attention_problem, causal_lm

if TYPE_CHECKING:
    from lockstep.inference.decoder import Decoder


def find_call(decoder: Decoder, model: CausalLM, *, fuses: bool) -> list[list[nn.Module]]:
    """The decoder uses it afterwards. Returns the linear layers that have the same input. All ranks.

    Raises UnsupportedModelError where no way gives the model's own logits. `fuses`: see Decoder.
    """

    def announce() -> None:
        decoder.announce(working=True)

    causal = causal_lm(model)
    is_narrow = causal.dtype not in (torch.float32, torch.float64)
    # Several processes exchange parts of a model in the precision that they hold.
    exact = ModelCheck.widened(model, announce) if is_narrow and not decoder.sharded else None
    check = ModelCheck(model, announce, exact)
    why = attention_problem(causal)
    for call in possible_calls(model, attends=not why):
        decoder.use_call(call, {})
        try:
            with decoder.in_use():
                if exact is not None:
                    _probe_widened(decoder, call, exact)
                return _probe(decoder, call, check, fuses=fuses)
        except UnsupportedModelError as error:
            why = why or str(error)
        finally:
            decoder.release()
    raise UnsupportedModelError(why)


def _probe_widened(decoder: Decoder, call: ModelCall, exact: ModelCheck) -> None:
    """Where parts of the model cannot be computed in float32, the probe in its own precision has to do.

    Without kernels: none has to be compiled for it, and that probe tries them. Every pass widens all weights.
    """
    try:
        with FloatsStayWide():
            _probe(decoder, call, exact, fuses=False, kernels=False)
    except WrongLogitsError:
        raise
    except (UnsupportedModelError, torch.OutOfMemoryError):
        pass
    finally:
        decoder.release()


def _probe(
    decoder: Decoder, call: ModelCall, check: ModelCheck, *, fuses: bool, kernels: bool = True
) -> list[list[nn.Module]]:
    """Find the shapes of the cache; then two texts token by token must give the model's own logits."""
    if call.cache is not None:
        call.cache.shapes.clear()
    elif kernels:
        check.refuse_other_state(call)
    decoder.use_call(call, check.find_shapes(call), kernels=kernels)
    no_adapters = torch.zeros(len(check.texts), dtype=torch.int64, device=decoder.device)
    with check.refusing("cannot be called for it"):
        decoder.prepare(len(check.texts), len(check.texts[0]))
        decoder.prefill([(slot, text[:-2]) for slot, text in enumerate(check.texts)])
        with recorded_groups(call.model) as groups, decoder.adapted(no_adapters):
            _compare_step(decoder, check, -2)
        if fuses:
            decoder.fuse(groups)
        fused = contextlib.nullcontext() if decoder.linears is None else decoder.linears.installed()
        with decoder.adapted(no_adapters), fused:
            _compare_step(decoder, check, -1)
    return groups


def _compare_step(decoder: Decoder, check: ModelCheck, place: int) -> None:
    """`place`: of the tokens, from the end of their texts."""
    slots, positions = range(len(check.texts)), [len(text) + place for text in check.texts]
    streams = torch.zeros(len(slots), dtype=torch.int64)
    decoder.slots.place(slots, [text[place] for text in check.texts], positions, streams)
    decoder.announce(working=True)
    check.compare(decoder.logits(len(slots), len(check.texts[0])), positions)
