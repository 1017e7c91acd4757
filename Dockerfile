# docs/install.md says how to build and run it.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim

# On CPUs mechanisms are compiled when they are first used, on GPUs by Triton; both need a compiler.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

# The build of PyTorch for CPUs; for GPUs torch==2.13.0 alone.
ARG TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
RUN pip install --no-cache-dir ${TORCH}

ARG EXTRAS=train
WORKDIR /approx
COPY pyproject.toml README.md LICENSE ./
COPY approx approx
COPY kernels kernels
COPY recipes recipes
RUN pip install --no-cache-dir ".[${EXTRAS}]"

RUN useradd --create-home approx && mkdir /data && chown approx /data
USER approx
WORKDIR /data
ENTRYPOINT ["approx"]
CMD ["--help"]
