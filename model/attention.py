"""Self-attention over packed documents (eq. 2): each piece of text sees itself only.

A core is what happens between the projections: core(q, k, v, rotate=..., pack=...). It applies
the rotation itself, since not every attention rotates what the projection gives; one that does says
so by `rotates_projections`, and gets q and k turned already, in one pass over the packed tensor.

Shapes: T tokens, C hidden size, H heads, D head size, S selected tokens.
"""

from typing import ClassVar

from torch import Tensor, nn

from model.config import ModelConfig
from model.kernels.attention import attend
from model.linear_attention import LinearCore
from model.pack import Pack
from model.positions import Rotate


class SoftmaxCore(nn.Module):
    """Scaled dot products and softmax."""

    rotates_projections: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.dropout = config.attention_dropout

    def forward(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        *,
        rotate: Rotate | None,
        pack: Pack,
    ) -> Tensor:
        """Attend within each piece of the pack. Values are not rotated."""
        if rotate is not None:
            q_THD, k_THD = rotate(q_THD), rotate(k_THD)
        dropout = self.dropout if self.training else 0.0
        return attend(q_THD, k_THD, v_THD, pack, causal=self.causal, dropout=dropout)


CORES: dict[str, type[SoftmaxCore] | type[LinearCore]] = {
    "softmax": SoftmaxCore,
    "linear": LinearCore,
}


class SelfAttention(nn.Module):
    """One projection to queries, keys and values of all heads, a core, and one projection back."""

    def __init__(self, config: ModelConfig, *, causal: bool) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.core = CORES[config.attention](config, causal=causal)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(
        self,
        x_TC: Tensor,
        *,
        rotate: Rotate | None,
        pack: Pack,
        select: Tensor | None = None,
    ) -> Tensor:
        """Return the attention's output [T, C], or [S, C] of the selected tokens."""
        qkv_T3HD = self.qkv(x_TC).unflatten(-1, (3, self.num_heads, -1))
        if rotate is not None and self.core.rotates_projections:
            qkv, rotate = rotate.split(qkv_T3HD), None
        else:
            qkv = qkv_T3HD.unbind(1)
        context_THD = self.core(*qkv, rotate=rotate, pack=pack)
        context_TC = context_THD.flatten(1)
        return self.output(context_TC if select is None else context_TC.index_select(0, select))
