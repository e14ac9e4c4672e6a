"""What the GPU's kernel computes, against fp64, under Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.xdist_group("interpreted")

# The interpreter cuts bf16 where a GPU rounds: a whole ulp instead of half.
LIMITS = {"fp32": 1e-6, "fp16": 0.5, "bf16": 1.0}


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.kernels.interpreted"],
        cwd=Path(__file__).parents[3],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("part", "cases"), [("matrix", 60), ("halves", 12), ("real tiles", 15)])
def test_values_and_gradients_are_rounded_once(
    results: dict[str, Any], part: str, cases: int
) -> None:
    assert len(results[part]) == cases
    for *shape, dtype, values, gradients in results[part]:
        assert 0 < max(values, gradients) <= LIMITS[dtype], (shape, dtype)


def test_only_the_first_features_turn_where_the_rotation_is_partial(
    results: dict[str, Any],
) -> None:
    assert len(results["partial"]) == 14
    for *case, values, gradients in results["partial"]:
        assert 0 < max(values, gradients) <= LIMITS["fp32"], case


def test_the_comparison_sees_mistakes(results: dict[str, Any]) -> None:
    mistakes = results["mistakes"]
    assert max(mistakes.pop("none")) <= LIMITS["fp32"]
    assert min(mistakes.pop("bf16 tables")) > 1e-3
    assert mistakes.keys() == {"sign", "halves", "next position"}
    assert min(min(errors) for errors in mistakes.values()) > 1


def test_gradcheck(results: dict[str, Any]) -> None:
    assert results["gradcheck"] == [True] * 2


def test_in_place_split_and_gathered_give_the_same_bits(results: dict[str, Any]) -> None:
    assert len(results["forms"]) == 4
    for dtype, halves, size, agreements in results["forms"]:
        assert len(agreements) == 8
        assert all(agreements.values()), (dtype, halves, size, agreements)


def test_an_empty_pack(results: dict[str, Any]) -> None:
    assert results["empty"] == [[0, 3, 4, 8]] * 2
