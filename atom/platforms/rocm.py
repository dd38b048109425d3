"""AMD GPUs: torch's ROCm builds answer through the same torch.cuda calls."""

from __future__ import annotations

from atom.platforms.cuda import CudaPlatform
from atom.platforms.interface import check_feature


class RocmPlatform(CudaPlatform):
    name = "rocm"
    attention_backends = ("aiter", "triton", "reference")

    def is_available(self) -> bool:
        import torch

        return torch.version.hip is not None and torch.cuda.is_available()

    def supports(self, feature: str) -> bool:
        check_feature(feature)
        # gfx94x computes in the fnuz variant of e4m3, later architectures in the OCP one.
        if feature == "fp8_e4m3fnuz":
            return self.architecture().startswith("gfx94")
        if feature == "fp8_e4m3fn":
            return self.architecture().startswith(("gfx95", "gfx12"))
        return True

    def architecture(self) -> str:
        """The gfx name, without feature suffixes."""
        import torch

        return torch.cuda.get_device_properties(0).gcnArchName.split(":")[0]

    def runtime(self) -> str:
        import torch

        return f"ROCm {torch.version.hip}"
