"""Faster projections in the place of a model's own: those of one input fused, weights laid out as the CPU reads them.

Most of a small pass on a CPU goes into reading weights, and oneDNN reads its own blocked layout 1.5 to 2 times as fast
as rows. A model's `forward` is untouched: modules are exchanged, and what is returned puts the old ones back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from transformers.pytorch_utils import Conv1D

# Children that a block calls on the same input, one after the other, the first of them first.
_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# What weights are packed for: the count of rows of a usual pass. Any other count works too.
_ROWS_HINT = 8

Project = Callable[[torch.Tensor], torch.Tensor]


class Projection(nn.Module):
    """x Wᵀ + b, with the weights packed where that is faster.

    Attributes:
        width: Numbers in a row of what it computes.
        packed: The weights are in a layout that only oneDNN knows.
        project: What it does.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Pack the weights if that is faster.

        Args:
            weight: [width, input's width].
            bias: [width], None for none.
        """
        super().__init__()
        product = _packed(weight, bias)
        self.width = weight.shape[0]
        self.packed = product is not None
        self.project: Project = product or (lambda x: F.linear(x, weight, bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        return self.project(x)


class _First(nn.Module):
    """The first of several projections of one input: computes all, and holds the others' parts for them."""

    def __init__(self, project: nn.Module, sizes: list[int]) -> None:
        super().__init__()
        self._project = project
        self._sizes = sizes
        self.input: torch.Tensor | None = None
        self.parts: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first: torch.Tensor
        first, *self.parts = self._project(x).split(self._sizes, dim=-1)
        self.input = x
        return first


class _Other(nn.Module):
    """One of the others: takes its part from the first."""

    def __init__(self, first: _First) -> None:
        super().__init__()
        # Not as a child module: it is one of the block's already.
        self._first = [first]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (first,) = self._first
        if x is not first.input:
            raise RuntimeError("projections fused for one input were called on different ones")
        part = first.parts.pop(0)
        if not first.parts:
            first.input = None
        return part


def exchange_projections(model: nn.Module) -> Callable[[], None]:
    """Exchange a model's linear modules for faster ones that compute the same; return what puts the old ones back."""
    replaced: list[tuple[nn.Module, str, nn.Module]] = []

    def replace(parent: nn.Module, name: str, new: nn.Module) -> None:
        replaced.append((parent, name, getattr(parent, name)))
        setattr(parent, name, new)

    for parent in list(model.modules()):
        for names in _SAME_INPUT:
            if linears := _fusable(parent, names):
                weight = torch.cat([linear.weight.detach() for linear in linears])
                biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
                first = _First(
                    Projection(weight, torch.cat(biases) if biases else None), [x.out_features for x in linears]
                )
                for name, module in zip(names, [first, *(_Other(first) for _ in names[1:])], strict=True):
                    replace(parent, name, module)
        for name, child in list(parent.named_children()):
            # Where nothing is packed, a single projection is best left as it is.
            if (weight_bias := _weight_and_bias(child)) and _packable(weight_bias[0]):
                replace(parent, name, Projection(*weight_bias))

    def undo() -> None:
        for parent, name, old in reversed(replaced):
            setattr(parent, name, old)

    return undo


def _fusable(parent: nn.Module, names: Sequence[str]) -> list[nn.Linear]:
    """Return the children of these names, empty unless all are plain linear modules of one input and one place."""
    linears = [child for name in names if type(child := getattr(parent, name, None)) is nn.Linear]
    alike = {(x.in_features, x.bias is None, x.weight.dtype, x.weight.device) for x in linears}
    return linears if len(linears) == len(names) and len(alike) == 1 else []


def _weight_and_bias(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    # The very types: a subclass may do more than multiply.
    if type(module) is nn.Linear:
        return module.weight, module.bias
    if type(module) is Conv1D:
        return module.weight.t(), module.bias
    return None


def _packable(weight: torch.Tensor) -> bool:
    # Private names of torch: absent ones count as no.
    supported = {torch.float32: True, torch.bfloat16: _flag(torch.ops.mkldnn, "_is_mkldnn_bf16_supported")}
    return (
        weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and supported.get(weight.dtype, False)
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _flag(where: object, name: str) -> bool:
    check = getattr(where, name, None)
    return check is not None and bool(check())


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Project | None:
    """Return a product with weights in oneDNN's own layout, None where there is none for them."""
    if not _packable(weight):
        return None
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
    product = torch.ops.mkldnn._linear_pointwise

    def project(x: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = product(x, packed, bias, "none", [], "")
        return projected

    return project
