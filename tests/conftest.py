"""What every test runs under: one torch thread, no hub, Hypothesis profiles by marker-free name."""

from __future__ import annotations

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_worker_niceness", "0")

# A shell's background job starts with SIGINT ignored, and so would every server the tests start and stop.
signal.signal(signal.SIGINT, signal.default_int_handler)
