"""Linear attention with rotary positions (section 3.3 of the paper, eq. 19).

    out_m = sum_n (R_m phi(q_m)) . (R_n phi(k_n)) v_n  /  sum_n phi(q_m) . phi(k_n)

The rotation comes after the feature map phi and stands in the numerator only: a rotated sum can be
zero or negative, and the denominator must not be. The sums over n are sums of products that do not
know m, so time and memory are linear in the length.

Shapes: T tokens, H heads, D head size, F features of a query or key; B pieces of L tokens, in N
chunks of C.
"""

import hashlib
import math
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from model.config import ModelConfig
from model.pack import Pack
from model.positions import Rotate

CHUNK = 128
"""Most tokens of a chunk; 64 is as fast, 256 slower."""
BLOCK = 2**22
"""Most numbers of a tensor on a CPU. glibc gives memory over 32 MiB back to the system at once, and
getting it again costs more than the arithmetic: 151 against 74 us a token at 16,384 tokens."""
FLOOR = 1e-30
"""Least denominator: a query whose keys are all 0 in fp32 gets 0 and not 0/0."""
LARGEST_EXPONENT = 60.0
"""Of a key's features: e^60 leaves fp32 room for a sum over e^28 of them."""


def linear_attention(
    q_BHLF: Tensor, k_BHLF: Tensor, turned: tuple[Tensor, Tensor], v_BHLD: Tensor, *, causal: bool
) -> Tensor:
    """Eq. 19 of queries and keys after the feature map, and of the same `turned`: [B, H, L, D].

    Causal, a piece is cut into equal chunks: the weights within each are one batched product, and
    the chunks before it are the running sum of k v^T. No chunk is sliced out of the whole: the
    backward pass of each slice would fill a gradient of the whole length, O(L^2 / C) in all.
    """
    if not causal:
        turned_q, turned_k = turned
        numerator_BHLD = turned_q @ (turned_k.mT @ v_BHLD)
        denominator_BHL1 = q_BHLF @ k_BHLF.sum(-2).unsqueeze(-1)
        return numerator_BHLD / denominator_BHL1.clamp(min=FLOOR)
    length = v_BHLD.shape[2]
    num_chunks, size = chunks_of(length)
    tensors = [q_BHLF, k_BHLF, *turned, v_BHLD]
    if padding := num_chunks * size - length:
        tensors = [F.pad(x, (0, 0, 0, padding)) for x in tensors]
    q, k, turned_q, turned_k, v = (x.unflatten(2, (num_chunks, size)) for x in tensors)
    numerator = (turned_q @ turned_k.mT).tril() @ v
    sums = k.cumsum(-2)
    if num_chunks > 1:
        numerator = numerator + turned_q @ _sum_before(turned_k.mT @ v)
        sums = sums + _sum_before(sums[..., -1:, :])
    denominator = (q * sums).sum(-1, keepdim=True)
    numerator_BHLD, denominator_BHL1 = (
        x.flatten(2, 3)[:, :, :length] for x in (numerator, denominator)
    )
    return numerator_BHLD / denominator_BHL1.clamp(min=FLOOR)


def chunks_of(length: int) -> tuple[int, int]:
    """Return (number, size) of the chunks of a piece: equal, so that they hardly need padding."""
    num_chunks = max(1, math.ceil(length / CHUNK))
    return num_chunks, math.ceil(length / num_chunks)


def _sum_before(x_BHN: Tensor) -> Tensor:
    """Sum over the chunks before each; subtracting a chunk from its own sum would round by it."""
    sums = x_BHN[:, :, :-1].cumsum(2)
    return torch.cat([torch.zeros_like(sums[:, :, :1]), sums], dim=2)


