"""Where a training step's time goes: torch's profiler, its events sorted into parts.

While it is profiled, the calls that make up a part carry the part's name. An operator belongs to
the most particular part that it runs within (they are listed by that); one of the backward pass,
to the part of the operator that it differentiates, whose sequence number it has.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import record_function

from model.attention import CORES
from model.encoder import Embeddings, FeedForward
from model.heads import LanguageModelHead
from trainer.engine import Engine

PARTS = (
    "data",
    "communication",
    "rotary",
    "head",
    "attention",
    "norm",
    "optimizer",
    "matmul",
    "activation",
    "embeddings",
)
"""By rank: the first of those that an operator runs within has it."""
OTHER = "other"

MODULES: dict[type[nn.Module], str] = {
    LanguageModelHead: "head",
    nn.LayerNorm: "norm",
    nn.Linear: "matmul",
    FeedForward: "activation",
    Embeddings: "embeddings",
    **{core: "attention" for core in CORES.values()},
}
OPERATORS = {
    "_InPlace": "rotary",
    "_InPlaceBackward": "rotary",
    "roformer::rotate_split": "rotary",
    "roformer::rotate_gather": "rotary",
    "aten::mm": "matmul",
    "aten::addmm": "matmul",
}
COLLECTIVES = (
    "all_reduce",
    "reduce",
    "broadcast",
    "barrier",
    "all_gather",
    "all_gather_object",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
)
BACKWARD = "autograd::engine::evaluate_function: "
PREFIX = "part: "
"""Of the ranges that carry a part's name."""


@dataclass(frozen=True)
class Breakdown:
    """What some steps took on one rank."""

    seconds: dict[str, float]
    """By part; what is in none is `other`."""
    matmul_flops: int
    """Operations of the products that are counted as `matmul`."""


@contextmanager
def named_parts(module: nn.Module, engine: Engine) -> Iterator[None]:
    """Let the calls of a model, an engine and torch.distributed carry their part's name."""
    with ExitStack() as patches:
        for child in module.modules():
            if part := MODULES.get(type(child)):
                patches.enter_context(_named(child, "forward", part))
        patches.enter_context(_named(engine, "step", "optimizer"))
        for name in COLLECTIVES:
            patches.enter_context(_named(torch.distributed, name, "communication"))
        patches.enter_context(_named(torch.distributed.Work, "wait", "communication"))
        yield


@contextmanager
def _named(owner: Any, attribute: str, part: str) -> Iterator[None]:
    """Wrap a function of an object, module or class for a while."""
    function: Callable[..., Any] = getattr(owner, attribute)
    own = attribute in vars(owner)

    @wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        with record_function(PREFIX + part):
            return function(*args, **kwargs)

    setattr(owner, attribute, named)
    try:
        yield
    finally:
        if own:
            setattr(owner, attribute, function)
        else:
            delattr(owner, attribute)


def break_down(events: Iterable[FunctionEvent], *, on_device: bool) -> Breakdown:
    """Sort events into parts.

    Args:
        events: Of torch's profiler, recorded within `named_parts`, with FLOPs.
        on_device: Add up what GPUs took rather than what this process took.
    """
    events = sorted(events, key=lambda event: event.time_range.start)
    forward: dict[int, str] = {}
    for event in events:  # the last operator of a number is the one that autograd gave it to
        if event.sequence_nr >= 0 and not any(e.name.startswith(BACKWARD) for e in _chain(event)):
            forward[event.sequence_nr] = part_of(event, {})
    seconds: defaultdict[str, float] = defaultdict(float)
    flops = 0
    for event in events:
        part = part_of(event, forward)
        own = event.self_device_time_total if on_device else event.self_cpu_time_total
        seconds[part] += own / 1e6
        flops += (event.flops or 0) * (part == "matmul")
    return Breakdown(dict(seconds), flops)


def part_of(event: FunctionEvent, forward: dict[int, str]) -> str:
    """Return the part of an event; `forward` has those of the forward pass by sequence number."""
    within, is_called = set(), False
    for outer in _chain(event):
        if outer.name.startswith(PREFIX):
            within.add(outer.name.removeprefix(PREFIX))
            is_called = True
        elif outer.name.startswith(BACKWARD) and not is_called:  # not computed once more, or sent
            within.add(forward.get(outer.sequence_nr, OTHER))
        elif outer.name in OPERATORS:
            within.add(OPERATORS[outer.name])
    return next((part for part in PARTS if part in within), OTHER)


def _chain(event: FunctionEvent | None) -> Iterator[FunctionEvent]:
    """Yield an event and what it runs within, outwards."""
    while event is not None:
        yield event
        event = event.cpu_parent
