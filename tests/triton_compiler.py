"""Compiles the kernels for cards that need not be here, and says what they would take of them.

`python -m tests.triton_compiler CASES` takes a JSON list of `compile_case`'s arguments, or of `compile_rows`'
where they name a layer, and prints a JSON list of what those return. A process of its own: Triton must not
interpret here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from replica.attention import paged_kernels, tiling
from replica.attention.tiling import Card, LayerKind
from replica.layers import row_kernels
from replica.layers.triton_rows import HeadNorms, TritonRows
from tests.fakes.launches import Launches

# By compute capability: A100, RTX 3090 and 4090, H100.
CARDS = {
    80: Card(processors=108, shared_bytes=163 << 10),
    86: Card(processors=82, shared_bytes=99 << 10),
    89: Card(processors=128, shared_bytes=99 << 10),
    90: Card(processors=132, shared_bytes=227 << 10),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NUMBERS = {2: ("bf16", tl.bfloat16), 4: ("fp32", tl.float32)}
FLOAT32_POINTERS = ("parts", "part_sums")
INT32_POINTERS = ("tiles", "spans", "tables")
POINTERS = ("out", "query", "keys", "values", "sinks")


def compile_case(
    arch: int,
    most_rows: int,
    kind: dict[str, Any],
    *,
    has_cap: bool = False,
    has_sinks: bool = False,
    merges: bool = False,
) -> dict[str, int]:
    """Compile `attend` as a launch would, and, if asked, `merge` with it, and `touch`; what `attend` takes.

    {shared, registers, spilled, ahead, buffers}: bytes a program, registers a thread, bytes of them, and what
    `_pipeline` finds.
    """
    layer = LayerKind(**kind)
    shape = tiling.tile_shape(most_rows, layer, CARDS[arch])
    number, product = NUMBERS[layer.itemsize]
    heads = {
        "VALUE_DIM": layer.value_dim,
        "VALUE_LANES": tiling.lanes(layer.value_dim),
        "HAS_SINKS": has_sinks,
    }
    attending = _compile(
        paged_kernels.attend,
        arch,
        number,
        {
            **heads,
            "GROUP": layer.group,
            "KV_HEADS": layer.kv_heads,
            "KEY_DIM": layer.key_dim,
            "KEY_LANES": tiling.lanes(layer.key_dim),
            "BLOCK_SIZE": 16,
            "ROWS": shape.rows,
            "KEYS": shape.keys,
            "HAS_WINDOW": layer.window is not None,
            "HAS_CAP": has_cap,
            "PRODUCT": product,
        },
        {"num_warps": shape.num_warps, "num_stages": shape.num_stages},
    )
    if merges:
        constants = {**heads, "HEADS": layer.kv_heads * layer.group, "MOST_SPLITS": tiling.MOST_SPLITS}
        _compile(paged_kernels.merge, arch, number, constants, {"num_warps": 4})
        _compile_typed(paged_kernels.touch, arch, {"number": "*i32"}, {}, {})
    return {
        "shared": attending.metadata.shared,
        **_resources(attending.asm["cubin"]),
        **_pipeline(attending.asm["ttgir"]),
    }


def _compile(kernel: Any, arch: int, number: str, constants: dict[str, Any], options: dict[str, int]) -> Any:
    types = dict.fromkeys(POINTERS, f"*{number}")
    types |= dict.fromkeys(FLOAT32_POINTERS, "*fp32") | dict.fromkeys(INT32_POINTERS, "*i32")
    types |= {"factor": "fp32", "cap": "fp32"}
    return _compile_typed(
        kernel, arch, {n: types.get(n, "i32") for n in kernel.arg_names}, constants, options
    )


def compile_rows(arch: int, number: str, layer: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Compile the kernels of rows as a layer of these sizes would launch them; what each takes.

    By kernel {registers, spilled, narrow}: the last are loads and stores of less than 16 bytes a thread.
    """
    launches = Launches()
    rows = TritonRows(launches)
    like = {"dtype": DTYPES[number], "device": "meta"}
    hidden, dim, heads, kv_heads = (layer[name] for name in ("hidden", "dim", "heads", "kv_heads"))
    given, weight = torch.empty(64, hidden, **like), torch.empty(hidden, **like)
    rows.add_norm(given, given, weight, 1e-5)
    packed, angles = torch.empty(64, heads + 2 * kv_heads, dim, **like), torch.empty(64, dim, **like)
    norms = HeadNorms(torch.empty(2, dim, **like), 1e-6) if layer.get("has_norms") else None
    rows.turn(packed, heads, kv_heads, angles, angles, norms)
    rows.swish_product(torch.empty(64, 2 * layer["mlp"], **like))
    taken = {}
    for launch in launches.made:
        kernel = getattr(row_kernels, launch.kernel)
        types = {
            name: f"*{number}" if isinstance(value, torch.Tensor) else "fp32"
            for name, value in zip(kernel.arg_names, launch.args, strict=False)
        }
        constants = {name: value for name, value in launch.options.items() if name != "num_warps"}
        warps = {"num_warps": launch.options["num_warps"]}
        made = _compile_typed(kernel, arch, types, constants, warps)
        moved = re.findall(r"(?:ld|st)\.global\.(\S+)", made.asm["ptx"])
        assert moved, "it neither loads nor stores"
        taken[launch.kernel] = {
            **_resources(made.asm["cubin"]),
            "narrow": sum(each not in ("v4.b32", "v2.b64") for each in moved),
        }
    return taken


def _compile_typed(
    kernel: Any, arch: int, types: dict[str, str], constants: dict[str, Any], options: dict[str, int]
) -> Any:
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    # As launches find them: tensors begin at multiples of 16 bytes, heads at multiples of 16 numbers.
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name.endswith("_stride")
    }
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def _resources(cubin: bytes) -> dict[str, int]:
    """Registers a thread and bytes of stack, which is where spilled ones go."""
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run(
            [cuobjdump, "-res-usage", file.name], check=True, stdout=subprocess.PIPE, text=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert found is not None, told
    return {"registers": int(found[1]), "spilled": int(found[2])}


def _pipeline(ttgir: str) -> dict[str, int]:
    """What is loaded ahead, in the loop over keys that does so least.

    ahead: loads of K and V that may be under way when a tile is computed. buffers: tiles of each in shared
    memory.
    """
    loops = re.finditer(r"^( *)%\S+ = scf\.for .*?^\1}", ttgir, re.DOTALL | re.MULTILINE)
    waits = [re.findall(r"ttg\.async_wait .*?num = (\d+)", loop[0]) for loop in loops]
    assert waits, "no loop over keys"
    # Allocated without a value, before a loop: buffers x tile.
    buffers = re.findall(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x", ttgir)
    return {
        "ahead": min(int(each) for body in waits for each in body) if all(waits) else 0,
        "buffers": min(map(int, buffers), default=0),
    }


if __name__ == "__main__":
    print(
        json.dumps(
            [
                compile_rows(**case) if "layer" in case else compile_case(**case)
                for case in json.loads(sys.argv[1])
            ]
        )
    )
