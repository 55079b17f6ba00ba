"""Two packages: ``oslo_models`` from the root, and ``oslo_kernels`` from ``kernels/``, which is no package itself.

Where ``nvcc`` is found, what is written in CUDA is compiled at once; elsewhere, and if editable, on first use.
``OSLO_BUILD_CUDA=0`` leaves it, ``1`` insists on it.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
CUDA = os.environ.get("OSLO_BUILD_CUDA", "auto")
if CUDA not in ("auto", "0", "1"):
    raise ValueError(f"OSLO_BUILD_CUDA={CUDA!r} is none of 'auto', '0', '1'")
build: dict[str, Any] = {"__file__": str(ROOT / "kernels/oslo_kernels/build.py"), "__name__": "build"}
exec(Path(build["__file__"]).read_text(), build)  # importing the package would need torch
BUILDS_CUDA = CUDA == "1" or (CUDA == "auto" and build["find_nvcc"]() is not None)
version: dict[str, Any] = {}
exec((ROOT / "oslo_models" / "_version.py").read_text(), version)
FIRST, LAST = (int(python.split(".")[1]) for python in version["PYTHON"])
readme = ROOT / "README.md"
SERVE = ["fastapi>=0.115", "uvicorn>=0.30"]
TEST = [*SERVE, "accelerate>=1.10", "hypothesis", "pytest>=8", "pytest-xdist"]  # of `make test-stacks`


def long_description() -> str:
    """The README without images, comments and links into the repository, none of which a package index can show."""
    if not readme.exists():
        return ""
    text = re.sub(r"<!--.*?-->\n|!\[[^\]]*\]\([^)]*\)\n", "", readme.read_text(), flags=re.DOTALL)
    return re.sub(r"\[([^\]]*)\]\((?!https?://)[^)]*\)", r"\1", text)


class BuildWithCUDA(build_py):
    """Also compiles for GPUs; a failure ends the installation only if that was insisted on."""

    def run(self) -> None:
        super().run()
        if not BUILDS_CUDA or self.editable_mode:
            return
        try:
            build["install_cuda"]("ngrams.cpp", Path(self.build_lib) / "oslo_kernels" / "csrc")
        except build["BuildError"] as error:
            if CUDA == "1":
                raise
            print(f"nothing was compiled for GPUs, which is tried again on first use: {error}", file=sys.stderr)


class MaybeCompiled(Distribution):
    """Compiled by other means than extension modules, if at all."""

    def has_ext_modules(self) -> bool:
        return BUILDS_CUDA


class Wheel(bdist_wheel):
    """For any Python; for one platform if something was compiled."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


setup(
    name="oslo-models",
    version=version["__version__"],
    description="A model zoo of pre-parallelized Hugging Face architecture classes",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=f">={version['PYTHON'][0]}",
    packages=[
        *find_packages(include=["oslo_models", "oslo_models.*"]),
        *find_packages("kernels", include=["oslo_kernels", "oslo_kernels.*"]),
    ],
    package_dir={"oslo_kernels": "kernels/oslo_kernels"},
    package_data={"oslo_kernels": ["csrc/*"], "oslo_models": ["*.pyi", "py.typed"]},
    distclass=MaybeCompiled,
    cmdclass={"build_py": BuildWithCUDA, "bdist_wheel": Wheel},
    install_requires=[
        version["requirement"]("torch"),
        version["requirement"]("transformers"),
        "huggingface_hub>=1.5",
        "numpy>=1.26",
        "safetensors>=0.8",
        "tqdm",
    ],
    extras_require={
        # peers, or what they need: accelerate is for the tensor parallelism of transformers
        "bench": ["accelerate", "datasets"],
        "data": ["pyarrow", "zstandard"],  # to read .parquet and .zst
        "deepspeed": ["deepspeed>=0.19,<0.20"],
        "demo": ["matplotlib"],
        "docs": ["matplotlib", "mkdocs", "mkdocs-material", "mkdocstrings[python]"],
        # libraries that handle sharded models in the tests: docs/ecosystem.md says how
        "ecosystem": [
            "accelerate>=1.10",
            "lightning>=2.5",
            "peft>=0.18",
            "trl>=1.0",
        ],
        # dequantize=True of their formats, TorchAoConfig
        "quantization": ["bitsandbytes>=0.48", "compressed-tensors>=0.13", "torchao>=0.15"],
        "grammar": ["llguidance>=1.2"],  # json_schema, regular expressions and grammars of the server
        "ray": ["ray>=2.40"],  # deploy_backend="ray"
        "serve": SERVE,
        "test": TEST,
        "dev": [
            *TEST,
            "datasets",
            "flask",
            "import-linter",
            "llguidance>=1.2",
            "megatron-core; python_version < '3.14'",
            "mypy",
            "openai",
            "ruff",
            "setuptools",
            "triton>=3.6; sys_platform == 'linux'",
            "uv",
            "wheel",
            "zstandard",
        ],
    },
    entry_points={"console_scripts": ["oslo-models = oslo_models.cli.main:main"]},
    classifiers=[
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(FIRST, LAST + 1)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
