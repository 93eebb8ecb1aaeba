import pytest

from benchmarks.published_figures import Figure, figures

MEASURED = (
    "tokens/s",
    "GiB",
    ": TFLOP/s",
    ": seconds",
    "a trillion tokens",
)  # these rehearse a model, and take seconds each
QUICK = [figure for figure in figures() if not any(unit in figure.what for unit in MEASURED)]


@pytest.mark.parametrize("figure", QUICK, ids=lambda figure: figure.what)
def test_published_figures_are_reproduced(figure: Figure) -> None:
    assert figure.predicted() == pytest.approx(figure.published, rel=figure.within)


@pytest.mark.full
@pytest.mark.parametrize(
    "figure", [f for f in figures() if f not in QUICK], ids=lambda figure: figure.what
)
def test_published_runs_are_reproduced(figure: Figure) -> None:
    assert figure.predicted() == pytest.approx(figure.published, rel=figure.within)
