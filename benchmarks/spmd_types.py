"""The faults of `silent_bugs/idioms.py` given to `spmd_types`, beside what `lockstep verify` says.

`spmd_types` (Meta, BSD) checks a program that is annotated with types: R, the same on all ranks; V,
another on each; P, a part of a sum; I, as R with a gradient that is the same. A script of others
has no annotations, so the step around each fault is written here as its user would annotate it, and
checked without ranks, over a fake process group of two. A gradient carries no type after
`backward()`; the programs say that it is a part of a sum, which is what it is.

pip install --no-deps spmd_types==0.3.1
python -m benchmarks.spmd_types [--out benchmarks/results/spmd_types.md]
"""

import argparse
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from benchmarks.page import machine, page, table, tell
from benchmarks.silent_bugs.idioms import IDIOMS

VERDICTS = Path(__file__).parent / "results/silent_bugs_idioms.md"


class Inferred:
    """Steps of a script as it is: nothing is annotated but the parameters and the batch.

    Of a script verify can see that parameters are alike on all ranks, and that each rank reads
    samples of its own. `local`: the batch is V; else it is S(0), cut over the ranks, and the types
    are global ones.
    """

    def __init__(self, spmd: Any, group: Any, *, local: bool) -> None:
        self.spmd = spmd
        self.group = group
        self.samples = spmd.V if local else spmd.S(0)
        torch.manual_seed(0)
        self.batch = (torch.randn(4, 6), torch.tensor([0, 1, 2, 3]))

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a model's outputs for a batch, and the targets."""
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 4)
        )
        for parameter in model.parameters():
            self.spmd.assert_type(parameter, {self.group: self.spmd.R})
        for tensor in self.batch:
            self.spmd.assert_type(tensor, {self.group: self.samples})
        inputs, targets = self.batch
        return model(inputs), targets

    def losses(self, unused: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the losses, and the number of targets that count."""
        outputs, targets = self.step()
        losses = F.cross_entropy(outputs, targets, reduction="none")
        mask = (targets != unused).float()
        return (losses * mask).sum(), mask.sum()

    # ---- programs, with what is right of them ----

    def divided_by_the_count_of_all_ranks(self) -> None:
        """Sound: the count is summed over ranks."""
        total, count = self.losses(unused=0)
        dist.all_reduce(count, group=self.group)
        total / count

    def divided_by_its_own_count(self) -> None:
        """Faulty: ranks have unequal numbers of targets."""
        total, count = self.losses(unused=0)
        total / count

    def divided_by_its_own_count_without_padding(self) -> None:
        """Sound: every target counts, on each rank as many."""
        total, count = self.losses(unused=-1)
        total / count

    def a_mean_of_torch(self) -> None:
        """Sound: each rank has as many samples."""
        F.cross_entropy(*self.step())

    def a_norm_to_log(self) -> None:
        """Sound: each rank logs the norm of its own outputs."""
        outputs, _ = self.step()
        outputs.detach().norm()

    def own_negatives(self) -> None:
        """Faulty: a contrastive loss of a rank's own samples."""
        outputs, _ = self.step()
        F.cross_entropy(outputs @ outputs.T, torch.arange(4), reduction="sum")

    def a_rank_that_weighs_its_samples(self) -> None:
        """Faulty: rank 0 counts for less."""
        total, _ = self.losses(unused=-1)
        total * (0.9 if dist.get_rank() == 0 else 1.1)


class Programs:
    """Holds annotated steps; each is checked as it should be, and with its fault."""

    def __init__(self, spmd: Any, group: Any) -> None:
        self.spmd = spmd
        self.group = group

    def typed(self, tensor: torch.Tensor, kind: Any) -> torch.Tensor:
        """Say of which type a tensor is over the ranks."""
        self.spmd.assert_type(tensor, {self.group: kind})
        return tensor

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take what differs on ranks for a part of a sum over them."""
        spmd = self.spmd
        out: torch.Tensor = spmd.reinterpret(tensor, self.group, src=spmd.V, dst=spmd.P)
        return out

    def summed(self, part: torch.Tensor, kind: Any = None) -> torch.Tensor:
        """Sum parts over the ranks."""
        spmd = self.spmd
        dst = spmd.R if kind is None else kind
        out: torch.Tensor = spmd.all_reduce(part, self.group, src=spmd.P, dst=dst)
        return out

    def weights(self) -> list[torch.Tensor]:
        """Return a matrix and a bias, the same on all ranks."""
        shapes = ((3, 2), (2,))
        return [self.typed(torch.randn(s, requires_grad=True), self.spmd.R) for s in shapes]

    def backward(self, weights: list[torch.Tensor], times: float = 1.0) -> list[torch.Tensor]:
        """Return the gradients of a rank's own samples, which are parts of a sum."""
        x = self.typed(torch.randn(4, 3), self.spmd.V)
        y = self.typed(torch.randn(4, 2), self.spmd.V)
        loss = (x @ weights[0] + weights[1] - y).square().mean() * times
        self.part(loss).backward()
        return [self.typed(w.grad, self.spmd.P) for w in weights if w.grad is not None]

    def update(self, weights: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        """Step as plain SGD does."""
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.sub_(0.1 * gradient)

    # ---- one for each kind of fault ----

    def a_gradient_that_is_not_reduced(self, wrong: bool) -> None:
        """Reduce all gradients, or not the last."""
        weights = self.weights()
        first, second = self.backward(weights)
        self.update(weights, [self.summed(first), second if wrong else self.summed(second)])

    def a_gradient_added_after_the_reduction(self, wrong: bool) -> None:
        """Add the gradient of a second micro-batch before the sum over ranks, or after it."""
        weights = self.weights()
        first = self.backward(weights)
        for weight in weights:
            weight.grad = None
        second = self.backward(weights)
        pairs = list(zip(first, second, strict=True))
        if wrong:
            self.update(weights, [self.summed(one) + other for one, other in pairs])
        else:
            self.update(weights, [self.summed(one + other) for one, other in pairs])

    def another_factor(self, wrong: bool) -> None:
        """Divide by the number of ranks once, or not, or twice."""
        weights = self.weights()
        gradients = self.backward(weights)
        self.update(weights, [self.summed(g) / (1 if wrong else 2) for g in gradients])

    def a_factor_of_a_rank(self, wrong: bool) -> None:
        """Weigh the loss alike on all ranks, or by rank."""
        weights = self.weights()
        times = (0.9 if dist.get_rank() == 0 else 1.1) if wrong else 1.0
        self.update(weights, [self.summed(g) for g in self.backward(weights, times)])

    def a_mean_over_own_targets(self, wrong: bool) -> None:
        """Divide the sum of losses by the targets of all ranks, or by a rank's own."""
        losses = self.typed(torch.randn(4), self.spmd.V)
        total = self.part(losses.sum())
        count = self.part((losses > 0).sum().float())
        total / (count if wrong else self.summed(count))

    def clipping_before_the_reduction(self, wrong: bool) -> None:
        """Clip what is summed over ranks, or each rank's own."""
        weights = self.weights()
        gradients = self.backward(weights)
        if not wrong:
            gradients = [self.summed(g) for g in gradients]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        gradients = [g * torch.clamp(1 / norm, max=1.0) for g in gradients]
        self.update(weights, [self.summed(g) for g in gradients] if wrong else gradients)

    def a_norm_of_shards(self, wrong: bool) -> None:
        """Clip shards by the norm over all ranks, or by a rank's own."""
        weight = self.typed(torch.randn(3), self.spmd.V)
        gradient = self.typed(torch.randn(3), self.spmd.V)
        square = gradient.square().sum()
        if not wrong:
            square = self.summed(self.part(square))
        weight.sub_(gradient * torch.clamp(square.rsqrt(), max=1.0))

    def other_samples_for_one_model(self, wrong: bool) -> None:
        """Give tensor-parallel ranks the same samples, or samples of their own."""
        spmd = self.spmd
        first = self.typed(torch.randn(3, 2, requires_grad=True), spmd.V)
        second = self.typed(torch.randn(2, 3, requires_grad=True), spmd.V)
        x = self.typed(torch.randn(4, 3), spmd.V if wrong else spmd.R)
        y = self.typed(torch.randn(4, 3), spmd.V if wrong else spmd.I)
        outputs = self.summed(self.part((x @ first).relu() @ second), spmd.I)
        (outputs - y).square().mean().backward()

    def what_is_gathered_has_no_gradient(self, wrong: bool) -> None:
        """Gather features with a gradient, or without one, each rank's own put back."""
        spmd = self.spmd
        own = self.typed(torch.randn(4, 3, requires_grad=True), spmd.V)
        if wrong:
            parts = [self.typed(torch.zeros(4, 3), spmd.R) for _ in range(2)]
            dist.all_gather(parts, own.detach(), group=self.group)
            parts[0] = own
        else:
            kinds = {"src": spmd.V, "dst": spmd.R}
            parts = list(spmd.all_gather(own, self.group, **kinds))
        self.part((own @ torch.cat(parts).mT).logsumexp(1).mean()).backward()

    def first_values_of_a_rank(self, wrong: bool) -> None:
        """Draw weights alike on all ranks, or by rank: their type is what the user says."""
        torch.manual_seed(dist.get_rank() if wrong else 0)
        weights = self.weights()
        self.update(weights, [self.summed(g) for g in self.backward(weights)])


_UNWRAPPED = "a_gradient_that_is_not_reduced"
_SCALE = "another_factor"
_BY_RANK = "a_factor_of_a_rank"
_COUNT = "a_mean_over_own_targets"
_SAMPLES = "which samples a rank reads is not a type: V holds for equal samples, too"
_LOOP = "a mistake of the loop, on one process as well: nothing of it is a type"
_DRAWS = "random numbers have no type"
PROGRAMS = {
    "gpt penalty": _BY_RANK,
    "gpt weighted rank": _BY_RANK,
    "sharded scaled": _SCALE,
    "diffusion scaled": _BY_RANK,
    "diffusion not reduced": _BY_RANK,
    "gan generator unwrapped": _UNWRAPPED,
    "wrapped zero scaled": _BY_RANK,
    "tensor_parallel sharded loader": "other_samples_for_one_model",
    "policy beside the wrapper": _UNWRAPPED,
    "fabric_loop beside the wrapper": _UNWRAPPED,
    "trainer_of_transformers penalty": _BY_RANK,
    "low_rank other adapters": "first_values_of_a_rank",
    "distilled other teacher": "first_values_of_a_rank",
    "weighted_classes local mean": _COUNT,
    "weighted_classes weighted rank": _BY_RANK,
    "random_crops sum of tokens": _SCALE,
    "preferences mean of tokens": _COUNT,
    "preferences other reference": "first_values_of_a_rank",
    "recipe clipped early": "clipping_before_the_reduction",
    "contrastive no gradient": "what_is_gathered_has_no_gradient",
    "streamed weighted rank": _BY_RANK,
    "averaged_by_hand summed": _SCALE,
    "averaged_by_hand biases left out": _UNWRAPPED,
    "averaged_by_hand before the last": "a_gradient_added_after_the_reduction",
    "fine_tuned mean of tokens": _COUNT,
    "fine_tuned beside the wrapper": _UNWRAPPED,
    "segmented own pixels": _COUNT,
    "segmented plain clipping": "a_norm_of_shards",
    "two_tasks head of a rank": _BY_RANK,
    "two_tasks twice": _BY_RANK,
}
NOT_EXPRESSED = {
    "samples": _SAMPLES,
    "random numbers": _DRAWS,
    "coupled samples": "nothing is gathered, and nothing says that it should be",
    "sum of gradients": "a pipeline's stages are programs of their own, which types do not join",
    "computation of a rank": (
        "a pipeline's stages, or a branch that one rank takes: the check runs one rank's program"
    ),
}


def said(programs: Programs, checker: Any, mesh: Any, name: str, wrong: bool) -> str:
    """Return what `spmd_types` says of a program; empty if nothing."""
    spmd = programs.spmd
    try:
        with spmd.set_current_mesh(mesh), checker.typecheck():
            getattr(programs, name)(wrong)
    except spmd.SpmdTypeError as error:
        return str(error).splitlines()[0]
    return ""


INFERRED = (
    "divided_by_the_count_of_all_ranks",
    "divided_by_its_own_count",
    "divided_by_its_own_count_without_padding",
    "a_mean_of_torch",
    "a_norm_to_log",
    "own_negatives",
    "a_rank_that_weighs_its_samples",
)


def inferred(spmd: Any, checker: Any, mesh: Any, name: str, *, local: bool) -> str:
    """Return what `spmd_types` says of a program in which it infers all but two types."""
    programs = Inferred(spmd, mesh.get_group("ranks"), local=local)
    try:
        with (
            spmd.set_current_mesh(mesh),
            checker.typecheck(strict_mode="permissive", local=local),
        ):
            getattr(programs, name)()
    except spmd.SpmdTypeError as error:
        return str(error).splitlines()[0].replace("|", "/")
    except ValueError as error:
        return f"no type: {error}"
    return "nothing"


def inferred_rows(spmd: Any, checker: Any, mesh: Any) -> list[str]:
    """Return the table of what is inferred."""
    rows = ["| program | is | local types | global types |", "|---|---|---|---|"]
    for name in INFERRED:
        text = (getattr(Inferred, name).__doc__ or "").rstrip(".")
        both = [inferred(spmd, checker, mesh, name, local=local) for local in (True, False)]
        rows.append(f"| {name} | {text} | {both[0]} | {both[1]} |")
    return rows


def verdicts() -> dict[str, str]:
    """Return what `lockstep verify` says of each script, from its own page."""
    found = re.findall(r"^\| ([^|]+) \| [^|]+ \| ([^|]+) \|", VERDICTS.read_text(), re.M)
    return dict(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    import spmd_types
    import spmd_types.checker

    dist.init_process_group(backend="fake", rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ranks",))
    programs = Programs(spmd_types, mesh.get_group("ranks"))
    checker = spmd_types.checker
    kinds = sorted(set(PROGRAMS.values()))
    sound = {kind: said(programs, checker, mesh, kind, False) for kind in kinds}
    wrong = {kind: said(programs, checker, mesh, kind, True) for kind in kinds}
    known = verdicts()
    rows = []
    faults = [idiom for idiom in IDIOMS if not idiom.sound]
    found = 0
    for idiom in faults:
        kind = PROGRAMS.get(idiom.name, "")
        if kind:
            text = wrong[kind] or "nothing"
            found += bool(wrong[kind])
        else:
            text = NOT_EXPRESSED.get(idiom.kinds[0], _LOOP)
        cells = (idiom.name, idiom.kinds[0], known.get(idiom.name, "-"), kind or "-", text)
        rows.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    expressed = sum(idiom.name in PROGRAMS for idiom in faults)
    alarms = [f"{kind}: {text}" for kind, text in sound.items() if text]
    goals = [
        f"| faults | {len(faults)} |",
        f"| that can be written with types | {expressed} |",
        f"| that spmd_types finds there | {found} |",
        f"| alarms on the {len(kinds)} programs without a fault | {len(alarms)} |",
    ]
    words = [
        *table("| | |", goals),
        "",
        *(f"Alarm: {alarm}" for alarm in alarms),
        "`spmd_types` needs a program with annotations and no run; `verify` needs a script as it",
        "is and runs it. Each fault was written as a step of a few lines with the annotations that",
        "its user would write (`benchmarks/spmd_types.py`), and checked with and without it;",
        "several scripts have the same step. Types hold how a value depends on the rank, so",
        "a gradient or a count that is not reduced shows without a run. Factors, samples, seeds,",
        "schedules, modes and weights have no type, and a rank's own branch is checked as the",
        "branch that this rank takes.",
        "",
        "## Without annotations",
        "",
        "Of a script as it is two things can be seen: parameters that are alike on all ranks (R),",
        "and samples that each rank has for itself (V; or S(0), a dim that is cut over the ranks).",
        "`spmd_types` infers the rest (`Inferred` in the same file):",
        "",
        *inferred_rows(spmd_types, checker, mesh),
        "",
        "This is why `lockstep verify` has no check of types. Local types can't tell the first two",
        "programs apart: what is V stays V, whatever is divided by it, and the sound one is",
        "refused, since nothing says that its count is a part of a sum. Global types can, and find",
        "negatives of a rank's own; but they hold for any values, so that they refuse the third,",
        "which differs from the second by a batch without padding, and what is only logged; and",
        "they end at a mean, with which most scripts compute their loss. A check of types would",
        "raise alarms on sound scripts, or have nothing to say of them.",
        "",
        "## Faults, with annotations",
    ]
    text = page(
        "Faults given to spmd_types and to verify",
        "python -m benchmarks.spmd_types --out benchmarks/results/spmd_types.md",
        machine(),
        words,
        "| script | planted | verify says | annotated program | spmd_types 0.3.1 says |",
        rows,
        [],
    )
    tell(text, given.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
