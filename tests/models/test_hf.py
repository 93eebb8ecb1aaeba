"""Against the library's own forward pass, on models of its own classes. Nothing is fetched."""

import copy
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.models import build_model, get_model
from lockstep.models.chain import run_segment
from lockstep.models.hf_layers import ATTENDING
from lockstep.models.language import generate
from lockstep.models.protocol import require_segments, segments_of
from lockstep.parallel.facts import facts_of
from lockstep.parallel.initial import to_empty
from tests.hosts import REPOSITORY
from tests.models.config_changes import all_changes
from tests.models.decoders import decoder, sizes
from tests.models.samples import VOCABULARY, texts
from tests.models.test_builders import Section
from tests.parity.toy import VOCAB

transformers = pytest.importorskip("transformers")

SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "initializer_range": 0.2,
    },
    "gpt2": {
        "n_embd": 16,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 16,
        "vocab_size": VOCABULARY,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "initializer_range": 0.2,
    },
}
cut_families = pytest.mark.parametrize("family", SIZES)
ties = pytest.mark.parametrize("tied", [False, True])


def pair(family: str, **args: Any) -> tuple[nn.Module, nn.Module]:
    """Ours, and the library's with the same values; both in eval mode."""
    args = {**SIZES[family], **args}
    ours = get_model(f"hf:{family}")(**args).eval()
    config = transformers.AutoConfig.for_model(family, **args)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    missing, unexpected = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert not unexpected
    assert not missing
    return ours, theirs


@cut_families
@ties
def test_the_chain_of_segments_is_the_librarys_forward(family: str, tied: bool) -> None:
    """In every bit, as one process and by segments; each gets what the one before it returned."""
    ours, theirs = pair(family, tie_word_embeddings=tied)
    ids = texts()["input_ids"]
    expected = theirs(ids).logits
    assert expected.std() > 0.1
    assert torch.equal(ours(ids), expected)
    values: Any = ids
    for _, segment in require_segments(ours):
        values = run_segment(segment, (values.detach(),), {}, ((ids,), {}))
    assert torch.equal(values, expected)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    (ours(ids) * weights).sum().backward()
    mine = dict(ours.named_parameters())
    assert list(mine) == [name for name, _ in theirs.named_parameters()]
    for name, parameter in theirs.named_parameters():
        assert torch.equal(mine[name].grad, parameter.grad), name


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8,
            "rope_theta": 1000.0,
        },
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "rope_theta": 1000.0,
        },
        {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1000.0},
    ],
)
def test_llamas_with_stretched_positions(rope: dict[str, Any]) -> None:
    if hasattr(transformers.LlamaConfig(), "rope_parameters"):
        args: dict[str, Any] = {"rope_parameters": rope}
    else:  # before version 5
        args = {
            "rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"},
            "rope_theta": rope["rope_theta"],
        }
    ours, theirs = pair("llama", max_position_embeddings=32, **args)
    ids = texts(length=20)["input_ids"]
    torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-5, atol=1e-5)
    # its angles depend on the length: what was computed for one is not a first value
    with torch.device("meta"):
        built = get_model("hf:llama")(max_position_embeddings=32, **SIZES["llama"], **args)
    assert built.lm_head.weight.is_meta == (rope["rope_type"] != "dynamic")


@cut_families
def test_segments_are_the_layers_with_what_stands_around_them(family: str) -> None:
    model = get_model(f"hf:{family}")(**SIZES[family])
    names = [name for name, _ in model.blocks()]
    assert len(names) == 3
    assert [name for name, _ in require_segments(model)] == ["inputs", *names, "outputs"]
    assert type(model.blocks()[0][1]) is type(model.blocks()[2][1])
    assert segments_of(model) is None  # one process runs the library's own pass


