"""Linear attention against the quadratic form of eq. 19 in fp64: values, gradients, what leaks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model.config import ModelConfig
from model.linear_attention import (
    CHUNK,
    FavorFeatures,
    LinearCore,
    chunks_of,
    orthogonal_gaussian,
    redraw,
)
from model.pack import Pack
from model.positions import RotaryPositions, Rotate
from tests.model.helpers import (
    KINDS,
    VOCAB,
    difference,
    document,
    logits,
    restarting,
    small_config,
    small_model,
)

H, D = 2, 8
MAPS = ("elu", "favor")
Features = Callable[[Tensor], Tensor]


def linear_config(features: str, **changes: Any) -> ModelConfig:
    sizes = {"hidden_size": H * D, "num_heads": H, "max_positions": 1024}
    return small_config(
        attention="linear", features=features, **{"num_features": 12, **sizes, **changes}
    )


def rotation(config: ModelConfig, lengths: tuple[int, ...]) -> Rotate:
    """Return eq. 15's rotation of every feature pair, as matrices in fp64."""
    theta = (
        config.rope_base ** (-torch.arange(0, config.query_size, 2) / config.query_size).double()
    )
    angles_TR = restarting(lengths)[:, None] * theta
    cos, sin = angles_TR.cos(), angles_TR.sin()
    blocks = torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)

    def turn(x_THF: Tensor) -> Tensor:
        pairs = x_THF.unflatten(-1, (-1, 2))
        return torch.einsum("trij,thrj->thri", blocks.to(x_THF.dtype), pairs).flatten(-2)

    return turn


def feature_map(core: LinearCore) -> Features:
    """Return phi as the papers write it, without what cancels."""
    if not isinstance(core.features, FavorFeatures):
        return lambda x: torch.where(x > 0, x + 1, x.exp())
    w = core.features.projection_FD.double()

    def favor(x: Tensor) -> Tensor:
        x = x / D**0.25
        exponent = torch.einsum("thd,fd->thf", x, w) - x.square().sum(-1, keepdim=True) / 2
        return exponent.exp() / len(w) ** 0.5

    return favor


def quadratic(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...],
    *,
    phi: Features,
    turn: Rotate | None,
    causal: bool,
    fault: str = "",
) -> Tensor:
    """Eq. 19 with all T x T weights, one block of the mask a document."""
    turn = turn or (lambda x: x)
    piece = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    allowed = piece[:, None] == piece[None, :]
    if causal:
        allowed &= torch.ones_like(allowed).tril(1 if fault == "sees one token ahead" else 0)
    q_plain, k_plain = phi(q), phi(k)
    q_turned, k_turned = turn(q_plain), turn(k_plain)
    if fault == "rotated before the map":
        q_turned, k_turned = phi(turn(q)), phi(turn(k))
    if fault == "rotated denominator":
        q_plain, k_plain = q_turned, k_turned
    if fault == "turned values":
        v = turn(v)
    weights = torch.einsum("mhf,nhf->hmn", q_turned, k_turned) * allowed
    total = (torch.einsum("mhf,nhf->hmn", q_plain, k_plain) * allowed).sum(-1)
    return torch.einsum("hmn,nhd->mhd", weights, v) / total.T[..., None]


def random_qkv(num_tokens: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, num_tokens, H, D, dtype=torch.float64, generator=generator)


