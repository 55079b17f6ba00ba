"""Installs two packages: ``oslo_models`` from the root, and ``oslo_kernels`` from ``kernels/``, which is no package.

If ``nvcc`` is found, CUDA code is compiled during installation. Otherwise, and in editable installations, it is
compiled on first use. ``OSLO_BUILD_CUDA=0`` skips the compilation, and ``1`` makes it mandatory.
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
exec(Path(build["__file__"]).read_text(), build)  # importing the package would require torch
BUILDS_CUDA = CUDA == "1" or (CUDA == "auto" and build["find_nvcc"]() is not None)
version: dict[str, Any] = {}
exec((ROOT / "oslo_models" / "_version.py").read_text(), version)
FIRST, LAST = (int(python.split(".")[1]) for python in version["PYTHON"])
readme = ROOT / "README.md"
SERVE = ["fastapi>=0.115", "uvicorn>=0.30"]
OPTIONAL = {library: f"{library}>={first}" for library, first in version["OPTIONAL"].items()}
TRL = f"{OPTIONAL['trl']}; python_version >= '3.11'"
TEST = [*SERVE, "accelerate>=1.10", "hypothesis", "pytest>=8", "pytest-xdist"]  # used by `make test-stacks`


def long_description() -> str:
    """Return the README without images, comments and repository links. A package index cannot show them."""
    if not readme.exists():
        return ""
    text = re.sub(r"<!--.*?-->\n|!\[[^\]]*\]\([^)]*\)\n", "", readme.read_text(), flags=re.DOTALL)
    return re.sub(r"\[([^\]]*)\]\((?!https?://)[^)]*\)", r"\1", text)


class BuildWithCUDA(build_py):
    """Also compiles for GPUs. A failure ends the installation only if compilation is mandatory."""

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
    """Distribution that may be compiled, but without extension modules."""

    def has_ext_modules(self) -> bool:
        return BUILDS_CUDA


class Wheel(bdist_wheel):
    """Wheel for any Python, and for one platform if it contains compiled code."""

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
        "audio": ["soundfile>=0.12"],  # FLAC and MP3 of the server's clients; it reads WAV itself
        # compared libraries and their requirements: transformers needs accelerate for tensor parallelism
        "bench": ["accelerate", "datasets"],
        "data": ["pyarrow", "zstandard"],  # to read .parquet and .zst
        "deepspeed": ["deepspeed>=0.19,<0.20"],
        "demo": ["matplotlib"],
        "docs": ["matplotlib", "mkdocs", "mkdocs-material", "mkdocstrings[python]"],
        # libraries that the tests run with sharded models, see docs/ecosystem.md
        "ecosystem": [
            "accelerate>=1.10",
            "lightning>=2.5",
            OPTIONAL["peft"],
            TRL,
        ],
        # for dequantize=True of their formats, and for TorchAoConfig
        "quantization": ["bitsandbytes>=0.48", "compressed-tensors>=0.13", "torchao>=0.18"],
        "grammar": ["llguidance>=1.2"],  # json_schema, regular expressions and grammars of the server
        # of oslo-models sft, dpo, grpo and pretrain
        "recipes": ["accelerate>=1.10", "datasets", "matplotlib", OPTIONAL["peft"], TRL],
        "ray": ["ray>=2.40"],  # deploy_backend="ray"
        "serve": SERVE,
        "speech": ["torchaudio>=2.11"],  # processors of Granite Speech and Fun-ASR
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
            "soundfile>=0.12",  # FLAC and MP3 in tests
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
