"""Triton kernels for CUDA and ROCm, each a twin of a function in ``kernels/reference``.

They also run, slowly, under Triton's interpreter (``TRITON_INTERPRET=1`` before the import), which is how they are
tested without a device.
"""
