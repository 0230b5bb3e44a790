"""Which errors a device raises: for lack of memory, which torch has a type for where its own allocators of
devices find it and nowhere else; and those that a card answers with once something has failed there.

Knows torch's, Triton's and NCCL's words; knows no steps.
"""

from __future__ import annotations

import torch

# The CPU's allocator; torch's own on a card, where its type is lost on the way; the driver, which a graph, a
# kernel's code, locked memory or NCCL's buffers are asked of; and cuBLAS.
OUT_OF_MEMORY = (
    "DefaultCPUAllocator: ",
    "CUDA out of memory. ",
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Cuda failure 2 'out of memory'",
    "Cuda failure 'out of memory'",  # where NCCL allocates
)
# Torch's, where its type is lost, and NCCL's.
FAILED = ("CUDA error: ", "unhandled cuda error")


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _says_one_of(OUT_OF_MEMORY, error)


def is_of_device(error: BaseException) -> bool:
    """Whether it is for lack of memory, or tells of a failure on this process's card."""
    if is_out_of_memory(error) or isinstance(error, torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and _says_one_of(FAILED, error)


def _says_one_of(words: tuple[str, ...], error: BaseException) -> bool:
    return any(each in str(error) for each in words)
