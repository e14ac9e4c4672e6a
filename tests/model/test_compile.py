"""What torch.compile makes of a layer: one graph for everything, and the same numbers.

tests/integration/test_exactness.py trains with Inductor's code under every ZeRO stage.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from model import encoder
from model.encoder import tokenwise
from model.heads import LanguageModel
from tests.model.helpers import difference, document, restarting, small_model

pytestmark = [  # torch's own, while it compiles
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]
STAGES = [(13,), (40, 2), (8,) * 9, (1,), (5, 60)]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    graph = torch.compile(tokenwise, dynamic=True, backend=counter)
    monkeypatch.setattr(encoder, "_graph", lambda: graph)
    yield counter
    torch._dynamo.reset()


def loss_and_gradients(
    model: LanguageModel, lengths: tuple[int, ...], num_targets: int
) -> list[Tensor]:
    ids = document(sum(lengths), 0)
    index = torch.arange(num_targets)
    torch.manual_seed(5)
    total = model(ids, restarting(lengths), lengths, index, ids[index]).total
    return [total.detach(), *torch.autograd.grad(total, list(model.parameters()))]


@pytest.mark.parametrize("checkpoint_layers", [False, True])
def test_one_graph_serves_all_layers_packs_and_stages(
    graphs: CompileCounterWithBackend, checkpoint_layers: bool
) -> None:
    eager = small_model(dropout=0.0)
    compiled = small_model(compile_layers=True, checkpoint_layers=checkpoint_layers)
    first = 0
    for lengths in STAGES:
        for num_targets in (0, 1, 2, 7):
            case = lengths, min(num_targets, sum(lengths))
            for ours, theirs in zip(
                loss_and_gradients(compiled, *case), loss_and_gradients(eager, *case), strict=True
            ):
                assert difference(ours, theirs) < 1e-9
            first = first or graphs.frame_count
    assert graphs.frame_count == first > 0


def test_an_evaluation_takes_one_graph_more(graphs: CompileCounterWithBackend) -> None:
    model = small_model(compile_layers=True, dropout=0.1)
    first = 0
    for lengths in STAGES:
        loss_and_gradients(model.train(), lengths, 1)
        with torch.no_grad():
            ids = document(sum(lengths), 0)
            model.eval()(ids, restarting(lengths), lengths, torch.arange(1), ids[:1])
            none = torch.zeros(0, dtype=torch.long)
            model(none, none, (), none, none)
        first = first or graphs.frame_count
    assert graphs.frame_count == first > 1


def test_the_count_sees_graphs_of_special_sizes(
    graphs: CompileCounterWithBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder, "tokenwise_compiled", lambda *layer: encoder._graph()(*layer))
    model = small_model(compile_layers=True)
    counts = []
    for num_targets in (2, 0, 1):
        loss_and_gradients(model, (13,), num_targets)
        counts.append(graphs.frame_count)
    assert counts[0] < counts[1] < counts[2]
