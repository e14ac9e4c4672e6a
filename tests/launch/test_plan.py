import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from configs.loader import load
from launch.cli import build_parser, main
from launch.devices import DEVICES, communication_bytes, step_seconds
from launch.memory import Memory, activation_bytes, state_memory
from launch.plan import ALLOCATOR, USABLE, make_plan, smallest_change
from launch.plan_page import plan as print_plan
from model.config import ModelConfig
from model.heads import LanguageModel
from trainer.config import EngineConfig

CONFIGS = Path(__file__).parents[2] / "configs"
PAPER = CONFIGS / "paper/chinese.yaml"
ONE_STAGE = (
    "curriculum.stages=[{name: only, seq_len: 1536, global_batch: 256, steps: 100}]",
    "schedule.warmup=10",
)


def printed(*arguments: str) -> tuple[int, str]:
    console = Console(record=True, width=100, file=io.StringIO())
    words = ["plan", *(a for a in arguments if "=" not in a)]
    parsed = build_parser().parse_args(
        [*words[:2], *(a for a in arguments if "=" in a), *words[2:]]
    )
    code = print_plan(parsed, console)
    return code, console.export_text()


def test_paper_plan_has_the_papers_numbers():
    plan = make_plan(load(PAPER), world=8, vocab_size=50_000)
    tokens = [row.stage.num_steps * row.stage.step_tokens for row in plan.stages]
    assert [round(count / 1e9, 1) for count in tokens] == [26.2, 4.9, 7.9, 5.2, 3.9, 7.9]
    assert sum(tokens) == pytest.approx(56.0e9, rel=2e-3)
    for row in plan.stages:
        factors = row.factors
        assert factors.micro_batch * factors.accumulation * 8 == row.stage.global_batch
        assert factors.micro_batch * row.stage.seq_len <= 16384


def test_parameters_are_those_of_the_model():
    config = load(CONFIGS / "demo.yaml")
    plan = make_plan(config, world=2, vocab_size=8000)
    model = LanguageModel(config.model, vocab_size=8000)
    assert plan.num_parameters == sum(p.numel() for p in model.parameters())
    assert plan.checkpoint_bytes == 3 * sum(p.numel() * 4 for p in model.parameters())


@pytest.mark.parametrize(
    ("stage", "precision", "weights", "gradients", "optimizer"),
    [
        (0, "fp32", 4, 4 + 4, 8),
        (1, "fp32", 4, 4 + 4 / 4, 12 / 4),
        (2, "fp32", 4, 4 + 4 / 4, 12 / 4),
        (3, "fp32", 4 / 4 + 8, 8 + 4 / 4, 12 / 4),
        (0, "bf16", 2, 2 + 4, 12),
        (1, "bf16", 2, 2 + 2 / 4, 12 / 4),
        (3, "bf16", 2 / 4 + 4, 4 + 2 / 4, 12 / 4),
    ],
)
def test_zero_parts_the_state_over_ranks(stage, precision, weights, gradients, optimizer):
    engine = EngineConfig(zero_stage=stage, precision=precision)
    memory = state_memory(1000, engine, world=4)
    bytes_each = (memory.weights / 1000, memory.gradients / 1000, memory.optimizer / 1000)
    assert bytes_each == (weights, gradients, optimizer)


def test_without_zero_gradients_take_the_place_of_activations_unless_they_accumulate():
    engine = EngineConfig(zero_stage=0)

    def gradients(**kwargs) -> float:
        return state_memory(1000, engine, **{"world": 1} | kwargs).gradients / 1000

    assert gradients() == 4
    assert gradients(activations=1000) == 3
    assert gradients(activations=9000) == 0
    assert gradients(activations=9000, accumulation=2) == 4
    assert gradients(activations=9000, world=2) == 4  # they are reduced in a bucket


