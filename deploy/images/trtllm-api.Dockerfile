# Earshot with TensorRT-LLM 1.4, whose LLM API runs the checkpoint. Two environments: NVIDIA's image
# has the library with numpy 2 and all else that it needs; Earshot and its tritonserver, of the wheel
# nvidia-pytriton, which needs numpy 1, are in /earshot/.venv. From the project's root:
#
#   docker build -f deploy/images/trtllm-api.Dockerfile -t earshot-trtllm-api .
#   docker run --rm --gpus all -v "$PWD/engines:/earshot/engines" earshot-trtllm-api \
#     .venv/bin/python -m build engine --config configs/large-v3-turbo-trtllm-api.toml
#   docker run --rm --gpus all --shm-size 2g -p 8000-8002:8000-8002 \
#     -e EARSHOT_API_KEYS -v "$PWD/engines:/earshot/engines" earshot-trtllm-api
#
# On a new kind of machine first: .venv/bin/python -m eval trtllm-check --python /usr/bin/python3
# The config names that interpreter, too, in runtime.tensorrt_llm.python.
FROM nvcr.io/nvidia/tensorrt-llm/release:1.4.0rc1

RUN apt-get update && apt-get install -y --no-install-recommends python3-venv libpython3.12 \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /earshot
COPY requirements.txt ./
RUN python3 -m venv .venv && .venv/bin/python -m pip install --no-cache-dir -r requirements.txt

COPY pyproject.toml LICENSE README.md ./
COPY build build
COPY serve serve
COPY eval eval
COPY tests tests
COPY configs configs
ENV CONFIG=configs/large-v3-turbo-trtllm-api.toml

EXPOSE 8000 8001 8002
# A longer start than the server's default wait: the checkpoint is checked and loaded.
HEALTHCHECK --start-period=10m CMD python3 -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/v2/health/ready')"
CMD ["sh", "-c", "exec .venv/bin/python -m serve start --config \"$CONFIG\""]
