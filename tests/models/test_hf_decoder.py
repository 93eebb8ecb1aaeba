"""Every family that is cut: segment by segment it computes the bits of the library's own forward
pass.
"""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lockstep
from lockstep.config import config_from
from lockstep.errors import UsageError
from lockstep.models.chain import run_segment
from lockstep.models.hf_causal import meet_protocol
from lockstep.models.hf_decoder import FAMILIES
from lockstep.models.hf_layers import hf_tensor_plan
from lockstep.models.protocol import blocks_of, require_segments, segments_of
from lockstep.parallel.facts import facts_of
from lockstep.parallel.place import key_model
from lockstep.parallel.tensor.cuts import apply_tensor
from lockstep.randomness import RandomState
from tests.models.config_changes import all_changes, built, outputs, single_changes
from tests.models.decoders import decoder
from tests.parity.toy import VOCAB
from tests.sampled import quick_and_full

LENGTH = 12


def folded(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """The model's outputs, through its segments; what travels is detached from nothing."""
    values: tuple[Any, ...] = ()
    keywords: dict[str, Any] = batch
    outputs: Any = None
    for _, segment in require_segments(model):
        outputs = run_segment(segment, values, keywords, ((), batch))
        values = outputs if isinstance(outputs, tuple) else (outputs,)
        keywords = {}
    return outputs


def batches() -> list[dict[str, Tensor]]:
    ids = torch.randint(0, VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 9:] = 0
    mask[1, 5:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return [
        {"input_ids": ids, "labels": ids},
        {"input_ids": ids, "labels": labels, "attention_mask": mask},
    ]


# in the quick run the test below has all of them, with every field of the config changed
@pytest.mark.parametrize("family", quick_and_full(sorted(FAMILIES), ["gpt2", "llama", "mixtral"]))
def test_the_chain_is_the_librarys_forward_pass(family: str) -> None:
    check_chain(decoder(family))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_chain_is_the_librarys_forward_pass_with_every_field_of_the_config_changed(
    family: str,
) -> None:
    changes, _ = all_changes(family)
    check_chain(built(family, **changes))


def test_the_changes_of_a_config_tell() -> None:
    """They are generated from a config's fields; these are known to count."""
    multipliers = (
        "embedding_multiplier",
        "logits_scaling",
        "residual_multiplier",
        "attention_multiplier",
    )
    assert {*multipliers, "attention_bias"} <= set(all_changes("granite")[1])
    assert {"final_logit_softcapping", "query_pre_attn_scalar", "layer_types"} <= set(
        all_changes("gemma2")[1]
    )
    assert {"no_rope_layers", "layer_types"} <= set(all_changes("smollm3")[1])


@pytest.mark.full
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_chain_is_the_librarys_forward_pass_with_each_field_of_the_config_changed(
    family: str,
) -> None:
    for field, value in single_changes(family):
        if outputs(family, {field: value}) is not None:
            check_chain(built(family, **{field: value}))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_layers_that_are_cut_are_the_librarys_with_every_field_of_the_config_changed(
    family: str,
) -> None:
    """In blocks on one process, as each rank computes its own; or there is no plan, and the axis is
    refused.
    """
    changes, _ = all_changes(family)
    exact = config_from({"distributed.reproducible": True, "distributed.tensor_blocks": 2})
    for args in ({}, changes):
        model = built(family, **args).eval()
        expected = model(input_ids=batches()[0]["input_ids"]).logits
        model = meet_protocol(model)
        if hf_tensor_plan(model) is not None:
            apply_tensor(facts_of(model), None, exact)
            torch.testing.assert_close(
                model(batches()[0]["input_ids"]), expected, rtol=1e-5, atol=1e-4
            )


def check_chain(whole: nn.Module) -> None:
    """Compare loss, logits and gradients of the whole model and of its chain.

    Random numbers are keyed by blocks in the whole model, and by segments in the chain. Dropout is
    on, and there is a mask or none.
    """
    cut = copy.deepcopy(whole)
    assert segments_of(whole) is None  # one process runs the library's own pass
    blocks = blocks_of(cut)
    assert [name for name, _ in require_segments(cut)] == [
        "inputs",
        *(name for name, _ in blocks),
        "outputs",
    ]
    random_states = [RandomState(7, torch.device("cpu")) for _ in range(2)]
    key_model(facts_of(whole), random_states[0])
    key_model(facts_of(cut), random_states[1], cut=True)
    for batch in batches():
        for model, random_state in zip((whole, cut), random_states, strict=True):
            model.zero_grad()
            with random_state.running("train", 3):
                random_state.at(2)
                outputs = folded(model, batch) if model is cut else model(**batch)
                outputs.loss.backward()
            if model is whole:
                expected = outputs
        assert torch.equal(outputs.loss, expected.loss)
        assert torch.equal(outputs.logits, expected.logits)
        others = dict(cut.named_parameters())
        for name, parameter in whole.named_parameters():
            if parameter.grad is None:
                assert others[name].grad is None
            else:
                torch.testing.assert_close(others[name].grad, parameter.grad, rtol=1e-6, atol=1e-7)


class Products(TorchDispatchMode):
    """Counts matrix products by the shapes and strides of what they multiply."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[Any] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm", "addmm", "baddbmm", "convolution") or "attention" in name:
            given = [(tuple(t.shape), t.stride()) for t in args if isinstance(t, Tensor)]
            # Positions times frequencies, before transformers 5: each segment makes the table anew.
            # A sum of one product has the same bits wherever it lies.
            if name != "bmm" or given[0][0][-1] != 1:
                self.seen[name, tuple(given)] += 1
        return func(*args, **(kwargs or {}))


# of each kind: tied and transposed weights, windows, experts, fused projections
SOME = ["gemma2", "gpt2", "llama", "mixtral", "phi3"]


@pytest.mark.parametrize("family", quick_and_full(sorted(FAMILIES), SOME))
def test_the_chain_multiplies_what_lies_alike_in_memory(family: str) -> None:
    """On some CPUs the bits of a product follow from its operands' strides, which here nobody sees
    in the results.
    """
    for attention in ("sdpa", "eager"):
        # As many heads of keys as of queries: fewer are copied for each query, and lie alike then.
        # Without dropout: before transformers 5 shapes follow from the experts that are chosen, by
        # what was drawn.
        sizes = {"num_hidden_layers": 2, "num_key_value_heads": 4, "attention_dropout": 0.0}
        heads = {} if family == "gpt2" else sizes
        whole = decoder(family, **heads)
        if not _attends_by(whole, attention):
            continue
        cut = copy.deepcopy(whole)
        lockstep.place(whole)
        for batch in batches():
            seen = []
            for model in (whole, cut):
                with (
                    Products() as products,
                    RandomState(0, torch.device("cpu")).running("train", 0),
                ):
                    outputs = folded(model, batch) if model is cut else model(**batch)
                    outputs.loss.backward()
                seen.append(products.seen)
            assert seen[0] == seen[1], attention


def _attends_by(model: Any, attention: str) -> bool:
    try:
        model.set_attn_implementation(attention)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_each_layer_belongs_to_one_segment_and_nothing_else_does_twice(family: str) -> None:
    model = decoder(family, tie_word_embeddings=False)
    owners: dict[str, list[str]] = {}
    for name, segment in require_segments(model):
        ours = {id(p) for p in segment.parameters()}
        for parameter, tensor in model.named_parameters():
            if id(tensor) in ours:
                owners.setdefault(parameter, []).append(name)
    assert set(owners) == {name for name, _ in model.named_parameters()}
    assert all(len(segments) == 1 for segments in owners.values())
    # the hooks of one are the hooks of the other
    assert require_segments(model)[1][1] is require_segments(model)[1][1]


def test_a_model_of_peft_is_cut_where_its_adapters_are_in_the_layers() -> None:
    """LoRA, DoRA and IA3 are; prompts that stand before a text are in no layer."""
    peft = pytest.importorskip("peft")
    task = {"task_type": "CAUSAL_LM"}
    chosen = {
        "target_modules": ["q_proj", "embed_tokens"],
        "modules_to_save": ["lm_head"],
        "lora_dropout": 0.1,
    }
    scaled = {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
    for family, config in {
        "llama": peft.LoraConfig(**task, **chosen, init_lora_weights=False),
        "gpt2": peft.LoraConfig(**task, fan_in_fan_out=True, init_lora_weights=False),
        "gemma2": peft.LoraConfig(target_modules="all-linear", use_dora=True),
        "qwen3": peft.IA3Config(**task, **scaled),
    }.items():
        check_chain(peft.get_peft_model(decoder(family), config))
    prompted = peft.get_peft_model(
        decoder("llama"), peft.PromptTuningConfig(**task, num_virtual_tokens=4)
    )
    with pytest.raises(UsageError, match=r"PeftModelForCausalLM can't be cut into stages"):
        require_segments(prompted)


def test_parameters_that_no_stage_would_run_are_refused() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(decoder("llama"), peft.LoraConfig(target_modules=["q_proj"]))
    model.value_head = nn.Linear(16, 1)
    with pytest.raises(
        UsageError, match=r"value_head.weight, value_head.bias of PeftModel are not among the parts"
    ):
        require_segments(model)


def test_balancing_losses_are_refused() -> None:
    with pytest.raises(UsageError, match=r"balances its experts[\s\S]*output_router_logits=False"):
        require_segments(decoder("mixtral", output_router_logits=True))


def test_what_stages_do_not_hand_on_is_refused() -> None:
    model = decoder("llama")
    [batch, _] = batches()
    with pytest.raises(UsageError, match="a batch with position_ids, which stages"):
        folded(model, {**batch, "position_ids": torch.arange(LENGTH)[None]})