@cut_families
@ties
def test_trap_19_tied_weights_stay_tied(family: str, tied: bool) -> None:
    """On meta → torch's to_empty the two registrations become two parameters, and not by ours."""
    with torch.device("meta"):
        model = get_model(f"hf:{family}")(tie_word_embeddings=tied, **SIZES[family])
    assert all(p.is_meta for p in model.parameters())
    count = sum(p.numel() for p in model.parameters())
    to_empty(model, torch.device("cpu"))
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(torch.nan)
    model.init_weights()
    at_once = get_model(f"hf:{family}")(tie_word_embeddings=tied, **SIZES[family])
    assert dict(model.named_buffers()).keys() == dict(at_once.named_buffers()).keys()
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), at_once.buffers(), strict=True))
    assert sum(p.numel() for p in model.parameters()) == count
    embedding: Any = model.get_input_embeddings()
    assert (model.lm_head.weight is embedding.weight) == tied
    batch = texts()
    loss = model.loss(model(*model.inputs(batch)), batch)
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None for p in model.parameters())


@cut_families
def test_trap_47_first_values_are_filled_one_by_one(family: str) -> None:
    """With all other parameters on meta each must still get its values, as the library would draw
    them.
    """
    with torch.device("meta"):
        model = get_model(f"hf:{family}")(**SIZES[family])
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                real = nn.Parameter(torch.full(parameter.shape, torch.nan))
                module._parameters[name] = real
                model.init_weights()
                assert not real.isnan().any(), name
                module._parameters[name] = parameter
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(family, **{**SIZES[family], "vocab_size": 2000})
    )
    ours = get_model(f"hf:{family}")(**{**SIZES[family], "vocab_size": 2000})
    ours.init_weights()
    mine = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        for statistic in (torch.mean, torch.std):
            torch.testing.assert_close(
                statistic(mine[name]), statistic(parameter), rtol=0.2, atol=0.03
            )


@cut_families
def test_the_loss_takes_targets_as_the_data_shift_them(family: str) -> None:
    ours, theirs = pair(family)
    ids = torch.randint(VOCABULARY, (2, 9))
    batch = {"input_ids": ids[:, :-1], "targets": ids[:, 1:]}
    mean_over_the_same_targets = theirs(ids, labels=ids).loss
    loss = ours.loss(ours(*ours.inputs(batch)), batch) / ours.count(batch)
    torch.testing.assert_close(loss, mean_over_the_same_targets, rtol=1e-5, atol=1e-6)