def both(
    features: str, lengths: tuple[int, ...], causal: bool, turned: bool, fault: str = ""
) -> tuple[float, float]:
    """Return the largest differences of values and of gradients from the quadratic form."""
    config = linear_config(features, num_features=D if fault else 12)
    core = LinearCore(config, causal=causal)
    turn = rotation(config, lengths) if turned else None
    ours, theirs = (random_qkv(sum(lengths)).requires_grad_() for _ in range(2))
    out = core(*ours.unbind(), rotate=turn, pack=Pack(lengths))
    expected = quadratic(
        *theirs.unbind(), lengths, phi=feature_map(core), turn=turn, causal=causal, fault=fault
    )
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
    gradients = [
        torch.autograd.grad((y * weights).sum(), x)[0] for y, x in ((out, ours), (expected, theirs))
    ]
    return difference(out, expected), difference(*gradients)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    features=st.sampled_from(MAPS),
    lengths=st.lists(
        st.sampled_from([1, 2, 3, 3, 3, 17, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3]),
        min_size=1,
        max_size=6,
    ).map(tuple),
    causal=st.booleans(),
    turned=st.booleans(),
)
def test_values_and_gradients_equal_the_quadratic_form(
    features: str, lengths: tuple[int, ...], causal: bool, turned: bool
) -> None:
    values, gradients = both(features, lengths, causal, turned)
    assert values < 1e-12
    assert gradients < 1e-12


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("features", MAPS)
@pytest.mark.parametrize("lengths", [(1000,), (512, 1, 300, 300, 87)])
def test_long_pieces_equal_the_quadratic_form(
    features: str, causal: bool, lengths: tuple[int, ...], record_property: Callable[..., None]
) -> None:
    values, gradients = both(features, lengths, causal, turned=True)
    record_property("largest difference", max(values, gradients))
    assert values < 1e-12
    assert gradients < 1e-12


@pytest.mark.parametrize("features", MAPS)
@pytest.mark.parametrize(
    ("fault", "causal"),
    [
        ("rotated denominator", True),
        ("rotated denominator", False),
        ("rotated before the map", True),
        ("rotated before the map", False),
        ("sees one token ahead", True),
        ("turned values", False),
    ],
)
def test_the_comparison_sees_every_fault(features: str, fault: str, causal: bool) -> None:
    values, gradients = both(features, (150, 20, 20), causal, turned=True, fault=fault)
    assert values > 1e-3
    assert gradients > 1e-3


@pytest.mark.parametrize("features", MAPS)
def test_the_comparison_sees_documents_that_see_each_other(features: str) -> None:
    config = linear_config(features)
    q, k, v = random_qkv(40)
    for causal in (True, False):
        core = LinearCore(config, causal=causal)
        run = partial(quadratic, q, k, v, phi=feature_map(core), turn=None, causal=causal)
        out = core(q, k, v, rotate=None, pack=Pack((15, 20, 5)))
        assert difference(out, run((15, 20, 5))) < 1e-12
        assert difference(out, run((40,))) > 0.1
        assert difference(out, run((20, 15, 5))) > 0.1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", MAPS)
def test_a_later_token_changes_no_earlier_output_by_a_bit(
    features: str, dtype: torch.dtype
) -> None:
    length = 2 * CHUNK + 9
    lengths = (length, 40)
    config = linear_config(features)
    core = LinearCore(config, causal=True)
    turn = rotation(config, lengths)
    qkv = random_qkv(length + 40).to(dtype)
    before = core(*qkv, rotate=turn, pack=Pack(lengths))
    for place in (1, 60, CHUNK, length - 1):
        changed = qkv.clone()
        changed[:, place] = 7 * changed[:, place] + 1  # features of a size never seen before
        after = core(*changed, rotate=turn, pack=Pack(lengths))
        assert torch.equal(after[:place], before[:place])
        assert not torch.equal(after[place:length], before[place:length])
        assert torch.equal(after[length:], before[length:])  # nor of the next document


