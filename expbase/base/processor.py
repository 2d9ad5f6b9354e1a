"""What the bits of a computation on a CPU depend on: the processor, its threads, the BLAS.

Kernels choose by the instruction sets how they sum, and so do libraries such as MKL.

    processor()["model"]            # AMD EPYC 9454 48-Core Processor
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import paddle

# By which kernels choose: of x86, of ARM, of LoongArch, by their names in /proc/cpuinfo.
_INSTRUCTIONS = (
    *"sse4_2 avx f16c fma avx2 avx_vnni avx512f avx512bw avx512dq avx512vl avx512_vnni".split(),
    *"avx512_bf16 avx512_fp16 amx_tile amx_bf16 amx_int8".split(),
    *"asimd asimdhp asimddp i8mm bf16 sve sve2 lsx lasx".split(),
)
_LIBRARY = re.compile("lib.*(mkl|blas|dnnl).*[.]so")  # of linear algebra


def processor() -> dict[str, Any]:
    """Returns the model, its instruction sets, the threads and the BLAS, as JSON values.

    What the system does not tell is an empty text.
    """
    known: dict[str, str] = {}
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open(errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            known.setdefault(name.strip().lower(), value.strip())
            if {"model name", "flags"} <= known.keys():  # as of the first core of many
                break
    there = (known.get("flags") or known.get("features", "")).split()
    # paddle's threads are those of OpenMP: by default one for each core that the process may use.
    cores = len(os.sched_getaffinity(0))
    return {
        "model": known.get("model name", ""),
        "instructions": " ".join(name for name in _INSTRUCTIONS if name in there),
        "threads": os.environ.get("OMP_NUM_THREADS") or str(cores),
        "blas": {"paddle": _blas_of_paddle(), "numpy": _blas_of_numpy()},
    }


def _blas_of_paddle() -> str:
    """Returns the names of its libraries, which it loads when they are first needed."""
    with contextlib.suppress(OSError):
        names = os.listdir(Path(paddle.__file__).parent / "libs")
        return " ".join(sorted(filter(_LIBRARY.match, names)))
    return ""


def _blas_of_numpy() -> str:
    with contextlib.suppress(LookupError, TypeError):  # not each build of numpy says it
        blas: Any = np.show_config(mode="dicts")
        blas = blas["Build Dependencies"]["blas"]
        return f"{blas['name']} {blas['version']}"
    return ""
