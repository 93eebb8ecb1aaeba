"""Faults that were reported elsewhere, each as a few lines of `program.Program`, with its source.

All are of our own writing. `kinds` are the causes that are right; where a fault can't be told from
another by what it does to a step, both are named.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from benchmarks.silent_bugs.program import CLASSES, IGNORED, SAMPLES, WIDTH, Net, Program


@dataclass(frozen=True)
class Case:
    """A fault: how the program is made, where it was reported, and which causes are right."""

    make: Callable[[bool], Program]
    source: str
    kinds: tuple[str, ...]


CASES: dict[str, Case] = {}


def case(source: str, *kinds: str) -> Callable[[type[Program]], type[Program]]:
    def register(program: type[Program]) -> type[Program]:
        CASES[program.__name__] = Case(program, source, kinds)
        return program

    return register


MEGATRON = "NVIDIA/Megatron-LM#7452"
SYNCHRONISATION = "gradient synchronisation"


# ---- gradients that are not reduced, or wrongly ----


@case("pytorch/pytorch#104336; TrainCheck pytorch-104336", SYNCHRONISATION)
class MovedAfterWrapping(Program):
    def parallel(self, model: nn.Module) -> nn.Module:
        wrapped = DistributedDataParallel(model)
        # as `.cpu()` and `.cuda()` may do: the wrapper's hooks are on tensors that are gone
        if self.faulty:
            for module in model.modules():
                for name, parameter in list(module.named_parameters(recurse=False)):
                    setattr(module, name, nn.Parameter(parameter.detach().clone()))
        return wrapped


@case(
    "TrainCheck x-jxmnop-ddp-out-of-sync; bytetriper/RAE#40; jingyaogong/minimind PR 854",
    SYNCHRONISATION,
)
class CalledBesideTheWrapper(Program):
    def prepare(self) -> None:
        if self.faulty:
            self.runs = self.net


@case(
    "TrainCheck pytorch-84803, pytorch-96600, baichuan2-86 (links that return other sums)",
    SYNCHRONISATION,
)
class LinkThatReturnsOtherSums(Program):
    def reduce(self) -> None:
        if self.faulty and self.rank == 1:
            for parameter in self.net.parameters():
                parameter.grad[..., 0] += 0.05  # type: ignore[index]


@case("pytorch/pytorch#162338", "sum of gradients")
class AverageThatIsASum(Program):
    def parallel(self, model: nn.Module) -> nn.Module:
        return model

    def reduce(self) -> None:
        for parameter in self.net.parameters():
            dist.all_reduce(parameter.grad)
            if not self.faulty:
                parameter.grad /= self.world


@case("pytorch/pytorch#47562", SYNCHRONISATION)
class GradientsOfAutogradGrad(Program):
    def backward(self, loss: Tensor) -> None:
        if not self.faulty:
            return loss.backward()
        for parameter, gradient in zip(
            self.net.parameters(),
            torch.autograd.grad(loss, list(self.net.parameters())),
            strict=True,
        ):
            parameter.grad = gradient  # the wrapper's hooks do not run
        return None


@case("no_sync over the last micro-batch", SYNCHRONISATION)
class NoSyncOverTheLastMicroBatch(Program):
    accumulate = 2

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        skip = self.number % 2 == 1 or self.faulty
        self.runs.require_backward_grad_sync = not skip
        return super().loss(inputs, targets)


@case("DistributedDataParallel that is given a part of the model", SYNCHRONISATION)
class HeadOutsideOfTheWrapper(Program):
    def parallel(self, model: nn.Module) -> nn.Module:
        if not self.faulty:
            return DistributedDataParallel(model)
        body = DistributedDataParallel(nn.Sequential(model.norm, model.up))
        return lambda x: model.head(F.gelu(body(x)))  # type: ignore[return-value]


@case("pytorch/torchtitan#2318: gradient norms apart by the number of ranks", "sum of gradients")
class DividedTwice(Program):
    def reduce(self) -> None:
        if self.faulty:
            for parameter in self.net.parameters():
                parameter.grad /= self.world


@case(
    "TrainCheck deepspeed-1801 (of deepspeedai/DeepSpeed PR 1801)",
    "clipping",
    "replicas",
    SYNCHRONISATION,
)
class ClippedOnOneRankAlone(Program):
    def clip(self) -> None:
        if self.rank == 0 or not self.faulty:
            super().clip()


# ---- losses ----


@case("huggingface/transformers PR 34191; PrimeIntellect-ai/prime-rl PR 2359", "loss normalisation")
class MeansOfUnequalCounts(Program):
    uneven = True

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return (
            self.cross_entropy(self.runs(inputs), targets)
            if self.faulty
            else super().loss(inputs, targets)
        )


@case("verl-project/verl PR 906; ml-explore/mlx-lm PR 1413", "gradient accumulation")
class AccumulatedMeansOfUnequalCounts(Program):
    uneven = True
    accumulate = 2

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if self.faulty:
            return super().loss(inputs, targets)
        return self.cross_entropy(self.runs(inputs), targets, "sum") * self.world / 96


@case("NVlabs/stylegan3#184; verl-project/verl#2919", "gradient accumulation")
class AccumulationThatIsNotDivided(Program):
    accumulate = 2

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return (
            self.cross_entropy(self.runs(inputs), targets)
            if self.faulty
            else super().loss(inputs, targets)
        )


class CutSequence(Program):
    """Each rank reads the whole batch, and takes a part of each sequence, as context parallelism
    does.
    """

    def loader(self) -> DataLoader[Any]:
        return DataLoader(self.dataset(), batch_size=self.batch_size)

    def part(self, x: Tensor) -> Tensor:
        return x.chunk(self.world, 1)[self.rank]


@case(f"{MEGATRON}, finding 9; Megatron-LM#7513", "loss normalisation")
class MaskedLossOfACutSequence(CutSequence):
    uneven = True

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        targets = self.part(targets)
        count = (targets != IGNORED).sum().float()
        total = self.cross_entropy(self.runs(self.part(inputs)), targets, "sum")
        if self.faulty:
            return total / count.clamp(min=1)
        dist.all_reduce(count)
        return total * self.world / count


@case(
    f"{MEGATRON}, multi-token prediction; Megatron-LM#7498", "loss normalisation", "coupled samples"
)
class SecondLossOfACutSequence(CutSequence):
    uneven = True

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.runs(self.part(inputs))
        mine = self.part(targets)
        later = self.part(torch.cat([targets[:, 1:], torch.full_like(targets[:, :1], IGNORED)], 1))
        counts = torch.stack([(mine != IGNORED).sum(), (later != IGNORED).sum()]).float()
        whole = counts.clone()
        dist.all_reduce(whole)
        first = self.cross_entropy(logits, mine, "sum") * self.world / whole[0]
        second = self.cross_entropy(logits, later, "sum")
        return first + (
            second / counts[1].clamp(min=1) if self.faulty else second * self.world / whole[1]
        )


@case(
    f"{MEGATRON}, router counts; Megatron-LM#7481",
    "sum of gradients",
    "loss normalisation",
    "coupled samples",
)
class CountOverwrittenByItsReduction(Program):
    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        local = torch.tensor(float(targets.numel()))
        whole = local if self.faulty else local.clone()
        dist.all_reduce(whole)  # in place: without the copy `local` is the sum, too
        mean = self.cross_entropy(self.runs(inputs), targets)
        return (
            mean * local * self.world / whole
            if not self.faulty
            else mean * local / (whole / self.world)
        )


@case("contrastive losses over each rank's own negatives (openai/CLIP issues)", "coupled samples")
class NegativesOfOneRank(Program):
    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        vectors = F.normalize(self.runs(inputs).mean(1), dim=1)
        every = vectors
        begin = 0
        if not self.faulty:
            every = torch.cat(dist.nn.functional.all_gather(vectors)) if self.world > 1 else vectors
            begin = self.rank * len(vectors)
        other = every.roll(1, 0).detach() if self.faulty else every
        return F.cross_entropy(vectors @ other.T / 0.5, begin + torch.arange(len(vectors)))


# ---- data ----


@case("huggingface/datasets#5360", "samples")
class LoaderThatIsNotSharded(Program):
    def loader(self) -> DataLoader[Any]:
        data = self.dataset()
        return super().loader() if not self.faulty else DataLoader(data, batch_size=self.batch_size)


@case("ranks that shuffle all samples by themselves", "samples")
class EachRankShufflesAllSamples(Program):
    def loader(self) -> DataLoader[Any]:
        order = torch.Generator().manual_seed(self.rank)
        if self.faulty:
            return DataLoader(
                self.dataset(), batch_size=self.batch_size, shuffle=True, generator=order
            )
        return super().loader()


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """The samples from `begin` on, of which a rank takes its own where `take` says so."""

    def __init__(self, data: Dataset[Any], begin: int, take: slice) -> None:
        self.data = data
        self.indices = list(range(SAMPLES))[begin:][take]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.data[index] for index in self.indices)


@case(
    "huggingface/datasets#8568: a stream that is skipped to where a run ended forgets its rank",
    "samples",
)
class StreamThatForgetsItsRank(Program):
    def loader(self) -> DataLoader[Any]:
        take = slice(None) if self.faulty else slice(self.rank, None, self.world)
        return DataLoader(Stream(self.dataset(), 32, take), batch_size=self.batch_size)


@case(
    "sandyresearch/parcae#10; huggingface/datasets#5696: ranks cut their own order of the files",
    "samples",
)
class RanksCutTheirOwnOrders(Program):
    def loader(self) -> DataLoader[Any]:
        order = torch.randperm(
            SAMPLES, generator=torch.Generator().manual_seed(self.faulty * self.rank)
        ).tolist()
        return DataLoader(
            self.dataset(), batch_size=self.batch_size, sampler=order[self.rank :: self.world]
        )


@case(
    "dropout drawn alike on all ranks (Accelerate and Fabric loops as documented)", "random numbers"
)
class DropoutDrawnAlike(Program):
    def model(self) -> nn.Module:
        return nn.Sequential(Net(), nn.Dropout(0.2))

    def prepare(self) -> None:
        torch.manual_seed(0 if self.faulty else self.rank)


@case("DistributedSampler.set_epoch is not called", "order of samples")
class EpochsInTheSameOrder(Program):
    batch_size = 32

    def begin_epoch(self, epoch: int) -> None:
        if not self.faulty:
            super().begin_epoch(epoch)


# ---- first values, replicas ----


@case("models that are made under a seed of each rank, without a wrapper", "first values")
class SeedsOfEachRank(Program):
    def model(self) -> nn.Module:
        if self.faulty:
            torch.manual_seed(self.rank)
        return Net()

    def parallel(self, model: nn.Module) -> nn.Module:
        return model

    def reduce(self) -> None:
        for parameter in self.net.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.world


@case("weights that one rank alone changes after an update (averages, weight clamps)", "replicas")
class ReplicaThatIsChanged(Program):
    def after(self) -> None:
        if self.faulty and self.rank == 1:
            self.net.head.weight.data.clamp_(-0.1, 0.1)


@case("learning rate × number of ranks, with the global batch held", "learning rate")
class RateTimesRanks(Program):
    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            self.net.parameters(), lr=1e-2 * (self.world if self.faulty else 1)
        )


# ---- the loop itself ----


@case("TrainCheck pytorch-forum-84911, stackoverflow-60335387", "gradients not zeroed")
class GradientsThatAreNotZeroed(Program):
    def clear(self) -> None:
        if not self.faulty:
            super().clear()


@case("optimizer made before the model that is trained", "stale optimizer")
class OptimizerOfAnotherModel(Program):
    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((Net() if self.faulty else self.net).parameters(), lr=1e-2)


@case("layers that are added after the optimizer was made", "parameters without an optimizer")
class LayerWithoutAnOptimizer(Program):
    def make_optimizer(self) -> torch.optim.Optimizer:
        held = [
            p
            for name, p in self.net.named_parameters()
            if not (self.faulty and name.startswith("head"))
        ]
        return torch.optim.AdamW(held, lr=1e-2)


class FromFrozen(Net):
    """Its lower layers run without gradients where a switch is left on."""

    frozen = False

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(not self.frozen and torch.is_grad_enabled()):
            y = F.gelu(self.up(self.norm(x)))
        z: Tensor = self.head(y)
        return z


@case(
    "TrainCheck pytorch-115607 (a forward pass that was compiled without gradients is used again)",
    "parameters without gradients",
)
class ForwardWithoutGradients(Program):
    def model(self) -> nn.Module:
        return FromFrozen()

    def prepare(self) -> None:
        self.net.frozen = self.faulty

    def parallel(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, find_unused_parameters=True)


@case("evaluation mode that is left on", "evaluation mode")
class TrainedInEvaluationMode(Program):
    def model(self) -> nn.Module:
        return nn.Sequential(Net(), nn.Dropout(0.0))

    def prepare(self) -> None:
        self.runs.train(not self.faulty)


@case("gradients clipped before the last micro-batch", "clipping")
class ClippedTooEarly(Program):
    accumulate = 2

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        if self.faulty:
            self.clip()

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return super().loss(inputs, targets) * 4


@case("schedule of an optimizer that was replaced", "learning rate schedule")
class ScheduleOfAnotherOptimizer(Program):
    def make_schedule(self) -> torch.optim.lr_scheduler.LRScheduler:
        schedule = super().make_schedule()
        if self.faulty:
            self.optimizer = self.make_optimizer()
        return schedule


@case("schedule stepped once for each micro-batch", "learning rate schedule")
class ScheduleOfMicroBatches(Program):
    accumulate = 2

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        if self.faulty and self.number % 2:
            self.schedule.step()


# ---- what one rank computes ----


@case("autocast on one rank alone", "precision")
class AutocastOnOneRank(Program):
    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=self.faulty and self.rank == 1):
            return super().loss(inputs, targets)


@case("targets that one rank shifts by a position", "computation of a rank")
class TargetsShiftedOnOneRank(Program):
    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return super().loss(
            inputs, targets.roll(1, 1) if self.faulty and self.rank == 1 else targets
        )


@case("positions or features that one rank computes otherwise", "computation of a rank")
class InputsScaledOnOneRank(Program):
    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if self.faulty and self.rank == 1:
            (
                self.net.up.register_forward_hook(lambda _m, _a, y: y * 1.5)
                if self.number == 1
                else None
            )
        return super().loss(inputs, targets)


# ---- models that are cut over ranks ----


class SumOverRanks(torch.autograd.Function):
    """Sums over ranks, and passes the gradient on."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class CopyToRanks(torch.autograd.Function):
    """Passes on, and sums the gradient over ranks."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class CutNet(nn.Module):
    """`Net` of which each rank holds some columns of `up` and some rows of `head`."""

    def __init__(self, faults: tuple[str, ...]) -> None:
        super().__init__()
        rank = dist.get_rank()
        world = dist.get_world_size()
        whole = Net()
        self.norm = whole.norm
        self.faults = faults
        self.up = nn.Linear(WIDTH, 16 // world)
        self.head = nn.Linear(16 // world, CLASSES, bias=False)
        with torch.no_grad():
            self.up.weight.copy_(whole.up.weight.chunk(world)[rank])
            self.up.bias.copy_(whole.up.bias.chunk(world)[rank])
            self.head.weight.copy_(whole.head.weight.chunk(world, 1)[rank])

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        x = x if "copy" in self.faults else CopyToRanks.apply(x)
        y = self.head(F.gelu(self.up(x)))
        z: Tensor = y if "sum" in self.faults else SumOverRanks.apply(y)
        return z


class CutModel(Program):
    """Tensor parallelism by hand: all ranks read the same samples."""

    fault = ""

    def loader(self) -> DataLoader[Any]:
        return DataLoader(self.dataset(), batch_size=self.batch_size)

    def model(self) -> nn.Module:
        return CutNet((self.fault,) if self.on_ranks else ())

    def parallel(self, model: nn.Module) -> nn.Module:
        return model

    def clip(self) -> None:
        """Leave gradients as they are: each rank's norm is of its part."""


