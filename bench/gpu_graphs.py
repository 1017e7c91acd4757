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
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph.replay
