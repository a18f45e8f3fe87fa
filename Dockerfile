# An image of the server with the bundled model: docker build -t ponder . (docs/operations.md).
# pip's variables may be given with --build-arg, such as PIP_EXTRA_INDEX_URL for an index of torch's CPU builds.
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS build
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python3 -m venv /opt/ponder
WORKDIR /src
COPY . .
# The lock's versions, without its hashes: the build of torch may be another than the lock's.
RUN sed '/--hash/d; s/ \\$//' requirements/base.txt > build-constraints.txt \
    && /opt/ponder/bin/pip install -c constraints.txt -c build-constraints.txt '.[postgres,redis]'

FROM ${BASE}
# g++ compiles the engine's CPU kernels on the processor that they run on; bubblewrap is the sandbox of Python tools.
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap g++ && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 ponder && install -d -o ponder -g ponder -m 700 /data /data/documents
COPY --from=build /opt/ponder /opt/ponder
COPY models /models
ENV PATH=/opt/ponder/bin:$PATH PONDER_MODEL=/models/pebble PONDER_DATA_DIR=/data PONDER_HOST=0.0.0.0 PONDER_AUTH=keys
USER ponder
WORKDIR /home/ponder
VOLUME /data
EXPOSE 8000
HEALTHCHECK --start-period=60s CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health')"]
CMD ["ponder", "serve"]
