"""Names from elsewhere and ours: ONE table, from which errors say what to write and the Coming-from pages are made.

Rows come from `names_guides` (five guides that people come with) and `names_trainers` (trainers in wide use). Nothing
here imports pydantic, so that the command line can look up a flag at once.
"""

from dataclasses import dataclass
from functools import cache

from lockstep.config.names_guides import GUIDES, Kind
from lockstep.config.names_trainers import TRAINERS

SOURCES = {
    "bdh": "BDH's training script",
    "forgather": "Forgather",
    "geometry_os": "geometry_os",
    "frameworm": "FRAMEWORM",
    "free_transformer": "the Free Transformer",
    "transformers": "Hugging Face Trainer",
    "lightning": "PyTorch Lightning",
    "fabric": "Lightning Fabric",
    "accelerate": "Hugging Face Accelerate",
    "deepspeed": "DeepSpeed",
    "torchtitan": "torchtitan",
    "nanogpt": "nanoGPT",
    "torch": "PyTorch itself",
}


@dataclass(frozen=True)
class Foreign:
    """One name from elsewhere.

    `ours` is a dotted key, an option (`--nnodes`), a Python name or a command; empty where nothing needs to be written.
    `value` is what to write there, where it does not follow from theirs. For `kind="value"`, `theirs` is a value of
    `ours`.
    """

    source: str
    kind: Kind
    theirs: str
    ours: str = ""
    value: str = ""
    note: str = ""

    @property
    def is_key(self) -> bool:
        """Whether `ours` is a key of the config."""
        return self.ours.split(".")[0] in SECTIONS


SECTIONS = ("model", "loss_fn", "data", "training", "precision", "distributed", "checkpoint", "monitor")


@cache
def table() -> tuple[Foreign, ...]:
    """All rows, in the order of `SOURCES`."""
    return tuple(Foreign(source, kind, *row) for source, kind, rows in (*GUIDES, *TRAINERS) for row in rows)


def advice_for(dotted: str) -> str | None:
    """What to write instead of a key from elsewhere, `fsdp_config.min_num_params` or `training.bf16`."""
    found = _matches(dotted)
    texts = dict.fromkeys(_advice(row, "{ours}: {value}") for row in found)
    return "; or ".join(texts) or None


def advice_for_flag(option: str) -> str | None:
    """What to write instead of an option from elsewhere, `--use_fsdp`."""
    texts = dict.fromkeys(_advice(row, "{ours}={value}") for row in _matches(option.lstrip("-").partition("=")[0]))
    return "; or ".join(texts) or None


def advice_for_object(name: str) -> str | None:
    """What to write instead of an object from elsewhere, `forgather.ml.tb_logger:TBLogger`."""
    rows = [row for row in table() if row.kind == "python" and row.theirs == name]
    return "; or ".join(dict.fromkeys(_advice(row, "{ours}: {value}") for row in rows)) or None


def foreign_key(name: str) -> str | None:
    """The one key of ours that a single foreign name stands for, value and all."""
    rows = [row for row in table() if row.kind == "key" and _normal(row.theirs) == _normal(name)]
    keys = {row.ours for row in rows if row.is_key and not row.value}
    return keys.pop() if len(keys) == 1 else None


def says_to_leave_out(name: str) -> str | None:
    """The advice of the table where it is to leave `name` out, as `rank`."""
    rows = [row for row in table() if row.kind == "key" and row.theirs == name and not row.ours]
    return rows[0].note if rows else None


def advice_for_value(key: str, value: object) -> str | None:
    """What to write as the value of our `key` instead of a value from elsewhere."""
    word = _normal(str(value))
    for row in table():
        if row.kind == "value" and row.ours == key and _normal(row.theirs) == word:
            note = f" ({row.note})" if row.note else ""
            return f"write {row.value}{note}"
    return None


def _matches(dotted: str) -> list[Foreign]:
    """The rows whose name is the end of `dotted`; those that match most of it."""
    parts = [_normal(part) for part in dotted.split(".")]
    best: list[Foreign] = []
    longest = 0
    for row in table():
        if row.kind not in ("key", "flag"):
            continue
        theirs = [_normal(part) for part in row.theirs.split(".")]
        if parts[-len(theirs) :] != theirs or len(theirs) < longest:
            continue
        if len(theirs) > longest:
            best, longest = [], len(theirs)
        best.append(row)
    return best


def _advice(row: Foreign, form: str) -> str:
    if not row.ours:
        return row.note
    value = row.value or ("VALUE" if "=" in form else "")
    what = form.format(ours=row.ours, value=value) if value and row.is_key else f"{row.ours} {row.value}".strip()
    return f"write {what}" + (f" ({row.note})" if row.note else "")


def _normal(name: str) -> str:
    return name.strip().lstrip("-").replace("-", "_").lower()
