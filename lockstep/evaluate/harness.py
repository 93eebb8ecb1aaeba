"""Lets lm-evaluation-harness ask a language model: multiple choice, likelihoods, generation.

    lockstep evaluate runs/run --tasks arc_easy,mine.yaml --limit 100

The harness knows the model by the name `lockstep` in its registry, once this module is imported:
`simple_evaluate(model="lockstep", model_args={"run": "runs/run"}, …)`. All ranks compute each
request together, as the run's strategy has it, so a model need not fit on one of them.

Tests: tests/evaluate/test_harness.py
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import UsageError, listed
from lockstep.evaluate.measure import Opened, opened, require_text
from lockstep.evaluate.subject import Asked, find_subject, for_ranks
from lockstep.models.language import generate, logits_in

try:
    from lm_eval import simple_evaluate, utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.tasks import TaskManager
except ImportError as error:
    what = "--tasks needs lm-evaluation-harness"
    fix = "pip install lm_eval"
    raise UsageError(what, where="--tasks", why=str(error), fix=fix) from error

_MOST_TOKENS = 256  # of an answer, where a task leaves its length open


@register_model("lockstep")
class LockstepLM(TemplateLM):  # type: ignore[misc]
    """A model of a run, a checkpoint, a file of weights or a folder of Hugging Face.

    Args:
        run: what `lockstep evaluate` takes as RUN; beside it `step`, `config` and `data`, as there.
        already: a model that is open, in the place of these.
        ignored: what the harness passes to any model, such as a batch size.
    """

    def __init__(
        self,
        run: str | None = None,
        step: int | None = None,
        config: str | None = None,
        data: str | None = None,
        already: Opened | None = None,
        **ignored: Any,
    ) -> None:
        super().__init__()
        if already is None:
            asked = Asked(Path(run or "."), _path(config), (), _path(data), step)
            subject = find_subject(asked)
            already = opened(subject, for_ranks(subject.config, (), 1, 1)[0])
        require_text(already, "--tasks")
        self._opened = already
        self._forward: Callable[[Tensor], Any] = already.trainer.forward
        self.max_length = already.block_size

    @property
    def eot_token_id(self) -> int:
        """The token that stands before a text without a context: that of a new line."""
        return self.tok_encode("\n")[0]

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the tokens of a text, as the run's data cut it."""
        encode = self._opened.data.encode
        assert encode is not None
        return list(encode(string))

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        """Return the log likelihood of each continuation, and whether it is the likeliest."""
        return [self._likelihood(context, text) for _, context, text in requests]

    def _likelihood(self, context: list[int], text: list[int]) -> tuple[float, bool]:
        if len(text) > self.max_length:
            what = f"an answer of {len(text)} tokens, and the model sees {self.max_length}"
            raise UsageError(what, where="--tasks", fix="train it on longer sequences")
        tokens = torch.tensor([[*context, *text][-(self.max_length + 1) :]])
        logits = self._logits(tokens[:, :-1])[0, -len(text) :]
        answer = tokens[0, -len(text) :]
        likelihoods = logits.double().log_softmax(-1)
        total = likelihoods.gather(1, answer[:, None]).sum()
        return float(total), bool((logits.argmax(-1) == answer).all())

    def _logits(self, ids: Tensor) -> Tensor:
        outputs = self._forward(ids.to(self._opened.trainer.device))
        return logits_in(outputs).cpu()

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log likelihood of whole texts, window after window."""
        totals = []
        for request in requests:
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs = [utils.make_disjoint_window(window) for window in windows]
            totals.append(sum(self._likelihood(*pair)[0] for pair in pairs))
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the answer to each request, up to the first of the texts that end it."""
        return [self._answer(*request.args) for request in requests]

    def _answer(self, context: str, settings: Mapping[str, Any]) -> str:
        """Return what the model adds to a context, by the harness's settings of a generation."""
        until = settings.get("until") or []
        ends = [until] if isinstance(until, str) else list(until)
        num_tokens = int(settings.get("max_gen_toks", _MOST_TOKENS))
        draws = bool(settings.get("do_sample", False))
        given = self.tok_encode(context) or [self.prefix_token_id]
        tokens = generate(
            self._logits,
            torch.tensor([given]),
            num_tokens,
            block_size=self.max_length,
            temperature=float(settings.get("temperature", 1.0)) if draws else 0.0,
        )
        decode = self._opened.data.decode
        assert decode is not None
        answer = decode(tokens[0, len(given) :].tolist())
        for end in ends:
            answer = answer.split(end)[0] if end else answer
        return answer


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def ask(found: Opened, tasks: Sequence[str], limit: int | None) -> dict[str, dict[str, float]]:
    """Return task → metric → value; all ranks call it together, and rank 0 alone has values.

    Args:
        tasks: names of the harness's tasks, or paths of their descriptions.
        limit: requests of each task; None: all.
    """
    manager = TaskManager()
    known = set(manager.all_tasks)
    unknown = [task for task in tasks if task not in known and not Path(task).exists()]
    if unknown:
        what = f"lm-evaluation-harness has no task {listed(unknown)}"
        fix = "`lm-eval ls tasks` lists them; a path of a description serves, too"
        raise UsageError(what, where="--tasks", fix=fix)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    results = simple_evaluate(
        LockstepLM(already=found),
        tasks=list(tasks),
        limit=limit,
        log_samples=False,
        task_manager=manager,
    )
    if results is None:  # it has collected those of all ranks on the first one of a machine
        return {}
    return {
        task: {
            metric.removesuffix(",none"): value
            for metric, value in row.items()
            if isinstance(value, int | float)
        }
        for task, row in results["results"].items()
    }
