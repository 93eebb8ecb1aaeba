"""Planning without a config, long runs, and the tables."""

import math

import pytest

from benchmarks.goodput import Reliability, best_interval, expected_goodput, simulate
from lockstep.costs.hardware import GPUS, LINKS, cluster_of, find_gpu, group_of, known_gpu
from lockstep.costs.steps import ScheduledPass, pipeline
from lockstep.errors import UsageError
from lockstep.plan import calculate_resources, typical_shape
from lockstep.plan.command import PlanOptions, cluster_for


def test_trap_42_activations_are_not_batch_times_sequence_times_parameters() -> None:
    """batch × seq × params × 4 says 230 TB here; 16 bytes a parameter and some per
    layer are right.
    """
    needs = calculate_resources(7e9, 2048, 4)
    assert needs.parameters + needs.gradients + needs.optimizer == pytest.approx(16 * 7e9)
    layer = 2048 * 4 * needs.shape.width * 34
    assert needs.activations == pytest.approx(needs.shape.layers * layer)
    quadratic = calculate_resources(7e9, 2048, 4, fused_attention=False)
    assert quadratic.activations - needs.activations == pytest.approx(
        needs.shape.layers * 5 * needs.shape.heads * 2048**2 * 4
    )
    recomputed = calculate_resources(7e9, 2048, 4, checkpointing=True)
    assert recomputed.activations == pytest.approx(
        needs.shape.layers * 2 * 2048 * 4 * needs.shape.width + layer
    )
    assert calculate_resources(7e9, 2048, 4, gpus=8).optimizer == pytest.approx(8 * 7e9 / 8)
    assert calculate_resources(7e9, 2048, 4, headroom=0.5).total == pytest.approx(1.5 * needs.total)


@pytest.mark.parametrize("params", [1e8, 1e9, 7e9, 7e10])
def test_the_assumed_shape_has_so_many_parameters(params: float) -> None:
    shape = typical_shape(params)
    made = 12 * shape.layers * shape.width**2 + 2 * shape.vocabulary * shape.width
    assert made == pytest.approx(params, rel=0.05)


def test_a_size_below_one_is_refused() -> None:
    with pytest.raises(UsageError, match="batch_size=0"):
        calculate_resources(7e9, 2048, 0)
    with pytest.raises(UsageError, match="gpus=-3: at least 1 is needed"):
        calculate_resources(7e9, 2048, 1, gpus=-3)
    with pytest.raises(UsageError, match="GPUs a node of 0 makes no cluster"):
        cluster_of(8, "H100", per_node=0)
    with pytest.raises(UsageError, match="a number of GPUs of 0"):
        cluster_for(PlanOptions(gpus=0))


def test_trap_45_gpipe_and_1f1b_have_the_same_bubble() -> None:
    """(p−1)/(m+p−1) for both: GPipe is not "bubble-minimal"; V interleaved stages have
    (p−1)/(V·m+p−1).
    """
    from lockstep.parallel.pipeline.schedules import actions

    p = 4
    m = 8
    for name, per_rank in (("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2)):
        orders = [
            [ScheduledPass(a.kind, a.stage, a.micro_batch) for a in order]
            for order in actions(name, p, per_rank, m)
        ]
        stages = p * per_rank
        seconds = {("F", s): 1 / per_rank for s in range(stages)} | {
            ("B", s): 2 / per_rank for s in range(stages)
        }
        line = pipeline(orders, seconds, [0.0] * stages, rank_of=[s % p for s in range(stages)])
        bubble = 1 - line.busy(("compute", 0)) / line.end
        assert bubble == pytest.approx((p - 1) / (per_rank * m + p - 1), abs=0.005), name


def test_young_and_daly() -> None:
    mean = 3600.0
    save = 5.0
    best = best_interval(save, mean)
    assert best == pytest.approx(math.sqrt(2 * save * mean), rel=0.05)
    goodputs = [expected_goodput(best * factor, save, 60, mean) for factor in (0.5, 1.0, 2.0)]
    assert goodputs[1] == max(goodputs)


def test_a_simulated_run_of_100_000_gpus_has_the_expected_goodput() -> None:
    machine = Reliability(gpu_hours_per_failure=50_000, restart_seconds=300, save_seconds=10)
    mean = machine.mean_time(100_000)
    interval = best_interval(10, mean)
    run = simulate(30 * 86400, interval, machine, 100_000)
    assert run.goodput == pytest.approx(expected_goodput(interval, 10, 300, mean), rel=0.05)


def test_gpus_are_found_by_what_people_and_drivers_call_them() -> None:
    assert find_gpu("RTX 4090").name == "RTX-4090"
    assert find_gpu("h100").name == "H100"
    with pytest.raises(UsageError, match="RTX-4090"):
        find_gpu("rtx 4099")


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 3080 Ti", "RTX-3080-Ti"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA L40S", "L40S"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA A100-SXM-64GB", None),
        ("NVIDIA A10G", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA RTX A4000", None),
    ],
)
def test_a_gpu_is_taken_for_no_other_whose_name_begins_alike(said: str, name: str | None) -> None:
    known = known_gpu(said)
    assert (known.name if known is not None else None) == name


def test_every_figure_has_a_source() -> None:
    assert all(entry.source for entry in (*GPUS.values(), *LINKS.values()))


def test_a_ring_moves_its_bytes() -> None:
    cluster = cluster_of(16, "H100", "InfiniBand NDR")
    group = group_of(cluster, 16)
    inside, between = group.bytes_sent(16e9)
    assert inside + between == pytest.approx(15e9)
    assert between == pytest.approx(1e9)
    assert group.gather(16e9) >= 8e9 / (8 * 50e9)
