"""Catches: a kernel that does not compile for a GPU that is not here, spills registers to memory,
or wants more shared memory than the device has. No GPU is needed: ptxas ships with Triton.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.ops.launches import Launch, all_kernels, more_launches, usual_launches

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter's kernels cannot be compiled"
)

NVIDIA = {90: 232_448, 100: 232_448}  # bytes of shared memory that a program may have
HARMLESS = 48  # bytes a thread: ptxas parks a few values to fit one more program
AMD = {"gfx942": 65_536}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def compiled(launch: Launch, target: GPUTarget):
    options = dict(launch.options)
    constants = dict(launch.constants)
    if target.backend != "cuda":  # programmatic dependent launch is NVIDIA's
        options.pop("launch_pdl", None)
        constants |= {"PDL": False} if "PDL" in constants else {}
    source = ASTSource(launch.kernel, launch.signature, constants, launch.attrs)
    return triton.compile(source, target=target, options=options)


def resources(cubin: bytes, folder: Path) -> dict[str, int]:
    """What ptxas gave the kernel, in bytes; REG in registers a thread."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [str(CUOBJDUMP), "--dump-resource-usage", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", text)}
    assert {"REG", "STACK", "LOCAL"} <= set(found), text
    return found


def faults(launches: list[Launch], capability: int, folder: Path) -> list[str]:
    """Kernels that spill or want too much memory, with their constants."""
    found = []
    for launch in launches:
        made = compiled(launch, GPUTarget("cuda", capability, 32))
        used = resources(made.asm["cubin"], folder)
        spilled = max(used["STACK"], used["LOCAL"])
        if spilled > HARMLESS or made.metadata.shared > NVIDIA[capability]:
            shared = made.metadata.shared
            found.append(f"{launch.name} {launch.constants} {launch.options} {used} {shared=}")
    return found


def test_every_kernel_is_launched():
    # These two are compiled in the tests of their own operators.
    elsewhere = {"_tree_gdn_kernel", "_divergence_kernel"}
    assert {launch.name for launch in usual_launches()} == all_kernels() - elsewhere
    assert len(all_kernels()) >= 18


@pytest.mark.parametrize("capability", list(NVIDIA))
def test_the_kernels_compile_for_nvidia(capability, tmp_path):
    assert not faults(usual_launches(), capability, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("capability", list(NVIDIA))
def test_every_variant_compiles_for_nvidia(capability, tmp_path):
    assert not faults(more_launches(), capability, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("arch", list(AMD))
def test_the_kernels_compile_for_amd(arch):
    """Most fit; tile sizes of the others are NVIDIA's and are not tuned for AMD yet."""
    over = set()
    for launch in usual_launches():
        made = compiled(launch, GPUTarget("hip", arch, 64))
        assert made.asm["hsaco"], launch.name
        if made.metadata.shared > AMD[arch]:
            over.add(launch.name)
    assert over <= {"_attend_kernel", "_gemm_kernel"}, over


def test_the_count_of_spills_is_real(tmp_path):
    """A kernel that must spill is seen to spill."""
    launch = next(found for found in usual_launches() if found.name == "_exact_kernel")
    options = launch.options | {"maxnreg": 24}
    made = compiled(launch._replace(options=options), GPUTarget("cuda", 90, 32))
    used = resources(made.asm["cubin"], tmp_path)
    assert max(used["STACK"], used["LOCAL"]) > HARMLESS
