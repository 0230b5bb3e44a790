"""An API key and its digest.

A key is 256 random bits, so its plain SHA-256 gives nothing away: there is nothing to guess, and nobody can
find another key with the same digest. Salts and slow hashes protect passwords, which people choose; here they
would only make every request dearer.
"""

from __future__ import annotations

import hashlib
import secrets

PREFIX = "wp-"  # so that scanners of repositories and logs know one when they see it
_RANDOM_BYTES = 32
MAX_KEY_BYTES = 512  # longer is no key: not worth hashing


def new_key() -> str:
    """A key nobody has had before."""
    return PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def new_secret() -> str:
    """A secret for salts, 64 hexadecimal digits."""
    return secrets.token_hex(32)


def digest_of(key: bytes) -> bytes:
    """What is kept of a key, 32 bytes."""
    return hashlib.sha256(key).digest()
