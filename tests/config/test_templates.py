"""The template language: what it gives, and what is said about mistakes in it."""

from pathlib import Path

import pytest

from lockstep.config import load_config, templates
from lockstep.config.prepass import is_template
from tests.config.shared import loaded, refusal, written

BASE = """\
---
training:
  -- block sizes
  batch_size: 2
  seed: 7
  -- endblock sizes
model:
  name: bdh
  args:
    -- block arguments
    n_layer: 2
    -- endblock
"""


def test_blocks_are_filled_at_the_depth_of_the_parent(tmp_path: Path) -> None:
    written(tmp_path, BASE, "base.yaml")
    config = loaded(
        tmp_path,
        """\
-- extends 'base.yaml'
-- block sizes
        batch_size: 3
        gradient_clip:
            value: 2
-- endblock sizes
-- block arguments
n_head: 4
-- endblock arguments
""",
    )
    assert (config.training.batch_size, config.training.seed) == (3, 1337)
    assert config.training.gradient_clip.value == 2
    assert config.model.args == {"n_head": 4}


def test_super_keeps_what_the_parent_says_and_the_child_wins(tmp_path: Path) -> None:
    written(tmp_path, BASE, "base.yaml")
    written(
        tmp_path,
        "-- extends 'base.yaml'\n-- block arguments\n   == super()\n   n_head: 4\n   deep: {a: 1,"
        " b: 1}\n-- endblock\n",
        "middle.yaml",
    )
    config = loaded(
        tmp_path,
        "-- extends 'middle.yaml'\n-- block arguments\n  == super()\n  n_layer: 6\n  deep: {b:"
        " 2}\n-- endblock\n",
    )
    assert config.model.args == {"n_layer": 6, "n_head": 4, "deep": {"a": 1, "b": 2}}
    assert config.training.batch_size == 2


def test_super_may_stand_deeper_than_the_block(tmp_path: Path) -> None:
    written(tmp_path, BASE, "base.yaml")
    text = (
        "-- extends 'base.yaml'\n-- block arguments\n  inner:\n    == super()\n    x: 1\n--"
        " endblock\n"
    )
    assert loaded(tmp_path, text).model.args == {"inner": {"n_layer": 2, "x": 1}}


def test_blocks_within_blocks(tmp_path: Path) -> None:
    written(
        tmp_path,
        "model:\n  -- block all\n  args:\n    -- block inner\n    a: 1\n    -- endblock\n    z: 9\n"
        "  -- endblock all\n",
        "base.yaml",
    )
    config = loaded(
        tmp_path,
        "-- extends 'base.yaml'\n-- block inner\n        a: 2\n        b:\n          - 3\n--"
        " endblock\n",
    )
    assert config.model.args == {"a": 2, "b": [3], "z": 9}


def test_text_outside_the_blocks_is_laid_over_the_result(tmp_path: Path) -> None:
    config = loaded(
        tmp_path,
        """\
---
-- extends 'trainers/fsdp.yaml'
-- set layers = 3
model:
  name: transformer
  args: {n_layer: {{ layers }}}
-- block trainer_args
    max_steps: {{ 10 * layers }}
-- endblock trainer_args
distributed:
  fsdp: {cpu_offload: true}
""",
    )
    assert config.model.args == {"n_layer": 3}
    assert config.distributed.strategy == "fsdp"
    assert config.distributed.fsdp.cpu_offload


def test_trap_65_document_starts_and_expressions_pass_the_line_pass(tmp_path: Path) -> None:
    """Jinja's line statements die on YAML's `---` and leave `== super()` as text."""
    config = loaded(
        tmp_path,
        """\
---
-- set wide = true
-- set names = ['a', 'b']
model:
  args:
    -- for name in names
    {{ name }}: 1
    -- endfor
    -- if wide
    n_embd: 512
    -- else
    n_embd: 128
    -- endif
    text: "--not a statement"
    # {{ a comment about templates }}
    == "last: " ~ names | length
""",
    )
    assert config.model.args == {
        "a": 1,
        "b": 1,
        "n_embd": 512,
        "text": "--not a statement",
        "last": 2,
    }


