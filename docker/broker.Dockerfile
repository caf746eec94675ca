# The broker alone: no torch, no compiler, no root, and nothing that it writes.
#
#   docker build -f docker/broker.Dockerfile -t tensorplay-broker .
#   docker run --read-only -p 5555:5555 -v "$HOME/.tensorplay/keys:/keys:ro" \
#     -e TENSORPLAY_CURVE_DIR=/keys --user "$(id -u)" tensorplay-broker
#
# Inside a container the broker must listen to other hosts, and it refuses to without keys (see
# `tensorplay keys`) until it is told, by TENSORPLAY_INSECURE=1, that all who can reach it are
# trusted.

# Any image with python3 (3.10 or newer), its venv and pip.
ARG BASE=docker.io/library/python:3.12-slim-bookworm

FROM ${BASE} AS build
# Byte code is written below, and depends on what is in a file, not on when it was written.
ENV PIP_BUILD_CONSTRAINT=/source/constraints.txt \
    PIP_CONSTRAINT=/source/constraints.txt \
    PIP_NO_CACHE_DIR=1 \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /source
RUN python3 -m venv /opt/tensorplay
COPY constraints.txt ./
# What the broker, its dashboard and the commands that ask it import, as it is tested. The
# package's own list of dependencies has torch, for the workers. The secret "pip" is a pip.conf.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/tensorplay/bin/python -m pip install --no-compile \
        click msgspec prometheus-client pyzmq rich starlette uvicorn
COPY . .
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/tensorplay/bin/python -m pip install --no-compile --no-deps . \
    && /opt/tensorplay/bin/python -m pip uninstall --yes --quiet pip \
    && python3 -m compileall -qf --invalidation-mode unchecked-hash /opt/tensorplay/lib \
    && /opt/tensorplay/bin/python -m tensorplay.broker --version

FROM ${BASE}
ARG REVISION=unknown
LABEL org.opencontainers.image.title="tensorplay broker" \
      org.opencontainers.image.description="Passes on the calls between clients and workers" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /opt/tensorplay /opt/tensorplay
# New volumes for keys that are mounted here are the user's below.
RUN mkdir -m 700 /keys /keys/broker /keys/peers && chown -R 10001:10001 /keys
ENV PATH=/opt/tensorplay/bin:${PATH} \
    TENSORPLAY_BIND=tcp://0.0.0.0:5555 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
EXPOSE 5555 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s --retries=3 \
    CMD ["python", "-m", "tensorplay.broker", "--check"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m", "tensorplay.broker"]