def test_the_usual_stabiliser_would_leak_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: the largest exponent of all keys, and a floor of 1e-6."""
    w = FavorFeatures(linear_config("favor")).projection_FD

    def usual(self: FavorFeatures, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = q / D**0.25, k / D**0.25
        out = []
        for x, dims in ((q, (-1,)), (k, (0, -1))):
            u = x @ w.to(x.dtype).T
            half = x.square().sum(-1, keepdim=True) / 2
            out.append((u - half - u.amax(dims, keepdim=True)).exp() + 1e-6)
        return out[0], out[1]

    monkeypatch.setattr(FavorFeatures, "forward", usual)
    core = LinearCore(linear_config("favor"), causal=True)
    qkv = random_qkv(50)
    before = core(*qkv, rotate=None, pack=Pack((50,)))
    qkv[1, 49] *= 7
    assert difference(core(*qkv, rotate=None, pack=Pack((50,)))[:49], before[:49]) > 0.01


@pytest.mark.parametrize("features", MAPS)
def test_a_token_that_sees_only_itself_gets_its_own_value(features: str) -> None:
    """Its weight is |R phi(q)| |R phi(k)| cos of the same angle: rotation cancels at distance 0."""
    config = linear_config(features)
    q, k, v = random_qkv(4)
    for turn in (None, rotation(config, (4,))):
        out = LinearCore(config, causal=False)(q, k, v, rotate=turn, pack=Pack((1, 1, 1, 1)))
        assert difference(out, v) < 1e-14


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("features", MAPS)
def test_low_precision_accumulates_in_fp32(features: str, causal: bool) -> None:
    """bf16 in, bf16 out: what is between costs less than rounding the result once."""
    lengths = (900, 100)
    config = linear_config(features)
    core = LinearCore(config, causal=causal)
    turn = rotation(config, lengths)
    exact = random_qkv(1000).bfloat16().double()
    out = core(*exact.bfloat16(), rotate=turn, pack=Pack(lengths))
    assert out.dtype == torch.bfloat16
    expected = core(*exact, rotate=turn, pack=Pack(lengths))
    assert difference(core(*exact.float(), rotate=turn, pack=Pack(lengths)), expected) < 2e-5
    rounding = expected.abs() * 2.0**-8  # half of the last of 8 bits
    assert ((out.double() - expected).abs() <= rounding + 2e-5).all()


@pytest.mark.parametrize("size", [1.0, 10.0, 1000.0])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("features", MAPS)
def test_queries_and_keys_of_any_size_give_numbers(
    features: str, causal: bool, size: float
) -> None:
    config = linear_config(features, hidden_size=2 * 128, num_features=64)
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(3, 300, 2, 128, generator=generator)
    qkv[:2] *= size
    qkv[:, 7] = 0
    qkv.requires_grad_()
    core = LinearCore(config, causal=causal)
    out = core(*qkv.unbind(), rotate=rotation(config, (300,)), pack=Pack((300,)))
    out.sum().backward()
    assert out.isfinite().all()
    assert qkv.grad is not None
    assert qkv.grad.isfinite().all()


@pytest.mark.parametrize("features", MAPS)
def test_heads_taken_a_few_at_a_time_change_nothing(
    features: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = linear_config(features, hidden_size=5 * D, num_heads=5)
    qkv = torch.randn(3, 90, 5, D, dtype=torch.float64)
    core = LinearCore(config, causal=True)
    turn = rotation(config, (60, 30))
    whole = core(*qkv, rotate=turn, pack=Pack((60, 30)))
    monkeypatch.setattr("model.linear_attention.BLOCK", 90 * 2 * config.query_size)
    seen = []
    forward = core.features.forward
    monkeypatch.setattr(
        core.features, "forward", lambda q, k: (seen.append(q.shape[1]), forward(q, k))[1]
    )
    assert difference(core(*qkv, rotate=turn, pack=Pack((60, 30))), whole) < 1e-13
    assert seen == [2, 2, 1]


@pytest.mark.parametrize("features", MAPS)
def test_an_empty_pack_stays_in_the_graph(features: str) -> None:
    qkv = random_qkv(0).requires_grad_()
    core = LinearCore(linear_config(features), causal=True)
    out = core(*qkv.unbind(), rotate=None, pack=Pack(()))
    out.sum().backward()
    assert out.shape == (0, H, D)
    assert qkv.grad is not None


@pytest.mark.parametrize("lengths", [(), (3,), (3, 3)])
def test_lengths_that_do_not_cover_the_pack_are_refused(lengths: tuple[int, ...]) -> None:
    core = LinearCore(linear_config("elu"), causal=False)
    with pytest.raises(RuntimeError, match="split_sizes"):
        core(*random_qkv(5), rotate=None, pack=Pack(lengths))


@pytest.mark.parametrize("length", [1, CHUNK, CHUNK + 1, 3 * CHUNK - 1, 32768])
def test_chunks_are_equal_and_hardly_padded(length: int) -> None:
    number, size = chunks_of(length)
    assert size <= CHUNK
    assert 0 <= number * size - length < number


class NumbersWritten(TorchDispatchMode):
    """Counts what every operation writes, forward and backward: work that FLOPs do not show."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.total += sum(x.numel() for x in tree_leaves(result) if isinstance(x, Tensor))
        return result