@cut_families
@ties
def test_weights_are_loaded_from_a_folder(family: str, tied: bool, tmp_path: Path) -> None:
    ours, theirs = pair(family, tie_word_embeddings=tied)
    theirs.save_pretrained(tmp_path)
    loaded = get_model(f"hf:{tmp_path}")()
    assert loaded.training
    ids = texts()["input_ids"]
    assert torch.equal(loaded.eval()(ids), ours(ids))
    loaded.save_pretrained(tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    torch.testing.assert_close(again(ids).logits, ours(ids), rtol=1e-6, atol=1e-6)


def test_weights_in_low_precision_become_float32(tmp_path: Path) -> None:
    _, theirs = pair("llama")
    theirs.bfloat16().save_pretrained(tmp_path)
    loaded = build_model(Section(f"hf:{tmp_path}"), {"vocab_size": 7})
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert {p.device.type for p in loaded.parameters()} == {"cpu"}
    assert torch.equal(loaded.lm_head.weight, theirs.lm_head.weight.float())


def test_weights_that_do_not_fill_the_model_are_refused(tmp_path: Path) -> None:
    _, theirs = pair("llama")
    theirs.save_pretrained(tmp_path)
    with pytest.raises(
        UsageError, match=r"do not fill 9 of the model's parameters[\s\S]*at random"
    ):
        get_model(f"hf:{tmp_path}")(num_hidden_layers=4)


def test_a_config_file_makes_a_model_with_random_values(tmp_path: Path) -> None:
    file = tmp_path / "small.json"
    file.write_text(json.dumps({"model_type": "gpt2", **SIZES["gpt2"]}))
    model = get_model(f"hf:{file}")(n_layer=1, num_attention_heads=2)
    assert len(model.blocks()) == 1
    assert model.config.n_head == 2


def test_facts_fill_the_config_of_a_type() -> None:
    args = {key: value for key, value in SIZES["gpt2"].items() if key != "vocab_size"}
    model = build_model(
        Section("hf:gpt2", args), {"vocab_size": 31, "block_size": 40, "image_size": 8}
    )
    assert model.config.vocab_size == 31
    assert model.config.n_positions == 16  # what args say stands
    with pytest.raises(UsageError, match="the config of a gpt2 has no 'image_size'"):
        build_model(Section("hf:gpt2", {**args, "image_size": 8}), {"vocab_size": 31})
    args.pop("n_positions")
    model = build_model(
        Section("hf:gpt2", {**args, "vocab_size": 33}), {"vocab_size": 31, "block_size": 1500}
    )
    assert model.config.vocab_size == 33
    assert model.config.n_positions == 1500


def test_another_family_trains_without_segments() -> None:
    sizes = {
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "attention_types": [[["global", "local"], 1]],
    }
    with torch.device("meta"):
        model = get_model("hf:gpt_neo")(vocab_size=VOCABULARY, **sizes)
    batch = texts()
    logits = model(*model.inputs(batch))
    assert logits.shape == (3, 8, VOCABULARY)
    model.loss(logits, batch).backward()
    assert not hasattr(model, "segments")
    assert len(model.blocks()) == 2


@cut_families
def test_a_copy_shares_nothing_and_text_is_continued(family: str) -> None:
    model = get_model(f"hf:{family}")(**SIZES[family]).eval()
    twin = copy.deepcopy(model)
    prompt = torch.tensor([[1, 2]])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    text: Tensor = generate(twin, prompt, 3, block_size=8, temperature=0)
    assert text.shape == (1, 5)
    assert twin(prompt).abs().max() > 0


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        ("hf:lama", {}, r"'lama' is neither[\s\S]*hf:l?lama"),
        (
            "hf:llama",
            {"num_layers": 3},
            r"the config of a llama has no 'num_layers'[\s\S]*num_hidden_layers",
        ),
        ("hf:gpt2", {"n_embd": 30, "n_head": 4}, r"can't build a gpt2[\s\S]*divisible"),
        ("hf:.", {}, r"config.json is not the config"),
    ],
)
def test_mistakes_are_named(name: str, args: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        get_model(name)(**args)


def test_a_text_longer_than_gpt2s_positions_is_refused() -> None:
    with pytest.raises(UsageError, match="17 tokens, and the model has 16 positions"):
        get_model("hf:gpt2")(**SIZES["gpt2"])(torch.zeros(1, 17, dtype=torch.int64))


EXPERTS: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "initializer_range": 0.2,
    "router_aux_loss_coef": 0.5,
}
MIXTURES = {
    "mixtral": {**EXPERTS, "num_local_experts": 4},
    "qwen3_moe": {
        **EXPERTS,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
    },
}


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_are_balanced_as_their_author_wrote_it(family: str) -> None:
    model = get_model(f"hf:{family}")(**MIXTURES[family], output_router_logits=True)
    batch = texts()
    logits, _ = outputs = model(*model.inputs(batch))
    loss = model.loss(outputs, batch) / model.count(batch)
    plain = get_model(f"hf:{family}")(**MIXTURES[family])
    plain.load_state_dict(model.state_dict())
    without = plain.loss(plain(*plain.inputs(batch)), batch) / plain.count(batch)
    assert torch.equal(model(batch["input_ids"]), logits)
    theirs = transformers.AutoModelForCausalLM.from_config(model.config)
    theirs.load_state_dict(model.state_dict())
    balance = theirs(input_ids=batch["input_ids"], output_router_logits=True).aux_loss
    torch.testing.assert_close(loss, without + 0.5 * balance, rtol=1e-5, atol=1e-6)
    assert balance > 1  # 2 where both experts of a token are always the same
    assert model.loss(outputs, {**batch, "targets": torch.full_like(batch["targets"], -100)}) == 0


def test_the_oldest_version_of_transformers_is_the_one_that_is_promised() -> None:
    from lockstep.models.hf import OLDEST

    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert extras["transformers"] == ["transformers>=" + ".".join(map(str, OLDEST))]


