"""FSDP2's options: what is gathered as one unit, that ties survive it, what is sharded, and in
which types.
"""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, transformer_auto_wrap_policy
from torch.utils.data import Dataset

from lockstep.config import config_from
from lockstep.errors import UsageError
from lockstep.parallel.execution.passes import explained
from lockstep.parallel.facts import facts_of
from lockstep.parallel.fsdp.units import explain_mixing, used_elsewhere
from lockstep.trainer import Trainer
from tests.parity.matrix import MODELS, Case, Result, difference, reference, run_all
from tests.parity.toy import Tokens
from tests.ranks import run_ranks

STEPS = 2
POLICIES: dict[str, dict[str, Any]] = {
    "transformer": {},
    "size": {"auto_wrap_policy": "size", "min_num_params": 500},
    "classes": {
        "auto_wrap_policy": [
            "Linear",
            "Embedding",
            "Head",
            "BDHLayer",
            "LlamaDecoderLayer",
            "LlamaRMSNorm",
        ]
    },
    "function": {"auto_wrap_policy": "tests.parallel.fsdp.test_fsdp:has_a_matrix"},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "forward prefetch": {"forward_prefetch": True},
    "backward prefetch none": {"backward_prefetch": "none"},
    "unsharded": {"accumulate": "unsharded"},
    "backward prefetch post": {"backward_prefetch": "post"},
    "buffers in fp32": {"buffer_dtype": "fp32"},
}


def has_a_matrix(module: nn.Module) -> bool:
    """A user's policy: any module that owns a matrix."""
    return any(p.ndim > 1 for p in module.parameters(recurse=False))


def fsdp(options: dict[str, Any], kind: str = "full_shard") -> tuple[tuple[str, Any], ...]:
    keys = {"sharding_strategy": kind, **options}
    return tuple((f"distributed.fsdp.{key}", value) for key, value in keys.items())


def cases(*, whole: bool = False) -> list[Case]:
    """Every policy and option; unless `whole`, each policy with one model, and some options."""
    policies = [
        Case(model, "fsdp", 3, "none", fsdp(policy), STEPS)
        for policy, models in zip(
            POLICIES.values(), (["tied"], ["tied"], ["hf"], ["bdh"]), strict=True
        )
        for model in (["tied", "hf", "bdh"] if whole else models)
    ]
    some = list(OPTIONS.values())[: None if whole else 1]
    options = [Case("tied", "fsdp", 3, "full", fsdp(option), STEPS) for option in some]
    modes = ("selective", "every_n") if whole else ("selective",)
    return [
        *policies,
        *options,
        *(Case("tied", "fsdp", 3, mode, fsdp({}), STEPS) for mode in modes),
    ]


def placed(model: str, options: dict[str, Any], **more: Any) -> Trainer:
    settings = {
        "training.batch_size": 2,
        "training.max_steps": 5,
        "precision.mode": "fp32",
        "distributed.strategy": "fsdp",
        **dict(fsdp(options)),
        **more,
    }
    return Trainer(MODELS[model][0](), config=config_from(settings))


def in_one_launch() -> dict[str, Any]:
    found: dict[str, Any] = {"results": run_all(cases()), "policies": {}}
    for name, options in POLICIES.items():
        for model in ("tied", "hf", "bdh"):
            trainer = placed(model, options)
            [module] = trainer.placed.parts
            local = sum(p.to_local().numel() for p in trainer.placed.parameters.values())
            found["policies"][name, model] = {
                "units": [n for n, m in module.named_modules() if isinstance(m, FSDPModule)],
                "aliases": trainer.placed.aliases,
                "share": local / trainer.placed.num_parameters,
                "log_lines": trainer.placed.log_lines,
            }
    found["rotary"] = rotary_under_bf16()
    found["reduced in bf16"] = run_all(
        [Case("transformer", "fsdp", 1, "none", fsdp({"reduce_dtype": "bf16"}))]
    )
    found["warnings"] = what_torch_warns_of()
    found["sometimes"] = with_a_layer_used_sometimes("fsdp")
    return found


class Sometimes(nn.Module):
    """x [B, 4] → [B, 4]; one of its two layers is used only where the first number is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(4, 4)
        self.sometimes = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.always(x)
        return y + self.sometimes(x) if x[0, 0] > 0 else y


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Eight rows; the first numbers of the first half, the first micro-batches of two ranks, are
    positive.
    """

    deterministic = True

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.tensor([1.0 if index < 4 else -1.0, index, 0.5, -0.25])
        return x, x.flip(0)


