"""The fused rotation on a CPU: values, gradients, ownership, torch.compile and checkpointing."""

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

from model.attention import SelfAttention
from model.kernels import rotary
from model.kernels.rotary import rotate, rotate_, rotate_gather, rotate_qk, rotate_split
from model.pack import Pack
from model.positions import RotaryPositions
from tests.model.helpers import difference, scatter_weights, small_config
from tests.model.kernels.cases import (
    DTYPES,
    error,
    exact_packed,
    pack,
    positions_of,
    turns_of,
)

LIMITS = {"fp32": 1e-6, "fp16": 0.5, "bf16": 0.5}
LAYOUT = pytest.mark.parametrize("halves", [False, True], ids=["pairs", "halves"])


def values_and_gradient(
    qkv: Tensor, gradient: Tensor, positions: Tensor | None, turns: Tensor, *, halves: bool
) -> tuple[Tensor, Tensor]:
    leaf = qkv.clone().requires_grad_()
    out = rotate_qk(leaf * 1, positions, turns, halves=halves)
    (back,) = torch.autograd.grad(out, leaf, gradient.unbind(1))
    return torch.stack(out, dim=1), back


@LAYOUT
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 257])
@pytest.mark.parametrize(("heads", "width", "size"), [(12, 64, 64), (1, 32, 20), (3, 96, 96)])
def test_equals_fp64(
    dtype: str, num_tokens: int, heads: int, width: int, size: int, halves: bool
) -> None:
    positions = positions_of(num_tokens)
    qkv, gradient = (pack((num_tokens, 3, heads, width), DTYPES[dtype], seed) for seed in (0, 1))
    results = values_and_gradient(qkv, gradient, positions, turns_of(size), halves=halves)
    for result, x, turned in zip(results, (qkv, gradient), (positions, -positions), strict=True):
        expected = exact_packed(x, turned, size, halves=halves)
        assert result.dtype == DTYPES[dtype]
        assert error(result, expected) <= LIMITS[dtype]
        if num_tokens > 1:
            assert error(result, exact_packed(x, -turned, size, halves=halves)) > 1
            assert error(result, exact_packed(x, turned, size, halves=not halves)) > 1
        # The plain formula is the same to a rounding.
        cos, sin = turns_of(size)[turned.abs()].unbind(-1)
        sin = sin if turned is positions else -sin
        plain = torch.stack(
            [*(rotate(x[:, i], cos, sin, halves=halves) for i in (0, 1)), x[:, 2]], dim=1
        )
        assert error(plain, expected) <= LIMITS[dtype]


def test_the_comparison_sees_tables_in_bf16() -> None:
    positions, qkv = positions_of(257), pack((257, 3, 4, 64), torch.float32)
    rounded = turns_of(64).bfloat16().float()
    for result, turned in zip(
        values_and_gradient(qkv, qkv, positions, rounded, halves=False),
        (positions, -positions),
        strict=True,
    ):
        assert error(result, exact_packed(qkv, turned, 64)) > 1e-3


@LAYOUT
@pytest.mark.parametrize("size", [6, 4])
@pytest.mark.parametrize("function", [rotate_qk, rotate_split])
def test_gradcheck(function: Callable[..., Any], size: int, halves: bool) -> None:
    qkv = pack((5, 3, 2, 6), torch.float64).requires_grad_()
    turns, positions = turns_of(size, torch.float64), torch.tensor([0, 5, 2, 0, 0])
    how = (positions, turns, halves) if function is rotate_split else (positions, turns)
    named = {} if function is rotate_split else {"halves": halves}
    assert torch.autograd.gradcheck(lambda x: function(x * 1, *how, **named), (qkv,))


@LAYOUT
def test_all_forms_give_the_same_bits(halves: bool) -> None:
    positions, turns = positions_of(50), turns_of(20)
    qkv = pack((50, 3, 4, 32), torch.bfloat16)
    split = torch.stack(rotate_split(qkv, positions, turns, halves), dim=1)
    out, back = values_and_gradient(qkv, qkv, positions, turns, halves=halves)
    assert torch.equal(out, split)
    by_rows, _ = values_and_gradient(qkv, qkv, None, turns[positions], halves=halves)
    assert torch.equal(by_rows, split)
    packed = qkv.clone()
    rotate_(packed, positions, turns, halves=halves, backward=True)
    assert torch.equal(back, packed)
    assert not torch.equal(packed, split)


def test_works_where_the_projection_wrote() -> None:
    qkv = pack((7, 3, 2, 8), torch.float32)
    before = qkv.clone()
    q, k, v = rotate_qk(qkv, None, turns_of(8)[:7])
    assert {x.untyped_storage().data_ptr() for x in (q, k, v)} == {qkv.data_ptr()}
    assert torch.equal(torch.stack([q, k, v], dim=1), qkv)
    assert not torch.equal(qkv[:, :2], before[:, :2])
    assert torch.equal(qkv[:, 2], before[:, 2])


