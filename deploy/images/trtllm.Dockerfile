# Earshot on NVIDIA's Triton Inference Server with TensorRT-LLM 1.2.1 and TensorRT 10.14.1: builds
# and serves TensorRT-LLM engines. Releases 26.04 to 26.07 of the base image carry that version.
# From the project's root:
#
#   docker build -f deploy/images/trtllm.Dockerfile -t earshot-trtllm .
#   docker run --rm --gpus all -v "$PWD/engines:/earshot/engines" earshot-trtllm \
#     python3 -m build engine --config configs/large-v3-turbo-trtllm.toml
#   docker run --rm --gpus all --shm-size 2g -p 8000-8002:8000-8002 \
#     -e EARSHOT_API_KEYS -v "$PWD/engines:/earshot/engines" earshot-trtllm
#
# `python -m serve keys new` makes a key and shows what EARSHOT_API_KEYS needs. Without it the server
# does not start, unless the config has server.open = true.
#
# Build the engine on the GPU that will serve it: it runs on no other compute capability. Before
# that, on a new kind of machine: python3 -m eval trtllm-check
FROM nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3

WORKDIR /earshot
COPY requirements.txt ./
# Only what the image lacks, as pinned for every machine. Its torch, transformers, safetensors,
# tokenizers, huggingface_hub, pydantic, protobuf and numpy are those that TensorRT-LLM was tested
# with: they must stay, hence --no-deps.
RUN grep -E '^(anyio|av|cffi|click|flatbuffers|googleapis-common-protos|grpcio|h11|httpcore2|httptools|httpx2|idna|iniconfig|jiwer|ml-dtypes|onnxruntime|opencc|opentelemetry-api|opentelemetry-exporter-http-transport|opentelemetry-exporter-otlp-common|opentelemetry-exporter-otlp-proto-common|opentelemetry-exporter-otlp-proto-http|opentelemetry-proto|opentelemetry-sdk|opentelemetry-semantic-conventions|pluggy|prometheus-client|psutil|pyarrow|pycparser|pytest|python-dateutil|python-multipart|python-rapidjson|rapidfuzz|soundfile|soxr|sqlalchemy|starlette|tomli-w|tqdm|tritonclient|truststore|uvicorn|websockets)==' \
      requirements.txt > needed.txt \
    && python3 -m pip install --no-cache-dir --no-deps -r needed.txt

COPY pyproject.toml LICENSE README.md ./
COPY build build
COPY serve serve
COPY eval eval
COPY tests tests
COPY configs configs
ENV CONFIG=configs/large-v3-turbo-trtllm.toml

EXPOSE 8000 8001 8002
# A longer start than the server's default wait: engines of gigabytes are checked and loaded.
HEALTHCHECK --start-period=10m CMD python3 -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/v2/health/ready')"
CMD ["sh", "-c", "exec python3 -m serve start --config \"$CONFIG\""]
