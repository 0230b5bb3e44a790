"""Which errors say that memory ran out: torch has a type for its own allocators of devices, and for no other.

Knows torch's and Triton's words; knows no steps.
"""

from __future__ import annotations

import torch

# The CPU's allocator; and beside torch's own on a card the driver, which a graph, a kernel's code or locked
# memory is asked of, and cuBLAS.
TOLD = (
    "DefaultCPUAllocator: ",
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in TOLD)