def written_per_token(
    attend: Callable[[Tensor, Rotate, tuple[int, ...]], Tensor], config: ModelConfig, length: int
) -> float:
    qkv = torch.randn(3, length, H, D, requires_grad=True)
    turn = RotaryPositions(config).rotation(torch.arange(length))
    with NumbersWritten() as numbers:
        attend(qkv, turn, (length,)).sum().backward()
    return numbers.total / length


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("features", MAPS)
def test_work_is_linear_in_the_length(features: str, causal: bool) -> None:
    config = linear_config(features, max_positions=8192)
    core = LinearCore(config, causal=causal)

    def attend(qkv: Tensor, turn: Rotate, lengths: tuple[int, ...]) -> Tensor:
        return core(*qkv.unbind(), rotate=turn, pack=Pack(lengths))

    short, long = (written_per_token(attend, config, length) for length in (1024, 8192))
    assert long < 1.02 * short


def test_a_loop_over_slices_would_not_be_linear() -> None:
    """The control of the test above: O(L^2 / C) in the backward pass, though not in FLOPs."""
    config = linear_config("elu", max_positions=8192)

    def attend(qkv: Tensor, turn: Rotate, lengths: tuple[int, ...]) -> Tensor:
        q, k, v = qkv.exp().unbind()
        state, out = torch.zeros(H, D, D), []
        for start in range(0, lengths[0], CHUNK):
            part = [x[start : start + CHUNK].transpose(0, 1) for x in (q, k, v)]
            out.append(part[0] @ state)
            state = state + part[1].mT @ part[2]
        return torch.cat(out, 1)

    short, long = (written_per_token(attend, config, length) for length in (1024, 8192))
    assert long > 4 * short


# -- random features ---------------------------------------------------------------------------


def test_rows_are_orthogonal_within_blocks_and_gaussian_by_themselves() -> None:
    rows = orthogonal_gaussian(40, 16, (0, 0, 0))
    for block in (rows[:16], rows[16:32], rows[32:]):
        products = block @ block.T
        assert np.abs(products - np.diag(np.diagonal(products))).max() < 1e-12
    many = np.concatenate([orthogonal_gaussian(16, 16, (1, 0, draw)) for draw in range(400)])
    assert abs(many.mean()) < 0.02
    assert np.abs(many.T @ many / len(many) - np.eye(16)).max() < 0.07
    lengths = (many**2).sum(1)
    assert abs(lengths.mean() - 16) < 0.4  # chi-squared of 16: mean 16, variance 32
    assert abs(lengths.var() - 32) < 3


def test_favor_estimates_the_softmax_kernel_without_bias() -> None:
    core = LinearCore(linear_config("favor", num_features=D, redraw_steps=1), causal=False)
    assert isinstance(core.features, FavorFeatures)
    q, k, _ = 0.5 * random_qkv(6)
    draws = []
    for step in range(1500):
        core.features.redraw(0, 0, step)
        phi = feature_map(core)
        draws.append(torch.einsum("mhf,nhf->hmn", phi(q), phi(k)))
    kernels = torch.stack(draws)
    error = kernels.std(0) / len(draws) ** 0.5
    products = torch.einsum("mhd,nhd->hmn", q, k)
    assert ((kernels.mean(0) - (products / D**0.5).exp()) / error).abs().max() < 4
    assert ((kernels.mean(0) - (products / D).exp()) / error).abs().max() > 6  # another scale


def test_draws_depend_on_seed_layer_and_step_alone() -> None:
    def projection(*key: int) -> Tensor:
        features = FavorFeatures(linear_config("favor", redraw_steps=10))
        features.redraw(3, 1, 4)  # whatever came before
        features.redraw(*key)
        return features.projection_FD

    first = projection(0, 0, 10)
    assert torch.equal(projection(0, 0, 19), first)
    for other in ((0, 0, 9), (0, 0, 20), (0, 1, 10), (1, 0, 10)):
        assert not torch.equal(projection(*other), first)
    fixed = FavorFeatures(linear_config("favor", redraw_steps=0))
    fixed.redraw(0, 0, 5)
    once = fixed.projection_FD
    fixed.redraw(0, 0, 10**6)
    assert torch.equal(fixed.projection_FD, once)