@pytest.mark.parametrize("size", [8, 6])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@LAYOUT
def test_gradients_are_left_as_they_came_however_they_lie(
    halves: bool, dtype: str, size: int
) -> None:
    positions, turns = positions_of(9), turns_of(size)
    wider = pack((3, 9, 2, 9), DTYPES[dtype])
    layouts = {
        "plain": wider[..., :8].contiguous(),
        "odd strides": wider[..., :8],
        "odd offset": wider[..., 1:],
        "transposed": wider[..., :8].transpose(1, 2).contiguous().transpose(1, 2),
        "features last": wider[..., :8].transpose(1, 3).contiguous().transpose(1, 3),
        "one number": wider[:, :1, :1, :1].expand(3, 9, 2, 8),
    }
    for name, gradients in layouts.items():
        before = gradients.clone()
        packed = rotate_gather(*gradients, positions, turns, halves)
        expected = exact_packed(before.transpose(0, 1), -positions, size, halves=halves)
        assert error(packed, expected) <= LIMITS[dtype], name
        assert torch.equal(gradients, before), name


def test_whoever_still_needs_the_input_is_told() -> None:
    leaf = pack((7, 3, 2, 8), torch.float32).requires_grad_()
    kept = leaf.sigmoid()  # its gradient needs its result
    q, _, _ = rotate_qk(kept, None, turns_of(8)[:7])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        q.sum().backward()
    with pytest.raises(ValueError, match="must not be a parameter"):
        rotate_qk(leaf, None, turns_of(8)[:7])


@pytest.mark.parametrize(
    ("shape", "num_positions", "pairs", "message"),
    [
        ((5, 3, 2, 7), 5, 3, r"even D, got \(5, 3, 2, 7\)"),
        ((5, 2, 2, 8), 5, 4, r"got \(5, 2, 2, 8\)"),
        ((5, 3, 16), 5, 4, r"got \(5, 3, 16\)"),
        ((5, 3, 2, 8), 5, 5, "5 pairs x 2 do not fit heads of 8"),
        ((5, 3, 2, 8), 5, 0, "0 pairs x 2 do not fit"),
        ((5, 3, 2, 8), 4, 4, "5 tokens, but positions of 4"),
    ],
)
def test_shapes_that_do_not_fit_are_named(
    shape: tuple[int, ...], num_positions: int, pairs: int, message: str
) -> None:
    positions = torch.zeros(num_positions, dtype=torch.long)
    with pytest.raises(ValueError, match=message):
        rotate_qk(torch.zeros(shape), positions, torch.zeros(9, pairs, 2))
    if pairs == 4 and len(shape) == 4 and shape[1] == 3:
        with pytest.raises(ValueError, match=message):
            rotate_qk(torch.zeros(shape), None, torch.zeros(num_positions, pairs, 2))


def test_only_contiguous_projections_are_taken() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        rotate_qk(torch.zeros(5, 2, 3, 8).transpose(1, 2), None, torch.zeros(5, 4, 2))


@LAYOUT
def test_the_operators_keep_torchs_rules(halves: bool) -> None:
    """Schema, fake results, autograd registration and tracing, checked by torch's own tool."""
    positions, turns = positions_of(9), turns_of(8)
    qkv = pack((9, 3, 2, 8), torch.float32)
    torch.library.opcheck(rotate_split, (qkv.clone().requires_grad_(), positions, turns, halves))
    torch.library.opcheck(rotate_split, (qkv, None, turns[:9], halves))
    torch.library.opcheck(rotate_gather, (*qkv.unbind(1), positions, turns, halves))


def attention() -> tuple[SelfAttention, Callable[[Tensor], Tensor]]:
    """Return an attention layer and its forward pass over a pack of three documents."""
    config = small_config()
    layer = SelfAttention(config, causal=False)
    scatter_weights(layer)
    pieces = Pack((5, 1, 6))
    positions = torch.cat([torch.arange(n) for n in pieces.lengths])
    assert len(pieces.calls) == 1  # made before a graph asks for them
    rotation = RotaryPositions(config).rotation(positions)
    return layer, lambda x: layer(x, rotate=rotation, pack=pieces)


def everything(layer: nn.Module, forward: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return the output and all gradients."""
    x = pack((12, 32), torch.float32).requires_grad_()
    out = forward(x)
    gradients = torch.autograd.grad(out, [x, *layer.parameters()], pack((12, 32), torch.float32, 1))
    return [out, *gradients]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_attention_is_the_same(backend: str) -> None:
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    torch._dynamo.reset()
    layer, forward = attention()
    expected = everything(layer, forward)
    results = everything(layer, torch.compile(forward, fullgraph=True, backend=backend))
    assert max(map(difference, results, expected)) < 1e-5


def test_graphs_hold_the_operators_once_each_way() -> None:
    torch._dynamo.reset()
    graphs = []

    def record(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph.forward)

    layer, forward = attention()
    everything(
        layer, torch.compile(forward, fullgraph=True, backend=aot_autograd(fw_compiler=record))
    )
    ahead, back = graphs
    assert ahead.count("roformer.rotate_split.default") == 1
    assert back.count("roformer.rotate_gather.default") == 1
    assert not [name for name in ahead + back if "complex" in name]


@pytest.mark.parametrize("compiled", [False, True])
def test_checkpointed_attention_is_the_same(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    layer, forward = attention()
    expected = everything(layer, forward)
    runs = []
    original = rotary._turn
    monkeypatch.setattr(
        rotary, "_turn", lambda *x, **how: (runs.append(how["backward"]), original(*x, **how))
    )
    inner = torch.compile(forward, fullgraph=True, backend="aot_eager") if compiled else forward
    results = everything(layer, lambda x: checkpoint(inner, x, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    once = [False] * (2 if compiled else 1)  # in place q and k are one tensor
    assert runs == [*once, *once, True, True]
