"""Calls as CUDA graphs, which run without launch overhead on the CPU."""

from collections.abc import Callable

import torch

# Calls before a capture, which compile, allocate, and choose.
_WARM = 3


def captured(call: Callable[[], object], calls: int) -> Callable[[], None]:
    """Capture this many consecutive calls as one graph.

    Returns:
        A function that replays it; the graph and the memory of its results live as long as the function.

    Raises:
        RuntimeError: if the call synchronises or cannot be captured. The process should then not be used for another
            graph.
    """
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(_WARM):
            call()
    current.wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()
    except RuntimeError as error:
        # Ending a failed capture is an error too, which hides the first.
        raise error.__context__ or error from None
    finally:
        # A failed capture leaves its own stream as the current one.
        torch.cuda.set_stream(current)
    return graph.replay
