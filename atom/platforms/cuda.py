"""NVIDIA GPUs through torch.cuda."""

from __future__ import annotations

from atom.platforms.interface import Platform, check_feature


class CudaPlatform(Platform):
    name = "cuda"
    device_type = "cuda"
    communication_backend = "nccl"
    attention_backends = (
        "flash_attention",
        "triton",
        "reference",
    )  # the first only where it was measured to win
    compilation_level = 3
    cudagraph_mode = "FULL"

    def is_available(self) -> bool:
        import torch

        return torch.version.hip is None and torch.cuda.is_available()

    def describe(self) -> dict[str, str]:
        import torch

        properties = torch.cuda.get_device_properties(0)
        gib = 1 << 30
        return {
            "device": f"{self.num_devices} x {properties.name}",
            "architecture": self.architecture(),
            "memory": f"{self.total_memory() / gib:.1f} GiB, {self.free_memory() / gib:.1f} GiB free",
            "runtime": self.runtime(),
        }

    def supports(self, feature: str) -> bool:
        check_feature(feature)
        import torch

        if feature in ("bf16", "fast_bf16_matmul"):
            return torch.cuda.is_bf16_supported(including_emulation=False)
        if feature == "fp8_e4m3fn":
            return torch.cuda.get_device_capability() >= (8, 9)
        return feature != "fp8_e4m3fnuz"

    def architecture(self) -> str:
        """Compute capability, as in ``sm_90``."""
        import torch

        major, minor = torch.cuda.get_device_capability()
        return f"sm_{major}{minor}"

    def runtime(self) -> str:
        import torch

        return f"CUDA {torch.version.cuda}"

    def num_multiprocessors(self, index: int = 0) -> int:
        import torch

        return torch.cuda.get_device_properties(index).multi_processor_count

    def total_memory(self, index: int = 0) -> int:
        import torch

        return torch.cuda.mem_get_info(index)[1]

    def free_memory(self, index: int = 0) -> int:
        import torch

        return torch.cuda.mem_get_info(index)[0]

    @property
    def num_devices(self) -> int:
        import torch

        return torch.cuda.device_count()

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()
