"""Which tokens of a pack belong together: pieces of text end to end, each attending to itself.

Lengths are known on the host, from the collator, so kernels are chosen and cut without asking a
device. Shapes: T tokens, B pieces of L tokens, H heads, D features.
"""

from collections.abc import Callable
from itertools import accumulate, groupby

import torch
from torch import Tensor

BLOCK = 64
"""Most tokens of short pieces that are computed together, under a mask."""

Call = tuple[tuple[int, int], Tensor | None]


class Pack:
    """The pieces of one pack; made once for all layers."""

    def __init__(self, lengths: tuple[int, ...], device: torch.device | str = "cpu") -> None:
        """Make it of the tokens of each piece, in order."""
        self.lengths = lengths
        self.device = torch.device(device)
        self.runs = tuple((length, len(list(same))) for length, same in groupby(lengths))
        """Neighbours of one length: (length, how many)."""
        # Made when they are asked for; functools.cached_property has a lock, which no graph takes.
        self._boundaries: Tensor | None = None
        self._calls: tuple[Call, ...] | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest piece."""
        return max(self.lengths, default=0)

    @property
    def boundaries(self) -> Tensor:
        """Where pieces begin, and T: int32 [B + 1] on the device."""
        if self._boundaries is None:
            places = torch.tensor(list(accumulate(self.lengths, initial=0)), dtype=torch.int32)
            if self.device.type == "cuda":  # from pinned memory a copy makes nobody wait
                places = places.pin_memory()
            self._boundaries = places.to(self.device, non_blocking=True)
        return self._boundaries

    @property
    def calls(self) -> tuple[Call, ...]:
        """Cut the pack for kernels without lengths: (pieces' shape, their mask if they differ).

        The shape is (B, L) of equal pieces, or (1, L) of short neighbours that share a mask
        [L, L], true where query and key belong together.
        """
        if self._calls is None:
            groups: list[list[tuple[int, int]]] = []
            held = BLOCK  # tokens of the last group: none can join before there is one
            for length, count in self.runs:
                held += length * count
                if held <= BLOCK:
                    groups[-1].append((length, count))
                else:
                    groups.append([(length, count)])
                    held = length * count
            self._calls = tuple(self._call(group) for group in groups)
        return self._calls

    def _call(self, runs: list[tuple[int, int]]) -> Call:
        if len(runs) == 1:
            length, count = runs[0]
            return (count, length), None
        lengths = torch.tensor([length for length, count in runs for _ in range(count)])
        piece_L = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        return (1, len(piece_L)), (piece_L[:, None] == piece_L[None, :]).to(self.device)

    def by_runs(self, attend: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Join `attend` of every run of equal pieces: no padding, every product is a needed one.

        attend: takes a [B, H, L, D] of each tensor [T, H, D], and returns one.
        """
        sizes = [length * count for length, count in self.runs]
        out = []
        for (length, _), *run in zip(self.runs, *(x.split(sizes) for x in tensors), strict=True):
            context = attend(*(x.unflatten(0, (-1, length)).transpose(1, 2) for x in run))
            out.append(context.transpose(1, 2).flatten(0, 1))
        return torch.cat(out) if out else tensors[-1]