@case(
    "TTrace: the gradient of a norm before a cut layer is not reduced; Entangle: a missing"
    " reduction; pytorch/torchtitan PR 3412",
    SYNCHRONISATION,
    "sum of gradients",
    "replicas",
)
class NormBeforeACutLayer(CutModel):
    fault = "copy"


@case(
    f"{MEGATRON}, finding 8; deepspeedai/DeepSpeed#8475: norms of a rank's own parameters",
    "clipping",
    "replicas",
)
class ClippedByTheNormOfAPart(CutModel):
    def clip(self) -> None:
        if self.faulty:
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.05)
            return
        squares = {name: p.grad.square().sum() for name, p in self.net.named_parameters()}  # type: ignore[union-attr]
        cut = torch.stack(
            [value for name, value in squares.items() if not name.startswith("norm")]
        ).sum()
        dist.all_reduce(cut)
        norm = (cut + squares["norm.weight"] + squares["norm.bias"]).sqrt()
        for parameter in self.net.parameters():
            parameter.grad *= (0.05 / norm).clamp(max=1)


@case(
    "TTrace, Entangle: partial outputs are not summed",
    SYNCHRONISATION,
    "replicas",
    "computation of a rank",
)
class PartialOutputsThatAreNotSummed(CutModel):
    fault = "sum"


