#!/usr/bin/env python3
"""Speed of causal attention's forward through cuDNN, as torch offers it, beside octet's.

Needs a CUDA device and torch. The shapes and the counting of operations are those of
`octet bench attention`: 4 x heads x width over the pairs of a query and a key that it sees.
"""
import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS, KV_HEADS, WIDTH = 32, 8, 128
RUNS, REPEATS = 3, 20


def best_seconds(body) -> float:
    for _ in range(3):
        body()
    best = float("inf")
    for _ in range(RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPEATS):
            body()
        end.record()
        end.synchronize()
        best = min(best, 1e-3 * begin.elapsed_time(end) / REPEATS)
    return best


def measure(sequences: int, length: int) -> None:
    def random(heads: int) -> torch.Tensor:
        # [sequences, length, heads, width] in memory, as a projection leaves it.
        shape = (sequences, length, heads, WIDTH)
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

    q, k, v = random(HEADS), random(KV_HEADS), random(KV_HEADS)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), torch.inference_mode():
        seconds = best_seconds(
            lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        )
    flops = 4 * HEADS * WIDTH * sequences * length * (length + 1) / 2
    print(
        f"cuDNN {torch.backends.cudnn.version()} prefill {sequences} x {length}, BF16: "
        f"{1e6 * seconds:.1f} us, {1e-12 * flops / seconds:.1f} TFLOP/s"
    )


if __name__ == "__main__":
    measure(32, 512)
    measure(8, 1024)
    measure(2, 4096)
