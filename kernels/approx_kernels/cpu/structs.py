"""The structures that C reads, in one table: each has the layout of the C type named in the table.

Every library exports the sizes of its structures (`SIZE_OF` of c/vectors.h); loading it compares them with these.
"""

import ctypes
from collections.abc import Iterator

import torch
from torch import Tensor

_INTEGER, _FLOAT, _POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class Rows(ctypes.Structure):
    """The address of a tensor [B, G, N, D], its first three strides, and the number of query heads per head of it."""

    _fields_ = (
        ("data", _POINTER),
        *((name, _INTEGER) for name in ("batch", "head", "row", "shared")),
    )


class Dropout(ctypes.Structure):
    """Which weights are dropped, and the factor of the others; see c/dropout.h."""

    _fields_ = (("seed", ctypes.c_uint64), ("bound", ctypes.c_int32), ("factor", _FLOAT))


def _fields(kind: type, names: str) -> Iterator[tuple[str, type]]:
    return ((name, kind) for name in names.split())


class KeyLists(ctypes.Structure):
    """`problem` of key_lists/tiles.h."""

    _fields_ = (
        *_fields(_INTEGER, "batch heads length keys ranks size values before blocks parts own_orders bf16 threads"),
        *_fields(Rows, "q k v out"),
        *_fields(_POINTER, "mask own starts first entries query_order key_order stretches places lse totals spans"),
        *_fields(_FLOAT, "scale ramp itself"),
        ("dropout", Dropout),
    )


class KeyListsBackward(ctypes.Structure):
    """`backward_problem` of key_lists/backward.c."""

    _fields_ = (("all", KeyLists), *_fields(Rows, "grad dq dk dv"), *_fields(_POINTER, "dspans dtotals dlse"))


class Clustered(ctypes.Structure):
    """`problem` of clustered/heads.h."""

    _fields_ = (
        *_fields(_INTEGER, "batch heads length keys size values most_clusters kept bf16 threads"),
        *_fields(Rows, "q k v out"),
        *_fields(_POINTER, "query_tokens key_tokens queries real_keys clusters groups rest sums mass top"),
        ("scale", _FLOAT),
        ("dropout", Dropout),
    )


class ClusteredBackward(ctypes.Structure):
    """`backward_problem` of clustered/backward.c."""

    _fields_ = (("all", Clustered), *_fields(Rows, "grad dq dk dv"))


class CausalClustered(ctypes.Structure):
    """`problem` of clustered/causal_heads.h."""

    _fields_ = (
        *_fields(_INTEGER, "batch heads length keys size values rows chunk kept bf16 threads"),
        *_fields(Rows, "q k v centroids out"),
        *_fields(_POINTER, "groups most peak mass top"),
        ("scale", _FLOAT),
        ("dropout", Dropout),
    )


class CausalClusteredBackward(ctypes.Structure):
    """`backward_problem` of clustered/causal_backward.c."""

    _fields_ = (("all", CausalClustered), *_fields(Rows, "grad dq dk dv"))


class Linear(ctypes.Structure):
    """`problem` of linear/features.h."""

    _fields_ = (
        *_fields(_INTEGER, "batch heads length keys size features values sets causal map bf16 threads"),
        *_fields(Rows, "q k v out"),
        *_fields(_POINTER, "mask sums tops rows offsets norms bases"),
        *_fields(_FLOAT, "input_scale eps floor"),
    )


class LinearBackward(ctypes.Structure):
    """`backward_problem` of linear/backward.c."""

    _fields_ = (("all", Linear), *_fields(Rows, "grad dq dk dv"))


class Far(ctypes.Structure):
    """`problem` of linear/far.c."""

    _fields_ = (
        *_fields(_INTEGER, "batch heads length keys size features values left right causal bf16 threads"),
        *_fields(Rows, "q k v near out"),
        *_fields(_POINTER, "mask query_map key_map query_gate key_gate gates near_logs share"),
        ("input_scale", _FLOAT),
    )


class Delta(ctypes.Structure):
    """`problem` of linear/delta.c."""

    _fields_ = (
        *_fields(_INTEGER, "batch heads length keys size values threads"),
        *_fields(Rows, "q k v out"),
        *_fields(_POINTER, "decays rates sums total written"),
    )


class LinearStep(ctypes.Structure):
    """`step` of linear/step.c."""

    _fields_ = (
        *_fields(_INTEGER, "batch heads shared keys size features values map leaving bf16 threads"),
        *_fields(Rows, "q k v out"),
        *_fields(_POINTER, "mask query_map key_map mix sums"),
        *_fields(_FLOAT, "scale input_scale eps"),
    )


class LinearMap(ctypes.Structure):
    """`problem` of linear/maps.h."""

    _fields_ = (
        *_fields(_INTEGER, "batch heads length size map bf16 threads"),
        *_fields(Rows, "out x"),
        ("weight", _POINTER),
        ("scale", _FLOAT),
    )


