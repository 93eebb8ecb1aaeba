"""What a profile looked like: the shares of a step, and the memory that was held while it ran."""

from lockstep.report.drawing import GIB, Figure, chart, line, moments, short
from lockstep.report.read import Run

_PARTS = {"compute": "@c1", "overlapped communication": "@c3", "exposed communication": "@c4", "idle": "@c8"}
_MIB = 2**20


def profile_charts(run: Run) -> list[Figure]:
    """Of the newest profile of a run; empty where there is none."""
    return [shares(run), memory(run)]


def shares(run: Run) -> Figure:
    """A bar for each traced rank."""
    profile = run.profile or {}
    ranks = profile.get("ranks") or []
    data = [
        {"type": "bar", "orientation": "h", "name": part, "y": [f"rank {rank['rank']}" for rank in ranks],
         "x": [short(rank["shares"][part]) for rank in ranks], "marker": {"color": colour},
         "hovertemplate": "%{x:.1%}"}
        for part, colour in _PARTS.items() if any(rank["shares"].get(part) for rank in ranks)
    ]  # fmt: skip
    note = f"{profile.get('about', '')} {profile.get('verdict', '')}".strip()
    return chart("profile", "Profile", data, note=note, barmode="stack",
                 xaxis={"tickformat": ".0%", "range": [0, 1]}, yaxis={"autorange": "reversed"},
                 short=len(ranks) < 3)  # fmt: skip


def memory(run: Run) -> Figure:
    """What was held more than when the trace began, over the trace."""
    curve = (run.profile or {}).get("memory") or []
    factor, sign, _ = moments(max((when for when, _ in curve), default=0.0))
    most = max((held for _, held in curve), default=0.0)
    unit, name = (GIB, "GiB") if most > GIB else (_MIB, "MiB")
    data = [line([short(when * factor) for when, _ in curve], [held / unit for _, held in curve], "held", "@c1",
                 line={"shape": "hv"}, showlegend=False)] if curve else []  # fmt: skip
    return chart("profile-memory", "Memory in the profile", data,
                 note="Held more than when the trace began, by the first traced rank.",
                 xaxis={"ticksuffix": sign}, yaxis={"ticksuffix": f" {name}"})  # fmt: skip