def test_buckets_and_offload_count():
    engine = EngineConfig(
        zero_stage=2,
        offload="optimizer",
        deepspeed={"zero_optimization": {"reduce_bucket_size": 100}},
    )
    memory = state_memory(1000, engine, world=2)
    assert memory.gradients == 100 * 4 + 2000
    assert memory.device == memory.weights + memory.gradients  # moments are on the host


def kept_and_peak(layers: int, **engine) -> int:
    model = ModelConfig(num_layers=layers, hidden_size=64, num_heads=2, intermediate_size=256)
    return activation_bytes(model, EngineConfig(**engine), 300, [128] * 4, 77)


def test_activations_grow_by_layers_and_shrink_by_checkpointing_and_half_precision():
    few, more = kept_and_peak(4), kept_and_peak(8)
    layer = (more - few) / 4
    assert layer == pytest.approx(512 * (12 * 64 + 2 * 256) * 4, rel=0.1)  # projections, GELU ...
    halves = kept_and_peak(8, precision="fp16")
    assert halves == pytest.approx(more / 2, rel=0.15)
    # on a CPU attention keeps its weights in bf16, in place of outputs and their scale
    kept = 8 * 512 * (2 * 128 * 2 - 64 * 2 - 2 * 4)
    assert kept_and_peak(8, precision="bf16") - halves == pytest.approx(kept, rel=0.05)
    checkpointed = (kept_and_peak(8, activation_checkpointing=True)) - kept_and_peak(
        4, activation_checkpointing=True
    )
    assert checkpointed == pytest.approx(4 * 512 * 64 * 4, rel=0.01)  # the layers' inputs alone


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "kind",
    [{}, {"attention": "linear", "features": "elu"}, {"attention": "linear", "features": "favor"}],
)
def test_counted_activations_are_what_autograd_keeps(kind, causal):
    sizes = {"num_layers": 3, "hidden_size": 64, "num_heads": 2, "intermediate_size": 256}
    config = ModelConfig(**sizes, **kind)
    model = LanguageModel(config, vocab_size=300, causal=causal)
    ids, asked = torch.zeros(512, dtype=torch.long), torch.zeros(77, dtype=torch.long)
    kept: dict[int, torch.Tensor] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(ids, ids, (128,) * 4, asked, asked)
    saved = sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in weights)
    counted = activation_bytes(config, EngineConfig(), 300, [128] * 4, 77, causal=causal)
    assert saved < counted < 1.25 * saved  # and what the passes work with


@pytest.mark.parametrize(
    ("stage", "sent"), [(0, 2 * 0.75), (1, 2 * 0.75), (2, 5 * 0.75), (3, 12 * 0.75)]
)
def test_bytes_between_ranks(stage, sent):
    engine = EngineConfig(zero_stage=stage)
    found = communication_bytes(1000, engine, world=4, accumulation=4, size=4)
    assert found == round(sent * 4000)
    assert communication_bytes(1000, engine, world=1, accumulation=4, size=4) == 0


def test_model_of_many_devices_agrees_with_a_published_run(tmp_path):
    bert = [
        *("model.num_layers=24", "model.hidden_size=2048", "model.num_heads=32"),
        *("model.intermediate_size=8192", "model.max_positions=512"),
        "curriculum.stages=[{name: a, seq_len: 512, global_batch: 1024, steps: 1000}]",
        *(
            "schedule.warmup=10",
            "engine.precision=fp16",
            "engine.zero_stage=1",
            "engine.device_tokens=8192",
        ),
        "evaluation.seq_len=null",
    ]
    plan = make_plan(load(PAPER, bert), world=64, vocab_size=30_592, kind="gpu")
    assert plan.num_parameters == pytest.approx(1.3e9, rel=0.03)
    (row,) = plan.stages
    seconds = step_seconds(
        DEVICES["a100-40"], flops=row.step_flops, sent=row.sent, world=64, precision="fp16"
    )
    assert row.step_flops / seconds / 64 == pytest.approx(145e12, rel=0.1)
    assert row.memory.device < USABLE * 40 * 2**30


