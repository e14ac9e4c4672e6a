"""Softmax attention within the pieces of a pack (eq. 2): one function, `attend`.

- CUDA, bf16 or fp16: variable-length flash attention over the whole pack, the flash-attn package's
  where it is installed, else torch's (which has no dropout)
- else: torch's scaled_dot_product_attention by pieces, neighbours of one length in one call, and
  short neighbours of no more than 64 tokens together in one, under a mask (`Pack.calls`)

On a CPU the mask pays for the calls it saves. Forward and backward against a call a piece, both in
one run (Zen 4, one thread, 12 or 4 heads of 64, fp32 and bf16): at a mean of 4 tokens a piece 0.28
to 0.74 of the time, at 8 tokens 0.5 to 0.9, at 16 tokens 0.73 to 0.95, from 32 tokens on 0.9 to
1.05. Blocks of 256 or 512 tokens took up to 3.4 times as long.

In bf16 torch's fused kernel is no faster than in fp32 on a CPU, so pieces up to 512 tokens are two
products and a softmax (in fp32, its weights rounded) there: forward and backward 0.14 to 0.5 of its
time where equal pieces share a call, 0.3 to 0.9 for a piece alone, for the memory of the weights.
Scores are rounded to bf16, which is what transformers' eager attention does: a relative error of
2.4e-3, 4.2e-3, 7.1e-3 for scores with a deviation of 0.25, 1, 2, where the fused kernel has 2e-3.

Shapes: T tokens, H heads, D head size, B pieces of L tokens.
"""

import importlib.util
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from model.pack import Pack

LARGEST_HEAD = 256
"""Of the flash kernels; they also want multiples of 8."""

LONGEST_PRODUCT = 512
"""Longest piece whose weights a CPU computes whole, in bf16."""
FEWEST_ROWS = 256
"""Fewest rows of weights in a call: products are more calls, which cost more than few rows do."""
CACHED = 256
"""Tokens at a time: more of them leave the cache."""

Kernel = Callable[[Tensor, Tensor, Tensor, Pack, bool, float], Tensor]


def attend(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, pack: Pack, *, causal: bool, dropout: float = 0.0
) -> Tensor:
    """Return the softmax-weighted values [T, H, D]; queries see the keys of their piece only.

    dropout: of the weights. Inputs may be strided views of a packed projection.
    """
    kernel = kernel_for(q_THD.device.type, q_THD.dtype, q_THD.shape[-1], dropout)
    return kernel(q_THD, k_THD, v_THD, pack, causal, dropout)


def kernel_for(device: str, dtype: torch.dtype, head_size: int, dropout: float) -> Kernel:
    """Choose the form for a device and what is asked of it."""
    fits = dtype in (torch.bfloat16, torch.float16)
    fits = fits and head_size % 8 == 0 and head_size <= LARGEST_HEAD
    if device != "cuda" or not fits:
        return by_pieces
    if has_flash_attn():
        return flash_attn
    if dropout == 0 and has_torch_varlen():
        return torch_varlen
    return by_pieces


def by_pieces(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, pack: Pack, causal: bool, dropout: float
) -> Tensor:
    """Attend by torch's own kernels, a call for neighbours of one length or for a short block."""
    sizes = [count * length for (count, length), _ in pack.calls]
    parts = zip(pack.calls, *(x.split(sizes) for x in (q_THD, k_THD, v_THD)), strict=True)
    out = []
    for (shape, mask), *qkv in parts:
        q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in qkv)  # [B, H, L, D]
        if causal and mask is not None:
            mask = mask.tril()
        if q.device.type == "cpu" and q.dtype == torch.bfloat16 and is_for_products(q):
            context_BHLD = by_products(q, k, v, mask, causal=causal, dropout=dropout)
        else:
            context_BHLD = F.scaled_dot_product_attention(
                q, k, v, mask, dropout, is_causal=causal and mask is None
            )
        out.append(context_BHLD.transpose(1, 2).flatten(0, 1))
    return torch.cat(out) if out else v_THD


def is_for_products(q_BHLD: Tensor) -> bool:
    """Whether two products in bf16 take less time on a CPU than its fused kernel."""
    count, heads, length, _ = q_BHLD.shape
    return length <= LONGEST_PRODUCT and count * heads * length >= FEWEST_ROWS


def by_products(
    q_BHLD: Tensor,
    k_BHLD: Tensor,
    v_BHLD: Tensor,
    mask_LL: Tensor | None,
    *,
    causal: bool,
    dropout: float,
) -> Tensor:
    """Attend by two matrix products with a softmax between them, a few pieces at a time."""
    length = q_BHLD.shape[2]
    if causal and mask_LL is None:
        mask_LL = torch.ones(length, length, dtype=torch.bool, device=q_BHLD.device).tril()
    out = []
    inputs = (q_BHLD * q_BHLD.shape[3] ** -0.5, k_BHLD, v_BHLD)
    parts = (x.contiguous().split(max(1, CACHED // length)) for x in inputs)  # copied once, here
    for q, k, v in zip(*parts, strict=True):
        scores_BHLL = q @ k.mT
        if mask_LL is not None:
            scores_BHLL = scores_BHLL.masked_fill(~mask_LL, -torch.inf)
        out.append(F.dropout(scores_BHLL.softmax(-1), dropout) @ v)
    return torch.cat(out)


def torch_varlen(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, pack: Pack, causal: bool, dropout: float
) -> Tensor:
    """Attend by torch's variable-length flash attention (A100 and later)."""
    from torch.nn.attention.varlen import varlen_attn

    assert dropout == 0
    ends, longest, window = pack.boundaries, pack.longest, (-1, 0 if causal else -1)
    out = varlen_attn(q_THD, k_THD, v_THD, ends, ends, longest, longest, window_size=window)
    assert isinstance(out, Tensor)  # and no auxiliary outputs with it
    return out


def flash_attn(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, pack: Pack, causal: bool, dropout: float
) -> Tensor:
    """Attend by the flash-attn package."""
    from flash_attn import flash_attn_varlen_func

    ends, longest = pack.boundaries, pack.longest
    out: Tensor = flash_attn_varlen_func(
        q_THD, k_THD, v_THD, ends, ends, longest, longest, dropout_p=dropout, causal=causal
    )
    return out


@cache
def has_flash_attn() -> bool:
    """Whether the flash-attn package is installed."""
    return importlib.util.find_spec("flash_attn") is not None


@cache
def has_torch_varlen() -> bool:
    """Whether this GPU has torch's kernel: compute capability 8.0 or more."""
    return torch.cuda.get_device_capability() >= (8, 0)
