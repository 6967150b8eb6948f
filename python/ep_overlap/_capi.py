# SPDX-License-Identifier: Apache-2.0
"""libep_overlap.so by ctypes: the structs and functions of ep_overlap.h that the binding uses.

Nothing here needs torch, and nothing is opened before `library()` is called.
"""
from __future__ import annotations

import ctypes
import operator
import os
from ctypes import POINTER, byref, c_char_p, c_double, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any, List, Optional

OK, E_ARG, E_STATE, E_UNSUPPORTED = 0, 1, 2, 9
DEFAULT, OFF, ON = -1, 0, 1
F32, BF16, F16 = 0, 1, 2
ALLTOALL, FLEX = 0, 1
ENGINE_AUTO, ENGINE_HOST, ENGINE_CUDA = 0, 1, 2

DISPATCHERS = {None: -1, "alltoall": ALLTOALL, "flex": FLEX}
ENGINES = {None: ENGINE_AUTO, "auto": ENGINE_AUTO, "host": ENGINE_HOST, "cuda": ENGINE_CUDA}
WIRES = {None: 0, "rows": 0, "e4m3": 1}
OVERFLOWS = {"error": 0, "drop_by_weight": 1, "drop_by_position": 2}

ALLGATHER = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t, c_void_p)
BARRIER = ctypes.CFUNCTYPE(c_int, c_void_p)
ALLOC = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_uint64)
FREE = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_uint64)


class Error(RuntimeError):
    """A call of the library failed. `status` is its name, "EPO_E_PEER" for example."""

    def __init__(self, status: str, text: str) -> None:
        super().__init__("%s: %s" % (status, text))
        self.status = status


_WHOLE = {c_int: (-(1 << 31), (1 << 31) - 1), c_uint64: (0, (1 << 64) - 1)}


