"""The encoder and its language model: packing, causality, checkpointing, empty batches."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from model.encoder import Layer
from model.heads import LanguageModel
from tests.model.helpers import (
    KINDS,
    VOCAB,
    difference,
    document,
    logits,
    restarting,
    small_model,
)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 5e-6)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_document_is_the_same_alone_and_anywhere_in_a_pack(
    kind: str, dtype: torch.dtype, tolerance: float
) -> None:
    model = small_model(positions=kind, dtype=dtype)
    ids, others = document(11, 0), [document(length, length) for length in (11, 1, 30, 7)]
    (alone,) = logits(model, ids)
    assert 0.5 < alone.std() < 5  # the tolerance is absolute
    for place in range(len(others) + 1):
        packed = logits(model, *others[:place], ids, *others[place:])[place]
        assert difference(packed, alone) < tolerance
    beside = logits(model, ids, document(11, 99))[0]
    assert difference(beside, logits(model, ids, document(11, 98))[0]) < tolerance


@settings(max_examples=15, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6), causal=st.booleans())
def test_any_pack_equals_its_documents_alone(lengths: list[int], causal: bool) -> None:
    model = small_model(causal=causal)
    documents = [document(length, i) for i, length in enumerate(lengths)]
    for packed, ids in zip(logits(model, *documents), documents, strict=True):
        assert difference(packed, logits(model, ids)[0]) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_the_comparison_sees_a_leak_and_positions_that_run_on(kind: str) -> None:
    model = small_model(positions=kind)
    first, second = document(9, 0), document(9, 1)
    ids, index = torch.cat([first, second]), torch.arange(9, 18)
    (alone,) = logits(model, second)
    with torch.no_grad():
        leaking = model.logits(ids, restarting((9, 9)), (18,), index)
        running_on = model.logits(ids, torch.arange(18), (9, 9), index)
    assert difference(leaking, alone) > 0.01
    # Rope sees only distances and "none" sees nothing: to these two an offset makes no difference.
    assert (difference(running_on, alone) > 0.01) == (kind in ("learned", "sinusoidal"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [True, False])
def test_later_tokens_change_earlier_logits_only_without_causality(kind: str, causal: bool) -> None:
    model = small_model(positions=kind, causal=causal)
    ids = document(20, 0)
    (before,) = logits(model, ids)
    for place in (1, 10, 19):
        changed = ids.clone()
        changed[place] = (ids[place] + 1) % VOCAB
        (after,) = logits(model, changed)
        earlier = difference(after[:place], before[:place])
        assert earlier == 0 if causal else earlier > 1e-3
        assert difference(after[place:], before[place:]) > 1e-3


def loss_and_gradients(model: LanguageModel) -> tuple[Tensor, dict[str, Tensor]]:
    lengths = (8, 8, 5)
    torch.manual_seed(0)  # of the dropout
    out = model.logits(document(21, 0), restarting(lengths), lengths, torch.tensor([0, 7, 8, 20]))
    loss = nn.functional.cross_entropy(out, document(4, 1))
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(model.parameters()))
    return loss.detach(), gradients


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointing_changes_nothing(dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    original = Layer.forward

    def spy(self: Layer, *args: Any) -> Tensor:
        passes.append(self)
        return original(self, *args)

    monkeypatch.setattr(Layer, "forward", spy)
    loss, gradients = loss_and_gradients(small_model(dropout=dropout))
    assert len(passes) == 2
    again_loss, again = loss_and_gradients(small_model(dropout=dropout, checkpoint_layers=True))
    assert len(passes) == 2 + 2 * 2  # forward, and once more on the way back
    assert torch.equal(loss, again_loss)
    assert gradients.keys() == again.keys()
    assert all(torch.equal(gradients[name], again[name]) for name in gradients)
    other_loss, _ = loss_and_gradients(small_model(dropout=dropout, seed=1))
    assert abs(other_loss - loss) > 1e-3


def test_dropout_stands_where_the_paper_has_it_and_in_training_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates = []
    dropout = nn.functional.dropout

    def spy(x: Tensor, p: float, training: bool, inplace: bool) -> Tensor:
        rates.append(p if training else 0.0)
        return dropout(x, p, training, inplace)

    monkeypatch.setattr(nn.functional, "dropout", spy)
    model, ids = small_model(dropout=0.3), document(9, 0)
    (noisy,) = logits(model, ids)
    assert rates == [0.3] * 5  # the embeddings, and two sublayers in each of two layers
    (exact,) = logits(model.eval(), ids)
    assert rates[5:] == [0.0] * 5
    assert torch.equal(exact, logits(small_model(), ids)[0])
    assert difference(exact, noisy) > 0.1


def test_every_parameter_gets_a_gradient() -> None:
    for kind in KINDS:
        _, gradients = loss_and_gradients(small_model(positions=kind))
        assert all(gradient.abs().max() > 1e-9 for gradient in gradients.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpoint_layers", [False, True])
@pytest.mark.parametrize(("lengths", "index"), [((), []), ((5, 3), [])])
def test_empty_batches_have_a_result_and_zero_gradients(
    kind: str, checkpoint_layers: bool, lengths: tuple[int, ...], index: list[int]
) -> None:
    model = small_model(positions=kind, checkpoint_layers=checkpoint_layers)
    ids = document(sum(lengths), 0)
    out = model.logits(ids, restarting(lengths), lengths, torch.tensor(index, dtype=torch.long))
    assert out.shape == (0, VOCAB)
    out.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_selected_tokens_are_those_of_the_whole_result() -> None:
    model = small_model()
    ids, lengths = document(16, 0), (9, 7)
    index = torch.tensor([3, 15, 3, 0])
    with torch.no_grad():
        whole = model.encoder(ids, restarting(lengths), lengths)
        some = model.encoder(ids, restarting(lengths), lengths, select=index)
        at_targets = model.logits(ids, restarting(lengths), lengths, index)
        everywhere = model.logits(ids, restarting(lengths), lengths, torch.arange(16))
    assert whole.shape == (16, 32)
    assert difference(some, whole[index]) < 1e-13
    assert difference(at_targets, everywhere[index]) < 1e-12
    assert difference(some, whole[index + (index < 15)]) > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_longer_than_the_positions_are_refused(kind: str) -> None:
    model = small_model(positions=kind)
    assert logits(model, document(64, 0))[0].shape == (64, VOCAB)
    with pytest.raises(ValueError, match=r"65 tokens, but .* is 64"):
        logits(model, document(3, 0), document(65, 0))


def test_token_types_are_zero_unless_given() -> None:
    model, ids = small_model(), document(6, 0)
    rest = (restarting((6,)), (6,), torch.arange(6))
    with torch.no_grad():
        default, zeros, ones = (
            model.logits(ids, *rest, types)
            for types in (None, torch.zeros(6, dtype=torch.long), torch.ones(6, dtype=torch.long))
        )
    assert difference(default, zeros) < 1e-13
    assert difference(default, ones) > 0.01


def test_the_tied_weight_is_stored_once_and_used_twice() -> None:
    model = small_model()
    shapes = [tuple(value.shape) for value in model.state_dict().values()]
    assert shapes.count((VOCAB, 32)) == 1
    assert sum(p.numel() for p in model.parameters()) == sum(
        value.numel() for value in model.state_dict().values()
    )
    ids = torch.zeros(4, dtype=torch.long)
    (before,) = logits(model, ids)
    with torch.no_grad():
        model.encoder.embeddings.words.weight[5] += 1.0  # a word that the text does not have
    (after,) = logits(model, ids)
    moved = (after - before).abs().amax(dim=0)
    assert moved[5] > 0.1
    assert moved[:5].max() == moved[6:].max() == 0


def test_the_tied_weight_learns_from_both_its_uses() -> None:
    _, gradients = loss_and_gradients(small_model())
    read = document(21, 0).unique()
    size = gradients["encoder.embeddings.words.weight"].norm(dim=1)
    unread = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, read, False)
    assert size.min() > 1e-6  # the decoder's gradient reaches all words
    assert size[read].mean() > 1.5 * size[unread].mean()  # and the embedding's those of the text


def test_no_logits_but_those_at_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    linear = nn.functional.linear

    def spy(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows.append((len(weight), len(x)))
        return linear(x, weight, bias)

    monkeypatch.setattr(nn.functional, "linear", spy)
    lengths = (10, 10)
    small_model().logits(document(20, 0), restarting(lengths), lengths, torch.tensor([4, 15]))
    assert [count for size, count in rows if size == VOCAB] == [2]
    assert [count for size, count in rows if size == 96] == [20, 20]  # keys and values of all
    assert [count for size, count in rows if size == 48] == [20, 2]  # feed-forward
