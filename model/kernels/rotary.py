"""Rotary position embedding of queries or keys (section 3.2.2 of the paper, eq. 14-16 and 34).

Shapes: T tokens, H heads, D features of a head.
"""

import torch
from torch import Tensor


def rotate(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Turn the feature pairs (0, 1), (2, 3), ... of every head by the angles of its token.

    cos and sin are fp32 with R = D/2 columns, one a pair. A pair is read as one complex number, so
    eq. 34 is a single multiplication, and its gradient the one by the conjugate: the fastest of the
    eager forms. The maths is fp32 or wider; the result has the type of x.
    """
    wide = x_THD.to(torch.promote_types(x_THD.dtype, torch.float32))
    pairs_THR = torch.view_as_complex(wide.unflatten(-1, (-1, 2)))
    turned_THR = pairs_THR * torch.complex(cos_TR, sin_TR).unsqueeze(-2)
    return torch.view_as_real(turned_THR).flatten(-2).to(x_THD.dtype)
