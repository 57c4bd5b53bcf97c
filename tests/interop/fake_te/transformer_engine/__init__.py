"""A stand-in for Transformer Engine, so that megatron-core builds its TE layer spec without CUDA.

It declares the parameters and the `_extra_state` that the real modules have, and computes nothing.
Any other name of the package is a class that accepts everything.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import torch

__version__ = "2.9.0"


class _Dummy:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *args: object) -> None: ...


class _DummyClass(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Dummy()


class _DummyModule(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        dummy = _DummyClass(name, (_Dummy,), {"__module__": self.__name__})
        setattr(self, name, dummy)
        return dummy


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] == "transformer_engine_torch" or name.startswith("transformer_engine."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _DummyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


class _Module(torch.nn.Module):
    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None: ...

    def set_tensor_parallel_group(self, group: Any) -> None:
        self.tp_group = group

    def declare(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
        self.register_parameter(name, torch.nn.Parameter(torch.empty(shape, dtype=dtype or torch.float32)))


class RMSNorm(_Module):
    def __init__(
        self,
        hidden_size: int | None = None,
        normalized_shape: int | None = None,
        params_dtype: torch.dtype | None = None,
        **other: Any,
    ) -> None:
        super().__init__()
        width = hidden_size or normalized_shape
        assert width
        self.declare("weight", (width,), params_dtype)


class LayerNorm(RMSNorm):
    def __init__(self, hidden_size: int, params_dtype: torch.dtype | None = None, **other: Any) -> None:
        super().__init__(hidden_size, params_dtype=params_dtype)
        self.declare("bias", (hidden_size,), params_dtype)


class Linear(_Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        tp_size: int = 1,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        **other: Any,
    ) -> None:
        super().__init__()
        self.in_features = in_features // tp_size if parallel_mode == "row" else in_features
        self.out_features = out_features // tp_size if parallel_mode == "column" else out_features
        self.parallel_mode, self.use_bias = parallel_mode, bias
        self.weight_names, self.bias_names = ["weight"], ["bias"] if bias else []
        self.declare("weight", (self.out_features, self.in_features), params_dtype)
        if bias:
            self.declare("bias", (self.out_features,), params_dtype)
        else:
            self.bias = None


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        normalization: str = "LayerNorm",
        params_dtype: torch.dtype | None = None,
        **other: Any,
    ) -> None:
        super().__init__(in_features, out_features, params_dtype=params_dtype, **other)
        self.declare("layer_norm_weight", (in_features,), params_dtype)
        if normalization == "LayerNorm":
            self.declare("layer_norm_bias", (in_features,), params_dtype)


class GroupedLinear(_Module):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        **other: Any,
    ) -> None:
        super().__init__()
        self.num_gemms, self.use_bias = num_gemms, bias
        self.fp8_meta = {"recipe": None, "fp8_checkpoint": False}
        self.fp8 = self.fp8_calibration = False
        self.init_fp8_metadata: Callable[..., None] = lambda *args, **kwargs: None
        for gemm in range(num_gemms):
            self.declare(f"weight{gemm}", (out_features, in_features), params_dtype)
            if bias:
                self.declare(f"bias{gemm}", (out_features,), params_dtype)


def _forgive_missing_state(module: torch.nn.Module, incompatible: Any) -> None:
    kept = [key for key in incompatible.missing_keys if not key.endswith("core_attention._extra_state")]
    incompatible.missing_keys[:] = kept


class DotProductAttention(_Module):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        # The real one has this hook too: megatron-core does not save the state of the decoder's attention.
        self.register_load_state_dict_post_hook(_forgive_missing_state)


sys.meta_path.insert(0, _Finder())
pytorch: Any = importlib.import_module("transformer_engine.pytorch")
common: Any = importlib.import_module("transformer_engine.common")
common.recipe = importlib.import_module("transformer_engine.common.recipe")
for _class in (RMSNorm, LayerNorm, Linear, LayerNormLinear, GroupedLinear, DotProductAttention):
    setattr(pytorch, _class.__name__, _class)
for _name in (
    "attention",
    "cpp_extensions",
    "cpu_offload",
    "cross_entropy",
    "distributed",
    "float8_tensor",
    "fp8",
    "module",
    "ops",
    "permutation",
    "router",
    "utils",
):
    setattr(pytorch, _name, importlib.import_module(f"transformer_engine.pytorch.{_name}"))


def _no_offload(*args: Any, **kwargs: Any) -> tuple[Any, Callable[[Any], Any]]:
    return nullcontext(), lambda tensor: tensor


pytorch.get_cpu_offload_context = pytorch.cpu_offload.get_cpu_offload_context = _no_offload