def test_trap_40_a_block_that_the_parent_lacks_is_an_error_with_the_parents_blocks(
    tmp_path: Path,
) -> None:
    """Jinja drops such a block without a word, and the run trains with other settings than were
    written.
    """
    message = refusal(
        tmp_path,
        "-- extends 'trainers/accel_trainer.yaml'\n\n-- block trainer_arg\n    max_steps: 3\n--"
        " endblock\n",
    )
    assert "no block trainer_arg" in message
    assert "run.yaml:3" in message
    assert "trainer_args, distributed_env, loss_fn, trainer_callbacks" in message


@pytest.mark.parametrize(
    "name", ["single", "dp", "ddp", "fsdp", "pipeline", "hybrid", "accelerate"]
)
def test_the_trainers_that_ship_define_the_four_blocks(name: str, tmp_path: Path) -> None:
    plain = load_config(f"trainers/{name}.yaml")
    config = loaded(
        tmp_path,
        f"""\
-- extends 'trainers/{name}.yaml'

-- block trainer_args
    == super()

    # sizes
    max_steps: 2000
    save_steps: 500
    log_steps: 5
    batch_size: 4  # per rank
    gradient_clip: 0
-- endblock trainer_args

-- block distributed_env
    == super()
    timeout_seconds: 60
-- endblock distributed_env

-- block loss_fn
    !singleton:torch.nn:CrossEntropyLoss@loss_fn
        label_smoothing: 0.1
-- endblock loss_fn

-- block trainer_callbacks
    - !singleton:mine.logs:Logger
        args: [1, 2]
        every: 3
-- endblock trainer_callbacks
""",
    )
    assert config.training.max_steps == 2000
    assert config.checkpoint.save_steps == 500
    assert config.monitor.log_steps == 5
    assert config.training.batch_size == 4
    assert config.training.gradient_clip.strategy == "none"
    assert config.distributed.timeout_seconds == 60
    assert config.distributed.model_dump(
        exclude={"timeout_seconds"}
    ) == plain.distributed.model_dump(exclude={"timeout_seconds"})
    assert config.loss_fn is not None
    assert (config.loss_fn.name, config.loss_fn.args) == (
        "torch.nn:CrossEntropyLoss",
        {"label_smoothing": 0.1},
    )
    (callback,) = config.monitor.callbacks
    assert (callback.name, callback.positional, callback.args) == (
        "mine.logs:Logger",
        [1, 2],
        {"every": 3},
    )


def test_a_pipeline_as_the_guide_writes_it_with_our_names(tmp_path: Path) -> None:
    config = loaded(
        tmp_path,
        """\
-- extends 'trainers/pipeline_trainer.yaml'

-- block trainer_args
    == super()
    split_spec:
        "layers.4": "end"
        "layers.8": "end"
    stages_per_rank: 1
    schedule: GPipe
    gradient_accumulation_steps: !calc "max(1, 64 // batch_size)"
    batch_size: 4
-- endblock trainer_args

-- block distributed_env
    !singleton:forgather.ml.distributed:DistributedEnvironment@distributed_env
        backend: "gloo"
-- endblock distributed_env

-- block trainer_callbacks
trainer_callbacks: &trainer_callbacks !list:@trainer_callbacks
    # only one
    - !singleton:mine.logs:Logger
        sink: &sink !singleton:mine.logs:Sink@sink
            args: [x]
    - !singleton:mine.logs:Other
        args: [*sink]
-- endblock trainer_callbacks
""",
    )
    assert config.distributed.strategy == "pipeline"
    assert config.distributed.pipeline.split_spec == {"layers.4": "end", "layers.8": "end"}
    assert config.distributed.pipeline.schedule == "GPipe"
    assert config.training.gradient_accumulation_steps == 16
    assert config.distributed.backend == "gloo"
    sink = {"name": "mine.logs:Sink", "args": {}, "positional": ["x"]}
    assert config.monitor.callbacks[0].args == {"sink": sink}
    assert config.monitor.callbacks[1].positional == [sink]