def test_a_models_layers_are_drawn_apart_and_nothing_of_it_is_saved() -> None:
    model = small_model(attention="linear", features="favor", num_features=8, redraw_steps=10)
    parameters = sum(p.numel() for p in small_model().parameters())
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model.state_dict().keys() == small_model().state_dict().keys()
    assert not list(model.buffers())
    ids = document(20, 0)
    redraw(model, 5, 1)
    first, second = (layer.attention.core.features for layer in model.encoder.layers)
    assert not torch.equal(first.projection_FD, second.projection_FD)
    (at_1,) = logits(model, ids)
    redraw(model, 5, 10)
    (at_10,) = logits(model, ids)
    redraw(model, 5, 9)
    assert torch.equal(logits(model, ids)[0], at_1)
    assert difference(at_1, at_10) > 1e-3
    model.bfloat16()
    assert first.projection_FD.dtype == torch.float32


# -- the whole model ---------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("features", MAPS)
@pytest.mark.parametrize("kind", KINDS)
def test_any_pack_equals_its_documents_alone(kind: str, features: str, causal: bool) -> None:
    model = small_model(positions=kind, causal=causal, attention="linear", features=features)
    documents = [document(length, length) for length in (11, 1, 30, 7, 7)]
    for packed, ids in zip(logits(model, *documents), documents, strict=True):
        assert difference(packed, logits(model, ids)[0]) < 1e-11


@pytest.mark.parametrize("features", MAPS)
@pytest.mark.parametrize("kind", KINDS)
def test_later_tokens_change_no_earlier_logits(kind: str, features: str) -> None:
    model = small_model(positions=kind, causal=True, attention="linear", features=features)
    ids = document(20, 0)
    (before,) = logits(model, ids)
    for place in (1, 10, 19):
        changed = ids.clone()
        changed[place] = (ids[place] + 1) % VOCAB
        (after,) = logits(model, changed)
        assert torch.equal(after[:place], before[:place])
        assert difference(after[place:], before[place:]) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("features", MAPS)
def test_checkpointing_and_bf16(features: str, kind: str) -> None:
    """Recomputed layers give the same gradients to the bit; bf16 gives nearly those of fp32."""
    gradients = {}
    for dtype in (torch.float32, torch.bfloat16):
        for kept in (False, True):
            model = small_model(
                positions=kind,
                causal=True,
                checkpoint_layers=kept,
                dtype=dtype,
                attention="linear",
                features=features,
            )
            lengths = (30, 30, 9)
            model.logits(
                document(69, 0), restarting(lengths), lengths, torch.arange(69)
            ).float().square().mean().backward()
            gradients[dtype, kept] = [p.grad for p in model.parameters()]
            assert all(g is not None and g.isfinite().all() for g in gradients[dtype, kept])
        pairs = zip(gradients[dtype, False], gradients[dtype, True], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    for fine, coarse in zip(
        gradients[torch.float32, False], gradients[torch.bfloat16, False], strict=True
    ):
        assert (fine - coarse.float()).norm() < 0.1 * fine.norm() + 1e-6


@pytest.mark.parametrize("checkpoint_layers", [False, True])
@pytest.mark.parametrize("features", MAPS)
@pytest.mark.parametrize(("lengths", "index"), [((), []), ((5, 3), [])])
def test_empty_batches_have_zero_gradients(
    features: str, checkpoint_layers: bool, lengths: tuple[int, ...], index: list[int]
) -> None:
    model = small_model(checkpoint_layers=checkpoint_layers, attention="linear", features=features)
    ids = document(sum(lengths), 0)
    out = model.logits(ids, restarting(lengths), lengths, torch.tensor(index, dtype=torch.long))
    out.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_rope_turns_as_many_features_as_there_are() -> None:
    config = linear_config("favor", num_features=20)
    rotate = RotaryPositions(config).rotation(torch.arange(9))
    x = torch.randn(9, H, 20)
    assert difference(rotate(x), rotation(config, (9,))(x)) < 1e-5