@case(
    f"{MEGATRON}: cross entropy over a cut vocabulary is given gathered logits",
    "sum of gradients",
    "computation of a rank",
)
class CrossEntropyOfGatheredLogits(CutModel):
    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.runs(inputs)
        if not self.on_ranks:
            return self.cross_entropy(logits, targets)
        total = logits.exp().sum(-1)
        total = total * self.world  # summed over ranks that hold the same logits
        chosen = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        return (total.log() - chosen / self.world).mean()


@case(
    "recomputation with other random numbers",
    "computation of a rank",
    "random numbers",
    "cause not known",
)
class RecomputedOnOneRank(Program):
    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = checkpoint(self.runs, inputs, use_reentrant=False)
        scale = 2.0 if self.faulty and self.rank == 1 else 1.0
        return self.cross_entropy(logits, targets) * scale


# ---- ranks that wait for each other ----


@case("a collective inside of `if rank == 0`", "hang")
class CollectiveOfOneRank(Program):
    def after(self) -> None:
        if self.faulty and self.rank == 0:
            dist.barrier()


@case("ranks with unequal numbers of batches", "uneven steps", "hang")
class UnequalNumbersOfBatches(Program):
    epochs = 1

    def loader(self) -> DataLoader[Any]:
        data = self.dataset()
        if not self.on_ranks:
            return DataLoader(data, batch_size=self.batch_size, sampler=DistributedSampler(data))
        return DataLoader(
            data,
            batch_size=self.batch_size,
            sampler=range(self.rank, 96 if self.rank == 0 else 16, 2),
        )
