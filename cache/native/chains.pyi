"""What `chains.c` is to Python: both functions give the hashes of all blocks, 16 bytes each.

They raise ValueError for blocks of another size than 1 to `MOST_BLOCK_BYTES`, and for others' parents.
"""

MOST_BLOCK_BYTES: int

def xxh3_chain(block_bytes: int, parent: bytes, tokens: bytes | memoryview, /) -> bytes: ...
def sha256_chain(block_bytes: int, parent: bytes, tokens: bytes | memoryview, /) -> bytes: ...
