"""The machine code of the GPU's kernel, compiled here for GPUs that are not: registers, widths.

sm_80 is an A100, sm_90 an H100 or H200, sm_100 a B200.
"""

import os
import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET"):
    pytest.skip("the interpreter does not compile", allow_module_level=True)

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from model.kernels import rotary_triton  # noqa: E402

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Code:
    """What a compiled kernel needs and how it moves data; loads and stores by width in bits."""

    registers: int
    spilled_bytes: int
    loads: Counter[int]
    stores: Counter[int]


def widths(sass: str, instruction: str) -> Counter[int]:
    found = re.findall(rf"\b{instruction}(\.[A-Z0-9_.]+)", sass)
    sizes = (re.search(r"\.[US]?(8|16|64|128)(?=\.|$)", kind.rstrip(".")) for kind in found)
    return Counter(int(size[1]) if size else 32 for size in sizes)


def compiled(
    folder: Path,
    capability: int,
    dtype: str,
    heads: int,
    size: int,
    *,
    halves: bool,
    gather: bool,
    pairs: int | None = None,
    aligned: bool = True,
) -> Code:
    """Compile as the JIT would for tensors whose addresses and strides are multiples of 16."""
    pairs = pairs or size // 2
    constants: dict[str, Any] = rotary_triton.tiles(1000, heads, size, pairs, halves) | {
        "H": heads, "D": size, "R": pairs, "HALVES": halves, "BACKWARD": gather, "COPY": gather,
        "ROWS": True, "ACC": tl.float32,
    }  # fmt: skip
    names = rotary_triton.turn_kernel.arg_names
    pointers = {"positions": "*i32", "turns": "*fp32"}
    pointers |= dict.fromkeys(("q", "k", "v", "q_out", "k_out", "v_out"), f"*{dtype}")
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names
    }
    hints: dict[tuple[int], list[list[object]]] = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if aligned and name not in constants and name != "num_tokens"
    }
    kernel = triton.compile(
        ASTSource(rotary_triton.turn_kernel, signature, constants, hints),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": rotary_triton.WARPS},
    )
    (folder / "cubin").write_bytes(kernel.asm["cubin"])
    usage = subprocess.run(
        [TOOLS / "cuobjdump", "-res-usage", folder / "cubin"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    sass = kernel.asm["sass"]
    assert not re.search(r"\b(LDL|STL|RED|ATOM|ATOMG)\b", sass)  # no spills, no atomics
    return Code(
        registers=numbers["REG"],
        spilled_bytes=numbers["STACK"] + numbers["LOCAL"],
        loads=widths(sass, "LDG"),
        stores=widths(sass, "STG"),
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    ("dtype", "heads", "size", "halves", "gather"),
    [
        ("bf16", 12, 64, False, False),
        ("bf16", 12, 64, False, True),
        ("bf16", 12, 64, True, False),
        ("bf16", 12, 64, True, True),
        ("fp16", 16, 128, False, False),
        ("fp32", 12, 64, False, True),
        ("bf16", 12, 96, False, True),
        ("bf16", 1, 32, False, True),
    ],
)
def test_everything_moves_in_128_bits_and_nothing_spills(
    folder: Path,
    capability: int,
    dtype: str,
    heads: int,
    size: int,
    halves: bool,
    gather: bool,
) -> None:
    code = compiled(folder, capability, dtype, heads, size, halves=halves, gather=gather)
    assert code.spilled_bytes == 0
    assert code.registers <= 96
    tile = rotary_triton.tiles(1000, heads, size, size // 2, halves)
    features = tile["BT"] * tile["BH"] * size * (3 if gather else 2)
    accesses = features * BYTES[dtype] // 16 // (32 * rotary_triton.WARPS)
    assert code.stores == Counter({128: accesses})
    # Besides: a position a token in 32 bits, cos and sin in 128.
    assert set(code.loads) == {32, 128}
    assert code.loads[128] > accesses
    assert code.loads[32] <= 4


def test_the_reading_sees_narrow_accesses(folder: Path) -> None:
    """Without the JIT's knowledge of alignment the same kernel moves 2 bytes at a time."""
    code = compiled(folder, 90, "bf16", 12, 64, halves=False, gather=False, aligned=False)
    assert code.stores.keys() == {16}
    assert 16 in code.loads