def test_an_empty_list_and_an_object_without_arguments(tmp_path: Path) -> None:
    config = loaded(
        tmp_path, "monitor:\n  callbacks: !list\nloss_fn: !singleton:torch.nn:MSELoss\n"
    )
    assert config.monitor.callbacks == []
    assert config.loss_fn is not None
    assert config.loss_fn.name == "torch.nn:MSELoss"


def test_foreign_names_in_a_template_are_told_with_their_lines(tmp_path: Path) -> None:
    message = refusal(
        tmp_path,
        """\
-- extends 'trainers/accel_trainer.yaml'
-- block trainer_args
    == super()
    output_dir: "./out"
    per_device_train_batch_size: 8
    accelerator_args:
        device_placement: true
        dataloader_config:
            num_workers: 4
-- endblock trainer_args
""",
    )
    lines = {int(line.split(":")[1]): line for line in message.splitlines()[1:]}
    assert "write --output-dir" in lines[4]
    assert "write training.batch_size" in lines[5]
    assert "write distributed.accelerate.device_placement" in lines[7]
    assert "write data.num_workers" in lines[9]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("-- blok x\n", ("run.yaml:1", "`-- blok` is not a statement", "write -- block")),
        ("-- block\n", ("run.yaml:1", "needs a name")),
        ("model: {}\n-- block a\n", ("run.yaml:2", "the block a has no end")),
        ("model: {}\n-- endblock a\n", ("run.yaml:2", "not begun")),
        ("-- block a\n-- endblock b\n", ("run.yaml:2", "the block a of line 1", "-- endblock a")),
        ("-- block a\n-- endblock\n-- block a\n-- endblock\n", ("run.yaml:3", "defined twice")),
        ("-- extends 'run.yaml'\n", ("round in a circle", "run.yaml → run.yaml")),
        ("\n-- extends 'trainers/fsd.yaml'\n", ("run.yaml:2", "write trainers/fsdp.yaml")),
        ("-- set p = 'trainers/fsdp.yaml'\n-- extends p\n", ("run.yaml:2", "a quoted name")),
        ("-- if\nmodel: {}\n-- endif\n", ("run.yaml:1", "can't be read")),
        ("-- set x = 1\nmodel:\n  args: {a: {{ y }}}\n", ("run.yaml:3", "'y' is undefined")),
        ("-- set x = 1\nmodel:\n  args: {a: {{ 1 / 0 }}}\n", ("run.yaml:3", "division by zero")),
        ("-- set x = 1\nmodel:\n  args: {a: {{ x.__class__ }}}\n", ("run.yaml:3", "unsafe")),
        ("-- set x = 1\n\nmodel:\n  nme: x\n", ("run.yaml:4", "model.nme", "write model.name")),
        (
            "-- set x = 1\n\nmodel: {}\nmodel: {}\n",
            ("run.yaml:4", "written twice, first in line 3"),
        ),
        ("-- set x = 1\n\nmodel: [\n", ("run.yaml:", "not YAML")),
        (
            "model:\n  args: {a: !factory:x:Y }\n",
            ("run.yaml:2", "!factory:x:Y is not known", "!singleton"),
        ),
        ("model:\n  args: {a: !singleton:x }\n", ("run.yaml:2", "is not known")),
        (
            "model:\n  args: {a: !singleton:x:Y 3}\n",
            ("run.yaml:2", "!singleton:x:Y takes arguments", "'3'"),
        ),
        ("model:\n  args: {a: !list 3}\n", ("run.yaml:2", "!list takes a list")),
        ("loss_fn: !singleton:x:Y\n  unknown: 1\ndata: {x: 1}\n", ("run.yaml:3", "data.x")),
        ("-- set x = 1\ntrainer_args:\n  name: x\n", ("run.yaml:3", "model.name or data.name")),
        ("-- set x = 1\ntrainer_args: 3\n", ("run.yaml:2", "keys and values")),
        (
            "-- set x = 1\ndistributed_env: !singleton:a:B\n",
            ("run.yaml:2", "can't be a:B", "init_method"),
        ),
        (
            "trainer_args:\n  batch_size: 3\n",
            ("run.yaml:2", "unknown key trainer_args.batch_size", "write training.batch_size"),
        ),
        (
            "-- set x = 1\ntrainer_args:\n  max_steps: 3\n  max_stepz: 3\n",
            (
                "run.yaml:4",
                "unknown key trainer_args.max_stepz",
                "write training.max_steps (in the block trainer_args",
            ),
        ),
    ],
)
def test_mistakes_in_templates_are_told_with_their_lines(
    tmp_path: Path, text: str, words: tuple[str, ...]
) -> None:
    message = refusal(tmp_path, text)
    for word in words:
        assert word in message, message
    assert "\ue000" not in message


