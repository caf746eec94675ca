# A worker on top of an image that has PyTorch.
#
#   docker build -f docker/worker.Dockerfile --build-arg BASE=pytorch/pytorch:latest \
#     -t tensorplay-worker .
#   docker run -e TENSORPLAY_BROKER=tcp://broker:5555 -e TENSORPLAY_NAME=worker0 tensorplay-worker
#
# Options come from TENSORPLAY_* variables or from the command line. On SIGTERM a worker finishes
# the calls under way: give it more time to stop than TENSORPLAY_DRAIN_TIMEOUT.

# An image with python3 (3.10 or newer), its venv and pip, and torch, for CPU or CUDA.
ARG BASE

FROM ${BASE}
LABEL org.opencontainers.image.title="tensorplay worker" \
      org.opencontainers.image.licenses="Apache-2.0"
WORKDIR /source
COPY . .
# The image's own torch is used, whatever its version: it fits the image's CUDA.
RUN python3 -m venv --system-site-packages /opt/tensorplay \
    && grep -v '^torch==' constraints.txt > /tmp/constraints.txt \
    && /opt/tensorplay/bin/python -c 'import torch' \
    && /opt/tensorplay/bin/pip install --no-cache-dir -c /tmp/constraints.txt '.[demo]' \
    && /opt/tensorplay/bin/python -m tensorplay.worker --version \
    && rm -rf /source /tmp/constraints.txt
WORKDIR /work
ENV PATH=/opt/tensorplay/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m", "tensorplay.worker"]
