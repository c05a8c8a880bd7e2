"""PackedLinear: a linear layer whose weight is laid out once for oneDNN, for forward passes over a few rows on a CPU.

A decoding step multiplies a handful of rows by every weight of a model. With the weight in oneDNN's own blocked layout that
runs at about twice the speed of PyTorch's eager float32 product, and activations, products and residual additions ride in
its epilogue. Other devices and dtypes keep the plain weight and `F.linear`, so callers need not care.

Inference only: nothing here carries a gradient, and a packed weight is a copy that does not see later changes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def can_pack(weight: Tensor) -> bool:
    """Whether this build of PyTorch can pack the weight `[m, k]`: float32, CPU, oneDNN present, not empty."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.numel() > 0
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


class PackedLinear(nn.Module):
    """`x [..., k] -> x @ weight.T + bias [..., m]`, with optional fused second steps.

    Args:
        weight: `[m, k]`; only a packed copy is kept (the tensor itself where it cannot be packed).
        bias: `[m]` or None.
        rows: number of rows that a call typically has; oneDNN picks the layout for it. Any other number works too.
        half: multiply in bfloat16 (results are float32 again) where oneDNN can. Half the memory to read, which is what few rows cost.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, rows: int = 8, *, half: bool = False) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = can_pack(weight)
        # Plain attributes: a packed weight has no place in a state dict and must not follow `.to()`.
        self.in_half = half and self.packed and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        weight = weight.detach().bfloat16() if self.in_half else weight.detach()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows) if self.packed else weight
        self._bias = None if bias is None else bias.detach().to(weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., k]` -> `[..., m]`."""
        if not self._use_packed(x):
            return F.linear(x, self._plain(x), self._bias if self._bias is None else self._bias.to(x.dtype))
        if self.in_half:
            return torch.ops.mkldnn._linear_pointwise(x.bfloat16(), self._weight, self._bias, "none", [], "").float()
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")

    def silu(self, x: Tensor) -> Tensor:
        """`silu(forward(x))`."""
        if not self._use_packed(x) or self.in_half:
            return F.silu(self.forward(x))
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "swish", [], "")

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """`forward(x) * other`, `other [..., m]`."""
        if not self._use_packed(x) or self.in_half:
            return self.forward(x) * other
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, self._weight, self._bias, "mul")

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """`forward(x) + other`, `other [..., m]`."""
        if not self._use_packed(x) or self.in_half:
            return self.forward(x) + other
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, self._weight, self._bias, "add")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self._bias is not None}, packed={self.packed}"

    def _use_packed(self, x: Tensor) -> bool:
        return self.packed and x.dtype == torch.float32 and x.numel() > 0

    def _plain(self, x: Tensor) -> Tensor:
        """The weight as F.linear takes it. Of a packed one only zero rows get here, for which its values do not matter."""
        if not self.packed:
            return self._weight
        if x.numel() > 0:
            raise TypeError(f"a packed float32 layer was given {x.dtype}")
        return x.new_zeros(self.out_features, self.in_features)


def pack_linears(module: nn.Module, rows: int = 8, *, half: bool = False) -> nn.Module:
    """Replace every `nn.Linear` below `module` by a `PackedLinear`, in place; returns `module`.

    A head tied to the embedding gets its own packed copy, and the embedding stays as it is. Layers that cannot be packed
    (device, dtype) and subclasses of `nn.Linear` are left alone. Layers used in several places are packed once. `half`: their products run in bfloat16.
    """
    made: dict[int, PackedLinear] = {}
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):  # unlike named_children, also the repeats of a shared layer
            if type(child) is nn.Linear and can_pack(child.weight):
                if id(child) not in made:
                    made[id(child)] = PackedLinear(child.weight, child.bias, rows, half=half)
                    made[id(child)].train(child.training)
                setattr(parent, name, made[id(child)])
    return module