def test_a_mistake_in_a_parent_names_the_parent(tmp_path: Path) -> None:
    written(tmp_path, "training:\n  -- block a\n  sed: 3\n  -- endblock\n", "base.yaml")
    message = refusal(tmp_path, "-- extends 'base.yaml'\nmodel: {name: bdh}\n")
    assert "base.yaml:3" in message
    assert "training.seed" in message
    written(
        tmp_path, "training:\n  -- block a\n  seed: {{ nothing }}\n  -- endblock\n", "base.yaml"
    )
    assert "base.yaml:3" in refusal(tmp_path, "-- extends 'base.yaml'\nmodel: {name: bdh}\n")


def test_a_block_in_a_file_that_extends_plain_yaml(tmp_path: Path) -> None:
    written(tmp_path, "training: {seed: 3}\n", "base.yaml")
    assert "plain YAML" in refusal(
        tmp_path, "-- extends 'base.yaml'\n-- block a\nmodel: {}\n-- endblock\n"
    )


def test_what_is_a_template() -> None:
    assert is_template("a: 1\n  -- block x\n")
    assert is_template("== super()\n")
    assert is_template("x: !calc '1'\n")
    assert not is_template(
        "---\na: 1\n--x: 2\n# !singleton's cousin !lister\nb: a -- b\nc: '{{ x }}'\n"
    )


@pytest.mark.parametrize(
    ("statement", "of"),
    [
        ("{{ 'x' * 10 ** 11 }}", "memory"),
        ("{{ '{:>99999999999}'.format(1) }}", "memory"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "time"),
        ("{{ 7 ** (9 ** 9) }}", "time"),
        ("{% for a in range(99999) %}{{ 'x' * 999 }}{% endfor %}", "text"),
    ],
)
@pytest.mark.promise(
    "Templates are filled in by a process of their own with little memory and time"
)
def test_a_template_that_grows_without_end_is_an_error(
    tmp_path: Path, statement: str, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if of == "time":  # the others come to their own limits within the usual seconds
        monkeypatch.setattr(templates, "SECONDS", 1)
    message = refusal(tmp_path, f"-- set x = 1\ndata: {{name: a{statement}}}\n")
    assert f"the template takes too much {of}" in message
    assert "where: run.yaml" in message


def test_calc_knows_the_variables_that_a_template_sets(tmp_path: Path) -> None:
    """With the guide's own expression; what is not set there is one of our keys, under the name of
    theirs.
    """
    text = """
-- extends 'trainers/pipeline.yaml'
-- set total_batch_size = 64
-- block trainer_args
== super()
batch_size: 4
gradient_accumulation_steps: !calc "max(1, total_batch_size // per_device_batch_size)"
-- endblock trainer_args
"""
    assert loaded(tmp_path, text).training.gradient_accumulation_steps == 16
    text = """
training:
  batch_size: 8
  global_batch_size: 64
  gradient_accumulation_steps: !calc "max(1, total_batch_size // per_device_batch_size)"
"""
    assert loaded(tmp_path, text).training.gradient_accumulation_steps == 8
    text = '-- set batch = "x"\ntraining: {seed: !calc "batch"}\n'
    assert "no key is named 'batch'" in refusal(tmp_path, text)
