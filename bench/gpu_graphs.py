"""Calls as CUDA graphs, which run without the time that launches take on the processor."""

from collections.abc import Callable

import torch

# Calls before a capture, which compile, allocate, and choose.
_WARM = 3


def captured(call: Callable[[], object], calls: int) -> Callable[[], None]:
    """Capture so many calls in a row as one graph.

    Returns:
        What replays it; the graph and the memory of its results live as long as that does.

    Raises:
        RuntimeError: if something in the call waits for the device or cannot be captured. The process is then better not
            used for another graph.
    """
    current, beside = torch.cuda.current_stream(), torch.cuda.Stream()
    beside.wait_stream(current)
    with torch.cuda.stream(beside):
        for _ in range(_WARM):
            call()
    current.wait_stream(beside)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()
    finally:
        # A capture that fails leaves its own stream behind.
        torch.cuda.set_stream(current)
    return graph.replay
