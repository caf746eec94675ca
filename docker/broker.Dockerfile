# The broker alone: no torch, no compiler, no root.
#
#   docker build -f docker/broker.Dockerfile -t tensorplay-broker .
#   docker run -p 127.0.0.1:5555:5555 -e TENSORPLAY_INSECURE=1 tensorplay-broker
#
# Inside a container the broker must listen to other hosts, and it refuses to until it is told,
# by TENSORPLAY_INSECURE=1, that all who can reach it are trusted: see SECURITY.md.

# Any image with python3 (3.10 or newer), its venv and pip.
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS build
WORKDIR /source
RUN python3 -m venv /opt/tensorplay
COPY constraints.txt ./
# What the broker imports. The wheel's own list of dependencies has torch, for the workers.
RUN /opt/tensorplay/bin/pip install --no-cache-dir -c constraints.txt click msgspec pyzmq
COPY . .
RUN /opt/tensorplay/bin/pip install --no-cache-dir --no-deps . \
    && /opt/tensorplay/bin/python -m tensorplay.broker --version \
    && /opt/tensorplay/bin/python -m pip uninstall --yes pip

FROM ${BASE}
LABEL org.opencontainers.image.title="tensorplay broker" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/tensorplay /opt/tensorplay
ENV TENSORPLAY_BIND=tcp://0.0.0.0:5555 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
EXPOSE 5555
HEALTHCHECK --interval=10s --timeout=3s --start-period=5s CMD ["/opt/tensorplay/bin/python", "-c", \
    "import socket; socket.create_connection(('127.0.0.1', 5555), 2).close()"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["/opt/tensorplay/bin/python", "-m", "tensorplay.broker"]
