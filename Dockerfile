# docker build -t tunediff .
# docker run --rm --gpus all --ipc=host --user "$(id -u):$(id -g)" -v "$PWD:/work" tunediff search mine.py --trials 8 --budget 60s
FROM python:3.12-slim

# torch.compile builds kernels and their launchers with a C compiler; `compare mine.py@HEAD` reads revisions with git.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/*

# The dependencies first: a layer that stays as it is while the code changes. CUDA's libraries come with torch's wheel.
WORKDIR /opt/tunediff
COPY pyproject.toml README.md LICENSE MANIFEST.in ./
RUN pip install --no-cache-dir uv \
    && uv pip install --system --no-cache --compile-bytecode --requirements pyproject.toml

COPY tunediff tunediff
COPY search_spaces search_spaces
RUN uv pip install --system --no-cache --no-deps --compile-bytecode .

# Whoever runs it may have no home here: caches of torch.compile, matplotlib and Ray go where everybody may write. A folder that
# belongs to somebody else on the host is no reason for git to refuse it.
ENV HOME=/tmp MPLCONFIGDIR=/tmp/matplotlib TORCHINDUCTOR_CACHE_DIR=/tmp/torchinductor USER=tunediff
RUN git config --system --add safe.directory '*'

WORKDIR /work
ENTRYPOINT ["tunediff"]
CMD ["doctor"]
