import textwrap

import pytest

from configs.loader import ConfigError, load, to_yaml
from tests.configs.golden import CONFIGS, GOLDEN, NAMES, resolved

MINIMAL = """
run: {name: r}
curriculum:
  stages:
    - {name: a, seq_len: 64, global_batch: 8, steps: 10}
    - {name: b, seq_len: 32, global_batch: 16, steps: 5}
"""


@pytest.fixture
def write(tmp_path):
    def write(text=MINIMAL, name="config.yaml"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write


def problems(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return [problem.removeprefix(f"{path}: ") for problem in caught.value.problems]


@pytest.mark.parametrize("name", NAMES)
def test_every_config_resolves_to_its_golden_text(name):
    assert resolved(name) == (GOLDEN / name).read_text()


@pytest.mark.parametrize("name", NAMES)
def test_resolved_form_loads_to_the_same_config(name, write):
    config = load(CONFIGS / name)
    assert load(write(to_yaml(config))) == config


def test_the_papers_performer_and_its_twin():
    full, small = (load(CONFIGS / kind / "performer.yaml") for kind in ("paper", "small"))
    model = full.model
    assert (model.num_layers, model.hidden_size, model.num_heads) == (12, 768, 12)
    assert (model.attention, model.positions, full.tokenizer.kind) == ("linear", "rope", "bytes")
    assert [(s.seq_len, s.global_batch) for s in full.curriculum.stages] == [(1024, 128)]
    assert (full.objective.kind, full.optimizer.lr) == ("causal", 1e-4)
    assert full.compare.arms == {
        name: [f"model.positions={name}"] for name in ("rope", "none", "learned")
    }
    assert small.compare == full.compare
    assert small.model.attention == "linear"


def test_a_files_arms_take_the_place_of_the_default_ones(write):
    arms = "compare: {arms: {none: [model.positions=none], rope: [model.positions=rope]}}"
    parent = write(MINIMAL + arms)
    assert list(load(parent).compare.arms) == ["none", "rope"]
    child = write(
        "extends: config.yaml\ncompare: {arms: {a: [model.dropout=0], b: []}}", "child.yaml"
    )
    assert list(load(child).compare.arms) == ["a", "b"]
    assert list(load(child, ["compare.arms.c=[model.dropout=0.1]"]).compare.arms) == ["a", "b", "c"]
    assert list(load(write()).compare.arms) == ["rope", "learned"]


def test_attentions_that_do_not_fit_are_one_line(write):
    path = write()
    dropped = ["model.attention=linear", "model.attention_dropout=0.1"]
    (problem,) = problems(path, *dropped)
    assert problem.startswith("model.attention_dropout: 0.1 cannot be had with attention=linear")
    (problem,) = problems(path, "model.features=favor")
    assert problem.startswith("model.features: favor is a feature map of attention=linear")
    odd = ["model.attention=linear", "model.features=favor", "model.num_features=9"]
    (problem,) = problems(path, *odd)
    assert problem.startswith("model.num_features: ")
    assert problem.endswith("9 is odd; take 10")


def test_paper_stages_and_their_twin_have_one_shape():
    full, small = (load(CONFIGS / kind / "chinese.yaml").curriculum for kind in ("paper", "small"))
    table = [
        (512, 256, 200_000),
        (1536, 256, 12_500),
        (256, 256, 120_000),
        (128, 512, 80_000),
        (1536, 256, 10_000),
        (512, 512, 30_000),
    ]
    assert [(s.seq_len, s.global_batch, s.steps) for s in full.stages] == table
    assert full.total_steps == 452_500
    for a, b in zip(full.stages, small.stages, strict=True):
        assert (b.seq_len * 8, b.global_batch * 16) == (a.seq_len, a.global_batch)
        assert b.steps == a.steps // 1000


def test_scalars_take_the_type_of_their_field(write):
    run = "{name: 695e0514, dir: 24:00:00, seed: 31}"
    path = write(
        MINIMAL.replace("{name: r}", run) + "optimizer: {lr: 1e-5}\nmodel: {dropout: 1e-1}\n"
    )
    config = load(path, ["tokenizer.model=1e-5", "run.batch_hash=true"])
    assert (config.run.name, config.run.dir, config.run.seed) == ("695e0514", "24:00:00", 31)
    assert config.optimizer.lr == 1e-5
    assert config.model.dropout == 0.1
    assert config.tokenizer.model == "1e-5"
    assert config.run.batch_hash is True


def test_overrides_reach_into_lists_and_lie_over_the_file(write):
    config = load(write(), ["curriculum.stages.1.steps=7", "optimizer.lr=3e-4"])
    assert [stage.steps for stage in config.curriculum.stages] == [10, 7]
    assert config.optimizer.lr == 3e-4


def test_interpolation_sees_defaults_files_and_overrides(write):
    path = write(MINIMAL + "data: {train: '${run.dir}/${run.name}/shards'}\n")
    assert load(path).data.train == "runs/r/shards"
    assert load(path, ["run.dir=elsewhere"]).data.train == "elsewhere/r/shards"
    assert load(path).tracking.mlflow.uri == "sqlite:///runs/mlflow.db"


def test_extends_lays_a_file_over_its_parent(write):
    write(name="parent.yaml")
    child = write("extends: parent.yaml\noptimizer: {lr: 2e-4}\nrun: {seed: 3}\n", "child.yaml")
    config = load(child)
    assert (config.run.name, config.run.seed, config.optimizer.lr) == ("r", 3, 2e-4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("extends: gone.yaml\n", "gone.yaml: No such file or directory"),
        ("extends: config.yaml\n", "extends itself"),
        ("extends: [a.yaml, b.yaml]\n", "one parent"),
        ("- a\n- b\n", "mapping of sections"),
        ("", "mapping of sections"),
        ("run: {name: r\n", "not YAML"),
        (MINIMAL + "run: {name: s}\n", "'run' stands twice"),
    ],
)
def test_files_that_are_no_config_give_one_line(write, text, said):
    with pytest.raises(ConfigError) as caught:
        load(write(text))
    assert len(caught.value.problems) == 1
    assert said in caught.value.problems[0]
    assert "\n" not in caught.value.problems[0]


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere.yaml: No such file"):
        load(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.lrr=1", "optimizer.lrr: unknown key; did you mean optimizer.lr?"),
        ("modl.num_layers=2", "modl: unknown key; did you mean model?"),
        ("zero_stage=2", "zero_stage: unknown key; did you mean engine.zero_stage?"),
        (
            "curriculum.stages.0.seqlen=8",
            "curriculum.stages.0.seqlen: unknown key; did you mean curriculum.stages.0.seq_len?",
        ),
        (
            "tracking.mlflow.url=x",
            "tracking.mlflow.url: unknown key; did you mean tracking.mlflow.uri?",
        ),
        ("curriculum.stages.2.steps=8", "curriculum.stages.2.steps: curriculum.stages has 2 items"),
        ("nonsense", "'nonsense' is no key=value"),
        ("run.name.more=3", "run.name.more: run.name has no keys in it"),
        ("model.num_layers=null", "model.num_layers: null is not allowed here"),
        ("model.num_layers=-1", "model.num_layers: must be greater than 0, and is '-1'"),
        ("model.num_layers=2.5", "model.num_layers: must be a whole number, and is '2.5'"),
        ("model.num_layers=two", "model.num_layers: must be a whole number, and is 'two'"),
        ("optimizer.lr=inf", "optimizer.lr: must be a finite number, and is 'inf'"),
        ("optimizer.lr=fast", "optimizer.lr: must be a number, and is 'fast'"),
        ("run.batch_hash=perhaps", "run.batch_hash: must be true or false, and is 'perhaps'"),
        ("model.positions=ropes", "did you mean rope?"),
        ("engine.zero_stage=4", "engine.zero_stage: must be less than or equal to 3"),
        ("model=5", "model: must be a mapping of keys, and is '5'"),
        ("curriculum.stages=[]", "curriculum.stages"),
        ("run.name=a/b", "run.name"),
        ("data.train=${nothing.here}", "data.train: Interpolation key 'nothing.here' not found"),
        ("launch.num_processes=many", "launch.num_processes"),
        ("schedule.warmup=16", "schedule.warmup: 16 steps of warm-up are over the 15"),
        ("model.max_positions=48", "curriculum.stages.0.seq_len: 64 is over the 48 positions"),
        ("engine.device_tokens=32", "curriculum.stages.0.seq_len: a row of 64 tokens is over"),
        ("launch.num_processes=3", "curriculum.stages.0.global_batch: 8 rows don't divide over"),
        ("data.workers=5", "data.lanes: 64 lanes don't divide over 1 ranks x 5 loader workers"),
        ("model.num_heads=5", "model.hidden_size: 768 is not a multiple of num_heads=5"),
        ("engine.offload=optimizer engine.zero_stage=0", "engine.offload: optimizer offload needs"),
        ("schedule.kind=wsd", "schedule.decay: wsd needs the length of its decay"),
        ("curriculum.stages.1.name=a", "curriculum.stages.1.name: 'a' is also the name of stage 0"),
        ("engine.deepspeed.gradient_cliping=1.0", "did you mean engine.deepspeed.gradient_clip"),
    ],
)
def test_each_mistake_is_named(write, override, said):
    assert any(said in line for line in problems(write(), *override.split()))