def with_a_layer_used_sometimes(strategy: str) -> list[tuple[float, float]]:
    """(loss, norm) of three steps of four micro-batches."""
    torch.manual_seed(0)
    settings = {
        "training.batch_size": 2,
        "training.global_batch_size": 8,
        "training.max_steps": 3,
        "data.shuffle": False,
        "training.optimizer": "sgd",
        "training.learning_rate": 0.01,
        "precision.mode": "fp32",
        "distributed.strategy": strategy,
        "distributed.fsdp.auto_wrap_policy": ["Sometimes"],
    }
    model = nn.Sequential(Sometimes(), nn.Linear(4, 4))
    trainer = Trainer(model, config=config_from(settings), loss_fn=nn.MSELoss())
    return [(float(record.loss), float(record.grad_norm)) for record in trainer.steps(Rows())]


def rotary_under_bf16() -> dict[str, Any]:
    """A rotary buffer of a model whose parameters are gathered in bf16, and where its user asks for
    bf16 buffers.
    """
    kept = placed("hf", {}, **{"precision.param_dtype": "bf16"})
    cast = placed("hf", {"buffer_dtype": "bf16"})
    next(kept.steps(Tokens()))

    def dtypes(trainer: Trainer) -> set[torch.dtype]:
        return {
            b.dtype for n, b in trainer.placed.parts[0].named_buffers() if n.endswith("inv_freq")
        }

    return {"kept": dtypes(kept), "cast": dtypes(cast), "said": cast.placed.log_lines}


def what_torch_warns_of() -> list[str]:
    """Deprecations during a step under each strategy."""
    said = []
    exact = {"distributed.reproducible": True}
    for strategy, more in (
        ("ddp", {}),
        ("fsdp", {}),
        ("accelerate", {}),
        ("ddp", exact),
        ("fsdp", exact),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = placed("tied", {}, **{"distributed.strategy": strategy, **more})
            next(trainer.steps(Tokens()))
        said += [
            f"{strategy}: {w.message}"
            for w in caught
            if issubclass(w.category, FutureWarning | DeprecationWarning)
        ]
    return said


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(in_one_launch, 2)


def test_trap_19_ties_and_counts_survive_every_wrap_policy(ranks: list[dict[str, Any]]) -> None:
    """Wrapping by size puts a tied weight into two units, and silently unties it.

    Equal training shows that it is one parameter, and so does the number of parameters.
    """
    for rank in ranks:
        check_like_one_process(cases(), rank["results"])
        for (policy, model), seen in rank["policies"].items():
            if model == "hf":
                assert (
                    seen["aliases"] == {"model.embed_tokens.weight": ["lm_head.weight"]}
                    or not seen["aliases"]
                )
            assert "" in seen["units"]
            assert len(seen["units"]) > 1 or model == "bdh", (policy, model, seen["units"])


def check_like_one_process(trained: list[Case], results: list[Result | str]) -> None:
    for case, result in zip(trained, results, strict=True):
        assert isinstance(result, Result), f"{case}: {result}"
        expected = reference(Case(case.model, "single", 1, "none", steps=STEPS), 6)
        assert difference(result, expected) < 1e-5, case
        assert result.num_parameters == expected.num_parameters


@pytest.mark.full
def test_every_model_trains_alike_under_every_policy_and_option() -> None:
    whole = cases(whole=True)
    for results in run_ranks(run_all, 2, whole, timeout=900):
        check_like_one_process(whole, results)


def test_units_follow_the_policy(ranks: list[dict[str, Any]]) -> None:
    units = {key: seen["units"] for key, seen in ranks[0]["policies"].items()}
    assert units["transformer", "tied"] == ["", "layers.0", "layers.1"]
    assert any(name.endswith("attention.query") for name in units["classes", "tied"])
    assert "embed" not in units["classes", "tied"], "the head borrows the embedding's weight"
    assert any(name.endswith("mlp.down") for name in units["function", "tied"])


def test_bdh_is_sharded_and_says_that_it_is_gathered_whole(ranks: list[dict[str, Any]]) -> None:
    """Its layers share their weights, which therefore belong to no block."""
    for rank in ranks:
        seen = rank["policies"]["transformer", "bdh"]
        assert 0.49 < seen["share"] < 0.51
        assert any("belong to no block" in line for line in seen["log_lines"])


def test_trap_20_rotary_phases_stay_fp32_unless_the_user_says_otherwise(
    ranks: list[dict[str, Any]],
) -> None:
    """In bf16, positions above 256 have the phases of their neighbours."""
    for rank in ranks:
        assert rank["rotary"]["kept"] == {torch.float32}
        assert rank["rotary"]["cast"] == {torch.bfloat16}
        assert any("buffers are kept in bf16" in line for line in rank["rotary"]["said"])


def test_gradients_may_be_reduced_in_bf16(ranks: list[dict[str, Any]]) -> None:
    result = ranks[0]["reduced in bf16"][0]
    assert isinstance(result, Result), result
    assert 1e-6 < difference(result, reference(Case("transformer", "single", 1, "none"), 2)) < 2e-2


def test_trap_64_no_deprecated_name_of_torch_is_used(ranks: list[dict[str, Any]]) -> None:
    """2.13 renames `all_gather_into_tensor`, `reduce_scatter_tensor`, DDP's `broadcast_buffers`;
    2.11 has the old.
    """
    for rank in ranks:
        assert not rank["warnings"]


def test_a_layer_that_later_micro_batches_leave_out_keeps_its_gradient(
    ranks: list[dict[str, Any]],
) -> None:
    alone = with_a_layer_used_sometimes("single")
    for rank in ranks:
        for (loss, norm), (its_loss, its_norm) in zip(rank["sometimes"], alone, strict=True):
            assert loss == pytest.approx(its_loss, rel=1e-5)  # fp32 sums in another order
            assert norm == pytest.approx(its_norm, rel=1e-5)


def test_a_policy_that_finds_nothing_names_the_models_classes() -> None:
    from lockstep.config import FSDPConfig
    from lockstep.parallel.fsdp.units import units_of

    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(UsageError, match="no module of the model is a Block"):
        units_of(facts_of(model), FSDPConfig(auto_wrap_policy=["Block"]))
    with pytest.raises(UsageError, match="there is no module 'nowhere'"):
        units_of(facts_of(model), FSDPConfig(auto_wrap_policy="nowhere:nothing"))


def module_wrap_policy() -> ModuleWrapPolicy:
    """As the guides write it: a function without arguments that returns a policy of torch's."""
    return ModuleWrapPolicy({nn.Linear})


a_policy = module_wrap_policy()
a_partial = partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear})


