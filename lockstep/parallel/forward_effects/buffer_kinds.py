"""Finds buffers whose changes in a forward pass a step can explain, and where they are registered.

Tests: tests/parallel/forward_effects/test_combined_buffers.py,
tests/parallel/forward_effects/test_state_between_calls.py
"""

from dataclasses import dataclass, field

from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm

from lockstep.torch_compat.module_hooks import forward_pre_hooks
from lockstep.torch_compat.normalizations import BatchNorm, SpectralNormParametrization

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
COUNTS = "step_counts"


@dataclass
class ExplainedBuffers:
    """The modules of a model with such buffers.

    Attributes:
        norms: name → batch normalisation that keeps running statistics.
        vectors: (module, attribute) of the vectors of spectral normalisation.
        counting: modules with `step_counts`.
    """

    norms: dict[str, BatchNorm] = field(default_factory=dict)
    vectors: list[tuple[nn.Module, str]] = field(default_factory=list)
    counting: list[nn.Module] = field(default_factory=list)

    @property
    def registrations(self) -> set[tuple[int, str]]:
        """(id of the module, attribute) of all of them."""
        statistics = {(id(norm), name) for norm in self.norms.values() for name in STATISTICS}
        vectors = {(id(module), name) for module, name in self.vectors}
        return statistics | vectors | {(id(module), COUNTS) for module in self.counting}


def explained_buffers(model: nn.Module) -> ExplainedBuffers:
    """Return the explained buffers of a model, or of a stage of it."""
    explained = ExplainedBuffers()
    for name, module in model.named_modules():
        if (
            isinstance(module, BatchNorm)
            and module.track_running_stats
            and module.running_mean is not None
        ):
            explained.norms[name] = module
        own = [attribute for attribute, _ in module.named_buffers(recurse=False)]
        if isinstance(module, SpectralNormParametrization):
            explained.vectors += [(module, attribute) for attribute in own]
        for hook in forward_pre_hooks(module):
            if isinstance(hook, SpectralNorm):  # the old one
                explained.vectors += [(module, f"{hook.name}_u"), (module, f"{hook.name}_v")]
        if COUNTS in own and hasattr(module, "end_step"):
            explained.counting.append(module)
    return explained
