# A worker, or any other process that uses tensorplay: training code, the demo.
#
#   docker build -f docker/worker.Dockerfile --build-arg BASE=pytorch/pytorch:latest \
#     -t tensorplay-worker .
#   docker run -e TENSORPLAY_BROKER=tcp://broker:5555 -e TENSORPLAY_NAME=worker0 tensorplay-worker
#
# Options come from TENSORPLAY_* variables or from the command line. On SIGTERM a worker finishes
# the calls under way: give it more time to stop than TENSORPLAY_DRAIN_TIMEOUT.

# Any image with python3 (3.10 or newer), its venv and pip. If it has torch, for CPU or CUDA, that
# is used, whatever its version: it fits the image. Else the tested version is installed.
ARG BASE=docker.io/library/python:3.12-slim-bookworm

FROM ${BASE} AS build
ENV PIP_BUILD_CONSTRAINT=/tmp/constraints.txt \
    PIP_CONSTRAINT=/tmp/constraints.txt \
    PIP_NO_CACHE_DIR=1 \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /source
COPY constraints.txt /tmp/
RUN python3 -m venv --system-site-packages /opt/tensorplay \
    && if python3 -c 'import torch'; then sed -i '/^torch==/d' /tmp/constraints.txt; fi
# The large ones in a layer of their own, which stays when only the sources change. The secret
# "pip" is a pip.conf: that of a mirror, say, or one that asks for torch without CUDA.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/tensorplay/bin/python -m pip install --no-compile matplotlib numpy scikit-learn torch
COPY . .
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/tensorplay/bin/python -m pip install --no-compile '.[demo]' \
    && /opt/tensorplay/bin/python -m tensorplay.worker --version
# A few of torch's files are for newer Pythons only, and do not compile.
RUN python3 -m compileall -qqf --invalidation-mode unchecked-hash /opt/tensorplay/lib || true

FROM ${BASE}
ARG REVISION=unknown
LABEL org.opencontainers.image.title="tensorplay worker" \
      org.opencontainers.image.description="Owns modules and runs calls" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /opt/tensorplay /opt/tensorplay
# New volumes for keys that are mounted here are the user's below.
RUN mkdir -m 700 /keys /keys/broker /keys/peers && chown -R 10001:10001 /keys
# What is imported from the current folder is found there; a notebook's or a script's is sent.
WORKDIR /work
ENV PATH=/opt/tensorplay/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m", "tensorplay.worker"]