def test_everything_wrong_is_reported_at_once(write):
    found = problems(
        write(),
        "optimizer.lrr=1",
        "model.num_layers=null",
        "schedule.warmup=16",
        "model.max_positions=48",
        "launch.num_processes=3",
        "engine.deepspeed.zero_optimisation.stage=1",
    )
    keys = {line.partition(":")[0] for line in found}
    assert keys == {
        "optimizer.lrr",
        "model.num_layers",
        "schedule.warmup",
        "curriculum.stages.0.seq_len",
        "curriculum.stages.0.global_batch",
        "curriculum.stages.1.global_batch",
        "data.lanes",
        "engine.deepspeed.zero_optimisation",
    }


def test_a_wrong_required_field_hides_nothing_else(write):
    found = problems(
        write(),
        "curriculum.stages.0.steps=null",
        "curriculum.stages.1.seq_len=4096",
        "curriculum.stages.0.global_batch=7",
        "launch.num_processes=2",
        "run.name=a/b",
        "schedule.warmup=100",
    )
    assert {line.partition(":")[0] for line in found} == {
        "curriculum.stages.0.steps",
        "curriculum.stages.1.seq_len",
        "curriculum.stages.0.global_batch",
        "run.name",
    }  # warm-up cannot be judged while the steps are unknown


@pytest.mark.parametrize("value", ["${", "${run.name", "${a:b:c}", "???", "${oc.env:NOT_SET_X}"])
def test_broken_interpolations_give_one_line(write, value):
    for path, overrides in (
        (write(), [f"data.train={value}"]),
        (write(MINIMAL + f"data: {{train: '{value}'}}\n"), []),
    ):
        with pytest.raises(ConfigError) as caught:
            load(path, overrides)
        assert len(caught.value.problems) == 1
        assert "\n" not in caught.value.problems[0]


def test_a_wrong_field_does_not_cause_errors_elsewhere(write):
    # the default of max_positions (512) would hold 64: the wrong value must not be judged twice
    assert len(problems(write(), "model.max_positions=x")) == 1


def test_a_correct_config_has_no_problems(write):
    assert load(write()).run.name == "r"
