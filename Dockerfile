# syntax=docker/dockerfile:1.10
# Head, Routers and engines all run this image.
#
#   docker build --target cpu -t warmpath:0.1.0-cpu .
#   docker build --target gpu -t warmpath:0.1.0-gpu .
#
# Model weights are never in it: they come from a volume. Base images are pinned by version here; pin them by digest
# too where you build (`--build-arg PYTHON=3.11.14-slim-bookworm@sha256:...`).
ARG PYTHON=3.11.14-slim-bookworm

# The project as a wheel, so that no source tree or build tool is in the image.
FROM python:${PYTHON} AS wheel
# Hashing and deciding are compiled: hatch_build.py.
RUN apt-get update && apt-get install -y --no-install-recommends gcc=4:12.2.0-3 libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY cache cache
COPY replica replica
COPY router router
COPY deploy deploy
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# What both targets have but torch, in an environment of its own.
FROM python:${PYTHON} AS environment
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/warmpath
ENV PATH=/opt/warmpath/bin:$PATH
COPY constraints.txt /opt/warmpath/constraints.txt

FROM environment AS environment-cpu
# torch's own wheels without CUDA: two gigabytes less.
RUN pip install -c /opt/warmpath/constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu "torch==2.13.0+cpu"
COPY --from=wheel /wheels /wheels
RUN pip install -c /opt/warmpath/constraints.txt "$(ls /wheels/warmpath-*.whl)[otel]"

FROM environment AS environment-gpu
# The wheels bring CUDA; the driver comes from the node.
RUN pip install -c /opt/warmpath/constraints.txt torch
COPY --from=wheel /wheels /wheels
RUN pip install -c /opt/warmpath/constraints.txt "$(ls /wheels/warmpath-*.whl)[otel]"

# What runs: no pip, no build tools, no root.
FROM python:${PYTHON} AS runtime
RUN groupadd --gid 1000 warmpath && useradd --uid 1000 --gid 1000 --no-create-home --home-dir /tmp warmpath
# KubeRay may start Ray by a login shell (ENABLE_LOGIN_SHELL of its operator), which begins with Debian's own PATH.
RUN echo 'PATH=/opt/warmpath/bin:$PATH' > /etc/profile.d/warmpath.sh
# The root file system may be read-only: all that is written goes to /tmp.
ENV PATH=/opt/warmpath/bin:$PATH \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    TOKENIZERS_PARALLELISM=false \
    RAY_USAGE_STATS_ENABLED=0
WORKDIR /tmp
EXPOSE 8000
# For containers that run by themselves, which is `docker run --network host`: without API keys deploy.yaml listens
# on 127.0.0.1 alone. Kubernetes has probes of its own.
HEALTHCHECK --interval=5s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
CMD ["python", "-m", "deploy", "serve", "/opt/warmpath/deploy.yaml"]

FROM runtime AS cpu
COPY --from=environment-cpu /opt/warmpath /opt/warmpath
COPY deploy.yaml /opt/warmpath/deploy.yaml
# The proxy as `python -m deploy serve` starts it: deploy/environment.py says what for.
RUN python -c "from pathlib import Path; from deploy.environment import write_proxy_wrapper; write_proxy_wrapper(Path('/opt/warmpath/bin/warmpath-haproxy'))" && chmod 755 /opt/warmpath/bin/warmpath-haproxy
USER 1000:1000

FROM runtime AS gpu
# Triton compiles its launchers in C on the node they run on: `attention_backend: triton`.
RUN apt-get update && apt-get install -y --no-install-recommends gcc=4:12.2.0-3 libc6-dev && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=environment-gpu /opt/warmpath /opt/warmpath
COPY deploy.yaml /opt/warmpath/deploy.yaml
RUN python -c "from pathlib import Path; from deploy.environment import write_proxy_wrapper; write_proxy_wrapper(Path('/opt/warmpath/bin/warmpath-haproxy'))" && chmod 755 /opt/warmpath/bin/warmpath-haproxy
USER 1000:1000
