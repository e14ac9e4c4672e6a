"""The benchmarks run, at sizes that measure nothing; what they compare is the same work."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from itertools import islice

import numpy as np
import pytest
import torch

from data_pipeline.batch import collate
from tests.benchmarks import gpu, roofline, rotary, timing
from tests.benchmarks.timing import Time


def test_sides_take_turns_and_the_first_changes():
    calls = []

    def side(name):
        def turn(number):
            calls.append((number, name))
            return Time(1.0, 2.0)

        return turn

    times = timing.alternate({"a": side("a"), "b": side("b")}, 3)
    expected = [(-1, "b"), (-1, "a"), (0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]
    assert calls == expected
    assert timing.wall(times["a"]) == [1.0] * 3  # the warm-up is not kept
    assert timing.cpu(times["b"]) == [2.0] * 3


def test_a_ratio_is_of_pairs_and_not_of_medians():
    ratio = timing.ratio([2.0, 20.0, 9.0], [1.0, 10.0, 3.0])
    assert ratio.median == 2.0  # medians would give 9 / 3
    assert str(ratio) == "2.00 (2.00-3.00)"
    assert timing.ratio([3.0], [2.0]) == (1.5, 1.5, 1.5)


@pytest.mark.parametrize(("corpus", "mean"), [("short", 130), ("articles", 300)])
def test_lengths_have_the_stated_mean_and_limit(corpus, mean):
    from tests.benchmarks.subjects import draw_lengths

    lengths = draw_lengths(corpus, 4000)
    assert len(lengths) == 4000
    assert np.mean(lengths) == pytest.approx(mean, rel=0.05)
    assert max(lengths) == 512
    assert lengths[:10] == draw_lengths(corpus, 4000)[:10]


def test_groups_of_both_kinds_are_of_different_documents_and_one_kind_needs_less_padding():
    from tests.benchmarks.huggingface import grouped_by_length, random_groups
    from tests.benchmarks.subjects import draw_lengths

    lengths = draw_lengths("short", 1600)
    grouped, drawn = grouped_by_length(lengths, 3, 4, 8), random_groups(3, 4, 8)
    padded = []
    for groups in (grouped, drawn):
        assert [len(group) for group in groups] == [32] * 3
        numbers = np.concatenate(groups)
        assert len(set(numbers)) == 96
        batches = np.array(lengths)[numbers].reshape(-1, 8)
        padded.append(8 * batches.max(1).sum() / batches.sum())
    assert padded[0] < 1.2 < 1.8 < padded[1]
    with pytest.raises(ValueError, match="60 steps are more than the 50 batches"):
        grouped_by_length(lengths, 6, 10, 8)


def test_every_rotary_form_gives_the_same():
    device = torch.device("cpu")
    qkv = torch.randn(64, 3, rotary.HEADS, rotary.SIZE, generator=torch.Generator().manual_seed(0))
    found = {}
    for name, form in rotary.forms(64, torch.float32, device).items():
        buffer = qkv.clone().requires_grad_() * 1.0
        outputs = form(buffer)
        weights = [(n + 1) * x.detach().cos() for n, x in enumerate(outputs)]
        found[name] = *outputs, *torch.autograd.grad(outputs, buffer, weights)
    assert list(found) == ["fused", "eager", "complex", "huggingface"]
    for name, tensors in found.items():
        for got, want in zip(tensors, found["eager"], strict=True):
            assert (got - want).abs().max() < 1e-5, name


def test_the_streaming_benchmark_counts_masked_tokens(tmp_path):
    from tests.benchmarks import streaming

    index = streaming.write_shards(tmp_path / "train", shards=8, documents=3)
    stream = streaming.open_ours(index, workers=1)
    batches = (collate(list(islice(stream, 4))) for _ in iter(int, 1))
    masked = next(batches)
    assert masked.num_tokens == 4 * streaming.SEQ_LEN
    assert masked.num_targets > 100
    pids = [process.pid for process in stream._loading._workers]
    rates = streaming.measure(((batch.num_tokens for batch in batches), lambda: pids), 2)
    stream.close()
    assert min(rates) > 0


def test_rotary_and_roofline_run():
    rows = rotary.measure(8, "bf16", torch.device("cpu"), turns=1, seconds=0.0)
    assert [row["form"] for row in rows] == ["fused", "eager", "complex", "huggingface"]
    assert rows[0]["both"] == (1.0, 1.0, 1.0)
    row = roofline.measure("tiny", "fp32", documents=1, turns=1, seconds=0.0)
    assert 0 < row["cpu_share"].median < 1
    assert 0 < row["cpu_rotary"].median < 1
    assert "aten::addmm" in roofline.profile("tiny", "fp32", documents=1)


def test_the_gpu_benchmark_runs_on_a_cpu_and_names_what_it_could_not_measure(
    capsys, tmp_path, monkeypatch
):
    def broken(scale):
        raise RuntimeError("out of memory")
        yield

    assert gpu.main(["--device", "cpu", "--tiny", "--json", str(tmp_path / "gpu.json")]) == 0
    table = capsys.readouterr().out
    for row in ("rotary against fp64 | bfloat16", "ours, backward gathered", "| training | tiny"):
        assert row in table
    assert '"rows"' in (tmp_path / "gpu.json").read_text()
    monkeypatch.setattr(gpu, "SECTIONS", (broken, gpu.values))
    assert gpu.main(["--device", "cpu", "--tiny"]) == 1
    table = capsys.readouterr().out
    assert "failed: RuntimeError: out of memory" in table
    assert "rotary against fp64" in table  # the others go on


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_gpu_benchmark_says_that_there_is_no_gpu(capsys):
    assert gpu.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1


def small_runs():
    from tests.benchmarks import huggingface, overhead, tracking

    rows = huggingface.measure(
        "tiny", "roformer", "fp32", "short", batch=4, steps=1, turns=2, threads=1
    )
    over = overhead.measure("tiny", "fp32", 0, rows=1, steps=1, threads=1, tracking=False)
    return rows, over, tracking.measure("refused", steps=1, turns=1)


def test_trainers_get_the_same_documents_and_targets_and_each_point_arrives_once():
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        (random, grouped), overhead, tracked = pool.submit(small_runs).result(timeout=300)
    assert random["loss_difference"] < 1e-5  # another document, mask or update would show
    assert random["padded_to_real"] > grouped["padded_to_real"] >= 1
    assert overhead["ratio"].median > 0
    assert overhead["parts"]["trainer"].keys() == overhead["parts"]["bare"].keys()
    assert tracked["ratio"].median > 0
    assert tracked["told"] is not None  # nobody listened, and the run's end says so
    assert tracked["points"] == tracked["steps"] == 9
