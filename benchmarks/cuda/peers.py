#!/usr/bin/env python3
"""Times decode attention of PyTorch and FlashInfer, as far as they are there, on the shapes of
attention_bench.cu: 32 query heads, 8 KV heads, head dimension 128, FP16. One call among many in a CUDA
graph where the library can be captured; every call reads other memory."""

import statistics

import torch

SHAPES = [("B1 4k", 1, 4096), ("B1 32k", 1, 32768), ("B1 128k", 1, 131072), ("B8 4k", 8, 4096),
          ("B8 32k", 8, 32768), ("B32 4k", 32, 4096), ("B32 32k", 32, 32768)]
QUERY_HEADS, KV_HEADS, DIM = 32, 8, 128


def graph_time(calls):
    """Microseconds of one of the calls, the median of ten replays of all of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times = []
    for _ in range(12):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(stop) / len(calls))
    return statistics.median(times[2:])


def sets_of(batch, context):
    """As many sets of keys and values as it takes to leave nothing in the L2 cache."""
    size = 2 * 2 * batch * context * KV_HEADS * DIM
    count = max(2, min(64, -(-200_000_000 // size)))
    for _ in range(count):
        yield [torch.randn(batch, KV_HEADS, context, DIM, device="cuda", dtype=torch.float16)
               for _ in range(2)]


def torch_times(batch, context, backend):
    from torch.nn.attention import sdpa_kernel
    query = torch.randn(batch, QUERY_HEADS, 1, DIM, device="cuda", dtype=torch.float16)
    calls = [lambda k=k, v=v: torch.nn.functional.scaled_dot_product_attention(
        query, k, v, enable_gqa=True) for k, v in sets_of(batch, context)]
    with sdpa_kernel(backend):
        return graph_time(calls)


def flashinfer_times(batch, context, dtype):
    import flashinfer
    page = 16
    pages = batch * context // page
    query = torch.randn(batch, QUERY_HEADS, DIM, device="cuda", dtype=torch.float16)
    calls = []
    for k, v in sets_of(batch, context):
        cache = torch.stack([k.view(pages, page, KV_HEADS, DIM), v.view(pages, page, KV_HEADS, DIM)],
                            dim=1).to(dtype)
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
        indptr = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * (context // page)
        last = torch.full((batch,), page, device="cuda", dtype=torch.int32)
        wrapper.plan(indptr, torch.randperm(pages, device="cuda", dtype=torch.int32), last,
                     QUERY_HEADS, KV_HEADS, DIM, page, q_data_type=torch.float16,
                     kv_data_type=dtype)
        calls.append(lambda w=wrapper, c=cache: w.run(query, c))
    return graph_time(calls)


def main():
    from torch.nn.attention import SDPBackend
    arms = [("torch cuDNN FP16", lambda b, n: torch_times(b, n, SDPBackend.CUDNN_ATTENTION)),
            ("torch flash FP16", lambda b, n: torch_times(b, n, SDPBackend.FLASH_ATTENTION)),
            ("FlashInfer FP16", lambda b, n: flashinfer_times(b, n, torch.float16)),
            ("FlashInfer FP8", lambda b, n: flashinfer_times(b, n, torch.float8_e4m3fn))]
    print(f"{'us per call':20}" + "".join(f"{name:>10}" for name, _, _ in SHAPES))
    for name, arm in arms:
        row = []
        for _, batch, context in SHAPES:
            try:
                row.append(f"{arm(batch, context):10.1f}")
            except Exception as failure:  # the library is not there, or refuses
                row.append(f"{type(failure).__name__[:9]:>10}")
            torch.cuda.empty_cache()
        print(f"{name:20}" + "".join(row), flush=True)


if __name__ == "__main__":
    main()
