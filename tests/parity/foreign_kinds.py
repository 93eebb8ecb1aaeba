"""Foreign models, one for each kind of mistake that was once made with such a model; and all foreign models."""

from tests.parity import foreign
from tests.parity.foreign import Foreign

KINDS: dict[str, Foreign] = {}

MODELS: dict[str, Foreign] = {**foreign.MODELS, **KINDS}