class LinearCore(nn.Module):
    """Feature map, rotation and eq. 19, in fp32 or wider whatever the model's type."""

    rotates_projections: ClassVar[bool] = False  # but what the feature map makes of them

    def __init__(self, config: ModelConfig, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.features = FEATURES[config.features](config)
        self.num_features = config.query_size

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
        # Heads know nothing of each other, so a CPU may take a few at a time.
        num_heads, blocks = q_THD.shape[1], 1
        if q_THD.device.type == "cpu":
            blocks = math.ceil(q_THD.shape[0] * num_heads * self.num_features / BLOCK)
        at_once = math.ceil(num_heads / max(blocks, 1))
        parts = (x.split(at_once, dim=1) for x in (q_THD, k_THD, v_THD))
        out = [self._attend(q, k, v, rotate, pack) for q, k, v in zip(*parts, strict=True)]
        return (out[0] if len(out) == 1 else torch.cat(out, dim=1)).to(v_THD.dtype)

    def _attend(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        rotate: Rotate | None,
        pack: Pack,
    ) -> Tensor:
        wide = torch.promote_types(v_THD.dtype, torch.float32)
        q_THF, k_THF = self.features(q_THD.to(wide), k_THD.to(wide))
        turned = (q_THF, k_THF) if rotate is None else (rotate(q_THF), rotate(k_THF))

        def attend(q: Tensor, k: Tensor, turned_q: Tensor, turned_k: Tensor, v: Tensor) -> Tensor:
            return linear_attention(q, k, (turned_q, turned_k), v, causal=self.causal)

        # One layout of all pieces in padded chunks took 0.8 to 1.3 times as long on a CPU (packs of
        # 130 or 300 tokens a piece).
        return pack.by_runs(attend, q_THF, k_THF, *turned, v_THD.to(wide))


class EluFeatures(nn.Module):
    """phi(x) = elu(x) + 1 (Katharopoulos et al., arXiv 2006.16236): as many features as a head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()

    def forward(self, q_THD: Tensor, k_THD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features of queries and keys."""
        return F.elu(q_THD) + 1, F.elu(k_THD) + 1


class FavorFeatures(nn.Module):
    """FAVOR+ (Choromanski et al., arXiv 2009.14794, lemma 1 and section 2.4).

    phi_i(x) = exp(w_i . x - |x|^2 / 2) of x over D^(1/4), with orthogonal Gaussian w_i: then
    phi(q) . phi(k) is an unbiased estimate of softmax's exp(q . k / sqrt D).

    Stabilised by what cancels exactly in eq. 19 and sees no other token: a query's own largest
    exponent (and its |q|^2 / 2 with it), and for all keys one constant of the w_i. The usual
    maximum over all keys would tell earlier tokens of later ones. An exponent of a key is at most
    |w_i|^2 / 2 whatever the key, so no more is needed against overflow.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_features, self.head_size = config.num_features, config.head_size
        self.redraw_steps = config.redraw_steps
        self._drawn: tuple[int, int, int] | None = None
        self.redraw(0, 0, 0)

    def redraw(self, seed: int, layer: int, step: int) -> None:
        """Use the projection of this step: one of (seed, layer, step // redraw_steps) alone."""
        drawn = seed, layer, step // self.redraw_steps if self.redraw_steps else 0
        if drawn != self._drawn:
            self._drawn = drawn
            values = orthogonal_gaussian(self.num_features, self.head_size, drawn)
            # Not a buffer, as in model.positions.Table: neither saved nor cast by an engine.
            self.projection_FD = torch.from_numpy(values.astype(np.float32))
            largest = float((values**2).sum(1).max() / 2)
            self.shift = max(0.0, largest - LARGEST_EXPONENT)

    def forward(self, q_THD: Tensor, k_THD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features [T, H, F] of queries and keys, up to factors that cancel."""
        if self.projection_FD.device != q_THD.device:
            self.projection_FD = self.projection_FD.to(q_THD.device)
        w_FD = self.projection_FD.to(q_THD.dtype) * self.head_size**-0.25
        q_THF, k_THF = F.linear(q_THD, w_FD), F.linear(k_THD, w_FD)
        half_TH1 = k_THD.square().sum(-1, keepdim=True) * (0.5 * self.head_size**-0.5)
        highest_TH1 = q_THF.detach().amax(-1, keepdim=True)
        return (q_THF - highest_TH1).exp(), (k_THF - (half_TH1 + self.shift)).exp()


def orthogonal_gaussian(num_rows: int, size: int, key: tuple[int, int, int]) -> NDArray[np.float64]:
    """Return standard Gaussian rows [num_rows, size], orthogonal within each `size` of them.

    Directions are those of random orthogonal matrices, lengths those of independent Gaussian
    vectors, so each row is Gaussian by itself. A function of the key alone.
    """
    digest = hashlib.blake2b(" ".join(map(str, key)).encode(), digest_size=16).digest()
    random = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    blocks = random.standard_normal((math.ceil(num_rows / size), size, size))
    directions, triangles = np.linalg.qr(blocks)
    directions *= np.sign(np.diagonal(triangles, axis1=1, axis2=2))[:, None, :]  # uniform then
    lengths = np.linalg.norm(random.standard_normal((num_rows, size)), axis=1)
    rows = directions.transpose(0, 2, 1).reshape(-1, size)[:num_rows]
    return rows * lengths[:, None]


FEATURES: dict[str, type[EluFeatures] | type[FavorFeatures]] = {
    "elu": EluFeatures,
    "favor": FavorFeatures,
}


def redraw(model: nn.Module, seed: int, step: int) -> None:
    """Give every layer the random features of a training step; nothing to do for other kinds.

    They depend on (seed, layer, step // redraw_steps) alone, so a run that goes on from any step
    has the same as one in one go, and nothing of them is saved. To be called between a step's
    backward pass and the next forward pass.
    """
    random = (module for module in model.modules() if isinstance(module, FavorFeatures))
    for layer, features in enumerate(random):
        features.redraw(seed, layer, step)