@pytest.mark.parametrize("family", sorted({*SIZES, *ATTENDING}))
def test_every_field_of_the_config_counts(family: str) -> None:
    """Also where the library's attention is exchanged for one that other ranks take part in, or
    that is refused.
    """
    changes, _ = all_changes(family)
    args = {**sizes(family), **changes}
    ours = get_model(f"hf:{family}")(**args).eval()
    theirs = decoder(family, **changes).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    ours.load_state_dict(
        {key: value for key, value in theirs.state_dict().items() if key in ours.state_dict()}
    )
    ids = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-6, atol=1e-6)
    if "sliding_window" in args or family == "gpt2":
        with pytest.raises(UsageError, match="can't be cut over ranks"):
            ours.context_plan()
    else:
        ours.config.attention_dropout = 0.0
        ours.context_plan()
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-5, atol=1e-5)


def test_angles_that_depend_on_the_length_are_refused_where_sequences_are_cut() -> None:
    """The part of a rank may be shorter than where the library changes them."""
    for family in ("llama", "qwen3"):
        rotary = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
        name = (
            "rope_parameters"
            if int(transformers.__version__.split(".")[0]) >= 5
            else "rope_scaling"
        )
        model: Any = get_model(f"hf:{family}")(
            **sizes(family, attention_dropout=0.0), **{name: rotary}
        )
        with pytest.raises(
            UsageError, match=r"its angles \(dynamic\) depend on the length of a text"
        ):
            model.context_plan()


@pytest.mark.parametrize(
    ("family", "axis"), [("qwen3", "context"), ("llama", "context"), ("gemma", "tensor")]
)
def test_a_refusal_of_the_librarys_object_names_what_can_be_cut(
    family: str, axis: str, tmp_path: Path
) -> None:
    """The advice is followed: the same model, built by name."""

    def plan_of(model: nn.Module) -> Any:
        facts = facts_of(model)
        return facts.required_context_plan() if axis == "context" else facts.tensor_plan

    model: Any = decoder(family, attention_dropout=0.0)
    if axis == "tensor" and not hasattr(model.get_input_embeddings(), "embed_scale"):
        pytest.skip(
            "before transformers 5 Gemma scales outside of its embedding: the object itself is cut"
        )
    with pytest.raises(UsageError, match=r"do: let Lockstep build it by name: [\s\S]*hf:folder"):
        plan_of(model)
    model.save_pretrained(tmp_path)
    assert plan_of(get_model(f"hf:{tmp_path}")())


def test_a_refusal_of_another_family_names_those_whose_sequences_can_be_cut() -> None:
    with pytest.raises(
        UsageError, match=r"do: write context_size: 1, or use one of hf:llama, hf:mistral"
    ):
        facts_of(decoder("mixtral")).required_context_plan()


@cut_families
def test_a_library_that_computes_something_else_than_the_chain_is_refused(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a later version might: it scales what its decoder returns, which each segment calls.

    A model on meta has no values by which a pipeline could compare it with its chain.
    """
    decoder = {"llama": transformers.LlamaModel, "gpt2": transformers.GPT2Model}[family]
    forward = decoder.forward

    def other(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = forward(self, *args, **kwargs)
        found.last_hidden_state = found.last_hidden_state * 2
        return found

    monkeypatch.setattr(decoder, "forward", other)
    with pytest.raises(UsageError, match=f"computes something else for a {family} of this config"):
        get_model(f"hf:{family}")(**SIZES[family])


@cut_families
def test_what_a_library_computes_around_its_decoder_is_followed(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a later version might: it scales its logits."""
    causal = {"llama": transformers.LlamaForCausalLM, "gpt2": transformers.GPT2LMHeadModel}[family]
    forward = causal.forward

    def other(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = forward(self, *args, **kwargs)
        found.logits = found.logits * 2
        return found

    ids = texts()["input_ids"]
    model = get_model(f"hf:{family}")(**SIZES[family]).eval()
    before = model(ids)
    monkeypatch.setattr(causal, "forward", other)
    assert torch.equal(model(ids), 2 * before)
    values: Any = ids
    for _, segment in require_segments(model):
        values = run_segment(segment, (values,), {}, ((ids,), {}))
    assert torch.equal(values, 2 * before)