@pytest.mark.parametrize("name", ["module_wrap_policy", "a_policy", "a_partial"])
def test_policies_of_torch_pick_units(name: str) -> None:
    from lockstep.config import FSDPConfig
    from lockstep.parallel.fsdp.units import in_order, units_of

    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Sequential(nn.Linear(2, 2)))
    config = FSDPConfig(auto_wrap_policy=f"tests.parallel.fsdp.test_fsdp:{name}")
    units = units_of(facts_of(model), config)
    assert [(unit.name, unit.own) for unit in units] == [
        ("2.0", ("weight", "bias")),
        ("0", ("weight", "bias")),
        ("", ()),  # the root, whose units have all parameters
    ]
    assert [unit.name for unit in in_order(units)] == ["", "0", "2.0"]


def test_a_module_whose_parameter_is_used_outside_is_no_unit() -> None:
    from lockstep.config import FSDPConfig
    from lockstep.parallel.fsdp.units import units_of

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 4)
            self.head = nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight
            self.body = nn.Linear(4, 4)

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.head(self.body(self.embed(ids)))
            return out

    policy = FSDPConfig(auto_wrap_policy="size", min_num_params=1)
    body, root = units_of(facts_of(Tied()), policy)
    assert (body.name, body.own) == ("body", ("weight", "bias"))
    assert (root.name, root.own) == ("", ("embed.weight",))


@pytest.mark.parametrize(
    ("says", "raises"),
    [
        ("aten.mm: got mixed torch.Tensor and DTensor, need to convert", UsageError),
        ("out of memory", RuntimeError),
    ],
)
def test_a_parameter_that_is_used_while_it_is_sharded_is_explained(
    says: str, raises: type[Exception]
) -> None:
    with (
        pytest.raises(raises) as found,
        explained([partial(explain_mixing, explanation=used_elsewhere)]),
    ):
        raise RuntimeError(says)
    assert ("outside of the module that it belongs to" in str(found.value)) == (
        raises is UsageError
    )
