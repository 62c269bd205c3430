# Earshot with its own runtime, for an NVIDIA GPU or a CPU: builds engines and serves them. From the
# project's root:
#
#   docker build -f deploy/images/native.Dockerfile -t earshot .
#
# deploy/README.md says how to run it. CUDA itself comes with torch's wheels; what the base adds is
# what the container toolkit reads to refuse a driver that is too old (driver 580 and later).
FROM docker.io/nvidia/cuda:13.0.1-base-ubuntu24.04

# The compiler and Python's headers are for kernels, which are compiled when they are first run;
# python3-dev also brings the shared library that tritonserver's Python stub needs. tini is the
# first process, and takes leave of those that others left behind.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      ca-certificates gcc libc6-dev python3 python3-dev python3-venv tini \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /earshot
ENV PATH=/opt/venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
# What `serve` and `build` import, in the pinned releases; what these need in turn is pinned, too.
COPY requirements.txt ./
RUN python3 -m venv /opt/venv \
    && /opt/venv/bin/python3 -m pip install --no-cache-dir --disable-pip-version-check \
      -c requirements.txt \
      av "httpcore2[asyncio]" httptools httpx2 huggingface-hub jiwer "numpy<2" nvidia-pytriton \
      onnxruntime opencc opentelemetry-exporter-otlp-proto-http opentelemetry-sdk packaging \
      prometheus-client psutil "psycopg[binary]" pyarrow pydantic python-multipart "ray[data]" \
      safetensors soundfile soxr sqlalchemy starlette tokenizers tomli-w torch tqdm transformers \
      "tritonclient[grpc,http]" uvicorn websockets

COPY pyproject.toml LICENSE ./
COPY build build
COPY serve serve
COPY configs configs
COPY tests/data tests/data
COPY deploy/images/earshot.py ./

# The only places that are written to: everything else may be read-only.
#   /earshot/engines  engines and the checkpoints they are built from
#   /earshot/cache    compiled kernels; what is kept there makes the next start faster
#   /tmp              a run's sockets and large uploads
#   /dev/shm          requests on their way to the model: --shm-size 1100m and more
ENV HF_HOME=/earshot/engines/.hub TRITON_CACHE_DIR=/earshot/cache HOME=/tmp
RUN groupadd --gid 10001 earshot \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp earshot \
    && mkdir -p engines cache && chown earshot: engines cache && ln -s engines .cache
USER 10001:10001
ENV CONFIG=configs/large-v3-turbo.toml

EXPOSE 8000 8001 8002
STOPSIGNAL SIGTERM
# /health is 200 once the model answers; an engine of gigabytes is checked and loaded before.
HEALTHCHECK --start-period=10m CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["tini", "--"]
CMD ["python3", "earshot.py", "serve"]