def test_slower_networks_make_slower_steps():
    times = [
        step_seconds(DEVICES["h100"], flops=1e16, sent=10**10, world=n, precision="bf16") * n
        for n in (1, 8, 16)
    ]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("capacity_gib", "world", "change"),
    [
        (12, 4, "engine.zero_stage=1"),
        (8, 1, "engine.device_tokens=8192"),
        (4.0, 1, "engine.device_tokens=2048"),
    ],
)
def test_smallest_change_that_fits(capacity_gib, world, change):
    config = load(PAPER, [*ONE_STAGE, "engine.zero_stage=0", "engine.precision=bf16"])
    found = smallest_change(
        config, world=world, vocab_size=50_000, kind="gpu", capacity=capacity_gib * 2**30
    )
    assert found is not None
    words, plan = found
    assert plan.fullest.memory.device <= USABLE * capacity_gib * 2**30
    assert words == change


def test_nothing_fits_where_the_weights_do_not():
    config = load(PAPER, ONE_STAGE)
    assert smallest_change(config, world=1, vocab_size=50_000, kind="gpu", capacity=2e8) is None


def test_printed_plan_says_what_is_not_ready(tmp_path):
    code, text = printed(str(PAPER), f"run.dir={tmp_path}")
    assert code == 2
    assert "452,500" not in text
    for expected in ("200,000", "1,536", "26.2 B", "ZeRO-1", "not ready: data/chinese"):
        assert expected in text
    assert not list(tmp_path.iterdir())  # a plan writes nothing


def test_a_gpus_flash_attention_keeps_no_weights():
    config = load(CONFIGS / "demo.yaml", ["engine.precision=bf16"])
    cpu, gpu = (make_plan(config, world=2, vocab_size=300, kind=kind) for kind in ("cpu", "gpu"))
    for ours, theirs in zip(cpu.stages, gpu.stages, strict=True):
        kept = ours.memory.activations / ALLOCATOR["cpu"] - theirs.memory.activations
        tokens = ours.factors.micro_batch * ours.stage.seq_len
        a_token = (
            config.model.num_heads * (2 * ours.stage.seq_len - 4) - 2 * config.model.hidden_size
        )
        assert 1 < kept / (config.model.num_layers * tokens * a_token) < 1.5  # and what turns them


def test_a_plan_for_machines_that_are_not_at_hand():
    code, text = printed(str(PAPER), "--ranks", "64", "--device", "h100")
    assert code == 2  # no shards here
    for expected in ("64 ranks", "h100", "4*1*64", "of 80.00 GiB", "50% of the peak"):
        assert expected in text
    assert "not ready: memory" not in text


def test_a_plan_that_does_not_fit_says_the_smallest_change():
    full = (*ONE_STAGE, "engine.precision=fp32", "engine.device_tokens=98304")
    code, text = printed(str(PAPER), "--ranks", "1", "--device", "v100", *full)
    assert code == 2
    assert "not ready: memory: stage only takes" in text
    assert "most of it activations" in text
    assert "engine.device_tokens=24576 does" in text


def test_a_given_rate_makes_the_time():
    _, text = printed(str(PAPER), "--ranks", "8", "--rate", "100")
    assert "100 TFLOP/s a rank, at 100 TFLOP/s a rank" in text


@pytest.mark.parametrize("words", [["--ranks", "0"], ["--ranks", "x"], ["--device", "abacus"]])
def test_options_that_make_no_sense_are_refused(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(PAPER), *words])
    assert ended.value.code == 2
    capsys.readouterr()


def test_ranks_that_do_not_divide_the_batch_are_refused(capfd):
    assert main(["plan", str(PAPER), "--ranks", "7"]) == 2
    assert "7" in capfd.readouterr().err


def test_memory_times_a_factor_leaves_the_runtime():
    memory = Memory(10, 20, 30, 40, runtime=50).times(2)
    assert (memory.state, memory.activations, memory.runtime) == (120, 80, 50)
