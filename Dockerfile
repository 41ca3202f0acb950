# The wheel of these sources on the CPU image of Python: docs/schedulers.md, Containers.
FROM python:3.11-bookworm AS build
WORKDIR /sources
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim-bookworm
COPY --from=build /wheels /wheels
COPY constraints.txt /wheels/
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
    --constraint /wheels/constraints.txt /wheels/*.whl && mkdir --mode 1777 /workspace
ENV HOME=/tmp
WORKDIR /workspace
USER 1000:1000
ENTRYPOINT ["gpuwatch"]
CMD ["--help"]
