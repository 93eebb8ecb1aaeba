"""What every family owes to the strategies."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.models.chain import lent, run_segments, shared_parameters_of
from lockstep.models.language import logits_in
from tests.models.samples import ALL, LANGUAGE, VOCABULARY, batch_for, texts
from tests.sampled import quick_and_full

families = pytest.mark.parametrize("family", ALL)
language_families = pytest.mark.parametrize("family", LANGUAGE)


def loss_of(model: nn.Module, family: str, seed: int = 1) -> Tensor:
    batch = batch_for(family)
    torch.manual_seed(seed)
    return model.loss(model(*model.inputs(batch)), batch)


def as_tuple(outputs: object) -> tuple[Tensor, ...]:
    if isinstance(outputs, dict):
        outputs = tuple(value for key, value in outputs.items() if key != "loss")
    return outputs if isinstance(outputs, tuple) else (outputs,)


@families
def test_first_values_are_filled_one_by_one(family: str) -> None:
    """Placement fills a model parameter by parameter: with all others on meta, each must still get
    its values.
    """
    with torch.device("meta"):
        model = ALL[family]()
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            real = nn.Parameter(torch.full(parameter.shape, torch.nan))
            module._parameters[name] = real
            model.init_weights()
            assert not real.isnan().any(), name
            module._parameters[name] = parameter
    assert not list(model.buffers())


@families
def test_trap_47_first_values_do_not_depend_on_what_else_is_there(family: str) -> None:
    """A parameter's value must be the same whether or not the others are real: they draw nothing on
    meta.
    """
    with torch.device("meta"):
        model = ALL[family]()
    name, parameter = list(model.named_parameters())[-1]
    alone = copy.deepcopy(model)
    owner, _, attribute = name.rpartition(".")
    alone.get_submodule(owner)._parameters[attribute] = nn.Parameter(torch.empty(parameter.shape))
    values = []
    for _ in range(2):
        torch.manual_seed(5)
        alone.init_weights()
        values.append(alone.get_parameter(name).detach().clone())
    assert torch.equal(*values)


@families
def test_a_model_built_on_meta_trains_once_filled(family: str) -> None:
    with torch.device("meta"):
        model = ALL[family]()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    model.init_weights()
    loss = loss_of(model, family)
    loss.backward()
    assert loss.isfinite()
    assert loss.dtype == torch.float32
    assert loss.ndim == 0
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@families
def test_forward_is_the_fold_of_the_segments(family: str) -> None:
    model = ALL[family](**({} if family == "vae" else {"dropout": 0.2}))
    inputs = model.inputs(batch_for(family))
    torch.manual_seed(3)
    whole = as_tuple(model(*inputs))
    torch.manual_seed(3)
    folded = as_tuple(run_segments(model, model.segments(), shared_parameters_of(model), *inputs))
    assert len(whole) == len(folded)
    assert all(torch.equal(a, b) for a, b in zip(whole, folded, strict=True))


@families
def test_segments_have_canonical_names_and_hold_the_blocks_and_every_parameter(family: str) -> None:
    model = ALL[family]()
    segments = model.segments()
    assert all(model.get_submodule(name) is module for name, module in segments)
    assert [item for item in segments if item[0] in dict(model.blocks())] == model.blocks()
    reached = {id(p) for _, module in segments for p in module.parameters()}
    reached |= {
        id(model.get_parameter(n))
        for names in shared_parameters_of(model).values()
        for n in names.values()
    }
    assert reached == {id(p) for p in model.parameters()}


@families
def test_no_parameter_has_two_owners(family: str) -> None:
    model = ALL[family]()
    assert len(list(model.named_parameters(remove_duplicate=False))) == len(
        list(model.parameters())
    )


@families
def test_trap_26_segments_can_be_stages(family: str) -> None:
    """Pipelines detach outputs in place and send gradients as they are: no views, no inputs,
    nothing strided.
    """
    model = ALL[family]()
    values = model.inputs(batch_for(family))
    edges = []
    for name, segment in model.segments():
        taken = tuple(
            v.detach().requires_grad_(v.is_floating_point() and name != model.segments()[0][0])
            for v in values
        )
        edges.append(taken)
        outputs = segment(*taken, **lent(model, shared_parameters_of(model).get(name, {})))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        for output in outputs:
            assert not output._is_view(), name
            assert all(output.data_ptr() != value.data_ptr() for value in taken), name
            assert output.is_contiguous(), name
        values = outputs
        last = outputs
    loss = model.loss(last if len(last) > 1 else last[0], batch_for(family))
    gradients = torch.autograd.grad(loss, edges[-1], allow_unused=True)
    assert all(g is None or g.is_contiguous() for g in gradients)


@families
def test_gradients_of_each_use_add_up(family: str) -> None:
    """Lending each segment a leaf of its own takes the gradient of a shared parameter apart, by
    use.
    """
    model = ALL[family]()
    loss_of(model, family).backward()
    whole = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    batch = batch_for(family)
    values = model.inputs(batch)
    uses: list[tuple[str, Tensor]] = []
    torch.manual_seed(1)
    for name, segment in model.segments():
        names = shared_parameters_of(model).get(name, {})
        leaves = {
            keyword: model.get_parameter(n).detach().requires_grad_()
            for keyword, n in names.items()
        }
        uses += [(names[keyword], leaf) for keyword, leaf in leaves.items()]
        outputs = segment(*values, **leaves)
        values = outputs if isinstance(outputs, tuple) else (outputs,)
    model.loss(outputs, batch).backward()
    total = {
        name: p.grad if p.grad is not None else torch.zeros_like(p)
        for name, p in model.named_parameters()
    }
    for name, leaf in uses:
        total[name] = total[name] + leaf.grad
    for name, gradient in whole.items():
        torch.testing.assert_close(total[name], gradient, rtol=1e-4, atol=1e-5)


@families
def test_parameters_are_looked_up_at_each_call(family: str) -> None:
    """FSDP2 swaps parameters around a forward pass: a model that keeps them aside computes with old
    ones.
    """
    model = ALL[family]()
    loss_of(model, family)
    inputs = model.inputs(batch_for(family))
    stand_ins = {name: p.detach() * 1.5 for name, p in model.named_parameters()}
    fresh = ALL[family]()
    fresh.load_state_dict(stand_ins)
    expected = loss_of(fresh, family)
    torch.manual_seed(1)
    called = torch.func.functional_call(model, stand_ins, inputs)
    assert torch.equal(model.loss(called, batch_for(family)), expected)
    for name, stand_in in stand_ins.items():
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner)._parameters[attribute] = nn.Parameter(stand_in)
    assert torch.equal(loss_of(model, family), expected)


@families
def test_a_copy_shares_nothing(family: str) -> None:
    model = ALL[family]()
    before = loss_of(model, family)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(loss_of(twin, family), before)


@pytest.mark.parametrize("family", ["bdh", "transformer", "free_transformer", "mixture"])
def test_trap_28_recomputed_blocks_draw_the_same(family: str) -> None:
    """Dropout and Bernoulli draws come from torch's generator alone, so restoring it
    restores them.
    """
    model = ALL[family](dropout=0.3)
    loss_of(model, family).backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for _, block in model.blocks():
        forward = block.forward
        block.forward = lambda *a, forward=forward, **k: checkpoint(
            forward, *a, use_reentrant=False, **k
        )
    loss_of(model, family).backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), plain, strict=True))


@families
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_stays_finite(family: str, dtype: torch.dtype) -> None:
    model = ALL[family]()
    full = loss_of(model, family)
    with torch.autocast("cpu", dtype=dtype):
        loss = loss_of(model, family)
    loss.backward()
    torch.testing.assert_close(loss, full, rtol=0.05, atol=0.05)
    assert all(p.grad.isfinite().all() for p in model.parameters())


@families
def test_parameters_may_be_bf16(family: str) -> None:
    model = ALL[family]().bfloat16()
    batch = batch_for(family)
    inputs = [i.bfloat16() if i.is_floating_point() else i for i in model.inputs(batch)]
    loss = model.loss(model(*inputs), batch)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.isfinite()


@pytest.mark.parametrize("family", quick_and_full(ALL, ["bdh", "transformer"]))
def test_one_batch_can_be_learnt(family: str) -> None:
    torch.manual_seed(0)
    model = ALL[family]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    batch = batch_for(family)
    first = None
    for _ in range(120):
        optimizer.zero_grad()
        loss = model.loss(model(*model.inputs(batch)), batch) / model.count(batch)
        loss.backward()
        optimizer.step()
        first = loss.item() if first is None else first
    # what is left of an image of noise is noise
    assert loss.item() < first / (1.5 if family == "vae" else 4)


@language_families
def test_shapes_and_counts(family: str) -> None:
    model = LANGUAGE[family]()
    batch = texts(2, 5)
    logits = as_tuple(model(*model.inputs(batch)))[0]
    assert logits.shape == (2, 5, VOCABULARY)
    assert model.count(batch) == 8  # of ten, two are not counted


@language_families
def test_trap_15_targets_are_taken_as_they_come(family: str) -> None:
    """Data shift targets; a model that shifts again learns to predict two tokens ahead."""
    model = LANGUAGE[family]()
    batch = texts()
    outputs = model(*model.inputs(batch))
    log_p = as_tuple(outputs)[0].log_softmax(-1)
    valid = batch["targets"] != -100
    expected = -log_p[valid].gather(-1, batch["targets"][valid][:, None]).sum()
    has_terms = hasattr(model, "loss_terms")
    ce = (
        model.loss_terms(outputs, batch)["cross_entropy"]
        if has_terms
        else model.loss(outputs, batch)
    )
    torch.testing.assert_close(ce, expected)


@pytest.mark.parametrize("family", LANGUAGE)
def test_the_future_does_not_reach_the_past(family: str) -> None:
    model = LANGUAGE[family]().eval()
    ids = texts()["input_ids"]
    # The Free Transformer's encoder reads the whole text; given the latent, it is causal, too.
    given = (
        {"mode": "inference", "codes": torch.zeros_like(ids)}
        if family == "free_transformer"
        else {}
    )
    changed = ids.clone()
    changed[:, 5] = (changed[:, 5] + 1) % VOCABULARY
    before = logits_in(model(ids, **given))
    after = logits_in(model(changed, **given))
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


@pytest.mark.parametrize(
    ("family", "block"),
    [
        pytest.param("bdh", "layers.0", marks=pytest.mark.full),
        ("transformer", "layers.0"),
        pytest.param("free_transformer", "latent", marks=pytest.mark.full),
    ],
)
def test_a_block_compiles_into_one_graph(family: str, block: str) -> None:
    model = ALL[family]()
    eager = loss_of(model, family)
    module = model.get_submodule(block)
    module.forward = torch.compile(module.forward, fullgraph=True, backend="aot_eager")
    compiled = loss_of(model, family)
    compiled.backward()
    torch._dynamo.reset()
    # compiled code may draw other bits
    torch.testing.assert_close(compiled, eager, rtol=0.02, atol=0)