def whole(name: str, value: Any, least: int, most: int) -> int:
    """The number as it is: ctypes would take the lowest bits of one that does not fit."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError("%s: found %r, needed is a whole number" % (name, value)) from None
    if not least <= number <= most:
        raise ValueError("%s: found %d, allowed is %d..%d" % (name, number, least, most))
    return number


def _number(name: str, value: Any) -> c_double:
    try:
        return c_double(value)
    except TypeError:
        raise ValueError("%s: found %r, needed is a number" % (name, value)) from None


class _Sized(ctypes.Structure):
    """A struct that begins with its own size; fields not given are zero."""

    def __init__(self, **fields: Any) -> None:
        for field in self._fields_:
            if field[0] in fields and field[1] in _WHOLE:
                fields[field[0]] = whole(field[0], fields[field[0]], *_WHOLE[field[1]])
            elif field[0] in fields and field[1] is c_double:
                fields[field[0]] = _number(field[0], fields[field[0]])
        super().__init__(size=ctypes.sizeof(type(self)), **fields)


class Bootstrap(_Sized):
    _fields_ = [("size", c_size_t), ("ctx", c_void_p), ("allgather", ALLGATHER), ("barrier", BARRIER)]


class GroupConfig(_Sized):
    _fields_ = [
        ("size", c_size_t), ("engine", c_int), ("rank", c_int), ("ranks", c_int),
        ("members", POINTER(c_int)), ("nmembers", c_int), ("bootstrap", POINTER(Bootstrap)),
        ("threads", c_void_p), ("overlap", c_int), ("dispatcher", c_int), ("delay_wgrad", c_int),
        ("chunks", c_int), ("timeout_s", c_double), ("warn_s", c_double),
        ("wgrad_limit_bytes", c_uint64), ("nccl_comm", c_void_p), ("alloc", ALLOC), ("free", FREE),
        ("alloc_ctx", c_void_p), ("tensor_parallel", c_int),
    ]


class GroupInfo(_Sized):
    _fields_ = [
        ("size", c_size_t), ("engine", c_char_p), ("rank", c_int), ("ranks", c_int),
        ("overlap", c_int), ("dispatcher", c_int), ("delay_wgrad", c_int), ("chunks", c_int),
        ("link_gbs", c_double), ("link_us", c_double), ("reason", c_char_p), ("versions", c_char_p),
    ]


class BufferConfig(_Sized):
    _fields_ = [
        ("size", c_size_t), ("experts", c_int), ("hidden", c_int), ("top_k", c_int),
        ("max_tokens", c_int), ("type", c_int), ("dispatcher", c_int), ("chunks", c_int),
        ("align_rows", c_int), ("max_rows", c_uint64), ("capacity_factor", c_double),
        ("capacity", c_int), ("overflow", c_int), ("pad_to_capacity", c_int),
        ("wire", c_int), ("graphs", c_int),
    ]


class Routing(_Sized):
    _fields_ = [("size", c_size_t), ("tokens", c_int), ("top_k", c_int), ("experts", c_void_p),
                ("weights", c_void_p)]


class PlanInfo(_Sized):
    _fields_ = [
        ("size", c_size_t), ("tokens", c_int), ("top_k", c_int), ("rows", c_uint64), ("capacity", c_uint64),
        ("dropped", c_uint64), ("pad_rows", c_uint64), ("chunks", c_int), ("engines", c_int),
    ]


class Stats(_Sized):
    _fields_ = [
        ("size", c_size_t), ("forward_calls", c_uint64), ("backward_calls", c_uint64), ("dispatch_bytes", c_uint64),
        ("combine_bytes", c_uint64), ("control_bytes", c_uint64), ("local_bytes", c_uint64),
        ("wgrad_delayed", c_uint64), ("wgrad_hidden", c_uint64), ("memory_bytes", c_uint64),
        ("memory_peak", c_uint64), ("call_s", c_double), ("caller_bytes", c_uint64), ("dropped_slots", c_uint64),
        ("padding_bytes", c_uint64), ("node_dispatch_bytes", c_uint64), ("node_combine_bytes", c_uint64),
    ]


class LayerConfig(_Sized):
    _fields_ = [
        ("size", c_size_t), ("experts", c_int), ("hidden", c_int), ("ffn", c_int), ("type", c_int),
        ("wgrad_type", c_int), ("w1", c_void_p), ("w2", c_void_p), ("dw1", c_void_p),
        ("dw2", c_void_p), ("wgrad_ready", c_void_p), ("ctx", c_void_p),
    ]


_SIGNATURES = {
    "epo_group_create": [POINTER(GroupConfig), POINTER(c_void_p)],
    "epo_group_destroy": [c_void_p],
    "epo_group_query": [c_void_p, POINTER(GroupInfo)],
    "epo_group_async_error": [c_void_p],
    "epo_group_barrier": [c_void_p],
    "epo_group_stats": [c_void_p, POINTER(Stats), c_int],
    "epo_group_wgrad_flush": [c_void_p, c_void_p],
    "epo_buffer_bytes": [c_void_p, POINTER(BufferConfig), POINTER(c_uint64)],
    "epo_buffer_create": [c_void_p, POINTER(BufferConfig), POINTER(c_void_p)],
    "epo_buffer_destroy": [c_void_p],
    "epo_plan_create": [c_void_p, POINTER(Routing), c_void_p, POINTER(c_void_p)],
    "epo_plan_rows": [c_void_p, POINTER(c_uint64)],
    "epo_plan_query": [c_void_p, POINTER(PlanInfo)],
    "epo_plan_experts": [c_void_p, POINTER(c_uint64), POINTER(c_uint64)],
    "epo_dispatch": [c_void_p, c_void_p, c_void_p, c_void_p, c_void_p],
    "epo_combine": [c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p],
    "epo_layer_create": [c_void_p, POINTER(LayerConfig), POINTER(c_void_p)],
    "epo_layer_destroy": [c_void_p],
    "epo_forward": [c_void_p, c_void_p, c_void_p, c_void_p, POINTER(c_void_p), c_void_p],
    "epo_backward": [c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p],
    "epo_layer_wgrad_flush": [c_void_p, c_void_p],
    "epo_layer_wgrad_begin": [c_void_p],
}

_library: Optional[ctypes.CDLL] = None


def _open() -> ctypes.CDLL:
    """The library that the job preloaded, else EP_OVERLAP_LIBRARY, else the system's."""
    loaded = ctypes.CDLL(None)
    if hasattr(loaded, "epo_version"):
        return loaded
    named = os.environ.get("EP_OVERLAP_LIBRARY")
    try:
        return ctypes.CDLL(named or "libep_overlap.so.0")
    except OSError as e:
        if named:
            raise ImportError("EP_OVERLAP_LIBRARY=%s was not opened (%s); name libep_overlap.so.0 there, or unset it"
                              % (named, e)) from None
        raise ImportError(
            "libep_overlap.so.0 was not found (%s); install it, run under srun --ep-overlap, or name "
            "it in EP_OVERLAP_LIBRARY" % e
        ) from None


