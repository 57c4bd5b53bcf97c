"""What mcore_bridge needs to be imported and run on a machine without CUDA. Imported before it.

It touches no weight: devices are renamed, and modules that are imported and not used are stood in for.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode

ROOT = Path(__file__).parents[2]
_ABSENT = ("triton", "datasets", "PIL")


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Stub

    def __instancecheck__(cls, instance: object) -> bool:
        return False


class _Stub(metaclass=_Anything):
    """Takes every argument; as a decorator it gives back the function."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else super().__new__(cls)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Stub


class _StubModule(types.ModuleType):
    __path__: ClassVar[list[str]] = []
    __version__ = "3.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Stub


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for packages that are not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in _ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


class _OnCpu(TorchFunctionMode):
    """device="cuda" means the CPU."""

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        told = {name: _cpu(value) for name, value in (kwargs or {}).items()}
        if function in (torch.Tensor.to, torch.Tensor.cuda):
            args = tuple(_cpu(value) for value in args)
        return args[0] if function is torch.Tensor.cuda else function(*args, **told)


def _cpu(value: Any) -> Any:
    is_cuda = (isinstance(value, str) and value.startswith("cuda")) or (
        isinstance(value, torch.device) and value.type == "cuda"
    )
    return torch.device("cpu") if is_cuda else value


def patch() -> None:
    """Call once, before megatron or mcore_bridge is imported."""
    importlib.import_module("torch._dynamo")  # it lists functions of torch.cuda, and wants each of them once
    sys.meta_path.append(_Finder())
    sys.path.insert(0, str(ROOT / "fixtures" / "megatron" / "fake_te"))
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = cuda.set_device = cuda.empty_cache = lambda *args, **kwargs: None
    cuda.current_stream = lambda *args, **kwargs: None
    cuda.memory_allocated = lambda *args, **kwargs: 0
    cuda.Stream = type("Stream", (), {"__init__": lambda self, *args, **kwargs: None})
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.compile = lambda model=None, **kwargs: model if model is not None else (lambda own: own)  # type: ignore[assignment]
    _OnCpu().__enter__()

    import megatron.core.tensor_parallel.random as random
    from megatron.core.ssm import gated_delta_net

    gated_delta_net.HAVE_FLA = True  # its kernels are not run

    random.CudaRNGStatesTracker.fork = lambda self, *args, **kwargs: contextlib.nullcontext()