class TopK(ctypes.Structure):
    """`problem` of topk/heads.h."""

    _fields_ = (
        *_fields(_INTEGER, "batch heads length keys size values kept causal bf16 threads"),
        *_fields(Rows, "q k v out"),
        *_fields(_POINTER, "mask top"),
        ("scale", _FLOAT),
        ("dropout", Dropout),
    )


class TopKBackward(ctypes.Structure):
    """`backward_problem` of topk/heads.h."""

    _fields_ = (("all", TopK), *_fields(Rows, "grad dq dk dv"))


class FewQueries(ctypes.Structure):
    """`problem` of exact/few.c."""

    _fields_ = (
        *_fields(_INTEGER, "batch heads length keys size values bf16 causal threads"),
        *_fields(Rows, "q k v out"),
        ("mask", _POINTER),
        ("scale", _FLOAT),
    )


class Ordering(ctypes.Structure):
    """`ordering` of lsh/sorting.c."""

    _fields_ = (
        *_fields(_INTEGER, "batch heads rounds length keys size wide bf16 threads"),
        *_fields(Rows, "q k"),
        *_fields(_POINTER, "planes query_lift key_lift by_query by_key"),
    )


class Hashing(ctypes.Structure):
    """`hashing` of lsh/sorting.c."""

    _fields_ = (
        *_fields(_INTEGER, "batch heads rounds tokens size wide bits levels bf16 threads"),
        ("x", Rows),
        *_fields(_POINTER, "planes mask before sums codes"),
    )


class Stretching(ctypes.Structure):
    """`stretching` of lsh/sorting.c."""

    _fields_ = (
        *_fields(_INTEGER, "batch heads rounds length keys cluster doublings ranks most rows far levels"),
        *_fields(_INTEGER, "shared threads"),
        *_fields(_POINTER, "by_query by_key mask query_order key_order blocks starts entries count seen places"),
    )


# By the names under which C exports their sizes.
STRUCTS: dict[str, type[ctypes.Structure]] = {
    "rows": Rows,
    "dropout": Dropout,
    "key_lists": KeyLists,
    "key_lists_backward": KeyListsBackward,
    "clustered": Clustered,
    "clustered_backward": ClusteredBackward,
    "causal_clustered": CausalClustered,
    "causal_clustered_backward": CausalClusteredBackward,
    "linear": Linear,
    "linear_backward": LinearBackward,
    "far": Far,
    "delta": Delta,
    "linear_step": LinearStep,
    "linear_map": LinearMap,
    "topk": TopK,
    "topk_backward": TopKBackward,
    "few_queries": FewQueries,
    "ordering": Ordering,
    "hashing": Hashing,
    "stretching": Stretching,
}


def check_sizes(loaded: ctypes.CDLL) -> None:
    """Compare the sizes of a library's structures with those of the table.

    Raises:
        OSError: naming the first that differs, if the library was compiled from other sources.
    """
    for name, struct in STRUCTS.items():
        if (tell := getattr(loaded, f"size_of_{name}", None)) is None:
            continue
        tell.restype = ctypes.c_int64
        if (size := tell()) != ctypes.sizeof(struct):
            raise OSError(
                f"the structure {name} has {size} bytes in C and {ctypes.sizeof(struct)} in Python; the two must agree. "
                "Install the package again"
            )


def rows_of(first: Tensor, *others: Tensor) -> list[Rows]:
    """The rows of CPU tensors [B, H, N, D]; in tensors with G heads, H / G query heads share each.

    Raises:
        ValueError: naming a tensor that C cannot read.
    """
    batch, heads = first.shape[:2]
    for x in (first, *others):
        fits = x.ndim == 4 and x.shape[0] == batch and x.shape[1] and heads % x.shape[1] == 0
        contiguous = fits and (x.stride(3) == 1 or x.shape[3] == 1)
        if not contiguous or x.dtype != first.dtype or x.device.type != "cpu":
            raise ValueError(
                f"C got rows of {x.dtype} on {x.device} of shape {list(x.shape)} and strides {list(x.stride())}; it reads "
                f"[{batch}, a divisor of {heads}, rows, numbers] of {first.dtype} on the CPU, with contiguous numbers."
            )
    return [Rows(x.data_ptr(), *x.stride()[:3], heads // x.shape[1]) for x in (first, *others)]


def address(x: Tensor | None, dtype: torch.dtype, *shape: int) -> ctypes.c_void_p:
    """The address of a contiguous CPU tensor; NULL for None.

    Raises:
        ValueError: if its dtype or shape is not the one that C reads.
    """
    if x is None:
        return _POINTER(None)
    if x.dtype != dtype or x.shape != shape or x.device.type != "cpu" or not x.is_contiguous():
        raise ValueError(
            f"C got {x.dtype} on {x.device} of shape {list(x.shape)} and strides {list(x.stride())}; it reads "
            f"contiguous {dtype} on the CPU of shape {list(shape)}."
        )
    return _POINTER(x.data_ptr())