def _function(lib: ctypes.CDLL, name: str) -> Any:
    """The library's function; one that lacks it is older than this package, or another library."""
    try:
        return getattr(lib, name)
    except AttributeError:
        version = "it has no epo_version at all"
        if hasattr(lib, "epo_version"):
            lib.epo_version.restype = c_char_p
            version = "its version is %s" % lib.epo_version().decode(errors="replace")
        raise ImportError("%s has no %s (%s): install the library and the Python package of the same release"
                          % (lib._name or "the preloaded library", name, version)) from None


def library() -> ctypes.CDLL:
    """The opened library with its signatures set."""
    global _library
    if _library is None:
        lib = _open()
        for name, arguments in _SIGNATURES.items():
            function = _function(lib, name)
            function.argtypes, function.restype = arguments, c_int
        for name in ("epo_version", "epo_error"):
            _function(lib, name).restype = c_char_p
        status_name = _function(lib, "epo_status_name")
        status_name.argtypes, status_name.restype = [c_int], c_char_p
        for name in ("epo_plan_retain", "epo_plan_release", "epo_saved_release"):
            function = _function(lib, name)
            function.argtypes, function.restype = [c_void_p], None
        _library = lib
    return _library


def check(status: int) -> None:
    """Raises what a status other than EPO_OK means: ValueError for a wrong argument."""
    if status == OK:
        return
    lib = library()
    name, text = lib.epo_status_name(status).decode(), lib.epo_error().decode(errors="replace")
    raise ValueError(text) if status == E_ARG else Error(name, text)


def create(function: str, *arguments: Any) -> c_void_p:
    """Calls an epo_*_create function, whose last argument receives the object."""
    out = c_void_p()
    check(getattr(library(), function)(*arguments, byref(out)))
    return out


def destroy(function: str, owner: Any) -> None:
    """Calls an epo_*_destroy function for `owner._handle`, which is None afterwards, unless the call does not fit
    the object's state: then it still is there."""
    status = getattr(library(), function)(owner._handle)
    if status != E_STATE:
        owner._handle = None
    check(status)


def plan_experts(plan: c_void_p, local: int) -> "tuple[List[int], List[int]]":
    first, count = (c_uint64 * local)(), (c_uint64 * local)()
    check(library().epo_plan_experts(plan, first, count))
    return list(first), list(count)


class Single:
    """Stands for one object of the library: a copy would end it a second time."""

    def __reduce_ex__(self, _: Any) -> Any:
        name = type(self).__name__
        raise TypeError("%s cannot be copied nor pickled: make another one, and copy or save a module that holds it by "
                        "its state_dict()" % name)


__all__ = ["Error", "Single", "library", "check", "create", "destroy", "whole", "byref", "c_float", "c_int64"]
