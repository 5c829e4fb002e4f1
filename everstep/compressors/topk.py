"""Top-k by magnitude: the k largest elements, exactly k, the lowest index winning among equals.

"topk" sends them as fp32, "topk+int8" in blocks of 256 with one scale each; what rounding loses stays behind too.
Places travel as Elias-Fano codes, about a byte each at 1 %.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from everstep import kernels
from everstep.compressors.base import COMPRESSORS, Codes, Compressed, Compressor, Spec
from everstep.compressors.quantised import coded, read_codes


@COMPRESSORS.register("topk")
class TopK(Compressor):
    """Keeps the `density` share of elements that are largest in magnitude (at least one)."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self._bound = torch.zeros(1)  # the last step's k-th magnitude: a hint, it changes no result

    def compress(self, accumulated: torch.Tensor, lsn: int) -> Compressed:
        """Return the k largest elements of `accumulated`."""
        return self._chosen(accumulated, None, None)

    def feed_back(self, residual: torch.Tensor, gradient: torch.Tensor, lsn: int, out: torch.Tensor) -> Compressed:
        """Return the k largest elements of `residual` + `gradient`; `out` gets the others. One pass."""
        return self._chosen(gradient, residual, out)

    def message(self, sent: Compressed, size: int) -> torch.Tensor:
        """Return the values, then the packed places."""
        assert sent.indices is not None
        return torch.cat([super().message(sent, size), kernels.pack(sent.indices, size)])

    def read(self, message: torch.Tensor, size: int, lsn: int) -> Compressed:
        """Return what `message` made."""
        k = self.spec.kept(size)
        cut = message.numel() - kernels.packed_size(k, size)
        values, codes = self._values(message[:cut], k)
        return Compressed(values, kernels.unpack(message[cut:], k), codes)

    def _chosen(self, gradient: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor | None) -> Compressed:
        k = self.spec.kept(gradient.numel())
        self._bound = self._bound.to(gradient.device)
        indices, values = kernels.topk_ef(gradient, residual, k, out=out, bound=self._bound)
        return Compressed(values, indices, finite=not bool(self._bound.isnan()))

    def _values(self, message: torch.Tensor, k: int) -> tuple[torch.Tensor, Codes | None]:
        return message.clone().view(torch.float32), None


@COMPRESSORS.register("topk+int8")
class TopKInt8(TopK):
    """Top-k whose values are sent as int8."""

    def compress(self, accumulated: torch.Tensor, lsn: int) -> Compressed:
        """Return the k largest elements of `accumulated`, quantised."""
        return self._quantised(super().compress(accumulated, lsn))

    def feed_back(self, residual: torch.Tensor, gradient: torch.Tensor, lsn: int, out: torch.Tensor) -> Compressed:
        """Return the k largest of `residual` + `gradient`, quantised; `out` gets the others and what rounding lost."""
        chosen = super().feed_back(residual, gradient, lsn, out)
        sent = self._quantised(chosen)
        out[chosen.indices] += chosen.values - sent.values  # added: one that is not finite stays
        return sent

    def _quantised(self, chosen: Compressed) -> Compressed:
        codes = coded(chosen.values, 8)
        return replace(chosen, values=codes.values(chosen.values.numel()), codes=codes)

    def _values(self, message: torch.Tensor, k: int) -> tuple[torch.Tensor, Codes | None]:
        codes = read_codes(message, k, 8)
        return codes.values(k), codes
