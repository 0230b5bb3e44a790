"""What a request is called: as its client says, where that is harmless, or by a new name.

Knows text; the proxies' middlewares (`deploy/request_ids.py`) go by it too.
"""

from __future__ import annotations

import re
import secrets

REQUEST_ID_HEADER = "x-request-id"
# It goes into log fields, headers and answers' ids: no quotes, blanks, separators of headers or control
# characters. With base64's `/+=`, as load balancers send it (`Root=1-67891233-abcdef012345678912345678`).
_SAFE = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


def is_safe(given: str) -> bool:
    """Whether it is harmless in a log line."""
    return _SAFE.fullmatch(given) is not None


def new_request_id() -> str:
    return secrets.token_hex(16)
