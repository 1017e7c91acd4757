"""The random directions of Performer attention."""

import torch
from torch import Tensor

from approx_kernels.tokens.shapes import check_draw, check_form


def draw_projection(size: int, *, features: int, orthogonal: bool, seed: int) -> Tensor:
    """Random rows, each N(0, 1) in every coordinate, drawn once from the seed.

    Orthogonal rows come in blocks of `size`: a uniformly drawn rotation whose rows have the lengths of independent
    Gaussian rows. They estimate the same with less variance.

    Returns:
        [features, size], float32.
    """
    check_draw(seed, features=features, size=size)
    check_form(orthogonal=orthogonal)
    generator = torch.Generator("cpu").manual_seed(seed)
    rows = torch.randn(features, size, generator=generator, device="cpu", dtype=torch.float32)
    if not orthogonal:
        return rows
    blocks = -(-features // size)
    gaussian = torch.randn(blocks, size, size, generator=generator, device="cpu", dtype=torch.float64)
    rotations, triangles = torch.linalg.qr(gaussian)
    # QR leaves the signs to the library; fixing those of the diagonal makes the rotation uniform and reproducible.
    rotations = rotations * triangles.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]
    directions = rotations.transpose(1, 2).reshape(blocks * size, size)[:features]
    return directions.float() * rows.norm(dim=1, keepdim=True)
